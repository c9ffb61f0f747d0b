"""FlashAttention-2's argument conventions, turned into Tandem's."""

from __future__ import annotations

import operator
from typing import Any

from torch import Tensor

from tandem_attn.api import checks
from tandem_attn.compat import errors

NAMES = {"scale": "softmax_scale", "window": "window_size", "page_table": "block_table", "return_lse": "return_attn_probs"}


def shared_options(
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool = False,
) -> dict[str, Any]:
    """Keywords of ``tandem_attn.attention`` that all seven functions have."""
    errors.refuse_dropout("dropout_p", dropout_p, "dropout_p=0.0")
    return {
        "causal": causal,
        "window": window(window_size),
        "scale": softmax_scale,
        "softcap": max(checks.number("softcap", softcap), 0.0),  # FlashAttention-2 takes every value <= 0 as off
        "alibi_slopes": alibi_slopes,
        "deterministic": deterministic,
    }


def window(window_size: Any) -> tuple[int | None, int | None]:
    """(left, right) with -1 (any negative number) for unbounded -> (left, right) with None for unbounded."""
    try:
        left, right = (operator.index(bound) for bound in window_size)
    except (TypeError, ValueError):
        raise TypeError(f"window_size must be a pair of integers (left, right), -1 for unbounded, got {window_size!r}") from None
    return (None if left < 0 else left), (None if right < 0 else right)


def unpack(name: str, packed: Any, count: int, ndim: int, layout: str) -> tuple[Tensor, ...]:
    """The ``count`` tensors stacked in the third last dimension; views, so the gradients meet in one tensor."""
    tensor = checks.require_tensor(name, packed)
    if tensor.ndim != ndim or tensor.shape[-3] != count:
        raise ValueError(f"{name} must have shape {layout}, got {tuple(tensor.shape)}")
    return tensor.unbind(-3)


def result(returned: Any, q: Tensor, return_attn_probs: bool) -> Any:
    """O, or (O, LSE, S_dmask): the dropout pattern, which FlashAttention-2 too returns empty when there is no dropout."""
    return (*returned, q.new_empty(0)) if return_attn_probs else returned
