"""Barriers of a CTA and of a cluster, fences. PTX manual, "bar, barrier", "bar.warp.sync", "barrier.cluster", "membar, fence"."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tandem_attn.emulator.events import Arrival, BarrierId, Fence, PhaseComplete, Wait
from tandem_attn.emulator.machine.team import Team
from tandem_attn.emulator.machine.warp import Blocked, Frame, Warp
from tandem_attn.emulator.memory.faults import Fault
from tandem_attn.emulator.ops.access import Array, reader, uniform, writer
from tandem_attn.emulator.ops.registry import Handler, machine, together
from tandem_attn.emulator.ptx.nodes import Instruction
from tandem_attn.emulator.sync.barrier import NamedBarrier

SECTION = "Parallel Synchronization and Communication Instructions: "


def _event(w: Warp, ins: Instruction, kind: str, m: Array | None) -> None:
    engine = w.cta.machine
    if engine.observed:
        engine.emit(Fence(w.agent, engine.site(ins.index), kind, w.lane_bits(m)))


@machine("bar.warp", "barrier.warp", section=SECTION + "bar.warp.sync")
def warp_sync(ins: Instruction) -> Handler:
    """Lanes of one path run in lockstep; the event orders them for the judge."""

    def run(w: Warp, m: Array | None) -> None:
        _event(w, ins, "bar.warp.sync", m)

    return together(run, lambda _: True)  # nobody looks on


@machine("fence", "membar", section=SECTION + "membar, fence")
def fence(ins: Instruction) -> Handler:
    """Memory here is sequentially consistent, so a fence changes nothing but what the judge knows."""
    kind = ".".join(ins.mods)

    def run(w: Warp, m: Array | None) -> None:
        _event(w, ins, kind, m)
        if ins.mods[1] == "proxy" and "tensormap::generic" in ins.mods:
            w.cta.machine.progress += 1

    return together(run, lambda _: "tensormap::generic" not in ins.mods)  # nobody looks on


def _counts(ins: Instruction) -> tuple[str, int]:
    """The operation (sync, arrive, red) and where its barrier number stands among the operands."""
    op = next(m for m in ins.mods if m in ("sync", "arrive", "red"))
    return op, 1 if op == "red" else 0


@machine("bar", "barrier", section=SECTION + "bar, barrier")
def barrier(ins: Instruction) -> Handler:
    """.sync waits, .arrive does not, .red also combines a predicate (.and, .or, .popc) over all threads."""
    op, at = _counts(ins)
    number = uniform(ins.operands[at], np.uint32)
    rest = ins.operands[at + 1 :]
    vote = reader(rest[-1], np.bool_) if op == "red" else None
    count = uniform(rest[0], np.uint32) if len(rest) > (1 if op == "red" else 0) else None
    result = writer(ins.operands[0]) if op == "red" else None
    red = next((x for x in ins.mods if x in ("and", "or", "popc")), "")

    def finish(w: Warp, bar: NamedBarrier, m: Array | None) -> None:
        engine = w.cta.machine
        if engine.observed:
            ident = BarrierId("named", w.cta.linear, bar.number)
            engine.emit(Wait(w.agent, engine.site(ins.index), ident, w.lane_bits(m), bar.phase - 1))
        if result is not None:
            votes = sum(int(np.count_nonzero(p)) for p, _ in bar.outcome)
            threads = sum(n for _, n in bar.outcome)
            if red == "popc":
                result(w, np.full(32, votes, np.uint32), m)
            else:
                result(w, np.full(32, votes == threads if red == "and" else votes > 0), m)

    def run(w: Warp, m: Array | None) -> Blocked | None:
        bar = w.cta.barrier(number(w, m))
        frame = w.stack[-1]
        if frame.arrived is not None and frame.arrived[0] == ins.index:
            if bar.phase == frame.arrived[1]:  # woken by something else
                return hold(w, bar)
            frame.arrived = None
            finish(w, bar, m)
            return None
        expected = count(w, m) if count is not None else -(-w.cta.live_threads() // 32) * 32
        engine = w.cta.machine
        lanes = w.lane_bits(m)
        if engine.observed:
            ident = BarrierId("named", w.cta.linear, bar.number)
            engine.emit(Arrival(w.agent, engine.site(ins.index), ident, lanes, bar.phase, 32))
        if vote is not None:
            on = np.ones(32, np.bool_) if m is None else m
            bar.votes.append((vote(w) & on, int(np.count_nonzero(on))))
        phase = bar.phase
        # A warp that is one path counts whole; the sides of a divergent branch count their own lanes.
        threads = 32 if m is None or len(w.stack) == 1 else lanes.bit_count()
        if bar.arrive(w.index, threads, expected):
            engine.progress += 1
            if engine.observed:
                engine.emit(PhaseComplete(BarrierId("named", w.cta.linear, bar.number), phase))
            waiting, bar.waiting = bar.waiting, []
            for other in waiting:
                engine.wake(other)
            if op != "arrive":
                finish(w, bar, m)
            return None
        if op == "arrive":
            return None
        frame.arrived = (ins.index, phase)
        return hold(w, bar)

    def hold(w: Warp, bar: NamedBarrier) -> Blocked:
        bar.waiting.append(w)
        return _waits(bar)

    return together(run, lambda t: op != "red" and arrive_together(t, ins.index if op == "sync" else -1, number, count))


Read = Callable[[Warp, Array | None], int]


def _waits(bar: NamedBarrier) -> Blocked:
    return Blocked(f"waits at barrier {bar.number}: {bar.arrived} of {bar.expected} threads came (warps {sorted(bar.members)})")


def arrive_together(t: Team, waiting_at: int, number: Read, count: Read | None) -> bool | Blocked:
    """The warps of a team come to one barrier, and nothing is wrong with their counts. `waiting_at`: the instruction, when it waits."""
    frames = [w.stack[0] for w in t.warps]
    if waiting_at >= 0 and frames[0].arrived is not None:
        return _behind(frames, waiting_at, t.cta.barrier(number(t.first, None)))
    given = {(number(w, None), count(w, None) if count is not None else 0) for w in t.warps}
    which, expected = given.pop()
    bar = t.cta.barrier(which)
    expected = expected or -(-t.cta.live_threads() // 32) * 32
    total = bar.arrived + 32 * t.count
    wrong = given or expected % 32 or total > expected or (bar.arrived and expected != bar.expected) or bar.votes
    if wrong or any(frame.arrived is not None for frame in frames) or any(w.index in bar.members for w in t.warps):
        return False
    if total < expected:
        bar.expected, bar.arrived = expected, total
        bar.members += [w.index for w in t.warps]
        if waiting_at < 0:
            return True
        for frame in frames:
            frame.arrived = (waiting_at, bar.phase)
        bar.waiting += t.warps
        return _waits(bar)
    bar.expected, bar.arrived, bar.phase, bar.outcome = expected, 0, bar.phase + 1, []
    bar.members.clear()
    engine = t.cta.machine
    engine.progress += 1
    waiting, bar.waiting = bar.waiting, []
    for other in waiting:
        engine.wake(other)
    return True


def _behind(frames: list[Frame], index: int, bar: NamedBarrier) -> bool:
    """Warps that have waited together go on, when the phase of their arrival is complete."""
    if any(frame.arrived != frames[0].arrived for frame in frames) or frames[0].arrived != (index, bar.phase - 1):
        return False
    for frame in frames:
        frame.arrived = None
    return True


@machine("barrier.cluster", section=SECTION + "barrier.cluster")
def cluster(ins: Instruction) -> Handler:
    """.arrive and .wait; a warp waits for the phase of its own last arrival."""
    arriving = ins.mods[2] == "arrive"
    semantics = "relaxed" if ins.has("relaxed") else "release" if arriving else "acquire"

    def run(w: Warp, m: Array | None) -> Blocked | None:
        engine = w.cta.machine
        group = w.cta.cluster
        ident = BarrierId("cluster", group.ctas[0].linear, 0)
        bar = group.barrier
        if arriving:
            if w.cluster_phase is not None:
                raise Fault("barrier", "barrier.cluster.arrive twice without a wait between")
            if engine.observed:
                engine.emit(Arrival(w.agent, engine.site(ins.index), ident, w.lane_bits(m), bar.phase, 32, 0, semantics, "cluster"))
            w.cluster_phase = bar.phase
            if bar.arrive(32 if w.alive is None else int(np.count_nonzero(w.alive))):
                engine.progress += 1
                if engine.observed:
                    engine.emit(PhaseComplete(ident, bar.phase - 1))
                waiting, bar.waiting = bar.waiting, []
                for other in waiting:
                    engine.wake(other)
            return None
        if w.cluster_phase is None:
            raise Fault("barrier", "barrier.cluster.wait without an arrive before it")
        if bar.phase > w.cluster_phase:
            if engine.observed:
                engine.emit(Wait(w.agent, engine.site(ins.index), ident, w.lane_bits(m), w.cluster_phase, semantics, "cluster"))
            w.cluster_phase = None
            return None
        bar.waiting.append(w)
        return Blocked(f"waits at the cluster barrier: {bar.arrived} of {bar.threads} threads came")

    return run
