"""Functions over sequences of different lengths, packed one behind the other."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tandem_attn.api.functions import attention_varlen
from tandem_attn.compat import errors
from tandem_attn.compat.flash_attn.arguments import NAMES, result, shared_options, unpack


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
    *,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
) -> Any:
    """``flash_attn_func`` over packed sequences; lengths may be zero.

    Args:
        q: (total_q, H, D).
        k: (total_k, Hkv, D); with ``block_table`` (pages, page_size, Hkv, D), any page size.
        v: (total_k, Hkv, Dv); with ``block_table`` (pages, page_size, Hkv, Dv).
        cu_seqlens_q: (B + 1,) int32: sequence b holds the rows cu_seqlens_q[b] to cu_seqlens_q[b + 1] - 1.
        cu_seqlens_k: likewise for the keys.
        max_seqlen_q: the longest query sequence, or an upper bound.
        max_seqlen_k: likewise for the keys.
        block_table: (B, pages of a sequence) int32: key j of sequence b lies in page block_table[b, j // page_size]. Forward only.

    The other arguments and the errors are those of ``flash_attn_func``.

    Returns:
        O (total_q, H, Dv); with ``return_attn_probs`` (O, LSE, S_dmask), LSE (H, total_q).
    """
    options = shared_options(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic)
    options |= {"q_descale": q_descale, "k_descale": k_descale, "v_descale": v_descale}
    returned = errors.call(
        attention_varlen, NAMES, q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
        page_table=block_table, return_lse=return_attn_probs, **options,
    )  # fmt: skip
    return result(returned, q, return_attn_probs)


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """``flash_attn_varlen_func`` for q, k, v stacked in one tensor.

    Args:
        qkv: (total, 3, H, D).
        cu_seqlens: (B + 1,) int32, of queries and keys.
        max_seqlen: the longest sequence, or an upper bound.

    The other arguments, the results and the errors are those of ``flash_attn_varlen_func``.
    """
    q, k, v = unpack("qkv", qkv, 3, 4, "(total, 3, heads, head_dim)")
    options = shared_options(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic)
    lengths = {f"{name}_{side}": name for name in ("cu_seqlens", "max_seqlen") for side in "qk"}
    names = NAMES | lengths | {"q": "qkv", "k": "qkv", "v": "qkv"}
    returned = errors.call(
        attention_varlen, names, q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, return_lse=return_attn_probs, **options
    )
    return result(returned, q, return_attn_probs)


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """``flash_attn_varlen_func`` for k and v stacked in one tensor.

    Args:
        q: (total_q, H, D).
        kv: (total_k, 2, Hkv, D).

    The other arguments, the results and the errors are those of ``flash_attn_varlen_func``.
    """
    k, v = unpack("kv", kv, 2, 4, "(total_k, 2, heads_kv, head_dim)")
    options = shared_options(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic)
    names = NAMES | {"k": "kv", "v": "kv"}
    returned = errors.call(
        attention_varlen, names, q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, return_lse=return_attn_probs, **options
    )
    return result(returned, q, return_attn_probs)
