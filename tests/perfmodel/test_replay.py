"""The replay of a trace: cycles of small kernels that can be told by hand, and the timeline of the Blackwell forward, step by step."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("numpy", reason="the emulator needs NumPy: pip install tandem-attn[emulator]")

import torch

from tandem_attn.kernels import emulated
from tandem_attn.perfmodel.drawing import BLOCKS, draw
from tandem_attn.perfmodel.replay import Replay, replay
from tandem_attn.perfmodel.roofline import EXP, MMA, roofline_of
from tandem_attn.perfmodel.timeline import FIRST, MAXIMA, REST, Timeline, timeline
from tandem_attn.spec.inputs import Inputs
from tandem_attn.spec.plan import Launch, Plan, Schedule, ScheduleKind
from tandem_attn.spec.planner import plan as make_plan
from tandem_attn.spec.problem import Problem
from tests.emulator.kernels import launch

ROLES = ("softmax 0", "softmax 1")
# Thread 0 arrives behind 64 exponentials; warp 1 waits for it.
HANDOVER = """
    mov.b32 %r1, smem; setp.eq.u32 %p1, %tid, 0; setp.lt.u32 %p2, %tid, 32;
    @%p1 mbarrier.init.shared::cta.b64 [%r1], 32;
    bar.sync 0;
    @!%p2 bra W;
    {work}
    mbarrier.arrive.shared::cta.b64 _, [%r1];
    bra DONE;
    W: mbarrier.try_wait.parity.shared::cta.b64 %p3, [%r1], 0; @!%p3 bra W;
    DONE:
"""


def replayed(body: str, **options: object) -> Replay:
    result = launch(body, target="sm_100a", trace=True, **options)
    assert result.ok, result.reports
    return replay(result.trace, "B200", "bfloat16")


def arrival(steps: list) -> float:
    return next(step.at for step in steps if step.arrived and step.arrived[0][0].kind == "mbarrier")


def behind(unit: str, count: int) -> str:
    lines = {"mufu": "ex2.approx.ftz.f32 %f{i}, %f{i};", "fma": "fma.rn.f32 %f{i}, %f{i}, %f{i}, %f{i};", "none": "mov.b32 %r{i}, %r{i};"}
    zero = " ".join(f"mov.b32 %f{i}, 0;" for i in range(8))
    return zero + " ".join(lines[unit].format(i=i % 8 + (2 if unit == "none" else 0)) for i in range(count)) + " mov.b32 %r2, 0;"


@pytest.mark.parametrize(("unit", "cycles"), [("mufu", 8), ("fma", 1), ("none", 0)])
def test_a_leg_takes_what_its_busiest_unit_does(unit: str, cycles: int) -> None:
    """Thirty-two lanes on a quarter of 16 MUFU or 128 FMA results a cycle; a wait ends with the arrival."""
    few, many = (replayed(HANDOVER.format(work=behind(unit, count)), threads=64, shared=64) for count in (64, 128))
    assert arrival(many.steps[0, 0]) - arrival(few.steps[0, 0]) == pytest.approx(64 * cycles)
    wait = next(step for step in many.steps[0, 1] if step.waited and step.waited[0].kind == "mbarrier")
    assert wait.at == arrival(many.steps[0, 0]) >= wait.since


def test_warps_of_one_sub_partition_share_it() -> None:
    work = behind("mufu", 64) + "bar.sync 1;"
    ends = [max(step.at for steps in replayed(work, threads=32 * n).steps.values() for step in steps) for n in (1, 4, 8)]
    assert ends[1] == pytest.approx(ends[0], abs=1)
    assert ends[2] == pytest.approx(ends[0] + 64 * 8, abs=4)


def test_a_chip_without_tensor_memory_is_refused() -> None:
    with pytest.raises(ValueError, match="arch must be a chip with tcgen05"):
        replay(SimpleNamespace(), "H200", "bfloat16")


def forward(rows: int) -> tuple[Plan, Replay, Timeline]:
    """Seven key blocks of a full mask at head_dim 128."""
    pytest.importorskip("triton", reason="kernels are compiled by Triton: pip install tandem-attn[cuda]")
    problem = Problem(batch=1, seqlen_q=rows, seqlen_k=896, heads=1, heads_kv=1, head_dim=128, device="cpu", return_lse=True)
    plan = make_plan(problem, "B200", schedule=Schedule(ScheduleKind.NAIVE, Launch.STATIC), num_splits=1).plan
    q, k, v = (torch.randn(1, length, 1, 128).bfloat16() for length in (rows, 896, 896))
    with emulated.settings(trace=True, checks="none"):
        trace = emulated.judged(problem, plan, Inputs(q=q, k=k, v=v))[2].trace
    found = replay(trace, plan.arch, plan.dtype)
    return plan, found, timeline(trace, found, plan)


@pytest.mark.parametrize("rows", [256, pytest.param(512, marks=pytest.mark.judge)])
def test_the_timeline_is_the_numbered_account(rows: int, tmp_path: Path) -> None:
    """docs/blackwell_forward.md, "The schedule", of one CTA and of a pair: each number is a step there."""
    plan, found, line = forward(rows)
    assert plan.cta_group == rows // 256
    start, stop = line.window(BLOCKS)
    period = (stop - start) / BLOCKS
    assert period == roofline_of(plan).cycles(MMA) == 2048, "the tensor cores never wait in the steady state"
    o0 = {span.block: span for span in line.of("mma", "O0")}
    first = next(block for block, span in o0.items() if span.start == start)
    for block in range(first, first + BLOCKS):
        products = [line.of("mma", name)[block + later] for name, later in (("O0", 0), ("S0", 1), ("O1", 0), ("S1", 1))]  # 1, 2, 3
        assert all(a.end == b.start for a, b in pairwise(products))
        for cta in range(plan.cta_group):
            for tile, role in enumerate(ROLES):
                softmax_of_a_block(line, cta, role, products[2 * tile + 1].end, line.of("mma", f"O{tile}")[block + 1].start, block + 1)
    for part in (MAXIMA, FIRST, REST):
        zero, one = (line.of(role, part)[first].start for role in ROLES)
        assert one - zero == pytest.approx(period / 2, abs=32), "softmax 1 half a block later"
    exponentials = found.busy[0, "mufu"] / len(o0)
    assert exponentials == pytest.approx(roofline_of(plan).cycles(EXP), rel=0.02)
    pytest.importorskip("matplotlib", reason="pictures are drawn by matplotlib: pip install tandem-attn[plot]")
    draw(line, "a title", tmp_path / "timeline.svg")
    assert all(name in (tmp_path / "timeline.svg").read_text() for name in ("softmax 0", "correction", "s_ready", "O0 i", "a title"))


def softmax_of_a_block(line: Timeline, cta: int, role: str, s_complete: float, needed: float, block: int) -> None:
    """Steps 4 to 8, between the commit of S and the product that needs P."""
    maxima, first, rest = (line.of(role, part, cta)[block] for part in (MAXIMA, FIRST, REST))
    assert s_complete == maxima.start < maxima.end <= first.end < rest.end, role  # 4 and 6; the warps of a role need not go in step
    during = [signal for signal in line.signals if signal.source[0] == cta and s_complete < signal.sent < needed]
    sent = {signal.name: signal.sent for signal in during if signal.source[1] == role}
    assert sent["stats_ready"] == maxima.end, "5: alpha"
    assert sent["p_ready, O rescaled"] == first.end < needed, "6: the planned share"
    assert sent["p_ready, rest"] == rest.end < needed, "7: the rest"
    rescaled = [signal.sent for signal in during if signal.name == "p_ready, O rescaled" and signal.source[1] == "correction"]
    assert any(at > maxima.end for at in rescaled), "8: correction takes alpha, and says that O is rescaled"


def test_the_timeline_of_key_blocks_in_turns() -> None:
    """docs/blackwell_forward.md, "One query tile": each role takes every other block, and sends its maxima before its exponentials."""
    plan, _, line = forward(128)
    assert plan.q_stages == 1
    start, stop = line.window(BLOCKS)
    assert (stop - start) / BLOCKS == roofline_of(plan).cycles(MMA) == 1024, "the tensor cores never wait in the steady state"
    starts = sorted((span.start, role) for role in ROLES for span in line.of(role, MAXIMA))
    assert [role for _, role in starts] == [ROLES[block % 2] for block in range(7)]
    for role, other in (ROLES, ROLES[::-1]):
        sent = [signal.sent for signal in line.signals if (signal.name, signal.source[1], signal.target[1]) == ("stats_ready", role, other)]
        maxima, first = line.of(role, MAXIMA), line.of(role, FIRST)
        assert sent[: len(maxima)] == [span.end for span in maxima]
        assert all(a < b.end for a, b in zip(sent, first, strict=False))
