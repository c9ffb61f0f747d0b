"""What each role of the Blackwell forward does when, in a replayed trace: spans of work, and the signals between roles.

Roles are found in the trace by what they do: mma issues the matrix products, load the copies into shared memory, correction those out of
it, and softmax 0 and 1 are the warpgroups that wait for the products' results, in the order in which they first get one.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from tandem_attn.perfmodel.replay import COMMIT, Phase, Replay, Step, WarpKey
from tandem_attn.spec.plan import Plan

if TYPE_CHECKING:
    from tandem_attn.emulator.trace import Trace

LOAD, MMA, CORRECTION, SOFTMAX = "load", "mma", "correction", "softmax {}"

# What an mbarrier says, by who arrives at it and who waits for it (softmax without its number).
SIGNALS = {
    ("load", "mma"): "loaded",
    ("mma", "load"): "empty",
    ("mma", "softmax"): "s_ready",
    ("softmax", "correction"): "stats_ready",
    ("correction", "softmax"): "stats_free",
    ("softmax", "correction softmax"): "stats_ready",  # by turns: the other softmax role takes them too
    ("correction softmax", "softmax"): "stats_free",
    ("correction softmax", "mma"): "p_ready, O rescaled",
    ("softmax", "mma"): "p_ready, rest",
    ("mma", "correction"): "o_ready",
}
MAXIMA, FIRST, REST, SUMS = "row maximum", "2^x, first part", "2^x, rest", "row sums"
_WORK = {"stats_ready": MAXIMA, "p_ready, O rescaled": FIRST, "p_ready, rest": REST}  # of a softmax role, by the arrival that ends it

Row = tuple[int, str]  # CTA and role
Times = dict[Phase, dict[Row, float]]


@dataclass(frozen=True)
class Span:
    """Work of a role in ``[start, end)``: the tile that a product writes, what softmax computes, or else the signal that began it.

    ``block`` counts spans of one label from 0; the parts of one product count as one.
    """

    row: Row
    label: str
    block: int
    start: float
    end: float


@dataclass(frozen=True)
class Signal:
    """A phase of an mbarrier: ``sent`` by the last arrival of the source role, ``taken`` when the first warp of the target returns."""

    name: str
    source: Row
    target: Row
    sent: float
    taken: float


@dataclass(frozen=True)
class Timeline:
    """Spans and signals in the order of time; ``rows`` from top to bottom of a drawing."""

    rows: tuple[Row, ...]
    spans: tuple[Span, ...]
    signals: tuple[Signal, ...]

    def of(self, role: str, label: str, cta: int = 0) -> list[Span]:
        """Spans of one kind, block by block."""
        return [span for span in self.spans if span.row == (cta, role) and span.label == label]

    def window(self, blocks: int) -> tuple[float, float]:
        """``blocks`` steady-state blocks: from the first product of query tile 0 with P in a middle block to that so many blocks later.

        Raises:
            ValueError: so many blocks do not lie between the first and the last.
        """
        starts = {span.block: span.start for span in reversed(self.of(MMA, "O0"))}
        first = (len(starts) - blocks) // 2
        if first < 1 or first + blocks >= len(starts):
            raise ValueError(f"seqlen_k: {len(starts)} key blocks, {blocks} between the first and the last need {blocks + 2} or more")
        return starts[first], starts[first + blocks]


def timeline(trace: Trace, replayed: Replay, plan: Plan) -> Timeline:
    """The timeline of a Blackwell forward of ``plan``.

    Raises:
        ValueError: the trace is not of such a kernel.
    """
    roles = _roles(trace, replayed)
    names, senders, takers = _barriers(trace, replayed, roles)
    spans = _products(replayed, plan)
    for row in sorted(set(roles.values())):
        warps = [replayed.steps[key] for key in replayed.steps if roles.get(key) == row]
        spans += _work(row, warps, names)
    signals = [
        Signal(names[phase[0]], source, target, sent, taken)
        for phase, at in senders.items()
        for source, sent in at.items()
        for target, taken in takers.get(phase, {}).items()
        if phase[0] in names and (source[1] != target[1])
    ]
    order = [LOAD, MMA, SOFTMAX.format(0), SOFTMAX.format(1), CORRECTION]
    rows = sorted({span.row for span in spans} | set(roles.values()), key=lambda row: (row[0], order.index(row[1])))
    return Timeline(tuple(rows), tuple(sorted(spans, key=_start)), tuple(sorted(signals, key=lambda signal: signal.sent)))


def _start(span: Span) -> float:
    return span.start


def _roles(trace: Trace, replayed: Replay) -> dict[WarpKey, Row]:
    """Whose warp each is; warps that take no part in the pipeline have no role."""
    roles: dict[WarpKey, Row] = {}
    for key, steps in replayed.steps.items():
        kinds = {trace.operations[step.serial].kind for step in steps if step.serial}
        if "tma-store" in kinds:
            roles |= {(key[0], warp): (key[0], CORRECTION) for warp in _warpgroup(key)}
        elif "tma-load" in kinds:
            roles[key] = (key[0], LOAD)
        elif "tcgen05.mma" in kinds:
            roles[key] = (key[0], MMA)
    done = {phase: replayed.phases[phase] for op in trace.operations.values() if op.kind == COMMIT for phase in op.arrivals}
    first: dict[tuple[int, int], float] = {}
    for (cta, warp), steps in replayed.steps.items():
        got = [done[step.waited] for step in steps if step.waited in done]
        if got and (cta, warp) not in roles:
            first[cta, warp // 4] = min([first.get((cta, warp // 4), got[0]), *got])
    for cta in {cta for cta, _ in first}:
        for number, (_, group) in enumerate(sorted((key for key in first if key[0] == cta), key=lambda key: first[key])):
            roles |= {(cta, warp): (cta, SOFTMAX.format(number)) for warp in _warpgroup((cta, 4 * group))}
    missing = {LOAD, MMA, CORRECTION, SOFTMAX.format(0)} - {role for _, role in roles.values()}
    if missing:
        raise ValueError(f"trace: no warp works as {', '.join(sorted(missing))}: not of a Blackwell forward with two or more key blocks")
    return roles


def _warpgroup(key: WarpKey) -> range:
    return range(key[1] // 4 * 4, key[1] // 4 * 4 + 4)


def _barriers(trace: Trace, replayed: Replay, roles: dict[WarpKey, Row]) -> tuple[dict[Any, str], Times, Times]:
    """Names of barriers, and by phase: when each role's last arrival came, and when each role's first wait returned."""
    sent: Times = defaultdict(dict)
    taken: Times = defaultdict(dict)
    for key, row in roles.items():
        for step in replayed.steps.get(key, ()):
            for phase in step.arrived:
                sent[phase][row] = max(sent[phase].get(row, step.at), step.at)
            if step.serial:
                for phase in trace.operations[step.serial].arrivals:
                    sent[phase][row] = replayed.phases[phase]
            if step.waited is not None:
                taken[step.waited][row] = min(taken[step.waited].get(row, step.at), step.at)
    sides: dict[Any, tuple[set[str], set[str]]] = defaultdict(lambda: (set(), set()))
    for i, side in enumerate((sent, taken)):
        for (barrier, _), rows in side.items():
            sides[barrier][i].update(role.split()[0] for _, role in rows)
    names = {barrier: SIGNALS.get((" ".join(sorted(a)), " ".join(sorted(b)))) for barrier, (a, b) in sides.items()}
    return {barrier: name for barrier, name in names.items() if name}, sent, taken


def _products(replayed: Replay, plan: Plan) -> list[Span]:
    """Products on the tensor cores, joined while they follow each other without a gap into one tile."""
    regions = {column: r.name for r in plan.tmem if not r.overlaps for column in range(r.offset, r.offset + r.size)}
    spans: list[Span] = []
    blocks: dict[str, int] = defaultdict(int)
    tile = ""
    for product in replayed.products:
        row, label = (product.cta, MMA), regions[product.column]
        if label == tile and spans[-1].end == product.start:
            spans[-1] = Span(row, label, spans[-1].block, spans[-1].start, product.end)
            continue
        blocks[label] += label != tile
        tile = label
        spans.append(Span(row, label, blocks[label] - 1, product.start, product.end))
    return spans


def _work(row: Row, warps: list[list[Step]], names: dict[Any, str]) -> list[Span]:
    """What the warps of a role do, from the first one's beginning of a part to the last one's end of it."""
    if row[1] == MMA:
        return []
    cut = _softmax_parts if row[1].startswith("softmax") else _between_waits
    spans = []
    counts: dict[str, int] = defaultdict(int)
    for parts in zip(*(cut(steps, names) for steps in warps if steps), strict=True):
        label = parts[0][0]
        start, end = min(part[1] for part in parts), max(part[2] for part in parts)
        spans.append(Span(row, label, counts[label], start, end))
        counts[label] += 1
    return spans


Part = tuple[str, float, float]  # label, start, end; of one warp


def _softmax_parts(steps: list[Step], names: dict[Any, str]) -> list[Part]:
    """A block is cut by its arrivals, from its ``s_ready`` on; what is behind the last goes to the next wait."""
    found: list[Part] = []
    start = None
    for step in steps:
        if start is not None and step.waited is not None and not _is(step, "stats_free", names):
            found.append((SUMS, start, step.since))
            start = None
        if _is(step, "s_ready", names):
            start = step.at
        for phase in step.arrived:
            label = _WORK.get(names.get(phase[0], ""))
            if start is not None and label is not None:
                found.append((label, start, step.at))
                start = step.at
    return found


def _is(step: Step, name: str, names: dict[Any, str]) -> bool:
    return step.waited is not None and names.get(step.waited[0]) == name


def _between_waits(steps: list[Step], names: dict[Any, str]) -> list[Part]:
    """From the return of each wait for a named signal to the next wait or the role's last arrival before it."""
    found: list[Part] = []
    steps = [step for step in steps if step.waited is not None or step.arrived]
    for last, step in pairwise(steps):
        if last.waited is not None and last.waited[0] in names:
            found.append((names[last.waited[0]], last.at, step.since))
        elif found and step.since > last.at and found[-1][2] == last.at:
            found[-1] = (found[-1][0], found[-1][1], step.since)
    return found
