"""``tandem plan``: how a problem is computed on a chip, its on-chip memory drawn, and why."""

from __future__ import annotations

import dataclasses
import json

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from tandem_attn.cli.problem_flags import problem_flags
from tandem_attn.spec.arch import ARCHS, Arch, get_arch
from tandem_attn.spec.errors import UnsupportedError
from tandem_attn.spec.plan import Plan
from tandem_attn.spec.planner import Planned
from tandem_attn.spec.planner import plan as make_plan
from tandem_attn.spec.problem import Problem
from tandem_attn.spec.resources import WARP, WARPGROUP, Region, used, warpgroup_registers

_BAR = 40  # characters of a memory bar
_MAPS = ("roles", "smem", "tmem")  # drawn by themselves


@click.command(short_help="How a kernel for a problem is built on a chip, and why.")
@problem_flags
@click.option(
    "--chip",
    type=click.Choice([*ARCHS], case_sensitive=False),
    default="B200",
    show_default=True,
    help="Chip to plan for; CPU: the reference.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the plan and its reasons as JSON.")
def plan(problem: Problem, chip: str, as_json: bool) -> None:
    """Show how a kernel for a problem is built on a chip, and why.

    Prints the Plan (all that a kernel is compiled for), draws shared and tensor memory with the regions that share space, and lists the
    planner's reasons. With --backward it plans the backward kernel. Needs no GPU and runs nothing.

    \b
    Example:
      tandem plan --chip b200 --seqlen-q 8192 --heads 16 --mask causal
    """
    problem = dataclasses.replace(problem, device="cpu" if get_arch(chip).capability is None else "cuda")
    try:
        planned = make_plan(problem, chip)
    except UnsupportedError as error:
        raise click.ClickException(str(error)) from error
    if as_json:
        click.echo(json.dumps(_as_dict(problem, planned), indent=2))
        return
    _show(Console(highlight=False), problem, planned)


def _as_dict(problem: Problem, planned: Planned) -> dict[str, object]:
    return {"problem": str(problem), "plan": dataclasses.asdict(planned.plan), "digest": planned.plan.digest, "reasons": planned.reasons}


def _show(console: Console, problem: Problem, planned: Planned) -> None:
    arch = get_arch(planned.plan.arch)
    console.print(f"[bold]Problem[/bold]  {escape(str(problem))}")
    console.print(_fields(planned.plan))
    if planned.plan.roles:
        console.print(_roles(planned.plan, arch))
    if planned.plan.smem:
        console.print(_memory("Shared memory", planned.plan.smem, arch.smem_bytes_cta or 0, "bytes"))
    if planned.plan.tmem:
        console.print(_memory("Tensor memory", planned.plan.tmem, arch.tmem_columns or 0, "columns"))
    console.print(_reasons(planned))


def _reasons(planned: Planned) -> Table:
    table = Table(title="Reasons", title_justify="left", show_header=False, box=None)
    table.add_column(justify="right", style="cyan")
    table.add_column(overflow="fold")
    for number, reason in enumerate(planned.reasons, 1):
        table.add_row(str(number), Text(reason))
    return table


def _fields(plan: Plan) -> Table:
    table = Table(title=f"Plan  {plan.digest[:12]}", title_justify="left", show_header=False, box=None)
    table.add_column(style="cyan")
    table.add_column(overflow="fold")
    for line in str(plan).splitlines()[1:]:
        name, _, value = line.strip().partition(" = ")
        if name not in _MAPS:
            table.add_row(name, Text(value))
    return table


def _roles(plan: Plan, arch: Arch) -> Table:
    total = sum(warpgroup_registers(plan.roles)) * WARPGROUP * WARP
    table = Table(title=f"Warp roles  {total:,} of {arch.registers:,} registers", title_justify="left", box=None)
    table.add_column("role", style="cyan")
    table.add_column("warps", justify="right")
    table.add_column("registers a thread", justify="right")
    for role in plan.roles:
        table.add_row(role.name, str(role.warps), str(role.registers))
    return table


def _memory(title: str, regions: tuple[Region, ...], capacity: int, unit: str) -> Table:
    overlaps = ", ▒ shares its space" if any(region.overlaps for region in regions) else ""
    table = Table(title=f"{title}  {used(regions):,} of {capacity:,} {unit} a CTA{overlaps}", title_justify="left", box=None)
    table.add_column("region", style="cyan", no_wrap=True)
    table.add_column("0" + "capacity".rjust(_BAR - 1), no_wrap=True)
    for heading in ("from", "size"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("over")
    for region in regions:
        bar = Text(draw(region, capacity), style="yellow" if region.overlaps else "green")
        table.add_row(region.name, bar, f"{region.offset}", f"{region.size}", ", ".join(region.overlaps))
    return table


def draw(region: Region, capacity: int) -> str:
    """A region on a bar that stands for the whole capacity; at least one mark wide."""
    start = region.offset * _BAR // capacity
    stop = max(start + 1, -(-region.stop * _BAR // capacity))
    mark = "▒" if region.overlaps else "█"
    return "·" * start + mark * (stop - start) + "·" * (_BAR - stop)
