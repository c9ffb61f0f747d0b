"""When two accesses are ordered, and what must lie between them: the rules of docs/emulator_races.md as code."""

from __future__ import annotations

from tandem_attn.emulator.events import AccessKind, Proxy, Space
from tandem_attn.emulator.judge import wording
from tandem_attn.emulator.judge.clock import AFTER, ALL, FULL, GLOBAL, PLAIN, RELAXED, SHARED, TENSORMAP, Clock, Times, WarpClock
from tandem_attn.emulator.judge.record import FAMILIES, WARPS, Record


class Rules:
    """The rules of one run. `clusters` gives the CTAs of each CTA's cluster; `wanted` the report kinds asked for."""

    def __init__(self, clusters: dict[int, tuple[int, ...]], wanted: frozenset[str]) -> None:
        self.clusters = clusters
        self.deterministic = "nondeterministic" in wanted
        self.tcgen05_fences = "missing-tcgen05-fence" in wanted

    def settled(self, other: Record, record: Record, actor: WarpClock | Clock) -> bool:
        """The quick test: the other access is over for every lane, and no fence is asked for."""
        if other.operation is not None and other.operation is record.operation:
            return True
        clock = actor.base if isinstance(actor, WarpClock) else actor
        sort = self.fence_needed(other, record)
        return known(other, ALL, clock) and (sort == PLAIN or known(other, ALL, clock, sort))

    def fence_needed(self, other: Record, record: Record) -> int:
        """The fence that must lie between two ordered accesses (PLAIN: none)."""
        if record.space is Space.TMEM:
            both = other.operation is not None and record.operation is not None
            return AFTER if self.tcgen05_fences and both and other.warp != record.warp else PLAIN
        if not (other.writes and other.generic) or record.generic or record.kind is AccessKind.WRITE:
            return PLAIN
        return TENSORMAP if record.proxy is Proxy.TENSORMAP else SHARED if record.space is Space.SHARED else GLOBAL

    def judge(self, other: Record, code: int, record: Record, actor: WarpClock | Clock, lane: int) -> str:
        """The kind of report that the pair deserves, or ""."""
        if other.strong and record.strong and self.morally_strong(other, record):
            if self.deterministic and wording.inexact_sum(other) and wording.inexact_sum(record):
                return "" if self.ordered(other, code, record, actor, lane) else "nondeterministic"
            return ""
        if not self.ordered(other, code, record, actor, lane):
            return "race"
        sort = self.fence_needed(other, record)
        if sort != PLAIN and not self.ordered(other, code, record, actor, lane, sort):
            return "missing-tcgen05-fence" if sort == AFTER else "missing-proxy-fence"
        return ""

    def morally_strong(self, a: Record, b: Record) -> bool:
        """Each one's scope includes the other's thread (PTX manual, "Morally Strong Operations")."""
        ca, cb = a.warp // WARPS, b.warp // WARPS
        if ca == cb:
            return True
        narrow = {"cta", "cluster"} if cb not in self.clusters.get(ca, ()) else {"cta"}
        return a.scope not in narrow and b.scope not in narrow

    def ordered(self, other: Record, code: int, record: Record, actor: WarpClock | Clock, lane: int, sort: int = PLAIN) -> bool:
        clock = actor
        if isinstance(actor, WarpClock):
            if other.operation is None and other.warp == record.warp and sort == PLAIN and code != ALL and code == lane:
                return True  # one thread's program order
            extra = actor.extra.get(lane)
            if extra is not None and known(other, code, extra, sort):
                return True
            clock = actor.base
            if lane == ALL and actor.extra:  # an instruction of the whole warp
                clock = actor.snapshot(FULL)
        assert isinstance(clock, Clock)
        if known(other, code, clock, sort):
            return True
        if record.space is Space.TMEM and other.operation is not None and record.operation is not None and pipelined(other, record):
            return clock.knows((other.warp, code_of(other)), other.epoch, sort) or clock.knows((other.warp, ALL), other.epoch, sort)
        return False


def code_of(record: Record) -> int:
    """The lane of an operation that one thread issued."""
    return (record.lanes & -record.lanes).bit_length() - 1


def pipelined(a: Record, b: Record) -> bool:
    """Operations that tcgen05 carries out in the order of their issue (PTX manual, "Pipelined Instructions")."""
    assert a.operation is not None and b.operation is not None
    return FAMILIES.get(a.operation.agent.kind) == "tcgen05" == FAMILIES.get(b.operation.agent.kind)


def known(record: Record, code: int, clock: Clock, sort: int = PLAIN) -> bool:
    """Whether the record (lane `code` of it) is before the point of the clock."""
    if _known(record, code, clock.times[sort]):
        return True
    relaxed = clock.times[RELAXED]
    return sort == PLAIN and bool(relaxed) and _known(record, code, relaxed)


def _known(record: Record, code: int, times: Times) -> bool:
    if record.operation is not None:
        return any(times.get(key, -1) >= time for key, time in record.done)
    if times.get((record.warp, ALL), -1) >= record.epoch:
        return True
    if code != ALL:
        return times.get((record.warp, code), -1) >= record.epoch
    lanes = record.lanes
    return lanes != 0 and all(times.get((record.warp, lane), -1) >= record.epoch for lane in range(32) if lanes >> lane & 1)
