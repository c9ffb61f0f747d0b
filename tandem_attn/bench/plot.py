"""Results as a plot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tandem_attn.bench import ours
from tandem_attn.bench.report import Cell, label, names
from tandem_attn.bench.run import MATMUL

_PANEL = ("head_dim", "head_dim_v", "heads", "heads_kv", "mask", "direction", "dtype")
_COLUMNS = 4


def plot(cells: list[Cell], environment: dict[str, Any], path: Path) -> None:
    """One panel for each head dimension, mask and direction: TFLOP/s over the sequence length.

    Raises:
        ImportError: matplotlib is missing.
        ValueError: no cell is dense, or matplotlib does not know the file's ending.
    """
    import matplotlib

    matplotlib.use("Agg")  # no window
    from matplotlib import pyplot

    panels: dict[tuple[Any, ...], list[Cell]] = {}
    for cell in cells:
        if cell["kind"] == "dense":
            panels.setdefault(tuple(cell[name] for name in _PANEL), []).append(cell)
    if not panels:
        raise ValueError("a plot shows dense cases over their sequence length, and there is none")
    lines = {key: found for key, found in panels.items() if len(found) > 1} or panels  # one length alone makes no line
    colors = {name: f"C{i % 10}" for i, name in enumerate(names(cells))}
    columns = min(_COLUMNS, len(lines))
    rows = -(-len(lines) // columns)
    figure, axes = pyplot.subplots(rows, columns, figsize=(4.2 * columns, 3.4 * rows), squeeze=False, layout="constrained")
    for ax in axes.flat[len(lines) :]:
        ax.set_visible(False)
    for ax, members in zip(axes.flat, lines.values(), strict=False):
        _panel(ax, sorted(members, key=lambda cell: cell["seqlen"]), colors)
    found = {text: line for ax in axes.flat for line, text in zip(*ax.get_legend_handles_labels(), strict=True)}
    figure.legend(found.values(), found.keys(), loc="outside upper center", ncols=len(found), fontsize=8)
    where = environment.get("gpu") or environment["processor"]
    figure.supxlabel(f"sequence length; {where}, commit {environment['commit'][:10]}, {environment['date'][:10]}", fontsize=8)
    figure.savefig(path)
    pyplot.close(figure)


def _panel(ax: Any, members: list[Cell], colors: dict[str, str]) -> None:
    for name in names(members):
        points = [(cell["seqlen"], cell["tflops"][name]) for cell in members if name in cell["tflops"]]
        style = {"color": "black", "linestyle": ":"} if name == MATMUL else {"color": colors[name], "marker": "o"}
        ax.plot(*zip(*points, strict=True), label=name, markersize=3, linewidth=2.2 if name == ours.NAME else 1.2, **style)
    seqlens = [cell["seqlen"] for cell in members]
    ax.set_title(label(members[0], sizes=False), fontsize=9)
    ax.set_xscale("log", base=2)
    ax.set_xticks(seqlens, [f"{n // 1024}k" if n % 1024 == 0 else f"{n}" for n in seqlens])
    ax.set_ylim(bottom=0)
    ax.set_ylabel("TFLOP/s", fontsize=8)
    ax.grid(alpha=0.3)
