"""The contract, line by line: every test is named after the line it holds to.

``tests/semantic`` checks the numbers over all features; here each line is shown by the smallest thing that would break it.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import sys
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

import tandem_attn
from tandem_attn import Causal, UnsupportedError, Window, attention, attention_kvcache, attention_varlen
from tandem_attn.api import backends
from tandem_attn.reference.compare import compare_all, plainly, results
from tandem_attn.reference.samples import sample
from tandem_attn.spec.inputs import Inputs
from tandem_attn.spec.problem import Problem
from tests.support.cases import DTYPES, Case
from tests.support.judge import check

INFINITY = float("inf")
NAN = float("nan")


def rand(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0, device: str = "cpu") -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(device, dtype)


def int32(*values: int, device: str = "cpu") -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def qkv(
    batch: int = 2, sq: int = 5, sk: int = 7, heads: int = 4, heads_kv: int = 2, d: int = 8, dv: int = 8, **options: Any
) -> list[Tensor]:
    return [
        rand(batch, sq, heads, d, **options),
        rand(batch, sk, heads_kv, d, seed=1, **options),
        rand(batch, sk, heads_kv, dv, seed=2, **options),
    ]


def seen(sq: int, sk: int, **mask: Any) -> list[str]:
    """Which keys each query sees, found by attention itself: with equal logits and V = identity, O is not 0 where a key is seen."""
    out = attention(torch.zeros(1, sq, 1, 4), torch.zeros(1, sk, 1, 4), torch.eye(sk)[None, :, None], **mask)
    return ["".join("#" if x > 0 else "." for x in row) for row in out[0, :, 0].tolist()]


def grads(out: Tensor, *inputs: Tensor, arriving: Tensor | None = None) -> tuple[Tensor, ...]:
    return torch.autograd.grad(out, inputs, torch.ones_like(out) if arriving is None else arriving)


# --- 1. scale, heads, head dimensions ----------------------------------------------------------------------------------------------------


def test_contract_01_scale_defaults_to_one_over_sqrt_head_dim() -> None:
    q, k, v = qkv(d=12)
    assert torch.equal(attention(q, k, v), attention(q, k, v, scale=1 / math.sqrt(12)))
    assert not torch.allclose(attention(q, k, v), attention(q, k, v, scale=1 / math.sqrt(8)))


@pytest.mark.parametrize("ratio", [1, 2, 3, 12])
def test_contract_01_query_heads_share_key_heads_in_order(ratio: int) -> None:
    q, k, v = qkv(heads=2 * ratio, heads_kv=2)
    repeated = [x.repeat_interleave(ratio, dim=2) for x in (k, v)]
    torch.testing.assert_close(attention(q, k, v), attention(q, *repeated), rtol=1e-6, atol=1e-6)


def test_contract_01_head_dim_v_may_differ() -> None:
    q, k, v = qkv(d=8, dv=5)
    assert attention(q, k, v).shape == (2, 5, 4, 5)


# --- 2. causal ---------------------------------------------------------------------------------------------------------------------------


def test_contract_02_causal_is_aligned_bottom_right() -> None:
    assert seen(3, 5, causal=True) == ["###..", "####.", "#####"]
    assert seen(5, 3, causal=True) == ["...", "...", "#..", "##.", "###"]
    assert seen(3, 5, mask=Causal()) == seen(3, 5, causal=True)


def test_contract_02_top_left_exists_by_name() -> None:
    assert seen(3, 5, mask=Causal("top-left")) == ["#....", "##...", "###.."]
    assert seen(4, 2, mask=Causal("top-left")) == ["#.", "##", "##", "##"]


# --- 3. windows --------------------------------------------------------------------------------------------------------------------------


def test_contract_03_window_counts_keys_beside_the_diagonal() -> None:
    assert seen(4, 4, window=(1, 0)) == ["#...", "##..", ".##.", "..##"]
    assert seen(4, 4, window=(0, 2)) == ["###.", ".###", "..##", "...#"]
    assert seen(4, 4, window=(0, 0)) == ["#...", ".#..", "..#.", "...#"]
    assert seen(2, 5, window=(1, 0)) == ["..##.", "...##"]
    assert seen(3, 3, window=(None, 1)) == ["##.", "###", "###"]
    assert seen(3, 3, window=(1, None)) == ["###", "###", ".##"]
    assert seen(2, 3, window=(None, None)) == ["###", "###"]


def test_contract_03_a_bound_beyond_every_sequence_is_unbounded() -> None:
    for far in (100, 2**31 - 1, 2**40, sys.maxsize, 2**70):
        assert seen(5, 3, window=(far, far)) == ["###"] * 5
        assert seen(5, 3, window=(far, 0)) == seen(5, 3, causal=True)
    assert seen(5, 3, mask=Window(sys.maxsize, sys.maxsize)) == ["###"] * 5


def test_contract_03_causal_and_window_compose() -> None:
    assert seen(4, 4, window=(1, 5), causal=True) == seen(4, 4, window=(1, 0))
    assert seen(4, 4, mask=Window(1, 1), causal=True) == seen(4, 4, window=(1, 0))
    assert seen(4, 4, mask=lambda b, h, i, j: j % 2 == 0, causal=True, window=(2, None)) == ["#...", "#...", "#.#.", "..#."]


# --- 4. rows without keys ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_contract_04_row_without_keys(dtype: str) -> None:
    q, k, v = (x.requires_grad_() for x in qkv(sq=6, sk=4, dtype=DTYPES[dtype]))
    out, lse = attention(q, k, v, causal=True, return_lse=True)
    assert not out[:, :2].any() and bool((lse[..., :2] == -INFINITY).all()) and bool(lse[..., 2:].isfinite().all())
    arriving = torch.zeros_like(out)
    arriving[:, :2] = 1
    for x in torch.autograd.grad((out, lse), (q, k, v), (arriving, torch.where(lse == -INFINITY, 1.0, 0.0).to(lse.dtype))):
        assert not x.any()


def test_contract_04_with_a_sink_lse_is_the_sink() -> None:
    q, k, v = (x.requires_grad_() for x in qkv(sq=6, sk=4))
    sink = rand(4).requires_grad_()
    out, lse = attention(q, k, v, causal=True, sink=sink, return_lse=True)
    assert not out[:, :2].any()
    torch.testing.assert_close(lse[..., :2], sink[None, :, None].expand(2, 4, 2).detach(), rtol=1e-6, atol=1e-6)
    dq, dk, dv, dsink = grads(lse[..., :2].sum(), q, k, v, sink)
    assert not (dq.any() or dk.any() or dv.any())
    torch.testing.assert_close(dsink, torch.full((4,), 4.0), rtol=1e-6, atol=1e-6)


def test_contract_04_sink_of_minus_infinity_is_no_sink() -> None:
    q, k, v = qkv(sq=6, sk=4)
    plain, with_sink = (attention(q, k, v, causal=True, sink=s, return_lse=True) for s in (None, torch.full((4,), -INFINITY)))
    for a, b in zip(plain, with_sink, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


def test_contract_04_a_bias_of_minus_infinity_hides_a_key() -> None:
    q, k, v = (x.requires_grad_() for x in qkv())
    bias = torch.zeros(1, 1, 5, 7)
    bias[..., 0, :], bias[..., 1, 3:] = -INFINITY, -INFINITY
    out, lse = attention(q, k, v, bias=bias.requires_grad_(), return_lse=True)
    assert not out[:, 0].any() and bool((lse[..., 0] == -INFINITY).all())
    torch.testing.assert_close(out[:, 1], attention(q[:, 1:2], k[:, :3], v[:, :3])[:, 0], rtol=1e-5, atol=1e-6)
    assert all(bool(x.isfinite().all()) for x in grads(out, q, k, v, bias))


@pytest.mark.parametrize(("batch", "sq", "sk"), [(0, 3, 3), (2, 0, 3), (2, 3, 0), (2, 0, 0), (0, 0, 0)])
def test_contract_04_zero_sizes_are_legal(batch: int, sq: int, sk: int) -> None:
    q, k, v = (x.requires_grad_() for x in qkv(batch, sq, sk))
    out, lse = attention(q, k, v, return_lse=True)
    assert out.shape == (batch, sq, 4, 8) and lse.shape == (batch, 4, sq)
    assert not out.any() and bool((lse == -INFINITY).all())
    assert all(not x.any() and x.shape == y.shape for x, y in zip(grads(out, q, k, v), (q, k, v), strict=True))


def test_contract_04_zero_length_sequences_are_legal() -> None:
    q, k, v = rand(5, 2, 8).requires_grad_(), rand(4, 1, 8, seed=1).requires_grad_(), rand(4, 1, 8, seed=2).requires_grad_()
    out, lse = attention_varlen(q, k, v, int32(0, 0, 3, 3, 5), int32(0, 4, 4, 4, 4), return_lse=True)
    assert not out.any() and bool((lse == -INFINITY).all())
    assert not any(x.any() for x in grads(out, q, k, v))
    cache = attention_kvcache(rand(2, 1, 2, 8), rand(2, 6, 1, 8), rand(2, 6, 1, 8), int32(0, 0))
    assert not cache.any()


# --- 5. LSE ------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_contract_05_lse_is_float32_natural_log(dtype: torch.dtype) -> None:
    q, k, v = qkv(dtype=dtype)
    _, lse = attention(q, k, v, return_lse=True)
    s = torch.einsum("bqhd,bkhd->bhqk", q.double(), k.double().repeat_interleave(2, 2)) / math.sqrt(8)
    assert lse.dtype == torch.float32 and lse.shape == (2, 4, 5)
    torch.testing.assert_close(lse.double(), s.logsumexp(-1), rtol=0, atol=2e-4)
    packed = attention_varlen(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), int32(0, 5, 10), int32(0, 7, 14), return_lse=True)[1]
    assert packed.dtype == torch.float32 and packed.shape == (4, 10)
    torch.testing.assert_close(packed, lse.transpose(0, 1).flatten(1), rtol=0, atol=2e-4)


def test_contract_05_lse_gradient_reaches_q_and_k() -> None:
    q, k, v = (x.requires_grad_() for x in qkv())
    _, lse = attention(q, k, v, causal=True, return_lse=True)
    got = grads(lse, q, k, v)
    s = torch.einsum("bqhd,bkhd->bhqk", q, k.repeat_interleave(2, 2)) / math.sqrt(8)
    s = s.masked_fill(torch.ones(5, 7, dtype=torch.bool).triu(3), -INFINITY)
    for x, want in zip(got, (*grads(s.logsumexp(-1), q, k), torch.zeros_like(v)), strict=True):
        torch.testing.assert_close(x, want, rtol=1e-5, atol=1e-5)
    assert got[0].abs().max() > 0.1


def test_contract_05_lse_alone_and_out_alone_have_gradients() -> None:
    q, k, v = (x.requires_grad_() for x in qkv())
    out, lse = attention(q, k, v, return_lse=True)
    both = torch.autograd.grad(out.sum() + lse.sum(), (q, k, v), retain_graph=True)
    apart = [torch.autograd.grad(x.sum(), (q, k, v), retain_graph=True) for x in (out, lse)]
    for together, a, b in zip(both, *apart, strict=True):
        torch.testing.assert_close(together, a + b, rtol=1e-5, atol=1e-5)


# --- 6. what lies beyond -----------------------------------------------------------------------------------------------------------------


def test_contract_06_beyond_seqused_is_never_used() -> None:
    q, k, v = qkv(sq=6, sk=9)
    used_q, used_k = int32(6, 2), int32(4, 9)
    short = attention(q[1:, :2], k[1:], v[1:]), attention(q[:1], k[:1, :4], v[:1, :4])
    q[1, 2:], k[0, 4:], v[0, 4:] = NAN, NAN, NAN
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = attention(*leaves, seqused_q=used_q, seqused_k=used_k)
    torch.testing.assert_close(out[1, :2], short[0][0], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(out[0], short[1][0], rtol=1e-6, atol=1e-6)
    assert not out[1, 2:].any()
    dq, dk, dv = grads(out, *leaves, arriving=torch.where(out == 0, NAN, 1.0))
    assert all(bool(x.isfinite().all()) for x in (dq, dk, dv))
    assert not (dq[1, 2:].any() or dk[0, 4:].any() or dv[0, 4:].any())


def test_contract_06_behind_the_last_sequence_is_never_used() -> None:
    q, k, v = rand(9, 2, 8), rand(11, 2, 8, seed=1), rand(11, 2, 8, seed=2)
    q[7:], k[8:], v[8:] = NAN, NAN, NAN
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out, lse = attention_varlen(*leaves, int32(0, 3, 7), int32(0, 5, 8), return_lse=True)
    assert bool(out.isfinite().all()) and not out[7:].any() and bool((lse[:, 7:] == -INFINITY).all())
    found = grads(out, *leaves)
    assert all(bool(x.isfinite().all()) for x in found) and not (found[0][7:].any() or found[1][8:].any() or found[2][8:].any())


def test_contract_06_beyond_the_page_table_is_never_used() -> None:
    k, v = torch.full((8, 4, 2, 8), NAN), torch.full((8, 4, 2, 8), NAN)
    k[5], v[5], k[2, :2], v[2, :2] = rand(4, 2, 8), rand(4, 2, 8, seed=1), rand(2, 2, 8), rand(2, 2, 8, seed=1)
    table = int32(5, 2, 99, -7).view(1, 4)
    out = attention_kvcache(rand(1, 1, 2, 8), k, v, int32(6), page_table=table)
    want = attention(rand(1, 1, 2, 8), torch.cat([k[5], k[2, :2]])[None], torch.cat([v[5], v[2, :2]])[None])
    torch.testing.assert_close(out, want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("where", ["q", "k", "v"])
def test_contract_06_nan_that_is_used_gives_nan_and_only_there(where: str) -> None:
    tensors = dict(zip("qkv", qkv(batch=1, sq=200, sk=200, heads=2, heads_kv=2), strict=True))
    tensors[where][0, 150, 1] = NAN
    out = attention(**tensors, causal=True, backend="reference")[0].isnan()
    rows = torch.zeros(200, 2, dtype=torch.bool)
    rows[150 if where == "q" else slice(150, None), 1] = True
    assert bool(out[rows].all())
    if where == "v":  # rows of the same tile that do not see the key multiply it by P = 0, and 0 * NaN is NaN: as in any matrix product
        rows[128:, 1] = True
    assert not out[~rows].any()


# --- 7. any finite logit -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["reference", "sdpa"])
@pytest.mark.parametrize("logit", [1e5, -1e5, 1e30, -1e30])
def test_contract_07_huge_logits_are_an_ordinary_softmax(logit: float, backend: str) -> None:
    """All logits equal: the softmax is uniform, whatever their size."""
    q, k, v = (
        torch.full((1, 3, 1, 4), math.sqrt(abs(logit))),
        torch.full((1, 200, 1, 4), math.copysign(math.sqrt(abs(logit)), logit)),
        rand(1, 200, 1, 4),
    )
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = attention(*leaves, scale=0.25, backend=backend)
    torch.testing.assert_close(out, v.mean(1, keepdim=True).expand_as(out), rtol=1e-3, atol=1e-5)
    dv = grads(out, *leaves)[2]
    if abs(logit) <= 1e5:  # beyond, one float32 rounding of LSE is larger than log(200)
        torch.testing.assert_close(dv, torch.full_like(dv, 3 / 200), rtol=2e-2, atol=0)
    assert bool(dv.isfinite().all())


@pytest.mark.parametrize("shift", [-50.0, -128.0, -1000.0, -5e4, 5e4])
def test_contract_07_lse_below_minus_88_in_backward(shift: float) -> None:
    q, k, v = (x.requires_grad_() for x in qkv(batch=1, sq=1, sk=128, heads=2, heads_kv=1))
    bias = torch.full((1, 1, 1, 1), shift)
    plain, (out, lse) = attention(q, k, v), attention(q, k, v, bias=bias, return_lse=True)
    assert bool(((lse - shift).abs() < 10).all())
    for a, b in zip((plain, *grads(plain, q, k, v)), (out, *grads(out, q, k, v)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5 + abs(shift) * 1e-6, atol=1e-5 + abs(shift) * 1e-7)


def test_contract_07_no_fully_masked_tile_poisons_a_row() -> None:
    """The first key blocks a row visits are masked for it: its maximum is -inf until later."""
    mask = tandem_attn.Predicate(lambda b, h, i, j: (j == (i * 7) % 400) | (j < 0 * i))
    q, k, v = qkv(batch=1, sq=130, sk=400, heads=1, heads_kv=1)
    out, lse = attention(q, k, v, mask=mask, return_lse=True)
    torch.testing.assert_close(out[0, :, 0], v[0, (torch.arange(130) * 7) % 400, 0], rtol=1e-6, atol=1e-6)
    assert bool(lse.isfinite().all())


# --- 8. strides --------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["reference", "sdpa"])
def test_contract_08_strides_do_not_change_a_bit(backend: str) -> None:
    whole = rand(2, 20, 12, 8)
    views = {
        "packed qkv": whole.split(4, dim=2),
        "transposed": [x.transpose(1, 2).contiguous().transpose(1, 2) for x in whole.split(4, dim=2)],
        "last stride 2": [torch.stack([x, x], -1)[..., 0] for x in whole.split(4, dim=2)],
        "negative-free permutation": [x.permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0) for x in whole.split(4, dim=2)],
    }
    want = attention(*(x.contiguous() for x in whole.split(4, dim=2)), backend=backend)
    for name, (q, k, v) in views.items():
        assert torch.equal(attention(q, k, v, backend=backend), want), name


def test_contract_08_expanded_batch_and_stride_zero_grad_out() -> None:
    q, k, v = qkv()
    shared = [x[:1].expand(2, -1, -1, -1).requires_grad_() for x in (k, v)]
    out = attention(q.requires_grad_(), *shared)
    expanded = torch.tensor(0.5).expand_as(out)
    got = grads(out, q, *shared, arriving=expanded)
    want = grads(out2 := attention(q, *(leaves := [x.detach().contiguous().requires_grad_() for x in shared])), q, *leaves,
                 arriving=torch.full_like(out2, 0.5))  # fmt: skip
    for a, b in zip((out, *got), (out2, *want), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("backend", ["reference", "sdpa"])
def test_contract_08_addressing_is_64_bit(backend: str) -> None:
    """Three sequences 2^30 + 64 elements apart: the last lies beyond 2^31 elements. The memory between them is never touched."""
    apart, row = 2**30 + 64, (4, 2, 8)
    memory = torch.empty(2 * apart + 64, dtype=torch.float16)
    far = memory.as_strided((3, *row), (apart, 16, 8, 1))
    near = rand(3, *row, dtype=torch.float16)
    far.copy_(near)
    assert torch.equal(attention(far, far, far, backend=backend), attention(near, near, near, backend=backend))


def test_contract_08_integer_tensors_may_have_any_strides() -> None:
    def spread(x: Tensor) -> Tensor:
        """The same values, every second element of a larger tensor."""
        return torch.stack([x, torch.full_like(x, -99)], -1)[..., 0]

    q, k, v = qkv(sq=1, sk=16)
    used = int32(3, 9)
    assert torch.equal(attention(q, k, v, seqused_k=spread(used)), attention(q, k, v, seqused_k=used))
    flat, cu = [x.flatten(0, 1) for x in qkv(sq=6, sk=6)], int32(0, 5, 12)
    assert torch.equal(attention_varlen(*flat, spread(cu), spread(cu)), attention_varlen(*flat, cu, cu))
    table = int32(4, 0, 2, 7).view(2, 2)
    new = rand(2, 2, 2, 8)
    caches = [[x.reshape(8, 4, 2, 8).clone() for x in (k, v)] for _ in range(3)]
    for (k_pages, v_pages), pages in zip(caches, (table, spread(table), table.t().contiguous().t()), strict=True):
        out = attention_kvcache(q, k_pages, v_pages, spread(int32(3, 5)), k=new, v=new, page_table=pages)
        assert torch.equal(out, attention_kvcache(q, *caches[0], int32(5, 7), page_table=table))
    assert all(torch.equal(a, b) for pair in caches[1:] for a, b in zip(pair, caches[0], strict=True))


# --- 9. repeatable -----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["reference", "sdpa"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_contract_09_forward_and_deterministic_backward_repeat_bit_for_bit(backend: str, dtype: str) -> None:
    leaves = [x.requires_grad_() for x in qkv(sq=150, sk=150, heads=6, heads_kv=2, dtype=DTYPES[dtype])]
    first: tuple[Tensor, ...] = ()
    for _ in range(5):
        out = attention(*leaves, causal=True, deterministic=True, backend=backend)
        now = (out, *grads(out, *leaves, arriving=rand(*out.shape, dtype=out.dtype)))
        first = first or now
        assert all(torch.equal(a, b) for a, b in zip(first, now, strict=True))


# --- 10. return type ---------------------------------------------------------------------------------------------------------------------


def test_contract_10_return_type_depends_on_return_lse_alone() -> None:
    for sq, sk, causal, needs_grad in itertools.product((0, 5), (0, 7), (False, True), (False, True)):
        q, k, v = qkv(sq=sq, sk=sk)
        q.requires_grad_(needs_grad)
        assert isinstance(attention(q, k, v, causal=causal), Tensor)
        pair = attention(q, k, v, causal=causal, return_lse=True)
        assert isinstance(pair, tuple) and len(pair) == 2 and all(isinstance(x, Tensor) for x in pair)


# --- 11. devices, graphs, compile (test_compile.py), no synchronisation ------------------------------------------------------------------


@pytest.mark.cuda(devices=2)
def test_contract_11_second_device_while_the_first_is_current() -> None:
    q, k, v = (x.requires_grad_() for x in qkv(dtype=torch.float16, device="cuda:1"))
    with torch.cuda.device(0):
        out = attention(q, k, v)
        found = (out, *grads(out, q, k, v))
    assert all(x.device == q.device for x in found)
    leaves = [x.detach().cpu().requires_grad_() for x in (q, k, v)]
    want = attention(*leaves)
    for a, b in zip(found, (want, *grads(want, *leaves)), strict=True):
        torch.testing.assert_close(a.cpu(), b, rtol=1e-2, atol=1e-2)


@pytest.mark.cuda
def test_contract_11_graph_replay_with_changed_seqused() -> None:
    q, k, v = qkv(sq=1, sk=64, dtype=torch.float16, device="cuda")
    used = int32(10, 64, device="cuda")
    attention(q, k, v, seqused_k=used)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attention(q, k, v, seqused_k=used)
    for lengths in ((3, 5), (64, 0), (33, 17)):
        used.copy_(int32(*lengths))
        graph.replay()
        torch.testing.assert_close(out, attention(q, k, v, seqused_k=used))


@pytest.mark.cuda
@pytest.mark.parametrize("layout", ["padded", "seqused", "packed", "cache", "append"])
def test_contract_11_no_host_synchronisation(layout: str) -> None:
    q, k, v = (x.requires_grad_() for x in qkv(sq=3, sk=64, dtype=torch.float16, device="cuda"))
    used, cu_q, cu_k = int32(10, 60, device="cuda"), int32(0, 3, 6, device="cuda"), int32(0, 64, 128, device="cuda")
    flat = [x.flatten(0, 1) for x in (q, k, v)]
    longest = torch.tensor(3, device="cuda"), torch.tensor(64, device="cuda")
    new = rand(2, 2, 2, 8, dtype=torch.float16, device="cuda")
    cache = [x.detach().clone() for x in (k, v)]
    calls = {
        "padded": lambda: attention(q, k, v, causal=True),
        "seqused": lambda: attention(q, k, v, causal=True, seqused_k=used),
        "packed": lambda: attention_varlen(*flat, cu_q, cu_k, *longest, causal=True),
        "cache": lambda: attention_kvcache(q.detach(), *cache, used, causal=True),
        "append": lambda: attention_kvcache(q.detach(), *cache, used, k=new, v=new, causal=True),
    }
    calls[layout]()  # the first call may build and load kernels
    torch.cuda.set_sync_debug_mode("error")
    try:
        out = calls[layout]()
        if out.requires_grad:
            out.sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


# --- 12. errors and backends -------------------------------------------------------------------------------------------------------------


def test_contract_12_a_named_backend_never_falls_back() -> None:
    q, k, v = qkv()
    with pytest.raises(UnsupportedError) as caught:
        attention(q, k, v, softcap=5.0, backend="sdpa")
    assert caught.value.backend == "sdpa" and caught.value.missing == "softcap" and "reference" in caught.value.nearest


def test_contract_12_auto_takes_the_first_that_covers_the_call() -> None:
    q, k, v = qkv()
    assert torch.equal(attention(q, k, v), attention(q, k, v, backend="sdpa"))
    assert torch.equal(attention(q, k, v, softcap=5.0), attention(q, k, v, softcap=5.0, backend="reference"))
    assert list(backends.ORDER) == [name for name in tandem_attn.backends() if name in backends.ORDER]


def test_contract_12_auto_says_once_that_it_fell_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "_told", set())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            backends._tell_once("reference", "a KV cache")
    assert len(caught) == 1 and "takes 'reference'" in str(caught[0].message) and "a KV cache" in str(caught[0].message)


def test_contract_12_input_errors_are_no_asserts() -> None:
    """An assert disappears under ``python -O``; the message table (test_wrong_calls.py) holds the rest."""
    q, k, v = qkv()
    for wrong in ({"scale": NAN}, {"window": (-1, 0)}, {"sink": rand(3)}, {"seqused_k": int32(9, 9)}, {"backend": "x"}):
        with pytest.raises((ValueError, TypeError)):
            attention(q, k, v, **wrong)


@pytest.mark.parametrize("options", [{}, {"causal": True, "softcap": 3.0}], ids=["sdpa", "reference"])
def test_contract_13_autocast_changes_nothing(options: dict[str, Any]) -> None:
    """O has q's dtype and accuracy; autocast is for the layers around."""
    leaves = [x.requires_grad_() for x in qkv()]
    want = attention(*leaves, **options)
    want_grads = grads(want, *leaves)
    with torch.autocast("cpu", torch.bfloat16):
        out = attention(*leaves, **options)
        found = grads(out, *leaves)
    assert all(torch.equal(a, b) and a.dtype == torch.float32 for a, b in zip((out, *found), (want, *want_grads), strict=True))


# --- 13. accuracy ------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["reference", "sdpa"])
@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
@pytest.mark.parametrize("mask", ["full", "causal"])
def test_contract_13_error_at_most_twice_the_plain_one(backend: str, dtype: str, mask: str) -> None:
    check(Case(batch=1, seqlen_q=384, seqlen_k=384, heads=2, heads_kv=1, head_dim=64, dtype=dtype, mask=mask), backend)


@pytest.mark.parametrize("backend", ["reference", "sdpa"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_contract_13_v_of_ones_gives_one(dtype: str, backend: str) -> None:
    q, k, v = qkv(batch=1, sq=300, sk=300, heads=2, heads_kv=2, d=64, dv=64, dtype=DTYPES[dtype])
    out = attention(4 * q, k, torch.ones_like(v), causal=True, backend=backend)
    error = (out.double() - 1).abs().max()
    roundings = 1 if out.dtype.itemsize == 2 else 16  # the result's own, or those of a sum of 300 numbers
    assert error <= roundings * torch.finfo(out.dtype).eps, f"V = 1 gives 1 up to {error}"


# --- 14. 8-bit inputs --------------------------------------------------------------------------------------------------------------------

SMALLEST = {torch.float8_e4m3fn: 2.0**-9, torch.float8_e5m2: 2.0**-16}  # subnormal numbers


def eight_bits(dtype: torch.dtype, spread: float = 1.0) -> tuple[Problem, Inputs]:
    sizes = {"batch": 2, "seqlen_q": 200, "seqlen_k": 400, "heads": 4, "heads_kv": 2, "head_dim": 64}
    problem = Problem(**sizes, dtype=str(dtype).removeprefix("torch."), mask=Causal(), descale=True)
    inputs = sample(problem, 0).inputs
    return problem, dataclasses.replace(inputs, q=(inputs.q.float() * spread).to(dtype))


def call(inputs: Inputs) -> tuple[Tensor, Tensor]:
    descales = {"q_descale": inputs.q_descale, "k_descale": inputs.k_descale, "v_descale": inputs.v_descale}
    return attention(inputs.q, inputs.k, inputs.v, causal=True, return_lse=True, **descales)


@pytest.mark.parametrize("spread", [1.0, 4.0])
@pytest.mark.parametrize("dtype", SMALLEST)
def test_contract_14_error_at_most_twice_the_plain_one(dtype: torch.dtype, spread: float) -> None:
    problem, inputs = eight_bits(dtype, spread)
    out, lse = call(inputs)
    assert out.dtype == torch.bfloat16
    found = {"out": out, "lse": lse}
    for comparison in compare_all(found, results(problem, inputs, torch.float64), plainly(problem, inputs), dtype):
        assert comparison.ok, str(comparison)


@pytest.mark.parametrize("spread", [1.0, 4.0])
@pytest.mark.parametrize("dtype", SMALLEST)
def test_contract_14_no_element_leaves_the_stated_bound(dtype: torch.dtype, spread: float) -> None:
    _, inputs = eight_bits(dtype, spread)
    factors = (inputs.q_descale, inputs.k_descale, inputs.v_descale)
    tensors = zip((inputs.q, inputs.k, inputs.v), factors, strict=True)
    q, k, v = (x.double() * f.double().repeat_interleave(x.shape[2] // 2, 1)[:, None, :, None] for x, f in tensors)
    k, v = (x.repeat_interleave(2, 2) for x in (k, v))
    s = torch.einsum("bqhd,bkhd->bhqk", q, k) / 8
    s = s.masked_fill(~torch.ones(200, 400, dtype=torch.bool).tril(200), float("-inf"))
    p = torch.softmax(s, -1)
    truth = torch.einsum("bhqk,bkhd->bqhd", p, v)
    weight_error = torch.maximum(p * torch.finfo(dtype).eps / 2, p.amax(-1, keepdim=True) * SMALLEST[dtype] / 2 / 256)
    allowed = torch.einsum("bhqk,bkhd->bqhd", weight_error.masked_fill(p == 0, 0.0), v.abs()) * (1 + 1e-6)
    allowed += (truth.abs() + allowed) * torch.finfo(torch.bfloat16).eps / 2
    excess = (call(inputs)[0].double() - truth).abs() - allowed
    assert excess.max() <= 0, f"an element is off by {excess.max():.3g} more than the contract says"


@pytest.mark.parametrize("dtype", SMALLEST)
def test_contract_14_v_of_ones_gives_one(dtype: torch.dtype) -> None:
    _, inputs = eight_bits(dtype)
    out, _ = call(dataclasses.replace(inputs, v=torch.ones_like(inputs.v.float()).to(dtype), v_descale=None))
    assert (out.double() - 1).abs().max() <= torch.finfo(dtype).eps / 2
