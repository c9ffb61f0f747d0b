"""Maxima that stay, and K and V loaded for two CTAs, on a Hopper GPU against the fp64 truth, whatever the logits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from accuracy import assert_accurate

pytest.importorskip("numpy", reason="the problems' inputs come with the emulator's: pip install tandem-attn[emulator]")

from emulation import planned, random_inputs
from forms import FORMS, OVERFLOWING, PROBLEMS, with_large_logits, with_large_values, with_sums_near_the_end

from tandem_attn.kernels import backend
from tandem_attn.spec.inputs import Inputs
from tandem_attn.spec.masks import Causal, Full
from tandem_attn.spec.plan import Plan
from tandem_attn.spec.problem import Problem

on_hopper = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not on_hopper, reason="needs a Hopper GPU")]


def check(p: Problem, plan: Plan, inputs: Inputs) -> None:
    there = Inputs(**{name: None if x is None else x.cuda() for name, x in vars(inputs).items()})
    out, lse = backend.forward(p, plan, there)
    assert_accurate(p, there, out, lse)
    assert torch.equal(out, backend.forward(p, plan, there)[0]), "not bitwise repeatable"


def consumers(name: str) -> dict[str, Any]:
    return {"q_stages": 3} if name.startswith("head_dim 64") else {}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", PROBLEMS)
def test_equals_truth(name: str, form: str) -> None:
    p = PROBLEMS[name]
    check(p, planned(p, "H200", **FORMS[form], **consumers(name)), random_inputs(p))


@pytest.mark.parametrize("where", ["head", "query", "all"])
@pytest.mark.parametrize("form", ["fixed", "both"])
@pytest.mark.parametrize("name", OVERFLOWING)
def test_overflow_is_computed_again(name: str, form: str, where: str) -> None:
    p = PROBLEMS[name]
    check(p, planned(p, "H200", **FORMS[form], **consumers(name)), with_large_logits(random_inputs(p), where))


@pytest.mark.parametrize("name", ["full", "sink"])
def test_sums_near_the_end_of_float32(name: str) -> None:
    p = PROBLEMS[name]
    check(p, planned(p, "H200", **FORMS["fixed"]), with_sums_near_the_end(random_inputs(p)))


def test_large_values() -> None:
    p = PROBLEMS["full"]
    check(p, planned(p, "H200", **FORMS["fixed"]), with_large_values(random_inputs(p)))


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("mask", [Full(), Causal()], ids=["full", "causal"])
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128), (256, 256)])
def test_long_sequences(dims: tuple[int, int], mask: Any, large: bool) -> None:
    """As the planner has them, thousands of tiles; ``large``: one head of one sequence overflows."""
    sizes = {"batch": 4, "heads": 8, "heads_kv": 8, "seqlen_q": 4096, "seqlen_k": 4096, "head_dim": dims[0], "head_dim_v": dims[1]}
    p = replace(PROBLEMS["full"], mask=mask, **sizes)
    inputs = random_inputs(p)
    check(p, backend.plan(p), with_large_logits(inputs, "head") if large else inputs)
