"""Every feature of the Hopper forward on a GPU against the fp64 truth: ``pytest tests/kernels/test_features_cuda.py``."""

from __future__ import annotations

import pytest
import torch
from accuracy import assert_accurate
from features import FEATURES, make

import tandem_attn
from tandem_attn.kernels import backend
from tandem_attn.spec.masks import Causal, Document

on_hopper = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not on_hopper, reason="needs a Hopper GPU")]


@pytest.mark.parametrize("name", FEATURES)
def test_equals_truth(name: str) -> None:
    feature = make(name, "cuda")
    plan = backend.plan(feature.problem).with_(**feature.plan)
    out, lse = backend.forward(feature.problem, plan, feature.inputs)
    assert_accurate(feature.problem, feature.inputs, out, lse)
    again, _ = backend.forward(feature.problem, plan, feature.inputs)
    assert torch.equal(out, again), "not bitwise repeatable"


@pytest.mark.parametrize("page_size", [0, 16, 64])
def test_decoding_step_by_step_equals_one_call(page_size: int) -> None:
    """Tokens appended one by one to a cache give the rows of a causal call over all of them."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 40, heads, 64, device="cuda").bfloat16() for heads in (8, 2, 2))
    whole = tandem_attn.attention(q, k, v, causal=True, backend="tandem")
    shape = (2, 64, 2, 64) if page_size == 0 else (2 * 64 // page_size, page_size, 2, 64)
    k_cache, v_cache = (torch.full(shape, float("nan"), device="cuda").bfloat16() for _ in range(2))
    table = None
    if page_size:
        table = torch.randperm(shape[0], device="cuda").int().view(2, -1)
    for i in range(40):
        length = torch.full((2,), i, dtype=torch.int32, device="cuda")
        step = slice(i, i + 1)
        out = tandem_attn.attention_kvcache(
            q[:, step], k_cache, v_cache, length, k=k[:, step], v=v[:, step], page_table=table, causal=True, backend="tandem"
        )
        assert (out.float() - whole[:, step].float()).abs().max() < 2e-2


def test_planner_splits_a_long_cache() -> None:
    """One query over 32k keys: the plan as the planner makes it, query heads packed and keys split."""
    torch.manual_seed(0)
    q = torch.randn(1, 1, 32, 128, device="cuda").bfloat16()
    k, v = (torch.randn(1, 32768, 8, 128, device="cuda").bfloat16() for _ in range(2))
    lengths = torch.tensor([30001], dtype=torch.int32, device="cuda")
    k[:, 30001:] = v[:, 30001:] = float("nan")
    out, lse = tandem_attn.attention_kvcache(q, k, v, lengths, return_lse=True, backend="tandem")
    truth, truth_lse = tandem_attn.attention(q.double(), k[:, :30001].double(), v[:, :30001].double(), return_lse=True, backend="reference")
    assert (out.double() - truth).abs().max() < 1e-3
    assert (lse - truth_lse).abs().max() < 1e-3


def test_graph_replays_with_other_lengths_and_documents() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 200, 4, 64, device="cuda").bfloat16() for _ in range(3))
    used = torch.tensor([200, 100], dtype=torch.int32, device="cuda")
    ids = torch.randint(0, 3, (2, 200), device="cuda", dtype=torch.int32).sort(-1).values
    call = lambda: tandem_attn.attention(q, k, v, mask=Causal() & Document(ids), seqused_k=used, backend="tandem")  # noqa: E731
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    used.copy_(torch.tensor([37, 200]))
    ids.copy_(torch.randint(0, 3, (2, 200)).sort(-1).values)
    graph.replay()
    assert torch.equal(out, call())


def test_many_packed_sequences() -> None:
    """The order of 70,000 sequences, more than a grid's second dimension holds."""
    torch.manual_seed(0)
    lengths = torch.randint(0, 4, (70_000,), device="cuda")
    cu = torch.zeros(70_001, dtype=torch.int32, device="cuda")
    cu[1:] = lengths.cumsum(0)
    total = int(cu[-1])
    q, k, v = (torch.randn(total, 2, 64, device="cuda").bfloat16() for _ in range(3))
    out = tandem_attn.attention_varlen(q, k, v, cu, cu, 3, 3, causal=True, backend="tandem")
    first = torch.searchsorted(cu, torch.arange(total, device="cuda"), right=True) - 1
    alone = cu[first] == torch.arange(total, device="cuda")  # the first token of a sequence sees itself only
    assert (out[alone].float() - v[alone].float()).abs().max() < 1e-2
    assert not out.isnan().any()
