"""No kernel of any plan loads from or stores to the stack. Needs no GPU.

``judge`` (make matrix) compiles the plans of every problem list; make test one of each cause of spills that there was.
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


# What make test has time for: one kernel of each cause of spills that there was, on both chips.
QUICK = (
    ("B200", "causal", 2),
    ("B200", "one window or another", 1),
    ("B200", "seqused", 1),
    ("B200", "alibi", 1),
    ("B200", "head_dim 192 and 128", 1),
    ("B200", "head_dim 160", 1),
    ("B200", "one document or another", 1),
    ("B200", "pages of 16, many queries", 1),
    ("B200", "splits, more than blocks", 1),
    ("B200", "heads packed, masks", 1),
    ("B300", "heads packed, masks", 2),
    ("H200", "sink", 0),
    ("H200", "alibi", 0),
    ("H200", "pages of 16, many queries", 0),
    ("H200", "two documents", 0),
    ("H200", "predicate, negative and wide numbers", 0),
    ("H200", "splits, more than blocks", 0),
)

# By chip, problem and CTAs of a tile (0: the chip has no choice).
CASES = (
    *(("H200", name, 0) for name in {**HOPPER, **FEATURES, **MANY_QUERIES}),
    *(
        (chip, name, pair)
        for chip, pair in (("B200", 1), ("B200", 2), ("B300", 1))
        for name in {**BLACKWELL_PROBLEMS, **FEATURES, **MANY_QUERIES}
    ),
)


def _plan(chip: str, name: str, pair: int) -> Plan:
    """The planner's plan."""
    options = {"cta_group": pair} if pair else {}
    if name in FEATURES or name in MANY_QUERIES:
        feature = make(name, "cpu")
        plan = backend.plan(feature.problem, FORWARD, chip).with_(**feature.plan)
        if not pair:
            return plan
        problem = replace(feature.problem, mask=lower(feature.problem.mask)[0])
        options |= {"num_splits": plan.num_splits, "pack_gqa": plan.pack_gqa, "schedule": plan.schedule}
        return make_plan(problem, chip, direction=FORWARD, **options).plan
    problem = (BLACKWELL_PROBLEMS if pair else HOPPER)[name]
    return make_plan(problem, chip, direction=FORWARD, num_splits=1, pack_gqa=1, **options).plan


@pytest.mark.parametrize("case", QUICK, ids=str)
def test_no_spills(case: tuple[str, str, int]) -> None:
    assert disassemble(compiled(_plan(*case)).cubin).spills == 0


@pytest.mark.judge
@pytest.mark.parametrize("case", CASES, ids=str)
def test_no_spills_in_any_plan(case: tuple[str, str, int]) -> None:
    test_no_spills(case)
