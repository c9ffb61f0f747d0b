"""The planner: from a Problem and a chip to a Plan, with the reasons for every choice.

Each chip family enumerates whole candidate plans; a candidate that breaks a capacity never exists, because a Plan validates itself. What
remains is compared by an ordered list of criteria, and each criterion that decides something leaves a sentence.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any

from tandem_attn.spec import planner_sm90, planner_sm100
from tandem_attn.spec.arch import Arch, get_arch
from tandem_attn.spec.errors import UnsupportedError
from tandem_attn.spec.plan import BACKWARD, FORWARD, Plan
from tandem_attn.spec.planner_rules import CPU_DTYPES, Criterion, Grid, fixed_fields, gpu_dtypes, row_step, rules
from tandem_attn.spec.problem import FLOAT8, HEAD_DIM_MAX, Problem

# Plan fields that only the problem may set.
_FROM_PROBLEM = frozenset(
    "arch dtype head_dim head_dim_v page_size leftpad varlen seqused".split()  # noqa: SIM905
    + "deterministic mask softcap sink alibi descale bias scaled_first return_lse".split()  # noqa: SIM905
)


@dataclass(frozen=True)
class Planned:
    """A plan and why it is so: one sentence a choice, in the order in which they were made."""

    plan: Plan
    reasons: tuple[str, ...]

    def __str__(self) -> str:
        return "\n".join([str(self.plan), "Reasons", *(f"  {i}. {reason}" for i, reason in enumerate(self.reasons, 1))])


def plan(problem: Problem, arch: Arch | str, **overrides: Any) -> Planned:
    """Chooses how to compute ``problem`` on ``arch``.

    Args:
        problem: what is asked. ``problem.backward`` selects the backward kernel.
        arch: record or name of the chip.
        overrides: Plan fields to fix, among them ``direction``; the planner chooses the others around them.

    Raises:
        UnsupportedError: a correct problem that no plan on this chip covers.
        ValueError: an override that is no Plan field, follows from the problem, is wrong, or leaves no plan that fits the chip.
    """
    chip = get_arch(arch) if isinstance(arch, str) else arch
    direction = overrides.pop("direction", BACKWARD if problem.backward else FORWARD)
    _check_overrides(problem, chip, direction, overrides)
    _check_supported(problem, chip, direction)
    if chip.capability is None:
        return _plan_cpu(problem, chip, direction, overrides)
    family = planner_sm90 if chip.capability[0] == 9 else planner_sm100
    grid = family.FORWARD if direction == FORWARD else family.BACKWARD
    best, reasons = choose(_candidates(problem, chip, direction, grid, overrides), grid.criteria(problem))
    remarks = [sentence for name, sentence in grid.remarks(best) if name not in overrides]
    best, why = rules(problem, chip, best.with_(**overrides), frozenset(overrides))
    given = [f"{name} = {value}: asked for" for name, value in overrides.items()]
    return Planned(best, (*given, *reasons, *remarks, *why))


def choose(candidates: Sequence[Plan], criteria: Iterable[Criterion]) -> tuple[Plan, list[str]]:
    """The candidate that is best by the first criterion that tells them apart, then the next, and the sentences of those that did."""
    left = list(candidates)
    reasons = ["one tiling fits the chip" if len(left) == 1 else f"{len(left)} tilings fit the chip"]
    for criterion in criteria:
        best = min(criterion.cost(candidate) for candidate in left)
        kept = [candidate for candidate in left if criterion.cost(candidate) == best]
        if len(kept) < len(left):
            reasons.append(f"{criterion.says(kept[0])} ({len(left) - len(kept)} of {len(left)} left out)")
        left = kept
    return left[0], reasons


def _candidates(problem: Problem, arch: Arch, direction: str, grid: Grid, overrides: dict[str, Any]) -> list[Plan]:
    base = fixed_fields(problem, arch, direction)
    axes = {name: (overrides[name],) if name in overrides else values for name, values in grid.axes.items()}
    found: list[Plan] = []
    failure: Exception | str = "they exclude each other"
    for combination in itertools.product(*axes.values()):
        try:
            candidate = grid.build(problem, arch, base, dict(zip(axes, combination, strict=True)))
        except ValueError as error:
            failure = error
        else:
            found += [] if candidate is None else [candidate]
    if found:
        return found
    if overrides:
        asked = ", ".join(f"{name}={value}" for name, value in overrides.items())
        raise ValueError(f"no plan for {problem} on {arch.name} fits the overrides {asked}: {failure}")
    dims = f"head_dim {problem.head_dim}, head_dim_v {problem.head_dim_v}"
    raise UnsupportedError(backend=backend_name(arch), missing=f"the {direction} of {dims} ({failure})", nearest=grid.nearest)


def backend_name(arch: Arch) -> str:
    """Name of the kernels for a chip, as errors give it."""
    return "reference" if arch.capability is None else f"sm_{arch.capability[0]}{arch.capability[1]}"


def _plan_cpu(problem: Problem, arch: Arch, direction: str, overrides: dict[str, Any]) -> Planned:
    base = fixed_fields(problem, arch, direction)
    # The Blackwell kernels' tiling and grouping, so that the reference shows what they compute.
    tiling = {"tile_m": 128, "tile_n": 128, "q_stages": 2, "rescale_rows": 32, "do_stages": 0 if direction == FORWARD else 1}
    if direction == BACKWARD:
        tiling["q_stages"] = 1
    reasons = [
        "128-row query tiles and 128-key blocks as on Blackwell, so that the reference rounds as those kernels do",
        "exp2 as the hardware function only: a CPU has no MUFU to relieve",
    ]
    given = [f"{name} = {value}: asked for" for name, value in overrides.items()]
    return Planned(Plan(**{**base, **tiling, **overrides}), (*given, *reasons))


def _check_overrides(problem: Problem, arch: Arch, direction: str, overrides: dict[str, Any]) -> None:
    known = {f.name for f in fields(Plan)}
    for name in overrides:
        if name not in known:
            raise ValueError(f"override {name!r} is no Plan field; fields: {', '.join(sorted(known))}")
        if name in _FROM_PROBLEM:
            raise ValueError(f"override {name!r} follows from the problem and cannot be set")
    Plan(**{**fixed_fields(problem, arch, direction), **overrides})  # names the field that is wrong by itself


def _check_supported(problem: Problem, arch: Arch, direction: str) -> None:
    backend = backend_name(arch)
    if problem.dtype in FLOAT8 and direction == BACKWARD:
        raise UnsupportedError(backend=backend, missing=f"gradients of {problem.dtype}", nearest="q, k and v in bfloat16")
    if arch.capability is None:
        if problem.dtype not in CPU_DTYPES:
            raise UnsupportedError(backend=backend, missing=f"dtype {problem.dtype}", nearest=", ".join(CPU_DTYPES))
        return
    if problem.dtype not in gpu_dtypes(arch):
        *most, last = gpu_dtypes(arch)
        nearest = f"{', '.join(most)} or {last}, or backend 'reference'"
        raise UnsupportedError(backend=backend, missing=f"dtype {problem.dtype}", nearest=nearest)
    for name in ("head_dim", "head_dim_v"):
        value = getattr(problem, name)
        if value > HEAD_DIM_MAX:
            raise UnsupportedError(backend=backend, missing=f"{name} {value}", nearest=f"{name} up to {HEAD_DIM_MAX}")
        step = row_step(problem)
        if value % step:
            nearest = f"{name} {-(-value // step) * step} with zero padding (TMA reads rows in units of 16 bytes)"
            raise UnsupportedError(backend=backend, missing=f"{name} {value}", nearest=nearest)
