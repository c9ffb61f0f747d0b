"""P is rounded to the inputs' dtype before its product with V: by cancellation, so that the output's own rounding cannot hide it."""

from __future__ import annotations

import math

import pytest
import torch

from tandem_attn import attention


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_p_is_rounded_before_its_product(dtype: torch.dtype) -> None:
    """Two keys with P = (1, p): V = (-round(p), 1) gives exactly 0 with P rounded, and p - round(p) otherwise."""
    logit = -0.40625  # a value of both dtypes, whose exponential is none of either
    p = math.exp(logit)
    rounded = float(torch.tensor(p).to(dtype))
    assert abs(p - rounded) > 1e-5
    q = torch.ones(1, 1, 1, 8, dtype=dtype)
    k = torch.zeros(1, 2, 1, 8, dtype=dtype)
    k[0, 1, 0, 0] = logit
    v = torch.tensor([-rounded, 1.0], dtype=dtype).view(1, 2, 1, 1)
    out = attention(q, k, v, scale=1.0, backend="reference")
    assert float(out) == 0.0, f"got {float(out):.3g}: P was not rounded (p - round(p) = {p - rounded:.3g})"
