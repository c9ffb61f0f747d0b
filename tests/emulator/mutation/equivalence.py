"""Arguments that a mutant is no worse than the original, each from what a clean run of the original shows.

1. Not executed: no warp ever comes to the instruction in this launch, so that it does not matter. Nor does a wait for groups where nothing
   is pending, an mbarrier that nobody uses, nor how long the last wait for bulk groups of a launch waits: the tracker reports sources that
   are still read when their CTA ends, and results in global memory nobody reads any more (the end of the grid completes them).
2. A fence for other CTAs (fence.mbarrier_init.release.cluster) in a cluster of one: the initialisation is ordered by a barrier of the CTA,
   else the tracker reports the mbarrier as used before it. (Whether copies by TMA need it for the async proxy the manual does not say.)
3. A barrier between two barriers of the same threads (for bar.warp.sync: of the same warp) orders only what lies between its neighbours:
   an access before it and behind its predecessor, against an access behind it and before its successor. Where no two of these conflict,
   nothing in the second part publishes what others did in the first, and everybody who acts in the second part has waited himself for
   what anybody has waited for in the first, every order that matters is also made by a neighbour. Neighbours are barriers at which all
   of these threads arrive *and wait*; all threads of the barrier come to it by the deleted instruction, so that none is left waiting.
   bar.warp.sync also makes a warp converge, as `.aligned` instructions need: it must not have diverged since the predecessor.
   An arrival conflicts with what makes or invalidates its mbarrier alone, and with nothing behind it where the mbarrier is made once.
   tcgen05.fence publishes no access of a thread: it orders tcgen05 operations, each of which is the warp's as a whole.
4. A wait at the cluster barrier whose threads do nothing before they wait at a barrier of the CTA that includes threads which have waited
   at the cluster barrier: what those acquired is before the barrier of the CTA, and so before all behind it (causality order).
5. A wait by parity for the phase before the first, and no other in this launch (the ring of stages does not wrap): it never waits.
6. A wait that teaches nothing: every warp that comes to it knows by then, from earlier waits, all that the arrivals of the phase release;
   or learns it, too, from the waits that follow before the warp does anything else.
   The same for a lowered arrival count of an mbarrier all of whose waits are such (and where the run still ends with every phase in step).
7. A cluster arrival made relaxed, where no access since the last releasing arrival conflicts with one of another CTA behind the barrier.
   Accesses count by threads and by their asynchronous operations, allocations of tensor memory as writes. Those do not count behind which
   the warp waits at a barrier of the CTA with a warp that then arrives with release: releases are cumulative.
8. A tcgen05.fence to which no warp comes that has any tcgen05 operation: it orders those alone (the other CTA of a pair, whose MMA role
   waits and issues under a predicate that is false).
"""

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

from tandem_attn.emulator import run
from tandem_attn.emulator.events import (
    Access,
    AccessKind,
    Arrival,
    AsyncAgent,
    BarrierId,
    BarrierInit,
    ClusterStart,
    Event,
    Fence,
    GroupWait,
    Issue,
    Space,
    TmemAllocation,
    Wait,
    WarpAgent,
    WarpExit,
)
from tandem_attn.emulator.judge.clock import PLAIN
from tandem_attn.emulator.judge.races import RaceTracker
from tandem_attn.emulator.judge.record import warp_number
from tandem_attn.emulator.machine.control import Control
from tandem_attn.emulator.report import Report
from tests.emulator.mutation.mutants import Mutant
from tests.emulator.subjects.subject import Subject

FULL = 0xFFFFFFFF


@dataclass
class Part:
    """What one warp does between two barriers: byte ranges by (thread, place), and what concerns other threads."""

    touches: list[tuple[Any, Any, int, int, bool]] = field(default_factory=list)  # thread, place, first byte, end, written
    asynchronous: list[tuple[Any, Any, int, int, bool]] = field(default_factory=list)  # the same by operations of these threads
    diverged: bool = False  # a branch has parted the warp
    publishes: set[Any] = field(default_factory=set)  # threads that release, commit or issue
    learns: dict[Any, set[Any]] = field(default_factory=lambda: defaultdict(set))  # what was waited for, and by which threads


class Log:
    """An observer: per warp its barriers (PTX line, which barrier) and the parts between them."""

    def __init__(self) -> None:
        self.lines: set[int] = set()
        self.covered: set[int] = set()  # lines that some warp came to, with or without an active lane
        self.cluster_size = 1
        self.events: dict[tuple[int, int], list[tuple[int, Any] | Part]] = defaultdict(lambda: [Part()])
        self.news: set[int] = set()  # lines of waits that taught a warp something
        self.idle: dict[int, bool] = {}  # of the waits for groups and TMEM moves, by line: whether nothing was ever pending
        self.tails: dict[tuple[int, int], set[int]] = defaultdict(set)  # lines of bulk waits behind which the warp does nothing but end
        self.followed: set[int] = set()  # lines of bulk waits behind which some warp does more
        self.used: set[Any] = set()  # mbarriers that anybody arrives at or waits for
        self.taught: set[Any] = set()  # the mbarriers of such waits
        self.made: dict[int, set[Any]] = defaultdict(set)  # mbarriers, by the line that initialises them
        self.places: Counter[tuple[Any, int]] = Counter()  # (place, first byte) of mbarriers: how often they are made or invalidated
        self.phases: dict[int, set[int]] = defaultdict(set)  # of the mbarrier waits, by line
        self.waited: dict[Any, set[tuple[int, int]]] = defaultdict(set)  # warps that waited, by cluster barrier and phase
        self.waits: dict[int, list[tuple[tuple[int, int], int, Any]]] = defaultdict(list)  # by line: warp, number of its part, barrier
        self.members: dict[Any, set[int]] = defaultdict(set)  # warps that come to a barrier, by barrier and phase
        self.arriving: set[int] = set()  # lines of barriers that do not wait
        self.releasing: dict[Any, set[tuple[tuple[int, int], int]]] = defaultdict(set)  # (warp, line) that arrive with release, by phase
        self.relaxed: set[int] = set()  # lines of relaxed cluster arrivals
        self.tensor: set[tuple[int, int]] = set()  # warps with tcgen05 operations
        self.tensor_fences: dict[int, set[tuple[int, int]]] = defaultdict(set)  # warps that come to a tcgen05.fence, by its line

    def event(self, event: Event) -> list[Report]:
        if isinstance(event, ClusterStart):
            self.cluster_size = max(self.cluster_size, len(event.ctas))
        site = getattr(event, "site", None)
        agent = getattr(event, "agent", None)
        if site is not None:
            self.lines.add(site.ptx_line)
        issuer = agent.issuer if isinstance(agent, AsyncAgent) else agent
        if isinstance(issuer, WarpAgent):
            self._note(event, agent, (issuer.cta, issuer.warp))
        return []

    def finish(self) -> list[Report]:
        return []

    def diverge(self, warp: tuple[int, int]) -> None:
        self._part(warp).diverged = True

    def _part(self, warp: tuple[int, int]) -> Part:
        part = self.events[warp][-1]
        assert isinstance(part, Part)
        return part

    def _note(self, event: Event, agent: Any, warp: tuple[int, int]) -> None:
        part = self._part(warp)
        self._ending(event, agent, warp)
        own = not isinstance(agent, AsyncAgent)
        if isinstance(event, Access):
            self._touch(event, warp, part, own)
        elif isinstance(event, TmemAllocation):
            self._allocation(event, warp, part)
        elif isinstance(event, Arrival) and not own:
            self.used.add(event.barrier)
        elif isinstance(event, Issue):
            part.publishes |= self._threads(warp, event.agent.lanes)
            if event.agent.kind.startswith("tcgen05"):
                self.tensor.add(warp)
        elif isinstance(event, BarrierInit):
            self.made[event.site.ptx_line].add(event.barrier)
            self.places[("mbarrier", event.barrier.cta), event.barrier.key] += 1
            thread = (*warp, (event.lanes & -event.lanes).bit_length() - 1)
            part.touches.append((thread, ("mbarrier", event.barrier.cta), event.barrier.key, event.barrier.key + 8, True))
        elif isinstance(event, Arrival) and own:
            self._arrival(event, warp, part)
        elif isinstance(event, Wait):
            self._wait(event, warp, part)
        elif isinstance(event, GroupWait):
            self.idle[event.site.ptx_line] = self.idle.get(event.site.ptx_line, True) and not event.members
            for member in event.members:
                part.learns[member.serial] |= self._threads(warp, event.lanes)
        elif isinstance(event, Fence):
            self._fence(event, warp, part)

    def _fence(self, event: Fence, warp: tuple[int, int], part: Part) -> None:
        if event.kind.startswith("tcgen05"):
            self.tensor_fences[event.site.ptx_line].add(warp)
        if event.kind.startswith(("bar.warp", "barrier.warp")):
            if event.lanes == FULL:
                self._cut(warp, event.site.ptx_line, "warp")
        elif event.kind.startswith(("fence", "membar")) and not event.kind.startswith("fence.mbarrier_init"):
            part.publishes |= self._threads(warp, event.lanes)

    def _ending(self, event: Event, agent: Any, warp: tuple[int, int]) -> None:
        """Tell the bulk waits behind which a warp only ends from the others."""
        if isinstance(event, GroupWait):
            self.tails[warp].add(event.site.ptx_line)
        elif isinstance(agent, WarpAgent) and not isinstance(event, WarpExit):
            self.followed |= self.tails.pop(warp, set())

    def last(self, line: int) -> bool:
        """Whether no warp does anything behind the wait at that line."""
        return line not in self.followed and any(line in lines for lines in self.tails.values())

    def _touch(self, event: Access, warp: tuple[int, int], part: Part, own: bool) -> None:
        if not own:
            thread, place = (*warp, -1), (event.space, event.cta)
            written = event.kind is not AccessKind.READ
            part.asynchronous += [(thread, place, start, start + event.size, written) for start in event.starts.tolist()]
            return
        for start, lane in zip(event.starts.tolist(), event.lane_ids.tolist(), strict=True):
            place = (event.space, event.cta)
            part.touches.append(((*warp, lane), place, start, start + event.size, event.kind is not AccessKind.READ))
            if event.semantics in ("release", "acq_rel"):
                part.publishes.add((*warp, lane))
            if event.semantics in ("acquire", "acq_rel"):
                part.learns[place, start].add((*warp, lane))

    def _allocation(self, event: TmemAllocation, warp: tuple[int, int], part: Part) -> None:
        """A write of all the columns, of both CTAs where a pair allocates."""
        self.tensor.add(warp)
        ctas = (event.cta & ~1, event.cta | 1) if "cta_group::2" in event.site.text else (event.cta,)
        first, end = event.column * 512, (event.column + abs(event.columns)) * 512
        part.asynchronous += [((*warp, -1), (Space.TMEM, cta), first, end, True) for cta in ctas]

    def _wait(self, event: Wait, warp: tuple[int, int], part: Part) -> None:
        which = (event.barrier, event.phase)
        self.used.add(event.barrier)
        if event.barrier.kind == "mbarrier":
            self.phases[event.site.ptx_line].add(event.phase)
            part.learns[which] |= self._threads(warp, event.lanes)
        elif event.barrier.kind == "cluster":
            self.waited[which].add(warp)
            self.waits[event.site.ptx_line].append((warp, len(self.events[warp]), which))
            self.events[warp] += [(-1, "wait"), Part()]

    def _arrival(self, event: Arrival, warp: tuple[int, int], part: Part) -> None:
        self.used.add(event.barrier)
        if event.barrier.kind == "mbarrier":
            part.publishes |= self._threads(warp, event.lanes)
            key = event.barrier.key
            part.touches += [(t, ("mbarrier", event.barrier.cta), key, key + 8, False) for t in self._threads(warp, event.lanes)]
        else:
            which = (event.barrier, event.phase)
            self.members[which].add(warp if event.barrier.kind == "named" else (-1, -1))
            line = event.site.ptx_line
            if ".arrive" in event.site.text and event.barrier.kind == "named":
                self.arriving.add(line)
            if event.barrier.kind == "cluster":
                self.relaxed.add(line) if event.semantics == "relaxed" else self.releasing[which].add((warp, line))
            self._cut(warp, event.site.ptx_line, which)

    @staticmethod
    def _threads(warp: tuple[int, int], lanes: int) -> set[Any]:
        return {(*warp, lane) for lane in range(32) if lanes >> lane & 1}

    def _cut(self, warp: tuple[int, int], line: int, which: Any) -> None:
        self.events[warp] += [(line, which), Part()]


@dataclass
class Lesson:
    """A wait of all lanes of a warp: where, all that the arrivals of its phase released, and of it what the warp had not known.

    That the phase is complete is no news by itself: only accesses of copies are over by it, whose barriers are ``transactions``.
    """

    line: int
    barrier: BarrierId
    released: dict[Any, int]
    news: dict[Any, int]


class Implied(RaceTracker):
    """Finds the waits that teach a warp something: what the arrivals of the phase released and the warp did not know already.

    Nor does a wait teach anything that the next ones, before the warp does anything but wait, teach as well.
    """

    def __init__(self, log: Log) -> None:
        super().__init__((1, 1, 1), frozenset())
        self.log = log
        self.transactions: set[BarrierId] = set()  # mbarriers that copies complete on
        self.lessons: dict[int, list[Lesson]] = defaultdict(list)  # by warp, since it last did anything but wait

    def event(self, event: Event) -> list[Report]:
        if isinstance(event, Arrival) and event.tx:
            self.transactions.add(event.barrier)
        if isinstance(event, Wait):
            self._wait(event)
        elif isinstance(getattr(event, "agent", None), WarpAgent) and not _only_converges(event):
            self._remember(warp_number(event.agent))
        super().event(event)
        return []

    def finish(self) -> list[Report]:
        for warp in list(self.lessons):
            self._remember(warp)
        return super().finish()

    def _wait(self, event: Wait) -> None:
        number = warp_number(event.agent)
        known = self.warp(number).base.times[PLAIN]
        released = self.barriers.state(event.barrier).complete.times[PLAIN]
        news = {key: time for key, time in released.items() if known.get(key, -1) < time and key != event.barrier}
        if event.barrier in self.transactions or (news and event.lanes != FULL):
            self._taught(event.site.ptx_line, event.barrier)
        elif news:
            self.lessons[number].append(Lesson(event.site.ptx_line, event.barrier, dict(released), news))

    def _remember(self, warp: int) -> None:
        lessons = self.lessons.pop(warp, [])
        for i, lesson in enumerate(lessons):
            later = lessons[i + 1 :]
            if any(all(other.released.get(key, -1) < time for other in later) for key, time in lesson.news.items()):
                self._taught(lesson.line, lesson.barrier)

    def _taught(self, line: int, barrier: BarrierId) -> None:
        self.log.news.add(line)
        self.log.taught.add(barrier)


def _only_converges(event: Event) -> bool:
    """Whether it is a barrier of a whole warp, which orders nothing new behind a wait of all its lanes."""
    return isinstance(event, Fence) and event.kind.startswith(("bar.warp", "barrier.warp")) and event.lanes == FULL


def log_of(subject: Subject) -> Log:
    """Of a clean run."""
    log = Log()
    branch = Control.branch

    def noting(self: Control, warp: Any, frame: Any, segment: Any) -> None:
        depth = len(warp.stack)
        branch(self, warp, frame, segment)
        if len(warp.stack) > depth:
            log.diverge((warp.cta.linear, warp.index))

    with patch.object(Control, "branch", noting):
        result = run(
            subject.kernel, subject.args, subject.grid, observers=[log, Implied(log)], backend="numpy", trace=True, **subject.options
        )
    program = result.trace.program
    segments = {index for warp in result.trace.warps.values() for index in warp.segments}
    log.covered = {program.code[i].line for index in segments for i in range(program.segments[index].start, program.segments[index].end)}
    return log


def reason(mutant: Mutant, log: Log) -> str:
    """Why the mutant is equivalent, or "" where none of the arguments holds."""
    line, what, before = mutant.line, mutant.what, mutant.before
    waits = what == "wait deleted" and line in log.phases
    wait_of_cluster = what == "cluster barrier deleted" and "wait" in before
    arguments = (
        # A wait that has never succeeded leaves no event.
        (
            "never executed in this launch",
            line not in (log.covered if what == "wait deleted" else log.lines) and what != "initialisation deleted",
        ),
        ("a fence for other CTAs in a cluster of one", before.startswith("fence.mbarrier_init") and log.cluster_size == 1),
        ("only ever passes the state before the first phase, for which nobody waits", waits and log.phases[line] == {-1}),
        ("all that its phase releases is known from earlier waits", waits and line not in log.news),
        ("nothing is ever pending there", log.idle.get(line, False)),
        ("a fence of warps without tcgen05 operations", line in log.tensor_fences and not log.tensor_fences[line] & log.tensor),
        ("an mbarrier that nobody uses", line in log.made and not log.made[line] & log.used),
        (
            "only global memory is written, and nothing of this launch reads it",
            what.startswith("group wait") and "cp.async.bulk" in before and log.last(line),
        ),
        (
            "a barrier whose waits teach nothing that earlier waits had not",
            what == "count lowered" and line in log.made and not log.made[line] & log.taught,
        ),
        (
            "its neighbouring barriers order everything that conflicts",
            what == "barrier deleted" and "arrive" not in before and redundant(log, line),
        ),
        (
            "the CTA's next barrier comes before any access, and includes threads that do wait",
            wait_of_cluster and waited_by_others(log, line),
        ),
        (
            "no access before it conflicts with one of another CTA behind it; the execution barrier stays",
            what == "cluster arrival relaxed" and not needs_release(log, line),
        ),
    )
    return next((why for why, holds in arguments if holds), "")


def waited_by_others(log: Log, line: int) -> bool:
    """Argument 4: who skips the wait does nothing before a barrier that it shares with a warp that has waited for the same phase."""
    for warp, at, which in log.waits.get(line, []):
        items = log.events[warp]
        i = at + 1
        while i < len(items) and not (isinstance(items[i], tuple) and items[i][1] not in ("warp", "wait")):
            if isinstance(items[i], Part) and (items[i].touches or items[i].publishes):
                return False
            i += 1
        if i >= len(items) or items[i][1][0].kind != "named" or items[i][0] in log.arriving:
            return False
        others = {w for w, _, _ in log.waits[line]}
        if not (log.members[items[i][1]] & log.waited[which]) - others:
            return False
    return bool(log.waits.get(line))


def needs_release(log: Log, line: int) -> bool:
    """Argument 7: whether something behind the cluster barrier conflicts with what another CTA did before this arrival."""
    before: dict[Any, list[Any]] = defaultdict(list)
    after: dict[Any, list[Any]] = defaultdict(list)
    for items in log.events.values():
        cuts = [(i, item[1]) for i, item in enumerate(items) if isinstance(item, tuple) and _is_cluster(item[1])]
        for n, (i, which) in enumerate(cuts):
            released = [at for at, _ in cuts[:n] if items[at][0] not in log.relaxed]
            start = released[-1] if released else 0
            end = cuts[n + 1][0] if n + 1 < len(cuts) else len(items)
            if items[i][0] == line:
                stop = _released_by_others(log, items, start, i, which, line)
                before[which] += [t for part in items[stop:i] if isinstance(part, Part) for t in (*part.touches, *part.asynchronous)]
            after[which] += [t for part in items[i:end] if isinstance(part, Part) for t in (*part.touches, *part.asynchronous)]
    for which, first in before.items():
        for cta in {t[0][0] for t in first}:
            mine = [t for t in first if t[0][0] == cta]
            if _conflict(mine, [t for t in after[which] if t[0][0] != cta]):
                return True
    return False


def _released_by_others(log: Log, items: list[Any], start: int, end: int, which: Any, line: int) -> int:
    """From where on, between start and end, nothing is released by another warp that a barrier of the CTA lies before."""
    releasing = {warp for warp, at in log.releasing[which] if at != line}
    for j in range(end - 1, start - 1, -1):
        item = items[j]
        if isinstance(item, tuple) and item[1] not in ("warp", "wait") and item[1][0].kind == "named" and log.members[item[1]] & releasing:
            return j
    return start


def _is_cluster(which: Any) -> bool:
    return isinstance(which, tuple) and which[0].kind == "cluster"


def redundant(log: Log, line: int) -> bool:
    """Argument 3 for every time that a warp comes to the barrier at that line."""
    groups: dict[Any, list[tuple[Part, Part]]] = defaultdict(list)
    comers: dict[Any, set[Any]] = defaultdict(set)
    for warp, items in log.events.items():
        for i, item in enumerate(items):
            if isinstance(item, tuple) and item[0] == line:
                pair = (_merged(log, items, i, -1), _merged(log, items, i, 1))
                if item[1] == "warp":
                    if pair[0].diverged:
                        return False
                    groups[warp, i].append(pair)
                else:
                    groups[item[1]].append(pair)
                    comers[item[1]].add(warp)
    if any(log.members[which] != warps for which, warps in comers.items()):
        return False
    return bool(groups) and all(not _matters(log, parts) for parts in groups.values())


def _merged(log: Log, items: list[Any], at: int, step: int) -> Part:
    """Everything up to the next barrier that orders at least the same threads."""
    total = Part()
    which = items[at][1]
    i = at + step
    while 0 <= i < len(items):
        item = items[i]
        if isinstance(item, Part):
            total.touches += item.touches
            total.publishes |= item.publishes
            total.diverged |= item.diverged
            for what, threads in item.learns.items():
                total.learns[what] |= threads
        elif item[1] == "wait" or item[0] in log.arriving:
            pass
        elif which == "warp" or (item[1] != "warp" and log.members[item[1]] >= log.members[which]):
            return total
        i += step
    return total


def _matters(log: Log, parts: list[tuple[Part, Part]]) -> bool:
    """Whether the barrier may order something that its neighbours do not."""
    first = [t for before, _ in parts for t in before.touches]
    second = [t for _, after in parts for t in after.touches]
    learns: dict[Any, set[Any]] = defaultdict(set)
    for before, _ in parts:
        for what, threads in before.learns.items():
            learns[what] |= threads
    publishes = {x for _, after in parts for x in after.publishes}
    users = {t[0] for t in second} | publishes
    if any(users - threads for threads in learns.values()):
        return True
    actors = {t[0] for t in first if t[4] or log.places[t[1], t[2]] != 1}
    if publishes and any(actors - {one} for one in publishes):
        return True
    return _conflict(first, second)


def _conflict(first: list[Any], second: list[Any]) -> bool:
    by_place: dict[Any, list[Any]] = defaultdict(list)
    for touch in second:
        by_place[touch[1]].append(touch)
    return any(
        a[0] != b[0] and (a[4] or b[4]) and a[2] < b[3] and b[2] < a[3] for a in first for b in by_place.get(a[1], ())
    )  # fmt: skip
