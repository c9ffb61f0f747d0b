"""``tandem emulate``: the package's kernel for a problem, compiled, executed and judged on this CPU."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from tandem_attn.api.backends import Backend, choose
from tandem_attn.cli.comparison import check_size, errors_table, expected, jsonable, outputs
from tandem_attn.cli.problem_flags import problem_flags
from tandem_attn.cli.schedule_flag import Order, OrdersType
from tandem_attn.cli.timeline import check_timeline, write_timeline
from tandem_attn.kernels import emulated
from tandem_attn.kernels.compile import compiled
from tandem_attn.reference.compare import Comparison, compare_all
from tandem_attn.reference.samples import Sample, sample
from tandem_attn.spec.errors import UnsupportedError
from tandem_attn.spec.plan import FORWARD, Plan
from tandem_attn.spec.problem import Problem

if TYPE_CHECKING:
    from tandem_attn.emulator import Result

ARCHS = tuple(emulated.CHIPS)


@dataclass(frozen=True)
class Run:
    """The kernel executed once, in one order."""

    order: Order
    found: list[Comparison]
    result: Result | None  # None: the problem needs no kernel (no queries or no keys)

    @property
    def ok(self) -> bool:
        return (self.result is None or self.result.ok) and all(comparison.ok for comparison in self.found)


@click.command(short_help="Run and judge a kernel without a GPU.")
@click.option("--arch", type=click.Choice(ARCHS), default=ARCHS[0], show_default=True, help="What the kernel is compiled for.")
@problem_flags
@click.option("--seed", type=int, default=0, show_default=True, help="Of the random tensors.")
@click.option(
    "--schedule", "orders", type=OrdersType(), default="at-issue", show_default=True, metavar="at-issue|latest|random:SEED,...",
    help="When asynchronous operations take effect; one run for each, in the order given.",
)  # fmt: skip
@click.option("--checks", default="all", show_default=True, help="all, default (without races), none, or names of reports: race,deadlock.")
@click.option("--clusters", type=click.IntRange(min=1), default=3, show_default=True, help="That a persistent kernel is launched with.")
@click.option("--plain", is_flag=True, help="The kernel's form without synchronisation in inline assembly.")
@click.option("--consan", is_flag=True, help="That form, instrumented by Triton's concurrency sanitizer (slow).")
@click.option(
    "--trace",
    "trace_file",
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
    help="File for what the first run executed: a JSON object for each warp-instruction.",
)
@click.option(
    "--timeline",
    "timeline_file",
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
    help="Picture (.svg, .png, .pdf) of what each role of the first run does when, by the roofline's rates; Blackwell only.",
)
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
def emulate(
    problem: Problem, arch: str, seed: int, orders: tuple[Order, ...], trace_file: Path | None, timeline_file: Path | None, as_json: bool,
    **chosen: Any,
) -> None:  # fmt: skip
    """Run the package's kernel for a problem on this CPU: errors against float64, the judgement, and statistics.

    The kernel is compiled for --arch as for the chip, and its PTX is executed instruction by instruction (docs/emulator.md says what a pass
    proves). Exits 1 when an error breaks the contract's bound or anything is reported.

    \b
    Examples:
      tandem emulate --seqlen-q 300 --heads 2 --mask causal
      tandem emulate --varlen 100,0,30:200 --schedule at-issue,latest,random:1 --checks default
      tandem emulate --arch sm_100a --heads 1 --seqlen-q 256 --seqlen-k 896 --timeline timeline.svg
    """
    if timeline_file is not None:
        check_timeline(arch)
    try:
        backend = _backend(problem, arch)
        check_size(problem)
        taken = sample(problem, seed)
        plan = backend.plan(problem, FORWARD)
        _compile(plan, chosen, quiet=as_json)
        truth = expected(problem, taken, quiet=as_json)
        runs = list(
            _runs(
                problem,
                plan,
                taken,
                truth,
                orders,
                chosen | {"progress": sys.stderr.isatty() and not as_json, "trace": bool(trace_file or timeline_file)},
            )
        )
    except (UnsupportedError, ValueError, TypeError, ImportError) as error:
        raise click.ClickException(str(error)) from error
    if trace_file is not None and runs[0].result is not None:
        write_trace(trace_file, runs[0].result.trace)
    if timeline_file is not None and runs[0].result is not None:
        write_timeline(timeline_file, plan, runs[0].result.trace)
    (_print_json if as_json else _print)(problem, arch, plan, runs, seed)
    if not all(run.ok for run in runs):
        sys.exit(1)


def _backend(problem: Problem, arch: str) -> Backend:
    if problem.backward:
        raise UnsupportedError(backend=arch, missing="the backward (no kernel of our own yet)", nearest="the forward, without --backward")
    return choose(problem, emulated.PREFIX + arch)


def _compile(plan: Plan, chosen: dict[str, Any], quiet: bool) -> None:
    """Fills the kernel cache, with something moving on the terminal: it takes seconds."""
    console = Console(stderr=True, quiet=quiet)
    with console.status(f"compiling the forward for {plan.arch}"):
        compiled(plan, plain=chosen["plain"] or chosen["consan"], consan=chosen["consan"])


def _runs(
    problem: Problem, plan: Plan, taken: Sample, truth: tuple[dict[str, Tensor], dict[str, Tensor]], orders: tuple[Order, ...], chosen: Any
) -> Iterator[Run]:
    from tandem_attn.emulator import EmulatorError

    checks = chosen.pop("checks")
    named = checks if checks in ("all", "default", "none") else tuple(name.strip() for name in checks.split(","))
    for i, order in enumerate(orders):
        settings = chosen | {"checks": named, "schedule": order.schedule, "seed": order.seed, "trace": chosen["trace"] and i == 0}
        with emulated.settings(**settings):
            try:
                out, lse, result = emulated.judged(problem, plan, taken.inputs)
            except EmulatorError as error:
                raise click.ClickException(str(error)) from error
        yield Run(order, compare_all({"out": out, "lse": lse}, *truth, getattr(torch, problem.dtype)), result)


def _print(problem: Problem, arch: str, plan: Plan, runs: list[Run], seed: int) -> None:
    console = Console()
    console.print(f"{problem}\nkernel for {arch}, planned for {plan.arch}, seed {seed}", highlight=False)
    for run in _distinct(runs):
        console.print(errors_table(run.found))
        for comparison in run.found:
            if not comparison.ok:
                console.print(str(comparison), highlight=False)
    console.print(_judgement(runs))
    for run in runs:
        for report in run.result.reports if run.result is not None else ():
            console.print(f"{run.order}: {report}", highlight=False, markup=False)
    if runs[0].result is not None:
        console.print(_units(runs[0]))


def _distinct(runs: list[Run]) -> list[Run]:
    """Runs whose errors differ from those of every run before: a right kernel computes the same in every order."""
    return [run for i, run in enumerate(runs) if all(run.found != earlier.found for earlier in runs[:i])]


def _judgement(runs: list[Run]) -> Table:
    table = Table(
        title="judgement", title_justify="left", caption="instructions: of a warp; M/s: millions of them a second", caption_justify="left"
    )
    for name in ("schedule", "reports", "CTAs", "instructions", "M/s", "TMA bytes", "MMA FLOP"):
        table.add_column(name, justify="left" if name in ("schedule", "reports") else "right", no_wrap=True)
    for run in runs:
        if run.result is None:
            table.add_row(str(run.order), "no kernel")
            continue
        s = run.result.statistics
        words = "[green]none[/]" if run.result.ok else f"[red]{len(run.result.reports)}{'' if run.result.finished else ', ended early'}[/]"
        table.add_row(
            str(run.order), words, str(s.ctas), f"{s.instructions:,}", f"{s.rate / 1e6:.3f}", f"{s.tma_bytes:,}", f"{s.mma_flops:.2e}"
        )
    return table


def _units(run: Run) -> Table:
    assert run.result is not None  # narrows the type: the caller checked
    table = Table(title="warp-instructions by unit", title_justify="left")
    counts = run.result.statistics.units.most_common()
    for name, _ in counts:
        table.add_column(name, justify="right")
    table.add_row(*(f"{count:,}" for _, count in counts))
    return table


def _print_json(problem: Problem, arch: str, plan: Plan, runs: list[Run], seed: int) -> None:
    report = {
        "problem": str(problem),
        "arch": arch,
        "plan": plan.digest,
        "seed": seed,
        "runs": [{"schedule": str(run.order), "ok": run.ok, "outputs": outputs(run.found), **_result(run.result)} for run in runs],
    }
    click.echo(json.dumps(jsonable(report), indent=2, allow_nan=False, default=str))


def _result(result: Result | None) -> dict[str, Any]:
    if result is None:
        return {"finished": True, "reports": [], "statistics": None}
    s = result.statistics
    statistics = {field.name: getattr(s, field.name) for field in dataclasses.fields(s)} | {"rate": s.rate, "units": s.units}
    reports = [{"text": str(report), **dataclasses.asdict(report)} for report in result.reports]
    return {"finished": result.finished, "reports": reports, "statistics": statistics}


def write_trace(path: Path, trace: Any) -> None:
    """One JSON object a line for each warp-instruction, warp by warp: see ``emulator.trace.Record``."""
    with path.open("w") as file:
        for cta, warp in sorted(trace.warps):
            for record in trace.instructions(cta, warp):
                ins = trace.program.code[record.index]
                line = {"cta": cta, "warp": warp, **dataclasses.asdict(record), "opcode": ins.opcode, "ptx_line": ins.line}
                file.write(json.dumps(line | {"source": None if ins.source is None else str(ins.source)}) + "\n")
