"""``tandem roofline``: cycles of each unit of an SM for one tile, and which one limits the kernel."""

from __future__ import annotations

import json
import re
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from tandem_attn.cli.problem_flags import DtypeType
from tandem_attn.perfmodel.roofline import EXP, MMA, SMEM, Roofline
from tandem_attn.perfmodel.roofline import roofline as make_roofline
from tandem_attn.spec.arch import ARCHS, get_arch
from tandem_attn.spec.plan import BACKWARD, FORWARD

_GPUS = [name for name, arch in ARCHS.items() if arch.capability]


class TileType(click.ParamType):
    """Query rows x keys of one CTA."""

    name = "MxN"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, int]:
        if isinstance(value, tuple):
            return value
        sizes = re.fullmatch(r"([1-9]\d*)[xX]([1-9]\d*)", str(value))
        if sizes is None:
            self.fail(f"{value!r} is not MxN (for example 128x128)", param, ctx)
        return int(sizes[1]), int(sizes[2])


@click.command(short_help="Cycles per tile of each unit of an SM, and the bottleneck.")
@click.option("--chip", type=click.Choice(_GPUS, case_sensitive=False), default="B200", show_default=True, help="Whose rates are taken.")
@click.option(
    "--tile", type=TileType(), default="128x128", show_default=True, help="Query rows x keys of one CTA; 256x128: two query tiles."
)
@click.option("--head-dim", type=click.IntRange(1, 512), default=128, show_default=True, help="Head dimension of Q and K.")
@click.option("--head-dim-v", type=click.IntRange(1, 512), help="Head dimension of V.  [default: --head-dim]")
@click.option("--dtype", type=DtypeType(), default="bfloat16", show_default=True, help="Of the operands.")
@click.option("--direction", type=click.Choice([FORWARD, BACKWARD, "both"]), default="both", show_default=True, help="Kernels to show.")
@click.option(
    "--cta-group", type=click.Choice(["1", "2", "both"]), default="both", show_default=True, help="CTAs that share an MMA (2: Blackwell)."
)
@click.option("--exp-fraction", type=click.FloatRange(0.0, 1.0), default=0.0, show_default=True, help="Share of exp2 on FMA units.")
@click.option("--terms", is_flag=True, help="Each unit's cycles term by term.")
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
def roofline(
    chip: str,
    tile: tuple[int, int],
    head_dim: int,
    head_dim_v: int | None,
    dtype: str,
    direction: str,
    cta_group: str,
    exp_fraction: float,
    terms: bool,
    as_json: bool,
) -> None:
    """Cycles per tile of each unit of an SM (MMA, shared memory, exp) and the bottleneck.

    Computed from the chip's rates; no GPU is needed. The defaults give the table of the FlashAttention-4 paper.

    \b
    Example:
      tandem roofline --chip b200 --direction backward --terms
    """
    directions = (FORWARD, BACKWARD) if direction == "both" else (direction,)
    has_pairs = get_arch(chip).tmem_columns is not None
    groups = ((1, 2) if has_pairs else (1,)) if cta_group == "both" else (int(cta_group),)
    sizes = {"tile_m": tile[0], "tile_n": tile[1], "head_dim": head_dim, "head_dim_v": head_dim_v or 0}
    try:
        results = [
            make_roofline(chip, way, dtype=dtype, cta_group=group, exp_fraction=exp_fraction, **sizes)
            for way in directions
            for group in groups
        ]
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    if as_json:
        click.echo(json.dumps([result.as_dict() for result in results], indent=2))
        return
    console = Console(highlight=False)
    console.print(_summary(results))
    for result in results if terms else ():
        console.print(_terms(result))


def _summary(results: list[Roofline]) -> Table:
    first = results[0]
    dims = f"{first.head_dim}" if first.head_dim == first.head_dim_v else f"({first.head_dim}, {first.head_dim_v})"
    title = f"{first.arch}, {first.dtype}, tile {first.tile_m} x {first.tile_n}, head_dim {dims}: cycles per tile and SM"
    table = Table(title=title, title_justify="left")
    table.add_column("kernel", style="cyan")
    for unit in (MMA, SMEM, EXP):
        table.add_column(unit, justify="right")
    table.add_column("bottleneck", style="bold")
    table.add_column("TFLOP/s", justify="right")
    for result in results:
        rate = "unknown" if result.tflops is None else f"{result.tflops:.0f}"
        cycles = [f"{result.cycles(unit):g}" for unit in (MMA, SMEM, EXP)]
        table.add_row(f"{result.direction} {result.cta_group}-CTA", *cycles, result.bottleneck, rate)
    arch = get_arch(first.arch)
    clock = "SM count or clock of this chip has no public source" if first.tflops is None else f"{arch.sms} SMs at {arch.clock_mhz} MHz"
    table.caption = f"TFLOP/s: if the busiest unit never waits ({clock})"
    table.caption_justify = "left"
    return table


def _terms(result: Roofline) -> Table:
    table = Table(title=f"{result.direction} {result.cta_group}-CTA", title_justify="left")
    table.add_column("unit", style="cyan")
    table.add_column("for")
    table.add_column("cycles", justify="right")
    for term in result.terms:
        table.add_row(term.unit, term.name, f"{term.cycles:g}")
    return table
