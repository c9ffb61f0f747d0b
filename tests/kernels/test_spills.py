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
    ("H200", "sink", 0),
    ("H200", "alibi", 0),
    ("H200", "pages of 16, many queries", 0),
)
_CAUSAL = (
    "causal",
    "causal, whole tiles",
    "causal, long",
    "causal, rows without keys",
    "causal, top left",
    "gqa 4",
    "mqa",
    "float16",
    "head_dim 104",
)
# By chip, problem and CTAs of a tile, in the whole kernel.
LEFT = {
    # A part of the keys has numbers of its own, once a tile.
    ("B200", "splits, more than blocks", 1): 12,
    ("B200", "splits, more than blocks", 2): 6,
    # A number that each role reads again in each block.
    ("B200", "alibi, causal, softcap, sink", 2): 6,
    # Correction, which has 88 registers where one query tile is worked on, reloads 12 values a block; with more, softmax does.
    ("B200", "heads packed, masks", 1): 14,
    ("B200", "heads packed, masks", 2): 14,
    # Thread and row numbers, once a tile: Q in registers leaves no room for them, and other places for them lengthen the loops.
    **{("H200", name, 0): 11 for name in _CAUSAL},
    ("H200", "varlen, causal", 0): 12,
    ("H200", "causal, few queries", 0): 4,
    ("H200", "heads packed, many queries", 0): 6,
    ("H200", "head_dim 160", 0): 2,
    ("H200", "head_dim 192", 0): 2,
    # Bounds of windows, once a tile.
    ("H200", "window, left only", 0): 3,
    ("H200", "varlen, window", 0): 6,
    ("H200", "many windows", 0): 8,
    ("H200", "splits, more than blocks", 0): 8,
    # Ids of documents and their addresses, once a tile; of two documents one in each masked block.
    ("H200", "document", 0): 6,
    ("H200", "document, int64 and one for all", 0): 6,
    ("H200", "document, causal", 0): 7,
    ("H200", "document, ids in disorder", 0): 6,
    ("H200", "document, packed", 0): 6,
    ("H200", "two documents", 0): 14,
    ("H200", "predicate, negative and wide numbers", 0): 24,
    ("H200", "pages, document", 0): 4,
    # A producer of 24 registers: places of pages, once a tile.
    ("H200", "pages of 16, many queries", 0): 27,
}


# By chip, problem and CTAs of a tile (0: the chip has no choice).
CASES = (
    *(("H200", name, 0) for name in {**HOPPER, **FEATURES, **MANY_QUERIES}),
    *(("B200", name, pair) for pair in (1, 2) for name in {**BLACKWELL_PROBLEMS, **FEATURES, **MANY_QUERIES}),
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


def _spills(case: tuple[str, str, int]) -> int:
    return disassemble(compiled(_plan(*case)).cubin).spills


@pytest.mark.parametrize("case", QUICK, ids=str)
def test_spills(case: tuple[str, str, int]) -> None:
    assert _spills(case) == LEFT.get(case, 0)


@pytest.mark.judge
@pytest.mark.parametrize("case", CASES, ids=str)
def test_spills_of_every_plan(case: tuple[str, str, int]) -> None:
    assert _spills(case) == LEFT.get(case, 0)
