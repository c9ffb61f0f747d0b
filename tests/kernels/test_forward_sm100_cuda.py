"""The Blackwell forward on a Blackwell GPU against the fp64 truth: the problems that the emulator runs, and larger ones.

Written without such a GPU at hand; ``make blackwell`` runs it, and then ``tandem bench``.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from emulation import PROBLEMS, assert_right, problem, random_inputs
from float8 import PAIRS as FLOAT8_PAIRS
from float8 import PROBLEMS as FLOAT8_PROBLEMS

from tandem_attn.kernels import backend
from tandem_attn.spec.inputs import Inputs
from tandem_attn.spec.masks import Causal
from tandem_attn.spec.plan import Launch, Schedule, ScheduleKind
from tandem_attn.spec.planner import plan as make_plan
from tandem_attn.spec.problem import FLOAT8, Problem

on_blackwell = torch.cuda.is_available() and torch.cuda.get_device_capability() in ((10, 0), (10, 3))
pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not on_blackwell, reason="needs a Blackwell GPU (compute capability 10.0 or 10.3)")]

LARGE = {
    "full, 4k": problem(4096, heads=4, batch=2),
    "causal, 3k": problem(3001, heads=8, heads_kv=2, mask=Causal()),
    "head_dim 64, 4k": problem(4000, head_dim=64, heads=4, mask=Causal()),
}


def _on_gpu(inputs: Inputs) -> Inputs:
    return Inputs(**{f.name: None if (x := getattr(inputs, f.name)) is None else x.cuda() for f in dataclasses.fields(inputs)})


def _check(p: Problem, **overrides: object) -> None:
    plan = make_plan(p, backend.chip_here(), direction="forward", num_splits=1, pack_gqa=1, **overrides).plan
    inputs = _on_gpu(random_inputs(p))
    out, lse = backend.forward(p, plan, inputs)
    assert_right(p, plan, inputs, out, lse)
    for _ in range(5):
        again, again_lse = backend.forward(p, plan, inputs)
        assert torch.equal(out, again)
        assert torch.equal(lse, again_lse)


@pytest.mark.parametrize("name", [*PROBLEMS, *LARGE])
def test_right_and_repeatable(name: str) -> None:
    _check((PROBLEMS | LARGE)[name])


@pytest.mark.parametrize("dtype", FLOAT8)
@pytest.mark.parametrize("name", [*FLOAT8_PROBLEMS, *FLOAT8_PAIRS])
def test_8_bit_inputs(name: str, dtype: str) -> None:
    p = dataclasses.replace((FLOAT8_PROBLEMS | FLOAT8_PAIRS)[name], dtype=dtype)
    _check(p, **({"cta_group": 2} if name in FLOAT8_PAIRS else {}))


@pytest.mark.parametrize("kind", [ScheduleKind.NAIVE, ScheduleKind.LPT])
@pytest.mark.parametrize("launch", list(Launch))
def test_schedules(launch: Launch, kind: ScheduleKind) -> None:
    _check(problem(700, heads=32, mask=Causal(), batch=4), schedule=Schedule(kind, launch, 6))  # 2.6 tiles for each of 148 SMs


@pytest.mark.parametrize("launch", [Launch.NONE, Launch.STATIC, Launch.CLC])
def test_schedules_of_pairs(launch: Launch) -> None:
    _check(problem(700, heads=32, batch=4), cta_group=2, schedule=Schedule(ScheduleKind.NAIVE, launch))
