"""Results of a problem beside the float64 truth, for the subcommands that show them."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator
from typing import Any

import click
import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor

from tandem_attn.reference.compare import Comparison, plainly, results
from tandem_attn.reference.samples import Sample
from tandem_attn.spec.inputs import Inputs
from tandem_attn.spec.problem import Problem

_DESCALES = ("q_descale", "k_descale", "v_descale")
_CAPTION = "max: largest absolute error; rel: relative Frobenius error; plain: PyTorch in the same dtype; bound: the contract's"
LARGEST = 1 << 28  # elements of one head's score matrix: the truth holds several such float64 matrices


def check_size(problem: Problem) -> None:
    """Refuses what is too large for a dense truth.

    Raises:
        click.UsageError: naming the sizes and the limit.
    """
    if problem.seqlen_q * problem.seqlen_k > LARGEST:
        raise click.UsageError(
            f"seqlen_q * seqlen_k must be <= {LARGEST} (the float64 truth is dense), got {problem.seqlen_q * problem.seqlen_k}"
        )


def expected(problem: Problem, taken: Sample, quiet: bool) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Truth in float64 and the plain computation, one key/value head at a time: a dense score matrix is large."""
    grad = taken.grad_out if problem.backward else None
    truth, plain = [], []
    with Progress(console=Console(stderr=True), transient=True, disable=quiet) as progress:
        for part, inputs, grad_out in progress.track(list(_heads(problem, taken.inputs, grad)), description="float64 truth"):
            truth.append(results(part, inputs, torch.float64, grad_out))
            plain.append(plainly(part, inputs, grad_out))
    return _joined(truth), _joined(plain)


def _heads(problem: Problem, inputs: Inputs, grad: Tensor | None) -> Iterator[tuple[Problem, Inputs, Tensor | None]]:
    group = problem.heads_per_kv
    part = dataclasses.replace(problem, heads=group, heads_kv=1)
    for h in range(problem.heads_kv):
        q, kv = slice(h * group, (h + 1) * group), slice(h, h + 1)
        one = dataclasses.replace(
            inputs,
            q=inputs.q[..., q, :],
            k=inputs.k[..., kv, :],
            v=inputs.v[..., kv, :],
            sink=None if inputs.sink is None else inputs.sink[q],
            alibi_slopes=None if inputs.alibi_slopes is None else inputs.alibi_slopes[q],
            **{name: None if (x := getattr(inputs, name)) is None else x[:, kv] for name in _DESCALES},
        )
        yield part, one, None if grad is None else grad[..., q, :]


def _joined(parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Results of all heads: LSE has its heads second to last, sink and slopes last, the others before the head dimension."""
    axes = {"dsink": -1, "dalibi_slopes": -1}
    return {name: torch.cat([part[name] for part in parts], dim=axes.get(name, -2)) for name in parts[0]}


def jsonable(x: object) -> object:
    """JSON has no infinities and no NaN: they become text ("-inf")."""
    if isinstance(x, dict):
        return {key: jsonable(value) for key, value in x.items()}
    if isinstance(x, (list, tuple)):
        return [jsonable(value) for value in x]
    return str(x) if isinstance(x, float) and not math.isfinite(x) else x


def outputs(found: list[Comparison]) -> list[dict[str, Any]]:
    """The comparisons, for JSON."""
    return [{**dataclasses.asdict(comparison), "ok": comparison.ok} for comparison in found]


def errors_table(found: list[Comparison]) -> Table:
    """One row an output: its errors beside PyTorch's own and the contract's bounds."""
    table = Table(caption=_CAPTION, caption_justify="left")
    table.add_column("output", overflow="fold")
    for kind, which in itertools.product(("max", "rel"), ("error", "plain", "bound")):
        table.add_column(f"{kind}\n{which}", no_wrap=True)
    table.add_column("", no_wrap=True)
    for c in found:
        numbers = (c.max_error, c.plain_max_error, c.max_bound, c.relative_error, c.plain_relative_error, c.relative_bound)
        table.add_row(c.name, *(f"{x:.1e}" for x in numbers), "[green]ok[/]" if c.ok else "[red]broken[/]")
    return table
