"""Functions over sequences of one length: q, k, v apart, or stacked in one tensor."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tandem_attn.api.functions import attention
from tandem_attn.compat import errors
from tandem_attn.compat.flash_attn.arguments import NAMES, result, shared_options, unpack


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
) -> Any:
    """softmax(scale * Q K^T) V, differentiable; FlashAttention-2's call.

    B batch, Sq and Sk sequence lengths, H query heads, Hkv key/value heads (H a multiple of Hkv), D head_dim, Dv head_dim_v.

    Args:
        q: (B, Sq, H, D), float16 or bfloat16 as in FlashAttention-2, and float32 and float64 too.
        k: (B, Sk, Hkv, D).
        v: (B, Sk, Hkv, Dv).
        dropout_p: must be 0.
        softmax_scale: factor of the logits; default 1 / sqrt(D).
        causal: query i sees keys j <= i + Sk - Sq. Sets the right side of ``window_size`` to 0.
        window_size: (left, right) keys each side of the diagonal that a query sees, the diagonal included; -1 is unbounded, (-1, 0) causal.
        softcap: > 0 replaces a logit s by softcap * tanh(s / softcap).
        alibi_slopes: (H,) or (B, H), float32; adds -slope * abs(i + Sk - Sq - j) to a logit.
        deterministic: bitwise repeatable gradients.
        return_attn_probs: return (O, LSE, S_dmask).
        q_descale, k_descale, v_descale: (B, Hkv) float32, for 8-bit q, k and v, as in FlashAttention-3; see ``tandem_attn.attention``. O is
            bfloat16 then.

    Returns:
        O (B, Sq, H, Dv) in q's dtype. With ``return_attn_probs`` (O, LSE, S_dmask): LSE (B, H, Sq) float32, the log-sum-exp of each row's
        logits, natural log; S_dmask is empty, as in FlashAttention-2 without dropout. A row without keys has O = 0 and LSE = -inf
        (FlashAttention-2: +inf).

    Raises:
        TypeError, ValueError: an argument is wrong; the message names it, its value and what is required.
        UnsupportedError: dropout_p > 0, or no backend covers the call.
    """
    options = shared_options(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic)
    options |= {"q_descale": q_descale, "k_descale": k_descale, "v_descale": v_descale}
    returned = errors.call(attention, NAMES, q, k, v, return_lse=return_attn_probs, **options)
    return result(returned, q, return_attn_probs)


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """``flash_attn_func`` for q, k, v stacked in one tensor.

    Args:
        qkv: (B, S, 3, H, D).

    The other arguments, the results and the errors are those of ``flash_attn_func``.
    """
    q, k, v = unpack("qkv", qkv, 3, 5, "(batch, seqlen, 3, heads, head_dim)")
    options = shared_options(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic)
    names = NAMES | {"q": "qkv", "k": "qkv", "v": "qkv"}
    returned = errors.call(attention, names, q, k, v, return_lse=return_attn_probs, **options)
    return result(returned, q, return_attn_probs)


def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """``flash_attn_func`` for k and v stacked in one tensor.

    Args:
        q: (B, Sq, H, D).
        kv: (B, Sk, 2, Hkv, D).

    The other arguments, the results and the errors are those of ``flash_attn_func``.
    """
    k, v = unpack("kv", kv, 2, 5, "(batch, seqlen_k, 2, heads_kv, head_dim)")
    options = shared_options(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic)
    names = NAMES | {"k": "kv", "v": "kv"}
    returned = errors.call(attention, names, q, k, v, return_lse=return_attn_probs, **options)
    return result(returned, q, return_attn_probs)
