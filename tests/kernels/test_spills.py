"""How many loads and stores of the stack ptxas leaves in the kernel of every plan: none, but for what is listed. Needs no GPU.

``judge`` (make matrix) compiles the plans of every problem list; make test a few that had spills before, or have some left.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from emulation import PROBLEMS as BLACKWELL
from features import FEATURES, MANY_QUERIES, make
from float8 import PAIRS
from float8 import PROBLEMS as FLOAT8
from problems import PROBLEMS as HOPPER
from sass import disassemble

from tandem_attn.kernels import backend
from tandem_attn.kernels.compile import compiled
from tandem_attn.spec.mask_tree import lower
from tandem_attn.spec.plan import FORWARD, Plan
from tandem_attn.spec.planner import plan as make_plan

BLACKWELL_PROBLEMS = {**HOPPER, **BLACKWELL, **{f"8 bits: {name}": p for name, p in (FLOAT8 | PAIRS).items()}}


def _all() -> dict[tuple[str, str, int], Plan]:
    """By chip, problem and CTAs a tile (0: the chip has no choice) the planner's plan."""
    found = {("H200", name, 0): _plan(p, "H200") for name, p in HOPPER.items()}
    for pair in (1, 2):
        found |= {("B200", name, pair): _plan(p, "B200", cta_group=pair) for name, p in BLACKWELL_PROBLEMS.items()}
    for name in {**FEATURES, **MANY_QUERIES}:
        feature = make(name, "cpu")
        problem = replace(feature.problem, mask=lower(feature.problem.mask)[0])
        found["H200", name, 0] = backend.plan(feature.problem, FORWARD, "H200").with_(**feature.plan)
        base = backend.plan(feature.problem, FORWARD, "B200").with_(**feature.plan)
        for pair in (1, 2):
            same = {"num_splits": base.num_splits, "pack_gqa": base.pack_gqa, "schedule": base.schedule, "cta_group": pair}
            found["B200", name, pair] = make_plan(problem, "B200", direction=FORWARD, **same).plan
    return found


def _plan(problem: Problem, chip: str, **options: object) -> Plan:
    return make_plan(problem, chip, direction=FORWARD, num_splits=1, pack_gqa=1, **options).plan


PLANS = _all()


def _spills(case: tuple[str, str, int]) -> int:
    return disassemble(compiled(PLANS[case]).cubin).spills


@pytest.mark.parametrize("case", QUICK, ids=str)
def test_spills(case: tuple[str, str, int]) -> None:
    assert _spills(case) == LEFT.get(case, 0)


@pytest.mark.judge
@pytest.mark.parametrize("case", PLANS, ids=str)
def test_spills_of_every_plan(case: tuple[str, str, int]) -> None:
    assert _spills(case) == LEFT.get(case, 0)
