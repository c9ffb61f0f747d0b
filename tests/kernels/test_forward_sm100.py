"""The Blackwell forward in the emulator: every feature and technique right, and judged clean. Executed on a CPU; never run on a chip."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from emulation import PROBLEMS, assert_right, packed, planned, problem, random_inputs, run

from tandem_attn.emulator.judge.checks import CHECKS
from tandem_attn.spec.exp2 import Exp2Split
from tandem_attn.spec.masks import Causal
from tandem_attn.spec.plan import Launch, Plan, Schedule, ScheduleKind
from tandem_attn.spec.problem import Problem

# What make test has time for: both forms of tiling, a pair, ragged rows, every change of the scores.
QUICK = ("full", "causal, few queries", "seqused", "alibi, causal, softcap, sink", "head_dim 64 and 256", "pair")
STRICT = CHECKS - {"uninitialised-register", "register-pressure"}  # with the checks that Triton's own tensor-memory code does not pass
ORDERS = (("at-issue", 0), ("latest", 0), ("random", 1), ("random", 2))
STATIC = Schedule(ScheduleKind.NAIVE, Launch.STATIC)


def _check(p: Problem, plan: Plan, **options: object) -> None:
    inputs = random_inputs(p)
    out, lse, result = run(p, plan, inputs, **options)
    assert result.ok, "\n".join(map(str, result.reports))
    assert_right(p, plan, inputs, out, lse)


@pytest.mark.parametrize("name", QUICK)
def test_right(name: str) -> None:
    _check(PROBLEMS[name], planned(PROBLEMS[name]))


@pytest.mark.judge(each="name")
@pytest.mark.parametrize("name", PROBLEMS)
def test_right_and_clean(name: str) -> None:
    p = PROBLEMS[name]
    _check(p, planned(p), checks="all")


@pytest.mark.judge
@pytest.mark.parametrize(("order", "seed"), ORDERS)
@pytest.mark.parametrize("name", ["full", "causal", "varlen, causal", "head_dim 256", "pair", "pair, head_dim 192 and 128"])
def test_clean_in_every_order(name: str, order: str, seed: int) -> None:
    """Under every check; three heads for two clusters, so that one tile follows another."""
    p = PROBLEMS[name]
    p = p if p.varlen else replace(p, heads=3, heads_kv=3)
    _check(p, planned(p), checks=STRICT, schedule=order, seed=seed, clusters=2, resident_ctas=2)


@pytest.mark.judge(each="launch")
@pytest.mark.parametrize("kind", [ScheduleKind.NAIVE, ScheduleKind.LPT])
@pytest.mark.parametrize("launch", list(Launch))
def test_schedules(launch: Launch, kind: ScheduleKind) -> None:
    p = problem(520, heads=3, mask=Causal())
    _check(p, planned(p, schedule=Schedule(kind, launch, 2)), checks="all", schedule="random", seed=3, resident_ctas=2)


@pytest.mark.judge(each="launch")
@pytest.mark.parametrize("launch", list(Launch))
def test_schedules_of_pairs(launch: Launch) -> None:
    p = problem(600, 300, heads=3)
    schedule = Schedule(ScheduleKind.NAIVE, launch)
    _check(p, planned(p, cta_group=2, schedule=schedule), checks=STRICT, schedule="random", seed=4, clusters=2, resident_ctas=4)


@pytest.mark.judge(each="launch")
@pytest.mark.parametrize("launch", [Launch.STATIC, Launch.DYNAMIC, Launch.CLC])
def test_schedules_of_packed_sequences_in_pairs(launch: Launch) -> None:
    p = packed(Causal())
    _check(p, planned(p, cta_group=2, schedule=Schedule(ScheduleKind.LPT, launch)), checks="all", clusters=1, resident_ctas=2)


@pytest.mark.judge(each="launch")
@pytest.mark.parametrize("launch", [Launch.STATIC, Launch.DYNAMIC, Launch.CLC])
def test_schedules_of_packed_sequences(launch: Launch) -> None:
    p = packed(Causal())
    _check(p, planned(p, schedule=Schedule(ScheduleKind.LPT, launch)), checks="all", resident_ctas=2)


TECHNIQUES: dict[str, dict[str, object]] = {
    "exp2 on MUFU only": {"exp2": Exp2Split()},
    "a quarter on FMA, at the end": {"exp2": Exp2Split(fma_pairs=4, first_pair=12)},
    "every second pair on FMA": {"exp2": Exp2Split(fma_pairs=1, group_pairs=2)},
    "all on FMA, degree 4": {"exp2": Exp2Split(4, 16)},
    "degree 5": {"exp2": Exp2Split(5, 3)},
    "P in one part": {"p_parts": (1.0,)},
    "P in three parts": {"p_parts": (0.25, 0.75, 1.0)},
    "first part of P of half": {"p_parts": (0.5, 1.0)},
    "always rescaled": {"rescale_rows": 0},
    "rescale by rows": {"rescale_rows": 1},
    "rescale by query tiles": {"rescale_rows": 128},
    "rescale whenever a maximum grew": {"rescale_threshold": 0.0},
    "blocks of 64 keys": {"tile_n": 64},
    "one query tile": {"q_stages": 1},
    "two slots": {"kv_stages": 2},
    "O over Q": {"o_over_q": True},
    "B300": {"arch": "B300"},
}


@pytest.mark.judge(each="name")
@pytest.mark.parametrize("name", TECHNIQUES)
def test_techniques(name: str) -> None:
    """Each technique on and off; logits are spread so that maxima grow in some blocks and not in others."""
    _check_technique(name, 1)


@pytest.mark.judge(each="name")
@pytest.mark.parametrize("name", TECHNIQUES)
def test_techniques_of_pairs(name: str) -> None:
    _check_technique(name, 2)


def _check_technique(name: str, cta_group: int) -> None:
    p = problem(300, 420, mask=Causal())
    plan = planned(p, **{"cta_group": cta_group, "schedule": STATIC, **TECHNIQUES[name]})
    inputs = random_inputs(p, spread=4.0)
    out, lse, result = run(p, plan, inputs, checks="all")
    assert result.ok, "\n".join(map(str, result.reports))
    assert_right(p, plan, inputs, out, lse)


@pytest.mark.judge(each="cta_group")
@pytest.mark.parametrize("cta_group", [1, 2])
def test_gluons_own_synchronisation(cta_group: int) -> None:
    p = problem(300, 420, mask=Causal())
    _check(p, planned(p, cta_group=cta_group, schedule=STATIC), checks="all", plain=True)


@pytest.mark.judge
@pytest.mark.parametrize("spread", [300.0, 1e4])
def test_large_logits(spread: float) -> None:
    p = PROBLEMS["causal"]
    inputs = random_inputs(p, spread)
    out, _, _ = run(p, planned(p), inputs)
    assert out.isfinite().all()
    assert out.float().abs().max() <= inputs.v.float().abs().max()


@pytest.mark.judge
def test_ones() -> None:
    p = PROBLEMS["causal"]
    inputs = random_inputs(p)
    inputs = replace(inputs, v=torch.ones_like(inputs.v))
    out, _, _ = run(p, planned(p), inputs)
    assert (out.float() - 1).abs().max() <= torch.finfo(out.dtype).eps


def test_bitwise_repeatable() -> None:
    p = PROBLEMS["full"]
    inputs = random_inputs(p)
    first, first_lse, _ = run(p, planned(p), inputs)
    again, again_lse, _ = run(p, planned(p), inputs, schedule="random", seed=7)
    assert torch.equal(first, again)
    assert torch.equal(first_lse, again_lse)
