"""Triggers from public bug reports of attention libraries: each stands for its whole kind, and its docstring says what went wrong there.

Sizes are the reported ones unless a comment or docstring says how they were cut down for a CPU. Speed reports are no tests: ``benchmarks``
measures them.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tandem_attn import Predicate, Problem, attention, attention_kvcache, attention_varlen
from tandem_attn.spec.plan import FORWARD, Plan
from tandem_attn.spec.schedule import schedule_for
from tests.support.cases import Case, build
from tests.support.judge import check

INFINITY = float("inf")
BACKENDS = pytest.mark.parametrize("backend", ["reference", "sdpa"])


def rand(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def leaves(*tensors: Tensor) -> list[Tensor]:
    return [x.requires_grad_() for x in tensors]


def grads(out: Any, inputs: list[Tensor]) -> tuple[Tensor, ...]:
    return torch.autograd.grad(out, inputs, torch.ones_like(out))


# --- masks, NaN, LSE ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("new", [0, 4])
def test_nan_beyond_the_used_part_of_a_cache(new: int) -> None:
    """Garbage behind a sequence's end leaked into its output, because 0 * NaN is NaN."""
    check(
        Case(
            layout="cache",
            batch=4,
            seqlen_q=1,
            seqlen_k=128,
            used_k=(32, 64, 96, 48),
            heads=8,
            heads_kv=8,
            head_dim=64,
            dtype="bf16",
            new=new,
        ),
        "auto",
    )
    check(Case(batch=4, seqlen_q=16, seqlen_k=128, used_k=(32, 64, 96, 48), heads=8, heads_kv=8, head_dim=64, dtype="bf16"), "reference")


@BACKENDS
@pytest.mark.parametrize("logit", [-5e4, -1e5, -1e30])
def test_every_logit_far_below_zero(logit: float, backend: str) -> None:
    """A finite number (-5e4, -1e30) stood for minus infinity, so rows whose logits are below it came out as zeros."""
    q, k, v = torch.ones(1, 4, 2, 4), torch.full((1, 150, 2, 4), logit / 4), rand(1, 150, 2, 4)
    k[0, 7, 0] *= 1 - 1e-3  # key 7 is 1e-3 nearer to zero: with such logits it takes everything
    out = attention(q, k, v, scale=1.0, backend=backend)
    torch.testing.assert_close(out[:, :, 1], v[:, :, 1].mean(1, keepdim=True).expand(1, 4, 4), rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(out[0, :, 0], v[0, 7, 0].expand(4, 4), rtol=1e-6, atol=1e-6)


def test_backward_of_a_row_whose_lse_is_minus_122() -> None:
    """The backward clamped LSE at -88 (the smallest float32 exponent of exp) and gave infinite dK, dV."""
    q, k, v = leaves(rand(1, 1, 2, 16), rand(1, 128, 2, 16, seed=1), rand(1, 128, 2, 16, seed=2))
    shifted, lse = attention(q, k, v, bias=torch.full((1, 1, 1, 1), -128.0), return_lse=True)
    assert -125 < float(lse.detach().max()) < -118
    for a, b in zip(grads(shifted, [q, k, v]), grads(attention(q, k, v), [q, k, v]), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_causal_with_more_queries_than_keys() -> None:
    """The first rows see no key: they came out as NaN, or as the mean of V."""
    q, k, v = leaves(rand(1, 2048, 1, 16), rand(1, 1024, 1, 16, seed=1), rand(1, 1024, 1, 16, seed=2))
    out, lse = attention(q, k, v, causal=True, return_lse=True)
    assert not out[:, :1024].any() and bool((lse[..., :1024] == -INFINITY).all()) and bool(lse[..., 1024:].isfinite().all())
    dq, dk, dv = torch.autograd.grad((out, lse), (q, k, v), (torch.ones_like(out), torch.ones_like(lse)))
    assert not dq[:, :1024].any()
    assert all(bool(x.isfinite().all()) for x in (dq, dk, dv))
    torch.testing.assert_close(out[0, 1024], v[0, 0], rtol=1e-6, atol=1e-6)


def test_a_window_as_long_as_the_sequence_is_causal() -> None:
    """Block ranges of window and causal masks were computed by different code and disagreed at the edges."""
    length = 1031  # reported with S 16384, H 8, D 128; a CPU needs no more than several tiles
    q, k, v = leaves(*(rand(1, length, 2, 32, dtype=torch.float16, seed=i) for i in range(3)))
    out, want = attention(q, k, v, window=(length - 1, 0), backend="reference"), attention(q, k, v, causal=True, backend="reference")
    assert torch.equal(out, want)
    assert all(torch.equal(a, b) for a, b in zip(grads(out, [q, k, v]), grads(want, [q, k, v]), strict=True))


@BACKENDS
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_v_of_ones_gives_ones(dtype: torch.dtype, backend: str) -> None:
    """The row sum and the product with V used differently rounded P."""
    q, k = rand(1, 300, 2, 64, dtype=dtype), rand(1, 300, 2, 64, dtype=dtype, seed=1)
    out = attention(3 * q, k, torch.ones_like(k), causal=True, backend=backend)
    assert (out.float() - 1).abs().max() <= torch.finfo(dtype).eps


def test_a_predicate_and_causal_both_apply() -> None:
    """A custom mask switched causal masking off, in the backward pass only."""
    for length in (40, 200):
        check(Case(seqlen_q=length, seqlen_k=length, mask="predicate&causal", grad_lse=True, head_dim=8), "auto")
    q, k, v = leaves(*(rand(1, 50, 1, 8, seed=i) for i in range(3)))
    allowed = (torch.arange(50)[:, None] + torch.arange(50)) % 3 != 0
    bias = torch.where(allowed.tril(), 0.0, -INFINITY)[None, None]
    out = attention(q, k, v, mask=lambda b, h, i, j: (i + j) % 3 != 0, causal=True)
    want = attention(q, k, v, bias=bias)
    for a, b in zip((out, *grads(out, [q, k, v])), (want, *grads(want, [q, k, v])), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


# --- variable length ---------------------------------------------------------------------------------------------------------------------


def test_keys_of_a_sequence_without_queries_get_no_gradient() -> None:
    """A batch whose first sequence has keys and no queries: the backward wrote outside its tensors."""
    # head_dim 64 for 256 and a quarter of each length: the zeros and the order of lengths are what matters
    cu_q, cu_k = int32(0, 0, 302, 512, 512), int32(0, 634, 1070, 1280, 2048)
    q, k, v = leaves(rand(512, 4, 64), rand(2048, 1, 64, seed=1), rand(2048, 1, 64, seed=2))
    dq, dk, dv = grads(attention_varlen(q, k, v, cu_q, cu_k), [q, k, v])
    assert not dk[:634].any() and not dv[:634].any() and not dk[1280:].any()
    assert bool(dk[634:1280].abs().sum(-1).all()) and bool(dq.abs().sum(-1).all())


def test_head_dim_256_with_one_key_head_backward() -> None:
    """The same report's head dimension and head ratio, at lengths that keep their remainders."""
    check(
        Case(
            layout="packed",
            batch=4,
            lengths_q=(0, 151, 105, 0),
            lengths_k=(127, 87, 42, 154),
            heads=4,
            heads_kv=1,
            head_dim=256,
            dtype="bf16",
        ),
        "auto",
    )


def test_causal_sequences_with_a_single_key() -> None:
    """Nearly every row sees nothing; dQ came out as NaN."""
    check(
        Case(
            layout="packed",
            batch=3,
            lengths_q=(76, 34, 146),
            lengths_k=(1, 1, 1),
            heads=1,
            heads_kv=1,
            head_dim=32,
            mask="causal",
            amplify=3.0,
        ),
        "auto",
    )
    q, k, v = leaves(3 * rand(256, 1, 32), 3 * rand(3, 1, 32, seed=1), 3 * rand(3, 1, 32, seed=2))
    out = attention_varlen(q, k, v, int32(0, 76, 110, 256), int32(0, 1, 2, 3), causal=True)
    assert all(bool(x.isfinite().all()) for x in grads(out, [q, k, v]))
    assert out.abs().sum((1, 2)).nonzero().flatten().tolist() == [75, 109, 255], "the last query of each sequence sees its key"


def test_an_empty_sequence_in_the_middle() -> None:
    """Its keys kept whatever the gradient buffers held before."""
    q, k, v = leaves(*(rand(300, 2, 16, seed=i) for i in range(3)))
    _, dk, dv = grads(attention_varlen(q, k, v, int32(0, 150, 150, 300), int32(0, 100, 200, 300)), [q, k, v])
    assert not dk[100:200].any() and not dv[100:200].any()
    assert bool(dk[:100].any()) and bool(dk[200:].any())


def test_work_grows_with_tokens_not_with_their_square() -> None:
    """8,192 sequences of 34 tokens: the grid was batch * (tiles of the whole batch), and nearly all of it had nothing to do."""
    count, length = 8192, 34
    problem = Problem(batch=count, seqlen_q=length, seqlen_k=length, heads=1, heads_kv=1, head_dim=4, varlen=True, total_q=count * length,
                      total_k=count * length, lengths=((length, length),) * count)  # fmt: skip
    plan = Plan(arch="CPU", direction=FORWARD, dtype=problem.dtype, head_dim=4, head_dim_v=4, varlen=True)
    assert schedule_for(problem, plan).num_tiles == count, "one tile each"
    q, k, v = leaves(*(rand(count * length, 1, 4, seed=i) for i in range(3)))
    cu = torch.arange(0, count * length + 1, length, dtype=torch.int32)
    out = attention_varlen(q, k, v, cu, cu, causal=True)
    want = attention(*(x.view(count, length, 1, 4) for x in (q, k, v)), causal=True, backend="reference").view_as(out)
    torch.testing.assert_close(out, want, rtol=1e-6, atol=1e-6)
    assert bool(grads(out, [q, k, v])[0].isfinite().all())


def test_more_than_65535_sequences() -> None:
    """The batch was a grid's y or z dimension, which ends at 65,535."""
    lengths = torch.tensor([1, 2, 0] * 22_000)
    cu = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)]).int()
    q, k, v = leaves(*(rand(int(cu[-1]), 1, 4, seed=i) for i in range(3)))
    out = attention_varlen(q, k, v, cu, cu, causal=True)
    first = cu[:-1][lengths > 0].long()
    assert torch.equal(out[first], v[first]), "the first query of a sequence sees its first key alone"
    assert bool(grads(out, [q, k, v])[2].isfinite().all())


# --- strides, size, device ---------------------------------------------------------------------------------------------------------------


@BACKENDS
def test_grad_out_beyond_two_to_the_31_elements(backend: str) -> None:
    """grad_out (410923, 16, 96) with strides (9728, 96, 1): 32-bit offsets overflowed. Here three rows 2^30 + 64 elements apart."""
    apart = 2**30 + 64
    far = torch.empty(2 * apart + 64, dtype=torch.float16).as_strided((1, 3, 2, 16), (1, apart, 16, 1))  # untouched memory costs nothing
    near = rand(1, 3, 2, 16, dtype=torch.float16, seed=3)
    far.copy_(near)
    q, k, v = leaves(*(rand(1, 3, 2, 16, dtype=torch.float16, seed=i) for i in range(3)))
    found = [torch.autograd.grad(attention(q, k, v, backend=backend), (q, k, v), g) for g in (far, near)]
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@BACKENDS
def test_heads_before_sequence_in_memory(backend: str) -> None:
    """(1, 32, 8192, 256).transpose(1, 2) was read as if it were contiguous. Cut to (1, 4, 200, 64)."""
    q, k, v = (rand(1, 4, 200, 64, seed=i).transpose(1, 2) for i in range(3))
    assert torch.equal(attention(q, k, v, backend=backend), attention(*(x.contiguous() for x in (q, k, v)), backend=backend))


@BACKENDS
def test_stride_zero_grad_out_over_65536_keys(backend: str) -> None:
    """The gradient of ``out.sum()`` is one number with stride 0 everywhere."""
    q, k, v = leaves(rand(1, 2, 1, 8), rand(1, 65536, 1, 8, seed=1), rand(1, 65536, 1, 8, seed=2))
    got = torch.autograd.grad(attention(q, k, v, backend=backend).sum(), (q, k, v))
    full = torch.autograd.grad(attention(q, k, v, backend=backend), (q, k, v), torch.ones(1, 2, 1, 8))
    assert all(torch.equal(a, b) for a, b in zip(got, full, strict=True))
    p = torch.softmax(q[0, :, 0].double() @ k[0, :, 0].double().T / math.sqrt(8), -1)
    torch.testing.assert_close(got[2][0, :, 0].double(), p.sum(0)[:, None].expand(-1, 8), rtol=1e-4, atol=1e-9)


@BACKENDS
def test_a_second_shape_after_the_first(backend: str) -> None:
    """A kernel compiled for one shape was launched again with the first shape's sizes inside."""
    for seqlen, heads, d in ((64, 2, 16), (65, 2, 16), (64, 4, 16), (129, 1, 32), (64, 2, 16)):
        check(Case(batch=1, seqlen_q=seqlen, seqlen_k=seqlen, heads=heads, heads_kv=1, head_dim=d, mask="causal"), backend)


# --- backward, heads, hangs --------------------------------------------------------------------------------------------------------------


def test_softcap_with_a_causal_backward_ends() -> None:
    """Softcap and causal together dead-locked two warp groups. Cut from B 2, H 32, D 128."""
    check(Case(batch=1, seqlen_q=1024, seqlen_k=1024, heads=1, heads_kv=1, head_dim=32, mask="causal", softcap=10.0, dtype="bf16"), "auto")


def test_a_thousand_sparse_backward_passes_agree() -> None:
    """A race in the block-sparse backward showed once in some hundred launches."""
    q, k, v = leaves(*(rand(1, 24, 2, 8, seed=i) for i in range(3)))
    mask = Predicate(lambda b, h, q_idx, kv_idx: (q_idx // 8) % 2 == (kv_idx // 8) % 2)
    first: tuple[Tensor, ...] = ()
    for _ in range(1000):
        now = grads(attention(q, k, v, mask=mask, deterministic=True), [q, k, v])
        first = first or now
        assert all(torch.equal(a, b) for a, b in zip(first, now, strict=True))


def test_96_query_heads_over_8_key_heads() -> None:
    """A ratio of 12 is no power of two: packed rows were assigned to the wrong head."""
    check(Case(batch=1, seqlen_q=20, seqlen_k=33, heads=96, heads_kv=8, head_dim=8, mask="causal", dtype="bf16"), "auto")


def test_head_dims_128_and_96() -> None:
    """dV was written with the row length of K."""
    check(Case(seqlen_q=40, seqlen_k=70, heads=2, heads_kv=1, head_dim=128, head_dim_v=96, dtype="bf16", mask="causal"), "auto")


def test_a_top_k_index_of_minus_one_is_skipped() -> None:
    """Rows with fewer than k chosen keys were filled with -1, and -1 addressed the last key."""
    chosen = torch.tensor([[0, 3, -1], [2, -1, -1], [-1, -1, -1], [5, 1, 0]])
    mask = Predicate(lambda b, h, q_idx, kv_idx: (chosen[q_idx] == kv_idx[..., None]).any(-1))
    q, k, v = leaves(*(rand(1, n, 1, 8, seed=n) for n in (4, 6, 6)))
    out, lse = attention(q, k, v, mask=mask, return_lse=True)
    torch.testing.assert_close(out[0, 1, 0], v[0, 2, 0])
    assert not out[0, 2].any() and float(lse[0, 0, 2]) == -INFINITY
    _, dk, dv = grads(out, [q, k, v])
    assert not dk[0, 4].any() and not dv[0, 4].any(), "nobody chose key 4"


def test_a_page_number_of_minus_one_behind_the_length_is_not_read() -> None:
    """Unused entries of a page table hold -1."""
    k = rand(4, 8, 1, 8)
    table = int32(2, -1, 3, 0).view(2, 2)
    cache, values = k.clone(), k.clone()
    out = attention_kvcache(
        rand(2, 1, 1, 8), cache, values, int32(5, 12), page_table=table, k=rand(2, 2, 1, 8, seed=1), v=rand(2, 2, 1, 8, seed=2)
    )
    assert bool(out.isfinite().all())
    changed = (cache != k).flatten(2).any(-1).nonzero().tolist()
    assert changed == [[0, 4], [0, 5], [2, 5], [2, 6]], "the new tokens' places, and no other"


# --- use ---------------------------------------------------------------------------------------------------------------------------------


def test_max_seqlen_given_as_a_tensor() -> None:
    """Its value was read on the host: a synchronisation a call, and a compilation a value (see test_compile.py)."""
    q, k, v = rand(12, 2, 8), rand(12, 2, 8, seed=1), rand(12, 2, 8, seed=2)
    want = attention_varlen(q, k, v, int32(0, 5, 12), int32(0, 5, 12), 7, 7, causal=True)
    for value in (0, 7, 10**9):
        longest = torch.tensor(value)
        assert torch.equal(attention_varlen(q, k, v, int32(0, 5, 12), int32(0, 5, 12), longest, longest, causal=True), want)


def test_changed_lengths_reach_a_compiled_call() -> None:
    """A captured graph kept the lengths of its capture. (The CUDA graph itself: test_contract_11_graph_replay_with_changed_seqused.)"""
    q, k, v, used = rand(2, 1, 2, 8), rand(2, 16, 2, 8, seed=1), rand(2, 16, 2, 8, seed=2), int32(3, 9)
    compiled = torch.compile(lambda: attention(q, k, v, seqused_k=used), fullgraph=True, backend="aot_eager")
    for lengths in ((3, 9), (16, 0), (1, 1)):
        used.copy_(int32(*lengths))
        assert torch.equal(compiled(), attention(q, k, v, seqused_k=used))


def test_a_mask_changed_in_place_reaches_the_next_call() -> None:
    """Same kind: a predicate that reads a tensor reads its present values."""
    keep = torch.ones(6, dtype=torch.bool)
    mask = Predicate(lambda b, h, q_idx, kv_idx: keep[kv_idx])
    q, k, v = rand(1, 2, 1, 8), rand(1, 6, 1, 8, seed=1), rand(1, 6, 1, 8, seed=2)
    everything = attention(q, k, v, mask=mask)
    keep[2:] = False
    torch.testing.assert_close(attention(q, k, v, mask=mask), attention(q, k[:, :2], v[:, :2]), rtol=1e-6, atol=1e-6)
    assert not torch.allclose(everything, attention(q, k, v, mask=mask))


def test_return_lse_does_not_change_the_backend_or_the_output() -> None:
    """Asking for LSE took a slower path. Here: the same backend, bit for bit the same output (its cost: benchmarks)."""
    for causal, dtype in itertools.product((False, True), (torch.float32, torch.bfloat16)):
        q, k, v = (rand(2, 70, 2, 16, dtype=dtype, seed=i) for i in range(3))
        assert torch.equal(attention(q, k, v, causal=causal, return_lse=True)[0], attention(q, k, v, causal=causal))
    call = build(Case(backward=False))
    assert call.problem().return_lse
