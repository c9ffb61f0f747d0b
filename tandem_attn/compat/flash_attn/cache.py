"""Attention of new tokens to a cache of keys and values, with rotary embedding of the new tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tandem_attn.api import checks
from tandem_attn.api.functions import attention_kvcache
from tandem_attn.compat import errors, rotary
from tandem_attn.compat.flash_attn.arguments import NAMES, shared_options
from tandem_attn.spec.errors import UnsupportedError
from tandem_attn.spec.masks import is_integer


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    *,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
) -> Any:
    """Attention of new queries to a cache; FlashAttention-2's call. Forward only.

    B batch, Sq new queries, H query heads, Hkv key/value heads, D head_dim, Dv head_dim_v, R rotated dimensions (R <= D, even).

    Args:
        q: (B, Sq, H, D).
        k_cache: (B_cache, S_cache, Hkv, D), or with ``block_table`` (pages, page_size, Hkv, D), any page size.
        v_cache: likewise, last size Dv.
        k: (B, new, Hkv, D), written into the cache in place behind ``cache_seqlens``, then attended to.
        v: (B, new, Hkv, Dv), likewise; both or neither.
        rotary_cos: (positions, R / 2) in q's dtype, with at least as many positions as a sequence has room for. Needs ``k``, and rotates it
            at the positions cache_seqlens, cache_seqlens + 1, ...; q likewise with a causal mask or a window, otherwise all of q at
            position cache_seqlens.
        rotary_sin: likewise; both or neither.
        cache_seqlens: (B,) int32 or an int: keys each sequence has in the cache before ``k``. Default: the whole cache.
        cache_batch_idx: (B,) int32, the cache row of each sequence. Not with ``block_table``.
        cache_leftpad: (B,) int32, keys at the start of the cache that are not part of the sequence.
        block_table: (B, pages of a sequence) int32: key j of sequence b lies in page block_table[b, j // page_size].
        softmax_scale, causal, window_size, softcap, alibi_slopes: as ``flash_attn_func``; Sk is a sequence's length after appending, less
            its leftpad.
        rotary_interleaved: rotate the pairs of dimensions (0, 1), (2, 3), ...; False: (0, R / 2), (1, R / 2 + 1), ...
        num_splits: accepted and without effect on results; backends split the keys as they see fit.
        return_softmax_lse: return (O, LSE).
        q_descale, k_descale, v_descale: (B, Hkv) float32, for 8-bit q, k and v, as in FlashAttention-3; see ``tandem_attn.attention``. O is
            bfloat16 then.

    Returns:
        O (B, Sq, H, Dv) in q's dtype; with ``return_softmax_lse`` (O, LSE), LSE (B, H, Sq) float32.

    Raises:
        TypeError, ValueError: an argument is wrong; the message names it, its value and what is required.
        UnsupportedError: no backend covers the call.
    """
    _check_splits(num_splits)
    options = shared_options(0.0, softmax_scale, causal, window_size, softcap, alibi_slopes)
    if rotary_cos is not None or rotary_sin is not None:
        if getattr(q, "dtype", None) in checks.FLOAT8:
            nearest = "tokens rotated before they are made 8-bit"
            raise UnsupportedError(backend="any", missing=f"rotary embedding of {q.dtype}", nearest=nearest)
        at_once = not options["causal"] and options["window"] == (None, None)
        angles = _angles(rotary_cos, rotary_sin, q, k, cache_seqlens, _room(k_cache, block_table))
        q = rotary.rotate(q, *angles, interleaved=checks.flag("rotary_interleaved", rotary_interleaved), same_position=at_once)
        k = rotary.rotate(checks.require_tensor("k", k), *angles, interleaved=rotary_interleaved)
    options |= {"q_descale": q_descale, "k_descale": k_descale, "v_descale": v_descale}
    names = NAMES | {"return_lse": "return_softmax_lse"}
    return errors.call(
        attention_kvcache, names, q, k_cache, v_cache, cache_seqlens, k=k, v=v, page_table=block_table,
        cache_batch_idx=cache_batch_idx, cache_leftpad=cache_leftpad, return_lse=return_softmax_lse, **options,
    )  # fmt: skip


def _check_splits(num_splits: Any) -> None:
    if isinstance(num_splits, bool) or not isinstance(num_splits, int):
        raise TypeError(f"num_splits must be an int, got {num_splits!r}")
    if num_splits < 0:
        raise ValueError(f"num_splits must be >= 0 (0: automatic), got {num_splits}")


def _room(k_cache: Any, block_table: Any) -> int:
    """Keys a sequence has room for."""
    cache = checks.require_tensor("k_cache", k_cache)
    checks.require_ndim("k_cache", cache, 4, "(batch, seqlen_cache, heads_kv, head_dim)")
    pages = 1 if block_table is None else checks.require_tensor("block_table", block_table).shape[-1]
    return pages * cache.shape[1]


def _angles(cos: Any, sin: Any, q: Any, k: Any, cache_seqlens: Any, room: int) -> tuple[Tensor, Tensor, Tensor]:
    """(cos, sin, first position of each sequence), checked."""
    if k is None:
        raise ValueError("rotary_cos and rotary_sin need new keys to rotate, got k=None")
    if cache_seqlens is None:
        raise ValueError("cache_seqlens must be given when k is appended, got None")
    query = checks.require_tensor("q", q)
    checks.require_ndim("q", query, 4, "(batch, seqlen_q, heads, head_dim)")
    checks.require_ndim("k", checks.require_tensor("k", k), 4, "(batch, new, heads_kv, head_dim)")
    for name, x in (("rotary_cos", cos), ("rotary_sin", sin)):
        rotary.check_table(name, x, query, room)
    checks.require_shape("rotary_sin", sin, tuple(cos.shape), "rotary_cos's shape")
    if is_integer(cache_seqlens):
        return cos, sin, torch.full((query.shape[0],), int(cache_seqlens), dtype=torch.int32, device=query.device)
    checks.lengths("cache_seqlens", cache_seqlens, query, query.shape[0])
    return cos, sin, cache_seqlens
