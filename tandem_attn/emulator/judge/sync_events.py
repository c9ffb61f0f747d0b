"""How barriers, fences, commits and waits change the clocks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tandem_attn.emulator.events import (
    AccessKind,
    Arrival,
    AsyncAgent,
    BarrierId,
    BarrierInit,
    Fence,
    GroupCommit,
    GroupWait,
    PhaseComplete,
    Proxy,
    Site,
    Space,
    Wait,
)
from tandem_attn.emulator.judge import wording
from tandem_attn.emulator.judge.clock import AFTER, ALL, BEFORE, FULL, GLOBAL, INIT, PLAIN, RELAXED, SHARED, TENSORMAP, Clock, raise_to
from tandem_attn.emulator.judge.record import OF_A_LANE, Operation, Record, completion_key, warp_number

if TYPE_CHECKING:
    from tandem_attn.emulator.judge.races import RaceTracker


@dataclass(slots=True)
class BarrierState:
    """A barrier of any kind. `current`: released by the arrivals of the open phase; `complete`: by all complete phases."""

    current: Clock = field(default_factory=Clock)
    complete: Clock = field(default_factory=Clock)
    causes: Clock = field(default_factory=Clock)  # of the open phase: also what only happened before, without release
    init: tuple[int, int, int, Site] | None = None  # warp, lane, epoch
    trusted: set[int] = field(default_factory=set)  # warps that were found behind the initialisation
    waits: dict[int, tuple[int, int, Site]] = field(default_factory=dict)  # last wait of each warp: phase, epoch


class Barriers:
    """Handles every synchronisation event of a tracker."""

    def __init__(self, tracker: RaceTracker) -> None:
        self.tracker = tracker
        self.states: dict[BarrierId, BarrierState] = {}
        self.handlers: dict[type, Any] = {
            BarrierInit: self.init, Arrival: self.arrival, PhaseComplete: self.phase, Wait: self.wait, Fence: self.fence,
            GroupCommit: lambda _: None, GroupWait: self.group_wait,
        }  # fmt: skip

    def state(self, barrier: BarrierId) -> BarrierState:
        found = self.states.get(barrier)
        if found is None:
            found = self.states[barrier] = BarrierState()
        return found

    def forget(self, cta: int) -> None:
        for barrier in [b for b in self.states if b.cta == cta]:
            del self.states[barrier]

    # ---- barriers
    def init(self, event: BarrierInit) -> None:
        """A new object: who uses it must be behind its initialisation."""
        number = warp_number(event.agent)
        clock = self.tracker.warp(number)
        state = BarrierState()
        if event.count:
            state.init = (number, event.lanes, clock.epoch, event.site)
        self.states[event.barrier] = state

    def check_init(self, state: BarrierState, barrier: BarrierId, number: int, lanes: int, clock: Clock | None, event: Any) -> None:
        """Arrivals, waits and completions must come behind the initialisation."""
        if state.init is None or number in state.trusted:
            return
        owner, bits, epoch, site = state.init
        state.trusted.add(number)
        if owner == number:
            return
        if clock is None:
            clock = self.tracker.warp(number).snapshot(lanes or FULL)
        lane = (bits & -bits).bit_length() - 1
        if any(clock.knows((owner, code), epoch) for code in (ALL, INIT, lane)):
            return
        agent = event.agent
        record = stand_in(number, agent, event.site)
        self.tracker.add("race", record, site.index, wording.uninitialised_barrier(barrier, agent, site, owner, self.tracker.grid))

    def arrival(self, event: Arrival) -> None:
        state = self.state(event.barrier)
        agent = event.agent
        mbarrier = event.barrier.kind == "mbarrier"
        if isinstance(agent, AsyncAgent):
            self.asynchronous(event, agent, state)
            return
        number = warp_number(agent)
        warp = self.tracker.warp(number)
        if mbarrier:
            self.check_init(state, event.barrier, number, event.lanes, None, event)
        if event.tx < 0:  # a complete_tx instruction: nothing is released
            return
        lanes = event.lanes if event.barrier.kind == "mbarrier" else FULL
        clock = warp.release(lanes)
        state.causes.join(clock)
        if event.semantics != "relaxed":
            state.current.join(clock)
        else:
            if warp.released is not None:
                state.current.join(warp.released)
            if warp.settled is not None:
                raise_to(state.current.times[RELAXED], warp.settled.times[PLAIN])

    @staticmethod
    def of_commit(event: Arrival, agent: AsyncAgent, operation: Operation) -> Record:
        """The arrival itself as an access, which is over when this or a later commit of the thread has been waited for."""
        done = [(completion_key(agent), agent.serial)]
        return Record(
            warp_number(agent.issuer), agent, event.site, AccessKind.ATOMIC, Space.SHARED, event.barrier.cta, Proxy.ASYNC, True,
            event.scope, agent.lanes, operation.epoch, operation, done,
        )  # fmt: skip

    def asynchronous(self, event: Arrival, agent: AsyncAgent, state: BarrierState) -> None:
        """The arrival of an asynchronous operation: its accesses are over when this phase is; a commit stands for all before it."""
        operation = self.tracker.operations[agent.serial]
        self.check_init(state, event.barrier, warp_number(agent.issuer), agent.lanes, operation.before, event)
        for record in operation.open:
            record.done.append((event.barrier, event.phase + 1))
        operation.open = []
        if agent.kind == "tcgen05.commit":
            self.tracker.visit(self.of_commit(event, agent, operation), event.barrier.cta)
        state.causes.join(operation.before)
        if agent.kind in ("tcgen05.commit", "cp.async"):
            state.current.join(operation.before)
            state.current.learn(completion_key(agent), agent.serial, (PLAIN, BEFORE))

    def phase(self, event: PhaseComplete) -> None:
        state = self.state(event.barrier)
        if event.barrier.kind == "mbarrier":
            self.missed(event, state)
        state.complete.join(state.current.for_others())
        state.current, state.causes = Clock(), Clock()

    def missed(self, event: PhaseComplete, state: BarrierState) -> None:
        """A warp that waits for a phase by parity must have come through before the next one can complete."""
        for number, (phase, epoch, site) in state.waits.items():
            if phase != event.phase - 1 or ".parity" not in site.text:
                continue
            times = state.causes.times[PLAIN]
            if any(times.get((number, lane), -1) >= epoch for lane in (ALL, *range(32))):
                continue
            agent = wording.agent_of(number)
            record = stand_in(number, agent, site)
            self.tracker.add("race", record, "phase", wording.missed_phase(event, number, site, self.tracker.grid))

    def wait(self, event: Wait) -> None:
        number = warp_number(event.agent)
        warp = self.tracker.warp(number)
        state = self.state(event.barrier)
        lanes = event.lanes if event.barrier.kind == "mbarrier" else FULL
        if event.barrier.kind == "mbarrier":
            self.check_init(state, event.barrier, number, lanes, None, event)
            if event.phase >= 0:
                state.waits[number] = (event.phase, warp.epoch, event.site)
        if event.phase < 0:
            return
        if event.semantics == "relaxed":
            if warp.pending is None:
                warp.pending = Clock()
            warp.pending.join(state.complete)
            warp.pending.learn(event.barrier, event.phase + 1, tuple(s for s in range(AFTER)))
            return
        warp.acquire(lanes, state.complete)
        warp.learn(lanes, event.barrier, event.phase + 1, tuple(s for s in range(AFTER)))
        if event.barrier.kind != "mbarrier":
            warp.extra.clear()
        if event.barrier.kind == "named" and len(self.tracker.clusters.get(event.agent.cta, ())) > 1:
            warp.settled = warp.base.copy()

    # ---- fences and waits of one warp
    def fence(self, event: Fence) -> None:
        warp = self.tracker.warp(warp_number(event.agent))
        kind, lanes = event.kind, event.lanes
        if kind.startswith(("bar.warp", "barrier.warp")):
            warp.sync(lanes)
        elif kind.startswith("fence.proxy.async"):
            if "global" not in kind:
                warp.fence(lanes, SHARED)
            if "shared" not in kind:
                warp.fence(lanes, GLOBAL)
        elif "tensormap" in kind:
            warp.fence(lanes, TENSORMAP)
        elif kind.startswith("wgmma.fence"):
            warp.wgmma_fenced = True
        elif kind.startswith("tcgen05.fence"):
            warp.fence(lanes, BEFORE) if "before" in kind else warp.fence(lanes, AFTER, BEFORE)
        elif kind.startswith("fence.mbarrier_init"):
            if warp.released is None:
                warp.released = Clock()
            warp.released.times[PLAIN][warp.warp, INIT] = warp.epoch
            warp.epoch += 1
        elif kind.startswith(("fence.", "membar")) and "proxy" not in kind:
            if warp.pending is not None:
                warp.acquire(lanes, warp.pending)
            warp.released = warp.release(lanes).for_others()

    def group_wait(self, event: GroupWait) -> None:
        """The members, and what was issued before them by the same thread, are complete."""
        warp = self.tracker.warp(warp_number(event.agent))
        sorts = (PLAIN,) if event.kind.startswith(("tcgen05", "cp.async")) else tuple(range(AFTER + 1))
        for agent in event.members:
            key = completion_key(agent)
            lanes = event.lanes if isinstance(key, tuple) and key[0] in OF_A_LANE else FULL
            warp.learn(lanes, completion_key(agent, read=True), agent.serial, sorts)
            if not event.read:
                warp.learn(lanes, key, agent.serial, sorts)


def stand_in(number: int, agent: Any, site: Site) -> Record:
    """A record to report a barrier operation with."""
    return Record(number, agent, site, AccessKind.READ, Space.SHARED, -1, Proxy.GENERIC, True, "", 0, 0)
