"""Runs a launch: picks warps, moves them from segment to segment, completes asynchronous work, finds deadlocks."""

from __future__ import annotations

import gc
import random
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from tandem_attn.emulator.errors import ExecutionError
from tandem_attn.emulator.events import Access, AccessKind, ClusterStart, Event, Observer, Proxy, Site, Space, WarpExit
from tandem_attn.emulator.judge.checks import CHECKS
from tandem_attn.emulator.judge.deadlock import explain
from tandem_attn.emulator.launch.launch import Launch
from tandem_attn.emulator.machine.async_ops import AsyncEngine, AsyncOp
from tandem_attn.emulator.machine.control import Control
from tandem_attn.emulator.machine.cta import CTA, Cluster
from tandem_attn.emulator.machine.team import Team
from tandem_attn.emulator.machine.warp import Blocked, Warp
from tandem_attn.emulator.memory.faults import Fault
from tandem_attn.emulator.memory.registers import RegisterFile
from tandem_attn.emulator.ptx.operands import CARRY
from tandem_attn.emulator.report import Report, Statistics
from tandem_attn.emulator.trace import Trace

IDLE_ROUNDS = 2000  # rounds in which every warp that can run only spins, after which the run counts as stuck
MAX_REPORTS = 200


class StopError(Exception):
    """The run cannot go on."""


class Machine:
    """One run of one launch."""

    def __init__(
        self, launch: Launch, segments: Any, *, schedule: str = "at-issue", seed: int = 0, resident_ctas: int = 148,
        observers: Iterable[Observer] = (), wanted: frozenset[str] = CHECKS, tick: Callable[[Machine], None] | None = None,
        trace: Trace | None = None,
    ) -> None:  # fmt: skip
        self.launch, self.segments = launch, segments
        self.program, self.memory = launch.program, launch.memory
        self.rng = random.Random(seed)
        self.schedule = schedule
        self.observers = list(observers)
        self.observed = bool(self.observers)
        self.teams = not self.observed and schedule != "random"  # whether warps are executed together
        self.engine = AsyncEngine(self, schedule, self.rng)
        self.check_uninitialised = "uninitialised" in wanted
        asked = "uninitialised-register" in wanted
        self.exposed = frozenset((r.cls, r.slot) for r in launch.program.exposed if r is not CARRY) if asked else frozenset()
        self.check_load_use = "tmem-load-use" in wanted
        self.reports: list[Report] = []
        self.seen: set[tuple[Any, ...]] = set()
        self.statistics = Statistics()
        self.progress = 0
        self.acting: AsyncOp | None = None
        self.resident_limit = max(1, resident_ctas)
        self.waiting_clusters = deque(enumerate(launch.clusters))
        self.resident: list[Cluster] = []
        self.cancelled = 0  # clusters that cluster launch control has taken over
        self.ready: deque[Warp] = deque()  # may hold a warp twice: `Warp.queued` says whether its turn is still to come
        self.idle: list[Warp] = []  # spinning: ran, yielded, and nothing has changed since
        self.sites: dict[int, Site] = {}
        self.tensormaps: dict[bytes, Any] = {}  # decoded descriptors by content
        self.control = Control(self)
        self.tick = tick
        self.trace = trace
        self.tick_at = 0.0
        self.finished = True
        self.spare_files: list[RegisterFile] = []  # of warps that have ended

    # ---- reports and events
    def site(self, index: int) -> Site:
        found = self.sites.get(index)
        if found is None:
            ins = self.program.code[index]
            found = self.sites[index] = Site(index, ins.line, ins.text, ins.source)
        return found

    def report(self, fault: Fault, warp: Warp | None, index: int, **details: Any) -> None:
        """Turn a fault into a report, once per kind, instruction and CTA-independent cause."""
        key = (fault.kind, index, fault.message if index < 0 else warp.index if warp else None)
        if key in self.seen or len(self.reports) >= MAX_REPORTS:
            return
        self.seen.add(key)
        site = self.site(index) if index >= 0 else None
        self.reports.append(
            Report(
                fault.kind, fault.message, warp.cta.where if warp else None, warp.index if warp else None,
                ptx_line=site.ptx_line if site else None, ptx=site.text if site else "", source=site.source if site else None,
                details=details,
            )
        )  # fmt: skip

    def emit(self, event: Event) -> None:
        for observer in self.observers:
            for report in observer.event(event) or ():
                self.add_report(report)

    def add_report(self, report: Report) -> None:
        key = (report.kind, report.ptx_line, report.message)
        if key not in self.seen and len(self.reports) < MAX_REPORTS:
            self.seen.add(key)
            self.reports.append(report)

    def access(
        self, warp: Warp, index: int, space: Space, cta: int, kind: AccessKind, proxy: Proxy, starts: Any, size: int, lanes: Any = None,
        semantics: str = "", scope: str = "", silent: Any = None,
    ) -> None:  # fmt: skip
        """Tell the observers of a memory access by a warp, or by the asynchronous operation that is acting."""
        op = self.acting
        agent = op.agent if op is not None and op.agent is not None else warp.agent
        site = self.site(op.index if op is not None else index)
        if not semantics:
            semantics, scope = self.control.ordering(index) if op is None else ("weak", "")
        starts = np.asarray(starts, np.int64).reshape(-1)
        ids = np.full(len(starts), -1, np.int64) if lanes is None or op is not None else np.asarray(lanes, np.int64)
        self.emit(Access(agent, site, space, cta, kind, proxy, starts, size, ids, semantics, scope, silent))

    # ---- scheduling
    def wake(self, warp: Warp) -> None:
        """What a warp waited for has happened."""
        if warp.blocked is not None:
            warp.blocked = None
            for frame in warp.stack:
                frame.waits = False
            self.enter(warp)
            self.progress += 1

    def enter(self, warp: Warp) -> None:
        """The warp can run."""
        warp.queued = True
        self.ready.append(warp)

    def start_cluster(self) -> bool:
        """Make the next cluster resident when it fits; False when there is none or no room."""
        if not self.waiting_clusters:
            return False
        if sum(len(c.ctas) for c in self.resident) + len(self.waiting_clusters[0][1]) > self.resident_limit and self.resident:
            return False
        index, coordinates = self.waiting_clusters.popleft()
        cluster = Cluster(self, index, coordinates)
        self.resident.append(cluster)
        self.statistics.ctas += len(cluster.ctas)
        warps = [warp for cta in cluster.ctas for warp in cta.warps]
        self.statistics.warps += len(warps)
        if self.observed:
            self.emit(ClusterStart(index, tuple(c.linear for c in cluster.ctas), len(cluster.ctas[0].warps)))
        for warp in warps:
            self.enter(warp)
        self.progress += 1
        return True

    def run(self) -> None:
        """Run every CTA to its end, or to a fault that ends the run."""
        began = time.perf_counter()
        collecting = gc.isenabled()
        gc.disable()  # operations are freed by their reference counts; searching for cycles costs a fifth of a run
        try:
            with np.errstate(all="ignore"):
                self.loop()
        except StopError:
            self.finished = False
        finally:
            if collecting:
                gc.enable()
        for observer in self.observers:
            for report in observer.finish() or ():
                self.add_report(report)
        self.statistics.run_s += time.perf_counter() - began
        self.statistics.opcodes = self.control.opcodes()

    def loop(self) -> None:
        stuck_rounds = 0
        random_order = self.schedule == "random"
        if random_order:
            for _ in range(self.rng.randint(1, 3)):
                self.start_cluster()
        while True:
            if self.ready:
                if random_order:
                    self.ready.rotate(self.rng.randrange(len(self.ready)))
                    self.engine.maybe_complete()
                self.turn(self.ready.popleft())
                if self.tick is not None and time.perf_counter() > self.tick_at:
                    self.tick(self)
                continue
            if self.spinners_may_see_news():
                stuck_rounds = 0
                continue
            if self.engine.complete_one() or self.start_cluster():
                continue
            if self.idle and stuck_rounds < IDLE_ROUNDS:
                stuck_rounds += 1
                self.enter_idle()
                continue
            if self.time_out_waits():
                continue
            if not self.resident and not self.waiting_clusters:
                return
            if all(cluster.done for cluster in self.resident) and not self.waiting_clusters:
                return
            self.reports.append(explain(self))
            raise StopError

    stamp = -1

    def spinners_may_see_news(self) -> bool:
        """Let spinning warps look again when something has happened since they last did."""
        if not self.idle or self.progress == self.stamp:
            return False
        self.enter_idle()
        return True

    def enter_idle(self) -> None:
        """The spinning warps look again."""
        self.stamp = self.progress
        for warp in self.idle:
            self.enter(warp)
        self.idle.clear()

    def time_out_waits(self) -> bool:
        """When nothing else can run, blocked try_waits return false (the manual allows a time limit); True when one did."""
        woken = [warp for cluster in self.resident for cta in cluster.ctas for warp in cta.warps if self.may_time_out(warp)]
        for warp in woken:
            assert warp.blocked is not None
            warp.time_out = True
            warp.blocked.detail["barrier"].waiters.remove(warp)
            warp.blocked = None
            for frame in warp.stack:
                frame.waits = False
            self.enter(warp)
        return bool(woken)

    def may_time_out(self, warp: Warp) -> bool:
        """Whether the warp's wait is a try_wait that has something to gain: with the same registers as last time it would wait for ever.

        A warp that counts its tries goes on, though IDLE_ROUNDS times at most.
        """
        if warp.blocked is None or not warp.blocked.detail.get("may_time_out"):
            return False
        if warp.timed_out_at != self.progress:
            warp.timed_out_at = self.progress
            warp.timed_out.clear()
        times, before = warp.timed_out.get(warp.current, (0, b""))
        registers = warp.digest()
        warp.timed_out[warp.current] = times + 1, registers
        return registers != before and times < IDLE_ROUNDS

    def turn(self, warp: Warp) -> None:
        """A warp's turn, with those that stand beside it; not if it has had it with them already."""
        if not warp.queued:
            return
        team = warp.team
        if team is not None and team.at(warp.stack[-1].segment):
            self.step_team(team)
        else:
            warp.queued = False
            self.step(warp)

    def step(self, warp: Warp) -> None:
        """Run a warp until it blocks, yields or ends; faults become reports."""
        try:
            self.control.run(warp)
        except Fault as fault:
            self.report(fault, warp, warp.current)
            raise StopError from None
        except ExecutionError as error:
            self.report(Fault("undefined", str(error)), warp, warp.current)
            raise StopError from None

    def step_team(self, team: Team) -> None:
        """The same for warps that stand at the same place; where their ways part, they go on one by one."""
        for warp in team.warps:
            warp.queued = False
        team.acting = team.first
        try:
            left = self.control.run_team(team)
        except Fault as fault:
            self.report(fault, team.acting, team.acting.current)
            raise StopError from None
        except ExecutionError as error:
            self.report(Fault("undefined", str(error)), team.acting, team.acting.current)
            raise StopError from None
        for warp in left:
            self.step(warp)

    def yielded(self, warp: Warp) -> None:
        """The warp gives way: it spins, or has run for long."""
        self.idle.append(warp)

    def blocked(self, warp: Warp, why: Blocked) -> None:
        warp.blocked = why

    def exited(self, warp: Warp) -> None:
        """A warp has ended: tell barriers, and free the CTA's place when it was the last."""
        warp.done = True
        self.statistics.instructions += warp.instructions
        self.progress += 1
        cta = warp.cta
        if warp.wgmma_open:
            text = "the warp ends with a wgmma that it never committed"
            self.report(Fault("register-in-flight", text), warp, warp.wgmma_open[0].form.index)
        if self.observed:
            self.emit(WarpExit(warp.agent))
        waiting, cta.register_waiters = cta.register_waiters, []
        for other in waiting:
            self.wake(other)
        cluster = cta.cluster
        if cluster.barrier.leave(32 if warp.alive is None else int(warp.alive.sum())):
            for waiting in cluster.barrier.waiting:
                self.wake(waiting)
            cluster.barrier.waiting.clear()
        if cta.done:
            self.end_cta(cta, warp)
            if cluster.done:
                self.resident.remove(cluster)
                self.spare_files += [file for each in cluster.ctas for file in each.files]

    def end_cta(self, cta: CTA, warp: Warp) -> None:
        if cta.has_tmem and cta.tmem.sizes:
            held = ", ".join(f"{n} columns at {first}" for first, n in cta.tmem.sizes.items())
            self.report(Fault("tmem-allocation", f"the CTA ends with TMEM allocated: {held}"), warp, -1)
