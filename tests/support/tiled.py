"""Runs the tiled reference directly, with a Plan of the test's choice."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import Tensor

from tandem_attn.reference import tiled
from tandem_attn.spec.plan import BACKWARD, FORWARD, Plan
from tests.support.cases import Call, Case, build
from tests.support.judge import compare_call, expected, nan_filled_memory


def run(call: Call, overrides: dict[str, Any]) -> dict[str, Tensor]:
    """Forward and backward under one set of Plan fields."""
    case, problem, inputs = call.case, call.problem(), call.inputs()
    common = {"arch": "CPU", "dtype": problem.dtype, "head_dim": case.head_dim, "head_dim_v": case.width_v} | overrides
    with nan_filled_memory():
        out, lse = tiled.forward(problem, Plan(direction=FORWARD, **common), inputs)
        found = {"out": out, "lse": lse}
        if case.needs_backward and call.grad_out is not None:
            backward = Plan(direction=BACKWARD, **{name: x for name, x in common.items() if name != "num_splits"})
            grads = tiled.backward(problem, backward, inputs, out, lse, call.grad_out, call.grad_lse)
            found |= {
                f"d{f.name}": x.to(call.leaves[f.name].dtype)
                for f in dataclasses.fields(grads)
                if (x := getattr(grads, f.name)) is not None
            }
    return found


def check(case: Case, roundings: float = 0.0, **overrides: Any) -> None:
    call = build(case)
    compare_call(call, run(call, overrides), *expected(case), roundings)
