"""The kernels in the emulator: every feature on small cases, then every order of events and every form of the kernel (``make judge``).

The kernels' PTX is executed here, not measured on a chip.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="the kernels are compiled by Triton: pip install tandem-attn[cuda]")

from tandem_attn.emulator import Result
from tandem_attn.kernels import emulated
from tandem_attn.reference.compare import compare_all, plainly, results
from tandem_attn.reference.samples import sample
from tandem_attn.spec.exp2 import Exp2Split
from tandem_attn.spec.masks import Causal, Full, Window
from tandem_attn.spec.plan import FORWARD, Launch, Schedule, ScheduleKind
from tandem_attn.spec.planner import plan as make_plan
from tandem_attn.spec.problem import Problem
from tests.semantic.conftest import ORDERS, BackendUnderTest
from tests.support.cases import Case
from tests.support.judge import check

KERNELS = {arch: BackendUnderTest(emulated.PREFIX + arch, kernels=True, slow=True) for arch in emulated.CHIPS}
PACKED = Case(layout="packed", batch=5, lengths_q=(7, 0, 20, 1, 7), lengths_k=(9, 6, 20, 0, 9), head_dim=8, tail_q=2, tail_k=3)

# Each feature at least once, in as few kernels as will do.
FEATURES = {
    "causal, GQA, head_dim 128": Case(batch=1, seqlen_q=150, seqlen_k=301, heads=6, heads_kv=2, head_dim=128, mask="causal", dtype="bf16"),
    "full, expanded batch": Case(batch=2, seqlen_q=200, seqlen_k=140, heads=2, heads_kv=1, head_dim=64, strides="expanded", dtype="fp16"),
    "window, sink": Case(batch=1, seqlen_q=140, seqlen_k=150, heads=2, heads_kv=1, mask="window(5,2)", sink=True, dtype="bf16"),
    "softcap, ALiBi, sink, rows without keys": Case(seqlen_q=53, seqlen_k=37, mask="causal", softcap=3.0, alibi=2, sink=True, dtype="fp16"),
    "packed slices of QKV": replace(PACKED, lengths_k=PACKED.lengths_q, strides="packed_qkv", mask="causal", dtype="bf16"),
    "packed, seqused": replace(PACKED, used_q=(3, 0, 20, 0, 1), used_k=(9, 0, 1, 0, 2), sink=True, mask="causal", dtype="fp16"),
    "seqused, top-left": Case(batch=4, seqlen_q=33, seqlen_k=40, used_q=(33, 0, 5, 5), used_k=(3, 7, 0, 40), mask="top-left", dtype="bf16"),
    "head_dim 192, head_dim_v 128": Case(
        batch=1, seqlen_q=70, seqlen_k=150, heads=2, heads_kv=2, head_dim=192, head_dim_v=128, dtype="bf16"
    ),
    "head_dim 256, few queries": Case(batch=1, seqlen_q=11, seqlen_k=140, heads=2, heads_kv=1, head_dim=256, mask="causal", dtype="bf16"),
    "head_dim 40, windows of two alignments": Case(
        batch=1, seqlen_q=90, seqlen_k=77, heads=2, heads_kv=2, head_dim=40, strides="transposed", mask="two-alignments", dtype="fp16"
    ),
    "tensors off alignment": Case(batch=1, seqlen_q=20, seqlen_k=31, heads=2, heads_kv=1, strides="unaligned", dtype="bf16"),
    "no keys, sink": Case(seqlen_q=5, seqlen_k=0, sink=True, dtype="bf16"),
    "no queries": Case(seqlen_q=0, seqlen_k=5, dtype="bf16"),
    "no sequences": Case(layout="packed", batch=0, head_dim=8, tail_q=3, tail_k=2, dtype="bf16"),
}


# sm_103a is sm_100a under another plan: make judge is soon enough.
QUICK = [pytest.param(arch, marks=[pytest.mark.judge] if arch == "sm_103a" else []) for arch in KERNELS]


def check_feature(name: str, arch: str) -> None:
    backend = KERNELS[arch]
    check(backend.form(FEATURES[name]), backend.name)


@pytest.mark.parametrize("arch", QUICK)
@pytest.mark.parametrize("name", FEATURES)
def test_feature(name: str, arch: str) -> None:
    check_feature(name, arch)


@pytest.mark.judge
@pytest.mark.parametrize("arch", KERNELS)
@pytest.mark.parametrize("order", ORDERS[1:4], ids=str)
@pytest.mark.parametrize("name", FEATURES)
def test_feature_in_other_orders(name: str, order: dict[str, Any], arch: str) -> None:
    with emulated.settings(**order):
        check_feature(name, arch)


# Tiles of every kind: several blocks, the last one partial; more tiles than clusters, so that each cluster works on several.
LONG = Problem(batch=1, seqlen_q=200, seqlen_k=300, heads=2, heads_kv=1, head_dim=64, return_lse=True)
MASKS = (Full(), Causal(), Window(100, 30))


def judged(problem: Problem, order: dict[str, Any], **overrides: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Runs the Hopper kernel under a plan with some fields fixed; checks the judgement and the errors, and returns O and LSE."""
    taken = sample(problem, seed=0)
    plan = make_plan(problem, "H200", direction=FORWARD, num_splits=1, pack_gqa=1, **overrides).plan
    with emulated.settings(**order):
        out, lse, result = emulated.judged(problem, plan, taken.inputs)
    assert isinstance(result, Result)
    assert result.ok, "\n".join(map(str, result.reports))
    expected = results(problem, taken.inputs, torch.float64), plainly(problem, taken.inputs)
    bad = [str(c) for c in compare_all({"out": out, "lse": lse}, *expected, getattr(torch, problem.dtype)) if not c.ok]
    assert not bad, "\n".join(bad)
    return out, lse


SCHEDULES = [Schedule(kind, launch, section) for kind, launch, section in itertools.product(
    (ScheduleKind.NAIVE, ScheduleKind.LPT), (Launch.NONE, Launch.STATIC, Launch.DYNAMIC), (0, 2)
)]  # fmt: skip


@pytest.mark.judge
@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_schedule_of_the_hopper_kernel(schedule: Schedule) -> None:
    for order in ORDERS[:3]:
        judged(replace(LONG, batch=2, total_q=0, total_k=0, mask=Causal()), order, schedule=schedule)


FORMS: dict[str, tuple[Problem, dict[str, Any]]] = {
    "one consumer": (LONG, {"q_stages": 1}),
    "two consumers": (LONG, {"q_stages": 2}),
    "three consumers": (replace(LONG, heads=1, seqlen_k=1100, total_k=0), {"q_stages": 3}),  # planned where there are many keys
    "Q in shared memory": (LONG, {"q_registers": False}),
    "64-key blocks": (LONG, {"tile_n": 64}),
    "softmax beside P V": (LONG, {"intra_overlap": True}),
    "softmax beside P V, Q in shared memory": (LONG, {"intra_overlap": True, "q_registers": False}),
    "late turn": (LONG, {"early_turn": False}),
    "no turns": (LONG, {"ping_pong": False}),
    "always rescaled": (LONG, {"rescale_rows": 0}),
    "rescaled whenever a maximum grows": (LONG, {"rescale_threshold": 0.0}),
    "exp2 on FMA units, degree 3": (LONG, {"exp2": Exp2Split(3, 4, 16)}),
    "exp2 on FMA units, degree 5": (LONG, {"exp2": Exp2Split(5, 8, 16)}),
    "two stages": (LONG, {"kv_stages": 2}),
}


@pytest.mark.judge
@pytest.mark.parametrize(
    ("name", "mask"), [(name, mask) for name in FORMS for mask in (MASKS if name != "three consumers" else MASKS[:1])], ids=str
)
def test_form_of_the_hopper_kernel(name: str, mask: Any) -> None:
    """A form computes the same bits in every order."""
    problem, overrides = FORMS[name]
    problem = replace(problem, mask=mask)
    first, *others = [judged(problem, order, **overrides) for order in ORDERS[:3]]
    for out, lse in others:
        assert torch.equal(out, first[0]) and torch.equal(lse, first[1]), "not bitwise repeatable"


@pytest.mark.judge
@pytest.mark.parametrize("arch", emulated.CHIPS)
def test_large_logits(arch: str) -> None:
    """|s| of 1e5: O stays within V."""
    problem = replace(LONG, mask=Causal())
    taken = sample(problem, seed=0).inputs
    out, _, result = emulated.judged(problem, emulated.plan(problem, arch), replace(taken, q=taken.q * 1e4))
    assert result is not None and result.ok, result
    assert out.isfinite().all() and out.abs().max() <= taken.v.abs().max()


SANITIZED = {
    "causal, GQA": Problem(batch=1, seqlen_q=150, seqlen_k=140, heads=2, heads_kv=1, head_dim=64, mask=Causal()),
    "packed, window": Problem(
        batch=3, seqlen_q=70, seqlen_k=90, heads=1, heads_kv=1, head_dim=16, mask=Window(20, 0), varlen=True,
        total_q=75, total_k=110, lengths=((5, 20), (0, 0), (70, 90)),
    ),
}  # fmt: skip


@pytest.mark.judge
@pytest.mark.parametrize("name", SANITIZED)
def test_consan_finds_nothing(name: str) -> None:
    """The Hopper kernel with Gluon's own synchronisation, instrumented by Triton's concurrency sanitizer; then that form without it."""
    judged(SANITIZED[name], {"consan": True, "checks": "default"})
    for order in ORDERS[:3]:
        judged(SANITIZED[name], {"plain": True, **order})
