"""Wrong calls of the compat functions: the error's type, and that it names the argument as the caller wrote it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tandem_attn import UnsupportedError
from tandem_attn.compat import flash_attn as fa
from tandem_attn.compat.errors import renamed
from tandem_attn.compat.sdpa import scaled_dot_product_attention as sdpa

Q, K = torch.randn(2, 5, 4, 16), torch.randn(2, 7, 2, 16)
QKV = torch.randn(2, 5, 3, 4, 16)
PACKED, PACKED_QKV = torch.randn(9, 4, 16), torch.randn(9, 3, 4, 16)
CU = torch.tensor([0, 4, 9], dtype=torch.int32)
CACHE, NEW = torch.randn(2, 8, 2, 16), torch.randn(2, 1, 2, 16)
COS = torch.ones(8, 8)
LENGTHS = torch.tensor([3, 4], dtype=torch.int32)
TABLE = torch.zeros(2, 1, dtype=torch.int32)


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


FLASH: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (lambda: fa.flash_attn_func(Q, K, K, 0.1), UnsupportedError, r"dropout.*dropout_p=0.1"),
    (lambda: fa.flash_attn_func(Q, K, K, dropout_p=1.5), ValueError, r"^dropout_p must lie between 0 and 1, got 1.5"),
    (lambda: fa.flash_attn_func(Q, K, K, dropout_p="no"), TypeError, r"^dropout_p must be a number, got str"),
    (lambda: fa.flash_attn_varlen_qkvpacked_func(PACKED_QKV, CU, 5, 0.1), UnsupportedError, r"dropout"),
    (lambda: fa.flash_attn_func(Q, K, K, window_size=5), TypeError, r"^window_size must be a pair"),
    (lambda: fa.flash_attn_func(Q, K, K, window_size=(1, 2, 3)), TypeError, r"^window_size must be a pair"),
    (lambda: fa.flash_attn_func(Q, K, K, window_size=(1.5, 0)), TypeError, r"^window_size must be a pair"),
    (lambda: fa.flash_attn_func(Q, K, K, window_size=None), TypeError, r"^window_size must be a pair"),
    (lambda: fa.flash_attn_func(Q, K, K, softmax_scale="big"), TypeError, r"^softmax_scale must be a number"),
    (lambda: fa.flash_attn_func(Q, K, K, softmax_scale=float("nan")), ValueError, r"^softmax_scale must be finite"),
    (lambda: fa.flash_attn_func(Q, K, K, softcap=float("inf")), ValueError, r"^softcap must be finite"),
    (lambda: fa.flash_attn_func(Q, K, K, causal=1), TypeError, r"^causal must be a bool"),
    (lambda: fa.flash_attn_func(Q, K, K, deterministic="yes"), TypeError, r"^deterministic must be a bool"),
    (lambda: fa.flash_attn_func(Q, K, K, return_attn_probs=1), TypeError, r"^return_attn_probs must be a bool"),
    (lambda: fa.flash_attn_func(Q, K, K, alibi_slopes=torch.ones(3)), ValueError, r"^alibi_slopes must have shape"),
    (lambda: fa.flash_attn_func(Q[0], K, K), ValueError, r"^q must have 4 dimensions"),
    (lambda: fa.flash_attn_func(Q, K, K.half()), TypeError, r"^v must have q's dtype"),
    (lambda: fa.flash_attn_func(Q, K[:1], K[:1]), ValueError, r"^k must have q's batch size"),
    (lambda: fa.flash_attn_func(Q[:, :, :3], K, K), ValueError, r"^q's heads must be a multiple of k's"),
    (lambda: fa.flash_attn_kvpacked_func(Q[:, :, :3], QKV[:, :, :2]), ValueError, r"^q's heads must be a multiple of kv's, got"),
    (lambda: fa.flash_attn_qkvpacked_func(Q), ValueError, r"^qkv must have shape \(batch, seqlen, 3, heads, head_dim\)"),
    (lambda: fa.flash_attn_qkvpacked_func(QKV[:, :, :2]), ValueError, r"^qkv must have shape"),
    (lambda: fa.flash_attn_qkvpacked_func(QKV.long()), TypeError, r"^qkv must be float16"),
    (lambda: fa.flash_attn_qkvpacked_func([1]), TypeError, r"^qkv must be a torch.Tensor, got list"),
    (lambda: fa.flash_attn_kvpacked_func(Q, QKV), ValueError, r"^kv must have shape \(batch, seqlen_k, 2, heads_kv, head_dim\)"),
    (lambda: fa.flash_attn_kvpacked_func(Q, QKV[:, :, :2].half()), TypeError, r"^kv must have q's dtype"),
    (lambda: fa.flash_attn_varlen_func(PACKED, PACKED, PACKED, CU.long(), CU, 5, 5), TypeError, r"^cu_seqlens_q must be int32"),
    (lambda: fa.flash_attn_varlen_func(PACKED, PACKED, PACKED, CU, CU, 3, 5), ValueError, r"^max_seqlen_q must be at least"),
    (lambda: fa.flash_attn_varlen_func(PACKED, PACKED, PACKED, CU, CU, "5", 5), TypeError, r"^max_seqlen_q must be an int"),
    (
        lambda: fa.flash_attn_varlen_func(PACKED, CACHE, CACHE, CU, CU, 5, 5, block_table=TABLE.long()),
        TypeError,
        r"^block_table must be int32",
    ),
    (
        lambda: fa.flash_attn_varlen_func(PACKED, CACHE, CACHE, CU, CU, 5, 5, block_table=TABLE + 9),
        ValueError,
        r"^block_table .*must hold pages",
    ),
    (lambda: fa.flash_attn_varlen_qkvpacked_func(PACKED_QKV, CU.long(), 5), TypeError, r"^cu_seqlens must be int32"),
    (lambda: fa.flash_attn_varlen_qkvpacked_func(PACKED_QKV, CU, 2), ValueError, r"^max_seqlen must be at least"),
    (lambda: fa.flash_attn_varlen_kvpacked_func(PACKED, PACKED_QKV, CU, CU, 5, 5), ValueError, r"^kv must have shape \(total_k, 2"),
    (lambda: fa.flash_attn_with_kvcache(Q, CACHE, CACHE, NEW, NEW), ValueError, r"^cache_seqlens must be given"),
    (lambda: fa.flash_attn_with_kvcache(Q, CACHE, CACHE, NEW, None, cache_seqlens=3), ValueError, r"^k and v must be given together"),
    (lambda: fa.flash_attn_with_kvcache(Q, CACHE, CACHE, cache_seqlens=9), ValueError, r"^cache_seqlens must lie between 0 and 8"),
    (
        lambda: fa.flash_attn_with_kvcache(Q, CACHE, CACHE, NEW, NEW, cache_seqlens=8),
        ValueError,
        r"^cache_seqlens must lie between 0 and 7",
    ),
    (lambda: fa.flash_attn_with_kvcache(Q, CACHE, CACHE, cache_seqlens=LENGTHS.long()), TypeError, r"^cache_seqlens must be int32"),
    (
        lambda: fa.flash_attn_with_kvcache(Q, CACHE, CACHE, cache_batch_idx=LENGTHS, block_table=TABLE),
        ValueError,
        r"^cache_batch_idx must be None",
    ),
    (lambda: fa.flash_attn_with_kvcache(Q, CACHE, CACHE, cache_leftpad=int32(1)), ValueError, r"^cache_leftpad must have shape"),
    (lambda: fa.flash_attn_with_kvcache(Q, CACHE, CACHE, num_splits=-1), ValueError, r"^num_splits must be >= 0"),
    (lambda: fa.flash_attn_with_kvcache(Q, CACHE, CACHE, num_splits=1.0), TypeError, r"^num_splits must be an int"),
    (lambda: fa.flash_attn_with_kvcache(Q, CACHE, CACHE, return_softmax_lse=1), TypeError, r"^return_softmax_lse must be a bool"),
    (
        lambda: fa.flash_attn_with_kvcache(Q, CACHE, CACHE, rotary_cos=COS, rotary_sin=COS, cache_seqlens=3),
        ValueError,
        r"^rotary_cos and rotary_sin need",
    ),
    (lambda: rotary(COS, None), TypeError, r"^rotary_sin must be a torch.Tensor"),
    (lambda: rotary(COS[:4], COS[:4]), ValueError, r"^rotary_cos must have a row for each of the cache's 8 positions"),
    (lambda: rotary(torch.ones(8, 9), COS), ValueError, r"^rotary_cos must have between 1 and head_dim / 2 = 8 columns"),
    (lambda: rotary(COS, COS[:, :4]), ValueError, r"^rotary_sin must have shape"),
    (lambda: rotary(COS.double(), COS), TypeError, r"^rotary_cos must have q's dtype"),
    (lambda: rotary(COS, COS, rotary_interleaved=2), TypeError, r"^rotary_interleaved must be a bool"),
    (lambda: rotary(COS, COS, cache_seqlens="3"), TypeError, r"^cache_seqlens must be a"),
]


def rotary(cos: Any, sin: Any, **options: Any) -> Any:
    return fa.flash_attn_with_kvcache(Q, CACHE, CACHE, NEW, NEW, cos, sin, **({"cache_seqlens": 3} | options))


QUERY, KEY = torch.randn(2, 4, 5, 8), torch.randn(2, 4, 7, 8)
MASK = torch.ones(5, 7, dtype=torch.bool)
SDPA: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (lambda: sdpa(QUERY, KEY, KEY, dropout_p=0.5), UnsupportedError, r"dropout.*dropout_p=0.5"),
    (lambda: sdpa(QUERY, KEY, KEY, dropout_p=-1), ValueError, r"^dropout_p must lie between 0 and 1"),
    (lambda: sdpa(QUERY, KEY, KEY, MASK, is_causal=True), ValueError, r"^attn_mask must be None with is_causal=True"),
    (lambda: sdpa(QUERY, KEY, KEY, is_causal=1), TypeError, r"^is_causal must be a bool"),
    (lambda: sdpa(QUERY, KEY, KEY, enable_gqa=None), TypeError, r"^enable_gqa must be a bool"),
    (lambda: sdpa(QUERY, KEY, KEY, scale="1"), TypeError, r"^scale must be a number"),
    (
        lambda: sdpa(QUERY, KEY[:, :2], KEY[:, :2]),
        ValueError,
        r"leading dimensions that broadcast \(fewer key/value heads .* enable_gqa=True\)",
    ),
    (
        lambda: sdpa(QUERY, KEY[:, :3], KEY[:, :3], enable_gqa=True),
        ValueError,
        r"^key and value must have the same number of heads, a divisor",
    ),
    (lambda: sdpa(QUERY, KEY[:, :2], KEY, enable_gqa=True), ValueError, r"^key and value must have the same number of heads"),
    (lambda: sdpa(QUERY[0, 0, 0], KEY, KEY), ValueError, r"^query must have at least 2 dimensions"),
    (lambda: sdpa(QUERY, None, KEY), TypeError, r"^key must be a torch.Tensor"),
    (lambda: sdpa(QUERY, KEY[..., :6], KEY), ValueError, r"^key must have query's head_dim 8"),
    (lambda: sdpa(QUERY, KEY, KEY[:, :, :6]), ValueError, r"^value must have key's seqlen 7"),
    (lambda: sdpa(QUERY, KEY.double(), KEY), TypeError, r"^key must have query's dtype"),
    (lambda: sdpa(QUERY.long(), KEY.long(), KEY.long()), TypeError, r"^query must be float16"),
    (lambda: sdpa(QUERY, KEY, KEY, MASK.int()), TypeError, r"^attn_mask must be bool, float32 or query's dtype"),
    (lambda: sdpa(QUERY, KEY, KEY, MASK.double()), TypeError, r"^attn_mask must be bool"),
    (
        lambda: sdpa(QUERY, KEY, KEY, MASK[:, :6]),
        ValueError,
        r"^attn_mask must broadcast to \(..., heads, seqlen_q, seqlen_k\) = \(2, 4, 5, 7\)",
    ),
    (lambda: sdpa(QUERY, KEY, KEY, MASK.expand(3, 2, 4, 5, 7)), ValueError, r"^attn_mask must broadcast"),
    (lambda: sdpa(QUERY, KEY, KEY, [1]), TypeError, r"^attn_mask must be a torch.Tensor"),
]


@pytest.mark.parametrize(("wrong", "error", "message"), FLASH, ids=[f"{i}-{case[2][:40]}" for i, case in enumerate(FLASH)])
def test_flash_attn(wrong: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        wrong()


@pytest.mark.parametrize(("wrong", "error", "message"), SDPA, ids=[f"{i}-{case[2][:40]}" for i, case in enumerate(SDPA)])
def test_sdpa(wrong: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        wrong()


def test_cache_is_untouched_by_a_refused_append() -> None:
    k_cache, v_cache = CACHE.clone(), CACHE.clone()
    with pytest.raises(ValueError, match="cache_seqlens"):
        fa.flash_attn_with_kvcache(Q, k_cache, v_cache, NEW, NEW, cache_seqlens=int32(3, 8))
    assert torch.equal(k_cache, CACHE)
    assert torch.equal(v_cache, CACHE)


def test_renamed_changes_only_names() -> None:
    names = {"q": "query", "scale": "softmax_scale"}
    assert renamed("q must have k's dtype, got q", names) == "query must have k's dtype, got q"
    assert renamed("k must have q's dtype", names) == "k must have query's dtype"
    assert renamed("scaled q's dtype", names) == "scaled query's dtype"
    assert renamed("scale must be finite", {}) == "scale must be finite"
