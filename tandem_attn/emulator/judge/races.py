"""The happens-before tracker: an observer that reports accesses which nothing orders, whatever order this run took.

docs/emulator_races.md has the rules. Events change clocks (`sync_events.py` has those of barriers, fences and waits); accesses are
compared with what the shadow memory remembers.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tandem_attn.emulator.events import (
    Access,
    AccessKind,
    AsyncAgent,
    ClusterStart,
    Complete,
    Event,
    Issue,
    Proxy,
    Space,
    TmemAllocation,
    WarpExit,
)
from tandem_attn.emulator.judge import wording
from tandem_attn.emulator.judge.clock import ALL, FULL, Clock, WarpClock
from tandem_attn.emulator.judge.locations import Locations
from tandem_attn.emulator.judge.pruning import Records
from tandem_attn.emulator.judge.record import WARPS, Operation, Record, completion_key, warp_number
from tandem_attn.emulator.judge.rules import Rules, known
from tandem_attn.emulator.judge.shadow import Array, Sets, Shadow, distinct
from tandem_attn.emulator.judge.sync_events import Barriers, stand_in
from tandem_attn.emulator.report import Report

NO_LANES = np.full(1, ALL)
NOTHING = Clock()


class RaceTracker:
    """One run's tracker.

    grid names CTAs in reports; wanted are the report kinds asked for; ignored is a range of global addresses that are no business of the
    kernel's (an instrumentation's own books).
    """

    def __init__(self, grid: tuple[int, int, int], wanted: frozenset[str], ignored: tuple[int, int] = (0, 0)) -> None:
        self.grid, self.ignored = grid, ignored
        self.warps: dict[int, WarpClock] = {}
        self.operations: dict[int, Operation] = {}
        self.records = Records()
        self.sets = Sets()
        self.shadows: dict[tuple[Space, int], Shadow] = {}
        self.clusters: dict[int, tuple[int, ...]] = {}  # by CTA
        self.rules = Rules(self.clusters, wanted)
        self.living: dict[int, int] = {}  # warps that have not ended, by CTA
        self.farewell: dict[int, Clock] = {}  # what the ended warps of a CTA knew
        self.visits: dict[int, dict[Any, Record]] = {}  # the last access of each stranger and site to a CTA's shared memory
        self.reports: list[Report] = []
        self.seen: set[Any] = set()
        self.locations = Locations(self)
        self.barriers = Barriers(self)
        self.handlers: dict[type, Any] = {
            Access: self.access, Issue: self.issue, Complete: self.complete, ClusterStart: self.start, WarpExit: self.exit,
            TmemAllocation: self.allocation, **self.barriers.handlers,
        }  # fmt: skip

    # ---- the observer
    def event(self, event: Event) -> list[Report]:
        self.handlers[type(event)](event)
        if not self.reports:
            return []
        found, self.reports = self.reports, []
        return found

    def finish(self) -> list[Report]:
        return []

    def add(self, kind: str, record: Record, other: Any, message: str) -> None:
        """Report once per kind and pair of instructions."""
        key = (kind, record.site.index, other)
        if key in self.seen:
            return
        self.seen.add(key)
        agent = record.agent.issuer if isinstance(record.agent, AsyncAgent) else record.agent
        site = record.site
        self.reports.append(
            Report(kind, message, wording.where(agent.cta, self.grid), agent.warp, record.lanes, site.ptx_line, site.text, site.source)
        )

    # ---- who
    def warp(self, number: int) -> WarpClock:
        found = self.warps.get(number)
        if found is None:
            found = self.warps[number] = WarpClock(number)
        return found

    def start(self, event: ClusterStart) -> None:
        for cta in event.ctas:
            self.clusters[cta] = event.ctas
            self.living[cta] = event.warps
            self.farewell[cta] = Clock()

    def exit(self, event: WarpExit) -> None:
        cta = event.agent.cta
        number = warp_number(event.agent)
        self.farewell[cta].join(self.warp(number).release(FULL))
        self.living[cta] -= 1
        if self.living[cta]:
            return
        for record in self.visits.pop(cta, {}).values():
            if not known(record, ALL, self.farewell[cta]):
                self.add("race", record, ("exit", cta), wording.visitor(record, cta, self.grid))
        cluster = self.clusters[cta]
        in_flight = any(operation.agent.issuer.cta in cluster for operation in self.operations.values())
        if not in_flight and not any(self.living[c] for c in cluster):
            for c in cluster:
                self.barriers.forget(c)
                for space in (Space.SHARED, Space.TMEM):
                    self.shadows.pop((space, c), None)
                for w in range(WARPS):
                    self.warps.pop(c * WARPS + w, None)

    def issue(self, event: Issue) -> None:
        agent = event.agent
        clock = self.warp(warp_number(agent.issuer))
        epoch = clock.epoch
        if agent.kind == "wgmma" and not clock.wgmma_fenced:
            text = "the warp's first wgmma.mma_async has no wgmma.fence before it"
            self.add("race", stand_in(clock.warp, agent, event.site), "wgmma.fence", text)
        self.operations[agent.serial] = Operation(agent, clock.release(agent.lanes), epoch)

    def complete(self, event: Complete) -> None:
        if event.stage == "done":
            operation = self.operations.pop(event.agent.serial, None)
            if operation is not None:
                operation.before = NOTHING  # it makes no accesses any more

    def allocation(self, event: TmemAllocation) -> None:
        """Columns change hands: what was done in them must be over, as for a write."""
        starts = np.arange(event.column, event.column + abs(event.columns), dtype=np.int64) * 512
        lanes = np.full(len(starts), ALL)
        self.access(Access(event.agent, event.site, Space.TMEM, event.cta, AccessKind.WRITE, Proxy.TENSOR, starts, 512, lanes))

    # ---- accesses
    def access(self, event: Access) -> None:
        if event.space is Space.GLOBAL and self.ignored[0] <= int(event.starts[0]) < self.ignored[1]:
            return
        record, actor = self.record_of(event)
        if event.space is Space.SHARED:
            self.visit(record, event.cta)
        shadow = self.shadows.get((event.space, event.cta))
        if shadow is None:
            shadow = self.shadows[event.space, event.cta] = Shadow()
        granules = shadow.granules(event.starts, event.size)
        lanes = np.where(event.lane_ids < 0, ALL, event.lane_ids) if record.operation is None else NO_LANES.repeat(len(event.starts))
        rows = np.arange(len(event.starts)).repeat(granules.shape[1])
        if self.records.due:
            self.records.prune(self.shadows.values(), self.sets)
        number = self.records.add(record)
        for writes, reads, index, row in shadow.parts(granules, rows):
            lane = lanes[row]
            self.against(writes[index], record, actor, lane, row, event)
            if record.writes:
                self.against(reads[index], record, actor, lane, row, event)
                writes[index] = number << 6 | lane
                reads[index] = 0
                if record.operation is None and len(index) > 1:
                    shared = writes[index] != (number << 6 | lane)
                    if shared.any():  # several lanes on one granule
                        writes[index[shared]] = number << 6 | ALL
            else:
                self.note_read(reads, index, lane, number, record, actor)
        if record.strong:
            self.locations.touch(event, record)

    def record_of(self, event: Access) -> tuple[Record, WarpClock | Clock]:
        agent = event.agent
        operation = None
        if isinstance(agent, AsyncAgent):
            operation = self.operations[agent.serial]
            number, epoch, lanes = warp_number(agent.issuer), operation.epoch, agent.lanes
            actor: WarpClock | Clock = operation.before
        else:
            number = warp_number(agent)
            actor = self.warp(number)
            epoch = actor.epoch
            lanes = 0
            for lane in event.lane_ids.tolist():
                lanes |= 1 << lane if 0 <= lane < ALL else FULL
        strong = event.kind is AccessKind.ATOMIC or event.semantics != "weak"
        record = Record(
            number, agent, event.site, event.kind, event.space, event.cta, event.proxy, strong, event.scope, lanes, epoch, operation
        )
        if operation is not None:
            key = completion_key(operation.agent, event.kind is AccessKind.READ)
            if key is not None:
                record.done.append((key, operation.agent.serial))
            operation.open.append(record)
        return record, actor

    def visit(self, record: Record, cta: int) -> None:
        """Remember that another CTA or an operation touches the shared memory of this one, which must not have ended, nor end before."""
        if record.warp // WARPS == cta and record.operation is None:
            return
        if not self.living.get(cta, 1):
            self.add("race", record, ("exit", cta), wording.visitor(record, cta, self.grid))
            return
        self.visits.setdefault(cta, {})[record.warp, record.site.index] = record

    def note_read(self, reads: Array, index: Array, lane: Array, number: int, record: Record, actor: WarpClock | Clock) -> None:
        """Add the read; earlier reads that are before it need not be kept."""
        mine = number << 6 | lane
        if record.operation is None and len(index) > 1 and len(distinct(index)) != len(index):
            mine = np.full(len(index), number << 6 | ALL)
        old = reads[index]
        reads[index] = mine
        if not old.any():
            return
        for value in distinct(old):
            if value == 0:
                continue
            at = old == value
            kept = [m for m in self.sets.of(value) if not self.superseded(m, lane[at], record, actor)]
            if not kept:
                continue
            for new in distinct(mine[at]):
                both = index[at & (mine == new)]
                reads[both] = self.sets.number((*kept, new))

    def superseded(self, value: int, lanes: Array, record: Record, actor: WarpClock | Clock) -> bool:
        """Whether an earlier read is before this one, so that who comes after this one comes after both."""
        old = self.records[value >> 6]
        if old is None or old.operation is not None or record.operation is not None:
            return False
        code = value & 63
        if old.warp == record.warp:
            return code != ALL and bool((lanes == code).all())
        return actor.knows(ALL, (old.warp, ALL), old.epoch) if isinstance(actor, WarpClock) else False

    def against(self, old: Array, record: Record, actor: WarpClock | Clock, lanes: Array, rows: Array, event: Access) -> None:
        """Compare with what the cells remember: record by record, and lane by lane only where the whole warp is not known to be before."""
        if not old.any():
            return
        cells = np.where(old < 0, old, old >> 6)  # sets and records
        for cell in distinct(cells):
            if cell == 0:
                continue
            if cell > 0:
                other = self.records[cell]
                if other is not None and not self.rules.settled(other, record, actor):
                    at = (old >> 6) == cell
                    self.by_lane(other, old[at] & 63, record, actor, lanes[at], rows[at], event)
                continue
            at = old == cell
            for member in self.sets.of(cell):
                other = self.records[member >> 6]
                if other is not None and not self.rules.settled(other, record, actor):
                    codes = np.full(int(at.sum()), member & 63)
                    self.by_lane(other, codes, record, actor, lanes[at], rows[at], event)

    def by_lane(
        self, other: Record, codes: Array, record: Record, actor: WarpClock | Clock, lanes: Array, rows: Array, event: Access
    ) -> None:  # fmt: skip
        """The lanes that touched the cells before (`codes`) against those that touch them now."""
        if other.warp == record.warp and other.operation is None and record.operation is None:
            differ = (codes != lanes) | (codes == ALL)
            if not differ.any():
                return  # each thread meets its own access
            codes, lanes, rows = codes[differ], lanes[differ], rows[differ]
        pairs = codes << 6 | lanes
        for pair in distinct(pairs):
            code, lane = pair >> 6, pair & 63
            verdict = self.rules.judge(other, code, record, actor, lane)
            if verdict and not self.replicated(other, record, event, rows[pairs == pair]):
                at = int(rows[int((pairs == pair).argmax())])
                message = wording.race(verdict, record, other, lane, code, int(event.starts[at]), event.size, self.grid)
                self.add(verdict, record, other.site.index, message)

    @staticmethod
    def replicated(other: Record, record: Record, event: Access, rows: Array) -> bool:
        """A layout that several threads hold writes the same values from each: the same instruction, the same bytes."""
        same = other.site.index == record.site.index and other.writes and event.silent is not None
        return same and event.silent is not None and bool(event.silent[rows].all())
