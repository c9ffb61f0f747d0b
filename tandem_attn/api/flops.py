"""FLOPs of the operators for torch.utils.flop_counter, counted as PyTorch counts its own attention: products only, masks not deducted."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from tandem_attn.api.ops import ARGUMENTS

_SIZES = ("cu_seqlens_q", "cu_seqlens_k")


def _forward(*args: Any, out_val: Any = None, **_: Any) -> int:  # noqa: ARG001
    named = dict(zip(ARGUMENTS, args, strict=True))
    return _pairs(named) * 2 * (named["q"].shape[-1] + named["v"].shape[-1])


def _backward(*args: Any, out_val: Any = None, **_: Any) -> int:  # noqa: ARG001
    """Five products: S, dQ and dK with head_dim, dP and dV with head_dim_v."""
    named = dict(zip(ARGUMENTS, args[4:], strict=True))
    return _pairs(named) * 2 * (3 * named["q"].shape[-1] + 2 * named["v"].shape[-1])


def _pairs(named: dict[str, Any]) -> int:
    """Query-key pairs over all heads and sequences, from the true lengths where they can be read without waiting."""
    heads = named["q"].shape[-2]
    batch = named["q"].shape[0] if named["cu_seqlens_q"] is None else named["cu_seqlens_q"].shape[0] - 1
    lengths = [named[name] for name in _SIZES]
    if all(isinstance(x, Tensor) and x.device.type == "cpu" and not torch._subclasses.fake_tensor.is_fake(x) for x in lengths):
        q_lengths, k_lengths = (x.diff().long() for x in lengths)
        return heads * int((q_lengths * k_lengths).sum())
    return heads * batch * named["max_seqlen_q"] * named["max_seqlen_k"]


register_flop_formula(torch.ops.tandem_attn.attention, get_raw=True)(_forward)
register_flop_formula(torch.ops.tandem_attn.attention_backward, get_raw=True)(_backward)
