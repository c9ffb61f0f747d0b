"""``tandem precompile``: fills the compile cache for a list of problems."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from tandem_attn.cli.problem_flags import problem_flags, problem_of
from tandem_attn.kernels import backend, cache, emulated
from tandem_attn.kernels.precompile import Compiled, distinct, precompile
from tandem_attn.spec.plan import FORWARD, Plan
from tandem_attn.spec.problem import Problem

_SHOWN = 3  # problems of one kernel that the table names


@click.command("precompile", short_help="Compile kernels ahead of their first call.")
@problem_flags
@click.option(
    "--file", "file", type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="JSON file: a list of objects with the names of the flags above (seqlen_q, heads_kv, ...); the flags are then not read.",
)  # fmt: skip
@click.option("--arch", type=click.Choice([*emulated.CHIPS]), default="sm_90a", show_default=True, help="What to compile for.")
@click.option("--workers", type=click.IntRange(1), help="Processes side by side, some 400 MB each.  [default: one a CPU core]")
@click.option("--json", "as_json", is_flag=True, help="Print the table as JSON.")
def command(problem: Problem, file: Path | None, arch: str, workers: int | None, as_json: bool) -> None:
    """Compile the kernels of a problem, or of a file of problems, into the disk cache. Needs no GPU.

    The cache is TANDEM_CACHE_DIR, by default ~/.cache/tandem_attn; it may be copied to another machine that has the same versions of
    Tandem and Triton. Problems that differ in run-time numbers alone share a kernel. Exits 1 when a problem is not covered or a kernel
    does not compile.

    \b
    Examples:
      tandem precompile --seqlen-q 8192 --heads 32 --heads-kv 8 --mask causal
      tandem precompile --file problems.json --workers 4
    with problems.json such as
      [{"seqlen_q": 4096, "heads": 32, "heads_kv": 8, "mask": "causal"}, {"varlen": "512,100", "dtype": "fp16"}]
    """
    problems = [problem] if file is None else _read(file)
    plans, refused = _plans(problems, arch)
    by_kernel: dict[Plan, list[Problem]] = {}
    for each, plan in plans:
        by_kernel.setdefault(distinct([plan])[0], []).append(each)
    done = _run(by_kernel, workers or os.cpu_count() or 1)
    if as_json:
        click.echo(json.dumps([*(_as_dict(one, by_kernel[one.plan], arch) for one in done), *refused], indent=1))
    else:
        _print(done, by_kernel, refused)
    if refused or any(one.error for one in done):
        sys.exit(1)


def _read(file: Path) -> list[Problem]:
    try:
        stored = json.loads(file.read_text())
    except ValueError as error:
        raise click.UsageError(f"--file {file}: not JSON ({error})") from error
    if not isinstance(stored, list) or not all(isinstance(each, dict) for each in stored):
        raise click.UsageError(f"--file {file}: must hold a list of objects, one a problem")
    found = []
    for number, each in enumerate(stored):
        try:
            found.append(problem_of(each))
        except click.UsageError as error:
            raise click.UsageError(f"--file {file}, problem {number}: {error.message}") from error
    return found


def _plans(problems: list[Problem], arch: str) -> tuple[list[tuple[Problem, Plan]], list[dict[str, Any]]]:
    """Each problem with its plan, and those that have none with the reason."""
    chip = emulated.CHIPS[arch]
    found, refused = [], []
    for problem in problems:
        forward = dataclasses.replace(problem, device="cuda", lengths=())
        if reason := backend.uncovered(forward, chip):
            refused.append({"arch": arch, "problems": [str(forward)], "error": f"not covered: {reason}"})
        else:
            found.append((forward, backend.plan(forward, FORWARD, chip)))
    return found, refused


def _run(by_kernel: dict[Plan, list[Problem]], workers: int) -> list[Compiled]:
    """Compiles with a bar on the terminal; in the order given."""
    found: dict[Plan, Compiled] = {}
    columns = (TextColumn("compiling"), MofNCompleteColumn(), TimeElapsedColumn())
    try:
        with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
            task = progress.add_task("", total=len(by_kernel))
            for done in precompile(by_kernel, workers, by_kernel):
                found[done.plan] = done
                progress.advance(task)
    except ImportError as error:
        raise click.ClickException(str(error)) from error
    return [found[plan] for plan in by_kernel]


def _as_dict(done: Compiled, problems: list[Problem], arch: str) -> dict[str, Any]:
    return {
        "arch": arch,
        "problems": [str(problem) for problem in problems],
        "kernel": done.plan.digest,
        "seconds": round(done.seconds, 3),
        "cached": done.cached,
        "registers": done.registers,
        "stack_bytes": done.stack_bytes,
        "shared_bytes": done.shared_bytes,
        "error": done.error,
    }


def _print(done: list[Compiled], by_kernel: dict[Plan, list[Problem]], refused: list[dict[str, Any]]) -> None:
    console = Console(highlight=False)
    table = Table(title=f"Kernels in {cache.directory() or 'memory only (TANDEM_CACHE_DIR is empty)'}", title_justify="left")
    table.add_column("problems", overflow="fold")
    for heading in ("seconds", "registers", "stack", "shared"):
        table.add_column(heading, justify="right")
    for one in done:
        problems = [str(problem) for problem in by_kernel[one.plan]]
        more = [f"and {len(problems) - _SHOWN} more"] if len(problems) > _SHOWN else []
        if one.error:
            table.add_row(Text("\n".join(problems[:_SHOWN] + more)), Text("failed", style="red"))
            continue
        seconds = f"{one.seconds:.2f}{' (was there)' if one.cached else ''}"
        stack = Text(f"{one.stack_bytes}", style="yellow" if one.stack_bytes else "")
        table.add_row(Text("\n".join(problems[:_SHOWN] + more)), seconds, f"{one.registers}", stack, f"{one.shared_bytes:,}")
    table.caption = "registers: a thread starts with; stack: bytes a thread, what ptxas spilled; shared: bytes a CTA"
    table.caption_justify = "left"
    console.print(table)
    for one in done:
        if one.error:
            console.print(f"{by_kernel[one.plan][0]}: {one.error}", markup=False)
    for each in refused:
        console.print(f"{each['problems'][0]}: {each['error']}", markup=False)
