"""Results as a table."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from rich.table import Table
from rich.text import Text

from tandem_attn.bench import ours, peers
from tandem_attn.bench.cases import DECODE
from tandem_attn.bench.run import MATMUL

Cell = dict[str, Any]


def names(cells: Iterable[Cell]) -> list[str]:
    """Implementations that ran somewhere: ours and its variants, peers, the product."""
    ran = list(dict.fromkeys(name for cell in cells for name in cell["tflops"]))
    rank = {**dict.fromkeys(peers.PEERS, 1), MATMUL: 2}
    return sorted(ran, key=lambda name: rank.get(name, 0))


def table(cells: list[Cell], environment: dict[str, Any]) -> Table:
    """TFLOP/s (decoding: GB/s of K and V read) of every implementation, and ours over the fastest peer."""
    where = environment.get("gpu") or environment["processor"]
    found = Table(title=f"{where}, TFLOP/s; ratio: {ours.NAME} over its fastest peer", title_justify="left")
    found.add_column("case", no_wrap=True)
    shown = names(cells)
    for name in shown:
        found.add_column(name, justify="right")
    found.add_column("ratio", justify="right")
    for cell in cells:
        found.add_row(label(cell), *(_rate(cell, name) for name in shown), _ratio(cell))
    found.caption, found.caption_justify = summary(cells), "left"
    return found


def label(cell: Cell, *, sizes: bool = True) -> str:
    """A case's name; without ``sizes``, of all its lengths."""
    dims = f"{cell['head_dim']}" if cell["head_dim"] == cell["head_dim_v"] else f"{cell['head_dim']},{cell['head_dim_v']}"
    heads = f"{cell['heads']}" if cell["heads"] == cell["heads_kv"] else f"{cell['heads']}/{cell['heads_kv']}"
    kind = "" if cell["kind"] == "dense" else f" {cell['kind']}"
    dtype = "" if cell["dtype"] == "bfloat16" else f" {cell['dtype']}"
    size = f" S{cell['seqlen']} B{cell['batch']}" if sizes else ""
    return f"d{dims}{size} H{heads} {cell['mask']}{kind}{dtype} {cell['direction']}"


def _rate(cell: Cell, name: str) -> Text:
    if name not in cell["tflops"]:
        return Text("failed" if name in cell["failed"] else "-", style="red" if name in cell["failed"] else "dim")
    value = cell["kv_gb_per_s"][name] if cell["kind"] == DECODE else cell["tflops"][name]
    unit = " GB/s" if cell["kind"] == DECODE else ""
    return Text(f"{value:.0f}{unit}" if value >= 10 else f"{value:.3f}{unit}", style="bold" if name == cell["fastest_peer"] else "")


def _ratio(cell: Cell) -> Text:
    if cell["ratio"] is None:
        return Text("-", style="dim")
    return Text(f"{cell['ratio']:.2f}", style="green" if cell["ratio"] >= 1 else "red")


def summary(cells: list[Cell]) -> str:
    """Geometric mean of the ratios and how many reach 1; shares of the product's rate; what a longest-first order gained."""
    ratios = [cell["ratio"] for cell in cells if cell["ratio"] is not None]
    if not ratios:
        return "no cell has both ours and a peer"
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
    text = f"geometric mean of {len(ratios)} ratios {mean:.3f}; {sum(ratio >= 1 for ratio in ratios)} at or above 1.00"
    naive = f"{ours.NAME}, naive order"
    gains = [cell["tflops"][ours.NAME] / cell["tflops"][naive] for cell in cells if {naive, ours.NAME} <= set(cell["tflops"])]
    products = [cell["of_matmul"] for cell in cells if "of_matmul" in cell]
    text += f"; {min(products):.2f} to {max(products):.2f} of the bfloat16 product" if products else ""
    return text + (f"; longest first over naive order {min(gains):.3f} to {max(gains):.3f}" if gains else "")
