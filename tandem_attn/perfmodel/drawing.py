"""A timeline as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tandem_attn.perfmodel.timeline import FIRST, MAXIMA, MMA, REST, SUMS, Row, Span, Timeline

BLOCKS = 3  # of the steady state, drawn
_TILES = (("#9ecae1", "#4292c6"), ("#fdd0a2", "#f0883e"))  # of query tile 0 and 1: lighter and darker
_OTHER = "#bdbdbd"
_SOFTMAX = {MAXIMA: ("max", 0), FIRST: ("2^x", 1), REST: ("rest", 0), SUMS: ("", 0)}
_ARROWS = {
    "s_ready": "#333333",
    "stats_ready": "#756bb1",
    "p_ready, O rescaled": "#c51b8a",
    "p_ready, rest": "#f768a1",
    "loaded": "#31a354",
    "empty": "#a1d99b",
}
_HEIGHT = 0.62  # of a row
_LETTER = 0.005  # of the width, a letter of a bar's text


def draw(timeline: Timeline, title: str, path: Path) -> None:
    """Some steady-state blocks: a row for each role, its spans as bars, and an arrow for each signal when its last arrival is made.

    Raises:
        ImportError: matplotlib is missing.
        ValueError: the run has too few key blocks, or matplotlib does not know the file's ending.
    """
    import matplotlib

    matplotlib.use("Agg")  # no window
    from matplotlib import pyplot

    start, stop = timeline.window(BLOCKS)
    first = next(span.block for span in timeline.of(MMA, "O0") if span.start == start)
    height = {row: -i for i, row in enumerate(timeline.rows)}
    with pyplot.rc_context({"svg.hashsalt": "timeline", "svg.fonttype": "none", "font.size": 8}):
        figure, ax = pyplot.subplots(figsize=(13, 1.6 + 0.5 * len(timeline.rows)), layout="constrained")
        for span in timeline.spans:
            if span.end > start and span.start < stop:
                _bar(ax, span, height[span.row], start, stop, first)
        _signals(ax, timeline, height, start, stop)
        pairs = len({cta for cta, _ in timeline.rows}) > 1
        ax.set_yticks(list(height.values()), [_name(row, pairs) for row in height])
        ax.set_xlim(0, stop - start)
        ax.set_ylim(min(height.values()) - 0.6, 0.6)
        ax.set_xlabel("cycles of the model")
        ax.set_title(title, fontsize=9, loc="left")
        figure.legend(loc="outside lower center", ncols=len(_ARROWS), frameon=False)
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
        pyplot.close(figure)


def _name(row: Row, pairs: bool) -> str:
    cta, role = row
    name = "mma (tensor cores)" if role == MMA else role
    return f"CTA {cta}: {name}" if pairs else name


def _bar(ax: Any, span: Span, y: float, start: float, stop: float, first: int) -> None:
    left, right = max(span.start, start) - start, min(span.end, stop) - start
    text, color = _look(span, first)
    ax.barh(y, right - left, _HEIGHT, left, color=color, edgecolor="white", linewidth=0.4)
    if right - left > _LETTER * len(text) * (stop - start):
        ax.text((left + right) / 2, y, text, ha="center", va="center", fontsize=7)


def _look(span: Span, first: int) -> tuple[str, str]:
    """Text and colour of a bar. Blocks are counted from the window's, i."""
    step = span.block - first
    block = "i" if step == 0 else f"i{step:+d}"
    role = span.row[1]
    if role == MMA:
        letter, tile = span.label[0], int(span.label[1])
        return f"{letter}{tile} {block}", _TILES[tile][letter == "O"]
    if role.startswith("softmax"):
        text, shade = _SOFTMAX[span.label]
        return f"{text} {block}" if text else "", _TILES[int(role[-1])][shade]
    return "", _OTHER


def _signals(ax: Any, timeline: Timeline, height: dict[Row, int], start: float, stop: float) -> None:
    named: set[str] = set()
    for signal in timeline.signals:
        color = _ARROWS.get(signal.name)
        if color is None or not start <= signal.sent <= stop:
            continue
        at = signal.sent - start
        source, target = height[signal.source], height[signal.target]
        edge = _HEIGHT / 2 if target > source else -_HEIGHT / 2
        arrow = {"arrowstyle": "->", "color": color, "linewidth": 1.1, "shrinkA": 0, "shrinkB": 0}
        ax.annotate("", (at, target - edge), (at, source + edge), arrowprops=arrow)
        if signal.name not in named:
            named.add(signal.name)
            ax.plot([], [], color=color, label=signal.name)
