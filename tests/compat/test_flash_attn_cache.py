"""flash_attn_with_kvcache: lengths, pages, left padding, appended keys and rotary embedding."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor

from tandem_attn import UnsupportedError
from tandem_attn.compat.flash_attn import flash_attn_with_kvcache

ROOM, HEADS, HEADS_KV, D = 12, 4, 2, 16


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def rotated(x: Tensor, angle: Tensor, positions: list[int], interleaved: bool) -> Tensor:
    """x (S, heads, D): pairs of dimensions as complex numbers, turned by angle[position]."""
    out = x.clone()
    r = 2 * angle.shape[1]
    first, second = (slice(0, r, 2), slice(1, r, 2)) if interleaved else (slice(0, r // 2), slice(r // 2, r))
    turned = torch.complex(x[..., first], x[..., second]) * torch.polar(torch.ones_like(angle), angle)[positions][:, None]
    out[..., first], out[..., second] = turned.real, turned.imag
    return out


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("seqlen_q", [1, 3])
def test_lengths_leftpad_and_batch_idx(truth: SimpleNamespace, seqlen_q: int, causal: bool) -> None:
    q, k, v = random(2, seqlen_q, HEADS, D), random(5, ROOM, HEADS_KV, D), random(5, ROOM, HEADS_KV, D)
    lens, pad, rows = [9, 5], [2, 0], [3, 1]
    k[:, 9:], v[:, 9:] = float("nan"), float("nan")  # never read
    out, lse = flash_attn_with_kvcache(
        q, k, v, cache_seqlens=int32(lens), cache_leftpad=int32(pad), cache_batch_idx=int32(rows), causal=causal, return_softmax_lse=True
    )
    for b in range(2):
        ks, vs = (x[rows[b], pad[b] : lens[b]][None] for x in (k, v))
        expected, expected_lse = truth.naive(q[b : b + 1], ks, vs, truth.window_matrix(seqlen_q, lens[b] - pad[b], causal=causal))
        truth.close(f"O of {b}", out[b : b + 1], expected)
        truth.close(f"LSE of {b}", lse[b : b + 1], expected_lse)


def int32(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (3, 0)])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotary_dim", [0, 8, 16])
def test_append_with_rotary(truth: SimpleNamespace, rotary_dim: int, interleaved: bool, window: tuple[int, int], paged: bool) -> None:
    lens, new = [4, 9], 3
    q, k, v = random(2, new, HEADS, D), random(2, new, HEADS_KV, D), random(2, new, HEADS_KV, D)
    k_dense, v_dense = random(2, ROOM, HEADS_KV, D), random(2, ROOM, HEADS_KV, D)
    angle = torch.rand(ROOM, rotary_dim // 2, dtype=torch.float64) * 6
    table = int32([5, 1, 0, 3, 4, 2]).view(2, 3) if paged else None
    caches = [in_pages(x, table) for x in (k_dense, v_dense)]
    cos, sin = (angle.cos(), angle.sin()) if rotary_dim else (None, None)
    out = flash_attn_with_kvcache(
        q, *caches, k, v, cos, sin, cache_seqlens=int32(lens), block_table=table, window_size=window, rotary_interleaved=interleaved
    )
    for b, length in enumerate(lens):
        after = list(range(length, length + new))
        at = [length] * new if window == (-1, -1) else after
        k_dense[b, length : length + new] = rotated(k[b], angle, after, interleaved)
        v_dense[b, length : length + new] = v[b]
        keys = slice(0, length + new)
        seen = truth.window_matrix(new, length + new, window)
        expected, _ = truth.naive(rotated(q[b], angle, at, interleaved)[None], k_dense[b : b + 1, keys], v_dense[b : b + 1, keys], seen)
        truth.close(f"O of {b}", out[b : b + 1], expected)
    for name, cache, dense in zip(("k_cache", "v_cache"), caches, (k_dense, v_dense), strict=True):
        truth.close(name, cache, in_pages(dense, table))


def in_pages(x: Tensor, table: Tensor | None) -> Tensor:
    """A (2, ROOM, ...) cache, as 6 pages of 4 keys where there is a table."""
    if table is None:
        return x.clone()
    pages = torch.empty(6, 4, *x.shape[2:], dtype=x.dtype)
    pages[table.long().flatten()] = x.reshape(6, 4, *x.shape[2:])
    return pages


def test_softcap_alibi_and_int_length(truth: SimpleNamespace) -> None:
    q, k, v = random(2, 3, HEADS, D), random(2, ROOM, HEADS_KV, D), random(2, ROOM, HEADS_KV, D)
    slopes = torch.rand(2, HEADS)
    out = flash_attn_with_kvcache(q, k, v, cache_seqlens=7, softmax_scale=0.3, causal=True, softcap=2.0, alibi_slopes=slopes, num_splits=4)
    seen, bias = truth.window_matrix(3, 7, causal=True), truth.alibi(slopes, 3, 7)
    truth.close("O", out, truth.naive(q, k[:, :7], v[:, :7], seen, bias=bias, scale=0.3, softcap=2.0)[0])


def test_length_may_be_numpys() -> None:
    q, new, angle = random(2, 1, HEADS, D), random(2, 1, HEADS_KV, D), random(ROOM, D // 2)
    outs = [
        flash_attn_with_kvcache(q, *(torch.zeros(2, ROOM, HEADS_KV, D).double() for _ in "kv"), new, new, angle.cos(), angle.sin(), length)
        for length in (3, np.int64(3))
    ]
    assert torch.equal(*outs)


def test_whole_cache_by_default(truth: SimpleNamespace) -> None:
    q, k, v = random(1, 2, HEADS, D), random(1, ROOM, HEADS_KV, D), random(1, ROOM, HEADS_KV, D)
    truth.close("O", flash_attn_with_kvcache(q, k, v), truth.naive(q, k, v, truth.window_matrix(2, ROOM))[0])


def test_append_with_rotary_compiles_without_a_graph_break() -> None:
    q, new, angle = random(2, 1, HEADS, D), random(2, 1, HEADS_KV, D), random(ROOM, D // 2)
    cache = random(2, ROOM, HEADS_KV, D)
    compiled = torch.compile(flash_attn_with_kvcache, fullgraph=True, backend="aot_eager")
    results = []
    for function in (compiled, flash_attn_with_kvcache):
        k_cache, v_cache = cache.clone(), cache.clone()
        out = function(q, k_cache, v_cache, new, new, angle.cos(), angle.sin(), cache_seqlens=int32([3, 5]), causal=True)
        results.append((out, k_cache, v_cache))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_is_forward_only() -> None:
    q, cache = random(1, 2, HEADS, D).requires_grad_(), random(1, ROOM, HEADS_KV, D)
    out = flash_attn_with_kvcache(q, cache, cache)
    with pytest.raises(UnsupportedError, match="gradient through a KV cache"):
        out.sum().backward()
