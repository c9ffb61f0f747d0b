"""The tensors of one attention call, beside the Problem that describes them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """Tensors of one call; B batch, S seqlen, H query heads, Hkv key/value heads, D head_dim, Dv head_dim_v.

    Exactly one layout holds: padded (no cu_seqlens, no page_table): q (B, Sq, H, D), k (B, Sk, Hkv, D), v (B, Sk, Hkv, Dv); packed
    (cu_seqlens_q and cu_seqlens_k): q (total_q, H, D), k (total_k, Hkv, D), v (total_k, Hkv, Dv); paged (page_table): q (B, Sq, H, D),
    k (pages, page_size, Hkv, D), v likewise. A contiguous cache is paged with one page a sequence.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    sink: Tensor | None = None  # (H,)
    alibi_slopes: Tensor | None = None  # (H,) or (B, H)
    bias: Tensor | None = None  # (B or 1, H or 1, Sq or 1, Sk or 1)
    cu_seqlens_q: Tensor | None = None  # (B + 1,) int32
    cu_seqlens_k: Tensor | None = None
    seqused_q: Tensor | None = None  # (B,) int32
    seqused_k: Tensor | None = None
    page_table: Tensor | None = None  # (B, pages of a sequence) int32
    leftpad: Tensor | None = None  # (B,) int32: the first key of each sequence in its cache
    q_descale: Tensor | None = None  # (B, Hkv) float32: 8-bit q, k and v stand for themselves times these
    k_descale: Tensor | None = None
    v_descale: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class Gradients:
    """Gradients of q, k, v (their shapes and dtypes) and, in float32, of those extra inputs that the call has."""

    q: Tensor
    k: Tensor
    v: Tensor
    sink: Tensor | None = None
    alibi_slopes: Tensor | None = None
    bias: Tensor | None = None
