"""Maxima that stay, K and V loaded for two CTAs, O staged in slots of V: right and judged clean in the emulator, whatever the logits.

Executed on a CPU.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from emulation import assert_right, planned, random_inputs, run
from forms import FIXED, FORMS, LENT, OVERFLOWING, PROBLEMS, SHARED, with_large_logits, with_large_values, with_sums_near_the_end

from tandem_attn.emulator import Result
from tandem_attn.spec.exp2 import Exp2Split
from tandem_attn.spec.inputs import Inputs
from tandem_attn.spec.plan import Launch, Schedule, ScheduleKind
from tandem_attn.spec.planner import plan as make_plan
from tandem_attn.spec.problem import Problem

pytest.importorskip("triton", reason="kernels are compiled by Triton: pip install tandem-attn[cuda]")

CHIP = "H200"
BOTH = FORMS["both"]
NAIVE = Schedule(ScheduleKind.NAIVE, Launch.STATIC)


def check(p: Problem, inputs: Inputs, form: dict[str, Any], **options: Any) -> Result:
    plan = planned(p, CHIP, **form)
    out, lse, result = run(p, plan, inputs, **options)
    assert result.ok, result
    assert_right(p, plan, inputs, out, lse)
    return result


@pytest.mark.parametrize(
    ("name", "form"), [("causal", "both"), ("seqused", "both"), ("head_dim 64", "fixed"), ("head_dim 256", "all three")]
)
def test_right(name: str, form: str) -> None:
    check(PROBLEMS[name], random_inputs(PROBLEMS[name]), FORMS[form])


@pytest.mark.parametrize(
    ("name", "form", "where"), [("causal", "both", "head"), ("full", "fixed", "query"), ("packed", "all three", "query")]
)
def test_overflow_is_computed_again(name: str, form: str, where: str) -> None:
    p = PROBLEMS[name]
    inputs = random_inputs(p)
    again = check(p, with_large_logits(inputs, where), FORMS[form])
    once = check(p, inputs, FORMS[form])
    assert again.statistics.instructions > once.statistics.instructions


@pytest.mark.parametrize(("name", "form"), [("packed", "fixed"), ("packed, causal, seqused", "all three")])
def test_more_clusters_than_tiles(name: str, form: str) -> None:
    """The host does not know how many tiles a packed batch has, so some CTAs of a launch may get none."""
    p = PROBLEMS[name]
    check(p, random_inputs(p), FORMS[form], clusters=60)


@pytest.mark.parametrize("name", ["full", "sink"])
def test_sums_near_the_end_of_float32(name: str) -> None:
    """They are finite, but their reciprocals would not be normal numbers: such tiles are computed again."""
    p = PROBLEMS[name]
    again = check(p, with_sums_near_the_end(random_inputs(p)), FIXED)
    assert again.statistics.instructions > check(p, random_inputs(p), FIXED).statistics.instructions


def test_large_values() -> None:
    """The row sum does not overflow here, but the sum of weighted values does."""
    p = PROBLEMS["full"]
    check(p, with_large_values(random_inputs(p)), FIXED)


def test_no_number_stays_with_its_row() -> None:
    p = PROBLEMS["full"]
    inputs = random_inputs(p)
    inputs.q[0, 7, 1] = float("nan")
    plan = planned(p, CHIP, **BOTH)
    out, lse, result = run(p, plan, inputs)
    assert result.ok, result
    assert out[0, 7, 1].isnan().all() and lse[0, 1, 7].isnan()
    out[0, 7, 1], lse[0, 1, 7] = 0.0, 0.0
    assert out.isfinite().all() and lse.isfinite().all()


@pytest.mark.judge
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", PROBLEMS)
def test_judge_accepts(name: str, form: str) -> None:
    check(PROBLEMS[name], random_inputs(PROBLEMS[name]), FORMS[form] | _consumers(name), checks="all")


@pytest.mark.judge
@pytest.mark.parametrize("where", ["head", "query", "all"])
@pytest.mark.parametrize("form", ["fixed", "both", "all three"])
@pytest.mark.parametrize("name", OVERFLOWING)
def test_judge_accepts_overflow(name: str, form: str, where: str) -> None:
    p = PROBLEMS[name]
    check(p, with_large_logits(random_inputs(p), where), FORMS[form] | _consumers(name), checks="all")


@pytest.mark.judge
@pytest.mark.parametrize("form", ["fixed", "both"])
@pytest.mark.parametrize("name", ["window", "window, left only", "windows of two alignments"])
def test_judge_accepts_overflow_in_a_window(name: str, form: str) -> None:
    """The second time the masked loop has all blocks, those too that a window's left side cuts."""
    p = PROBLEMS[name]
    again = check(p, with_large_logits(random_inputs(p), "middle"), FORMS[form], checks="all")
    once = check(p, random_inputs(p), FORMS[form])
    assert again.statistics.instructions > once.statistics.instructions


@pytest.mark.judge
@pytest.mark.parametrize("order", ["latest", "random"])
@pytest.mark.parametrize("schedule", [NAIVE, Schedule(ScheduleKind.LPT, Launch.DYNAMIC), Schedule(ScheduleKind.LPT, Launch.NONE)])
@pytest.mark.parametrize("form", FORMS)
def test_every_order(form: str, schedule: Schedule, order: str) -> None:
    """Short tiles, of one or two blocks, so that the producers of a cluster run far ahead; one head overflows."""
    p = PROBLEMS["causal"]
    inputs = with_large_logits(random_inputs(p), "head") if "fixed_max" in FORMS[form] else random_inputs(p)
    check(p, inputs, FORMS[form] | {"schedule": schedule}, schedule=order, checks="all")


def _consumers(name: str) -> dict[str, Any]:
    """Three at head_dim 64, which the planner gives long sequences only."""
    return {"q_stages": 3} if name.startswith("head_dim 64") else {}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": "float16"}, "fixed_max must be False for float16"),
        ({"softcap": 5.0}, "fixed_max must be False with softcap"),
        ({"alibi": True}, "fixed_max must be False with softcap, alibi"),
    ],
)
def test_what_fixed_maxima_exclude(change: dict[str, Any], message: str) -> None:
    p = Problem(batch=1, seqlen_q=300, seqlen_k=300, heads=1, heads_kv=1, head_dim=64, device="cuda", **change)
    with pytest.raises(ValueError, match=message):
        make_plan(p, CHIP, direction="forward", **FIXED)


def test_fixed_maxima_need_an_exponential_with_infinity() -> None:
    p = Problem(batch=1, seqlen_q=300, seqlen_k=300, heads=1, heads_kv=1, head_dim=64, device="cuda")
    with pytest.raises(ValueError, match="fixed_max must be False with exponentials on FMA units"):
        make_plan(p, CHIP, direction="forward", exp2=Exp2Split(3, 4, 32), **FIXED)


def test_what_shared_loads_exclude() -> None:
    p = Problem(batch=1, seqlen_q=300, seqlen_k=300, heads=1, heads_kv=1, head_dim=64, device="cuda")
    with pytest.raises(ValueError, match="kv_multicast must be 1, or 2 in a forward on Hopper, got 2 in a forward on B200"):
        make_plan(p, "B200", direction="forward", **SHARED)
    with pytest.raises(ValueError, match="kv_multicast must be 1 with one consumer"):
        make_plan(p, CHIP, direction="forward", q_stages=1, **SHARED)
    with pytest.raises(ValueError, match="got 3"):
        make_plan(p, CHIP, direction="forward", kv_multicast=3)


def test_bits_do_not_depend_on_where_operands_lie() -> None:
    """Loads for two CTAs change no arithmetic, nor does the place where O is staged."""
    p = PROBLEMS["head_dim 192 and 128"]
    inputs = random_inputs(p)
    own_o = FIXED | {"o_in_ring": False, "tile_n": 128}
    first, *others = (run(p, planned(p, CHIP, **form), inputs, checks="none")[0] for form in (own_o, BOTH, FORMS["all three"]))
    assert all(torch.equal(first, other) for other in others)


@pytest.mark.parametrize("name", ["causal", "head_dim 256"])
def test_parts_of_the_keys_need_no_slot(name: str) -> None:
    """They are written without TMA."""
    p = replace(PROBLEMS[name], seqlen_k=600)
    inputs = random_inputs(p)
    plan = make_plan(p, CHIP, direction="forward", num_splits=2, pack_gqa=1, **LENT).plan
    out, lse, result = run(p, plan, inputs)
    assert result.ok, result
    assert_right(p, plan, inputs, out, lse)
