"""From tensors to a backend: the public functions, their checks, and the operators behind them."""
