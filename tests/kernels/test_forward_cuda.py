"""The Hopper forward on a GPU against the fp64 truth, over every path of ``problems``."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from accuracy import assert_accurate
from problems import K_LENGTHS, PROBLEMS, Q_LENGTHS

from tandem_attn.kernels import backend
from tandem_attn.spec.inputs import Inputs
from tandem_attn.spec.plan import Launch, Schedule, ScheduleKind
from tandem_attn.spec.planner import plan as make_plan
from tandem_attn.spec.problem import Problem

on_hopper = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not on_hopper, reason="needs a Hopper GPU")]


def random_inputs(p: Problem, spread: float = 1.0) -> Inputs:
    """Normal values; what lies beyond seqused is NaN."""
    dtype = getattr(torch, p.dtype)
    make = lambda *shape: torch.randn(shape, device="cuda").to(dtype)  # noqa: E731
    rows_q, rows_k = ((p.total_q,), (p.total_k,)) if p.varlen else ((p.batch, p.seqlen_q), (p.batch, p.seqlen_k))
    q, k, v = make(*rows_q, p.heads, p.head_dim), make(*rows_k, p.heads_kv, p.head_dim), make(*rows_k, p.heads_kv, p.head_dim_v)
    extra = {}
    if p.varlen:
        for side, lengths in (("q", Q_LENGTHS), ("k", K_LENGTHS)):
            extra[f"cu_seqlens_{side}"] = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device="cuda")
        for x, total in ((q, sum(Q_LENGTHS)), (k, sum(K_LENGTHS)), (v, sum(K_LENGTHS))):
            x[total:] = float("nan")
    if p.seqused and p.varlen:
        extra["seqused_k"] = torch.tensor([5, 0, 33, 301, 400, 0, 127], dtype=torch.int32, device="cuda")
        for b, (start, used) in enumerate(zip(extra["cu_seqlens_k"].tolist(), extra["seqused_k"].tolist(), strict=False)):
            k[start + used : start + K_LENGTHS[b]] = float("nan")
            v[start + used : start + K_LENGTHS[b]] = float("nan")
    elif p.seqused:
        used_q = torch.tensor([p.seqlen_q, 0, p.seqlen_q - 3, 130], dtype=torch.int32, device="cuda")
        used_k = torch.tensor([p.seqlen_k - 7, 40, 0, 257], dtype=torch.int32, device="cuda")
        for x, used in ((q, used_q), (k, used_k), (v, used_k)):
            for b in range(p.batch):
                x[b, used[b] :] = float("nan")
        extra = {"seqused_q": used_q, "seqused_k": used_k}
    if p.sink:
        extra["sink"] = torch.randn(p.heads, device="cuda")
    if p.alibi:
        extra["alibi_slopes"] = torch.rand(p.heads, device="cuda") * 0.1
    return Inputs(q=q * spread, k=k, v=v, **extra)


@pytest.mark.parametrize("name", PROBLEMS)
def test_equals_truth(name: str) -> None:
    p = PROBLEMS[name]
    assert backend.lacks(p) is None
    torch.manual_seed(0)
    inputs = random_inputs(p)
    out, lse = backend.forward(p, backend.plan(p), inputs)
    assert_accurate(p, inputs, out, lse)
    again, _ = backend.forward(p, backend.plan(p), inputs)
    assert torch.equal(out, again), "not bitwise repeatable"


@pytest.mark.parametrize("launch", [Launch.NONE, Launch.STATIC, Launch.DYNAMIC])
@pytest.mark.parametrize("kind", [ScheduleKind.NAIVE, ScheduleKind.LPT])
def test_schedules(kind: ScheduleKind, launch: Launch) -> None:
    p = dataclasses.replace(PROBLEMS["causal, long"], batch=8, heads=12, heads_kv=12)
    inputs = random_inputs(p)
    plan = make_plan(p, "H200", direction="forward", num_splits=1, pack_gqa=1, schedule=Schedule(kind, launch, 5)).plan
    for _ in range(2):  # the dynamic counter is back at 0 for the second call
        out, lse = backend.forward(p, plan, inputs)
        assert_accurate(p, inputs, out, lse)


@pytest.mark.parametrize("layout", ["qkv slice", "heads first", "expanded batch", "odd strides"])
def test_strides(layout: str) -> None:
    p = PROBLEMS["causal"]
    b, s, h, d = p.batch, p.seqlen_q, p.heads, p.head_dim
    if layout == "qkv slice":
        q, k, v = torch.randn(b, s, 3, h, d, device="cuda").bfloat16().unbind(2)
    elif layout == "heads first":
        q, k, v = (torch.randn(b, h, s, d, device="cuda").bfloat16().transpose(1, 2) for _ in range(3))
    elif layout == "expanded batch":
        q, k, v = (torch.randn(1, s, h, d, device="cuda").bfloat16().expand(b, -1, -1, -1) for _ in range(3))
    else:
        q, k, v = (torch.randn(b, s, h, d + 3, device="cuda").bfloat16()[..., 1:-2] for _ in range(3))
    inputs = Inputs(q=q, k=k, v=v)
    assert_accurate(p, inputs, *backend.forward(p, backend.plan(p), inputs))


@pytest.mark.parametrize("spread", [300.0, 1e4])
def test_large_logits(spread: float) -> None:
    p = PROBLEMS["causal"]
    inputs = random_inputs(p, spread)
    out, _ = backend.forward(p, backend.plan(p), inputs)
    assert out.isfinite().all()
    assert out.float().abs().max() <= inputs.v.float().abs().max()


def test_ones() -> None:
    p = PROBLEMS["causal"]
    inputs = dataclasses.replace(random_inputs(p), v=torch.ones(p.batch, p.seqlen_k, p.heads_kv, p.head_dim_v, device="cuda").bfloat16())
    out, _ = backend.forward(p, backend.plan(p), inputs)
    assert (out.float() - 1).abs().max() <= 2**-8
