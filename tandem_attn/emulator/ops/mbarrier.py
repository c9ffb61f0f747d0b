"""mbarrier instructions. PTX manual, "Parallel Synchronization and Communication Instructions: mbarrier.*"."""

from __future__ import annotations

import numpy as np

from tandem_attn.emulator.events import Arrival, BarrierId, BarrierInit, PhaseComplete, Wait
from tandem_attn.emulator.machine.cta import CTA
from tandem_attn.emulator.machine.team import Team
from tandem_attn.emulator.machine.warp import Blocked, Warp
from tandem_attn.emulator.memory.addresses import OFFSET_MASK, RANK_SHIFT
from tandem_attn.emulator.memory.faults import Fault
from tandem_attn.emulator.ops.access import Array, lane_list, lanes_of, reader, scalar, shared_scalar, writer
from tandem_attn.emulator.ops.registry import Handler, machine, together
from tandem_attn.emulator.ptx.nodes import Discard, Instruction, Memory, Reg
from tandem_attn.emulator.sync.mbarrier import MBarrier

SECTION = "Parallel Synchronization and Communication Instructions: "


def locate(warp: Warp, address: int) -> tuple[CTA, int]:
    """The CTA and the offset that a shared address names."""
    return warp.cta.peer(address >> RANK_SHIFT), address & OFFSET_MASK


def find(warp: Warp, address: int) -> tuple[CTA, int, MBarrier]:
    cta, offset = locate(warp, address)
    return cta, offset, cta.mbarrier(offset)


def opened(cta: CTA, offset: int, barrier: MBarrier) -> None:
    """A phase is complete: wake who waits for it."""
    engine = cta.machine
    engine.progress += 1
    if engine.observed:
        engine.emit(PhaseComplete(BarrierId("mbarrier", cta.linear, offset), barrier.phase - 1))
    waiters, barrier.waiters = barrier.waiters, []
    for warp in waiters:
        engine.wake(warp)


def complete_tx(warp: Warp, cta: CTA, offset: int, size: int) -> None:
    """An asynchronous operation has moved `size` bytes: the complete-tx operation on its mbarrier."""
    barrier = cta.mbarrier(offset)
    engine = cta.machine
    if engine.observed:
        op = engine.acting
        agent = op.agent if op is not None and op.agent is not None else warp.agent
        site = engine.site(op.index if op is not None else warp.current)
        engine.emit(Arrival(agent, site, BarrierId("mbarrier", cta.linear, offset), 0, barrier.phase, 0, -size))
    if barrier.complete_tx(size):
        opened(cta, offset, barrier)


def arrive_async(warp: Warp, cta: CTA, offset: int, count: int = 1) -> None:
    """An arrival triggered by an asynchronous operation (tcgen05.commit, cp.async.mbarrier.arrive)."""
    barrier = cta.mbarrier(offset)
    engine = cta.machine
    if engine.observed:
        op = engine.acting
        agent = op.agent if op is not None and op.agent is not None else warp.agent
        site = engine.site(op.index if op is not None else warp.current)
        engine.emit(Arrival(agent, site, BarrierId("mbarrier", cta.linear, offset), 0, barrier.phase, count))
    if barrier.arrive(count):
        opened(cta, offset, barrier)


@machine("mbarrier.init", section=SECTION + "mbarrier.init")
def init(ins: Instruction) -> Handler:
    address, count_of = shared_scalar(ins, ins.operands[0]), scalar(ins.operands[1])

    def run(w: Warp, m: Array | None) -> None:
        w.current = ins.index
        for lane in lane_list(m):
            cta, offset = locate(w, address(w, lane))
            count = count_of(w, lane)
            cta.shared.check(np.array([offset]), 8, 8)
            old = cta.mbarriers.get(offset)
            if old is not None and old.waiters:
                raise Fault("mbarrier", f"mbarrier.init at {offset:#x} while warps wait on it")
            cta.mbarriers[offset] = MBarrier.init(count)
            cta.shared.written[offset : offset + 8] = True
            if cta.machine.observed:
                barrier = BarrierId("mbarrier", cta.linear, offset)
                cta.machine.emit(BarrierInit(w.agent, cta.machine.site(ins.index), barrier, count, 1 << lane))

    return run


@machine("mbarrier.inval", section=SECTION + "mbarrier.inval")
def inval(ins: Instruction) -> Handler:
    address = shared_scalar(ins, ins.operands[0])

    def run(w: Warp, m: Array | None) -> None:
        w.current = ins.index
        for lane in lane_list(m):
            cta, offset, barrier = find(w, address(w, lane))
            if barrier.waiters:
                raise Fault("mbarrier", f"mbarrier.inval at {offset:#x} while warps wait on it")
            del cta.mbarriers[offset]
            cta.shared.written[offset : offset + 8] = False
            if cta.machine.observed:
                cta.machine.emit(BarrierInit(w.agent, cta.machine.site(ins.index), BarrierId("mbarrier", cta.linear, offset), 0, 1 << lane))

    return run


@machine("mbarrier.arrive", "mbarrier.arrive_drop", section=SECTION + "mbarrier.arrive, mbarrier.arrive_drop")
def arrive(ins: Instruction) -> Handler:
    """With .expect_tx the operand is bytes and the count 1; .noComplete must not complete the phase."""
    at = 0 if isinstance(ins.operands[0], Memory) else 1
    state = writer(ins.operands[0]) if at else None
    address = shared_scalar(ins, ins.operands[at])
    operand = scalar(ins.operands[at + 1]) if len(ins.operands) > at + 1 else None
    expect, drop = ins.has("expect_tx"), ins.mods[1] == "arrive_drop"
    semantics = "relaxed" if ins.has("relaxed") else "release"
    scope = "cluster" if ins.has("cluster") else "cta"
    wants_state = at == 1 and not isinstance(ins.operands[0], Discard)

    def run(w: Warp, m: Array | None) -> None:
        w.current = ins.index
        states = np.zeros(32, np.uint64) if wants_state else None
        for lane in lane_list(m):
            cta, offset, barrier = find(w, address(w, lane))
            value = operand(w, lane) if operand is not None else 1
            count, tx = (1, value) if expect else (value, 0)
            if states is not None:
                states[lane] = barrier.state()
            engine = cta.machine
            if engine.observed:
                ident = BarrierId("mbarrier", cta.linear, offset)
                engine.emit(Arrival(w.agent, engine.site(ins.index), ident, 1 << lane, barrier.phase, count, tx, semantics, scope))
            if tx:
                barrier.expect_tx(tx)
            barrier.arrivals.append((w.agent, ins.line))
            if (barrier.drop if drop else barrier.arrive)(count):
                if ins.has("noComplete"):
                    raise Fault("mbarrier", "an arrival with .noComplete completes the phase")
                opened(cta, offset, barrier)
        if states is not None and state is not None:
            state(w, states, m)

    return run


@machine("mbarrier.expect_tx", "mbarrier.complete_tx", section=SECTION + "mbarrier.expect_tx, mbarrier.complete_tx")
def transactions(ins: Instruction) -> Handler:
    address, size_of = shared_scalar(ins, ins.operands[0]), scalar(ins.operands[1])
    expect = ins.mods[1] == "expect_tx"

    def run(w: Warp, m: Array | None) -> None:
        w.current = ins.index
        for lane in lane_list(m):
            cta, offset, barrier = find(w, address(w, lane))
            size = size_of(w, lane)
            if not expect:
                complete_tx(w, cta, offset, size)
                continue
            if cta.machine.observed:
                ident = BarrierId("mbarrier", cta.linear, offset)
                site = cta.machine.site(ins.index)
                cta.machine.emit(Arrival(w.agent, site, ident, 1 << lane, barrier.phase, 0, size, "relaxed"))
            barrier.expect_tx(size)

    return run


@machine("mbarrier.test_wait", "mbarrier.try_wait", section=SECTION + "mbarrier.test_wait, mbarrier.try_wait")
def wait(ins: Instruction) -> Handler:
    """By state or by parity. try_wait blocks; when nothing else can run it may return false (`Machine.time_out_waits`)."""
    result = writer(ins.operands[0])
    target = ins.operands[0].slot if isinstance(ins.operands[0], Reg) else None
    address = shared_scalar(ins, ins.operands[1])
    base = ins.operands[1].base if isinstance(ins.operands[1], Memory) else ins.operands[1]
    raw = reader(base, np.uint64 if getattr(base, "cls", "r") == "d" else np.uint32)
    parity = ins.has("parity")
    phase, wanted = reader(ins.operands[2], np.uint32 if parity else np.uint64), scalar(ins.operands[2])
    blocking = ins.mods[1] == "try_wait"
    semantics = "relaxed" if ins.has("relaxed") else "acquire"
    scope = "cluster" if ins.has("cluster") else "cta"

    def run(w: Warp, m: Array | None) -> Blocked | None:
        out = np.zeros(32, np.bool_)
        pending: tuple[CTA, int, MBarrier, int] | None = None
        lanes = lanes_of(m)
        alike = len(lanes) == 32 and same(raw(w)) and same(phase(w))
        tested = [(0, lanes)] if alike else [(int(lane), np.array([lane])) for lane in lanes]
        for lane, group in tested:
            cta, offset, barrier = find(w, address(w, lane))
            value = wanted(w, lane)
            done = barrier.done(value) if parity else barrier.passed(value)
            out[group] = done
            if done:
                _waited(w, ins, cta, offset, barrier, group, value, parity, semantics, scope)
            else:
                pending = (cta, offset, barrier, value)
        if pending is not None and blocking and not w.time_out:
            cta, offset, barrier, value = pending
            _check_overrun(w, ins, cta, offset, barrier, parity)
            barrier.waiters.append(w)
            return _waits(barrier, cta, offset, value, parity)
        w.time_out = False
        w.waits_in_phase = None
        if pending is not None and not blocking:
            w.yielding = True
        result(w, out, m)
        return None

    def team(t: Team) -> bool | Blocked:
        """All lanes ask for one phase of one barrier."""
        if target is None or not same(raw(t)) or not same(phase(t)):
            return False
        cta, offset, barrier = find(t.first, address(t.first, 0))
        value = wanted(t.first, 0)
        if not (barrier.done(value) if parity else barrier.passed(value)):
            if not blocking or any(w.time_out for w in t.warps):
                return False
            for w in t.warps:
                _check_overrun(w, ins, cta, offset, barrier, parity)
            barrier.waiters += t.warps
            return _waits(barrier, cta, offset, value, parity)
        t.P[target] = True
        for w in t.warps:
            w.time_out, w.waits_in_phase = False, None
        return True

    return together(run, team)


def _waits(barrier: MBarrier, cta: CTA, offset: int, value: int, parity: bool) -> Blocked:
    what = f"parity {value & 1}" if parity else f"phase {value >> 40}"
    reason = f"waits for {what} of the mbarrier at shared offset {offset:#x} of CTA {cta.where}"
    return Blocked(reason, detail={"barrier": barrier, "may_time_out": True, "cta": cta, "offset": offset})


def _check_overrun(w: Warp, ins: Instruction, cta: CTA, offset: int, barrier: MBarrier, parity: bool) -> None:
    """Report a warp that waits by parity and is woken only when a further phase has completed: it may now wait for ever."""
    before, w.waits_in_phase = w.waits_in_phase, (cta.linear, offset, ins.index, barrier.phase)
    if parity and before is not None and before[:3] == w.waits_in_phase[:3] and barrier.phase >= before[3] + 2:
        gone = f"phases {before[3]} to {barrier.phase - 1}"
        text = f"{gone} of the mbarrier at {offset:#x} completed while the warp waited for phase {before[3]}"
        cta.machine.report(Fault("mbarrier", text), w, ins.index)


def same(lanes: Array) -> bool:
    """Whether all lanes hold one value."""
    raw = lanes.tobytes()
    width = lanes.itemsize
    return raw == raw[:width] * (len(raw) // width)


def _waited(
    w: Warp, ins: Instruction, cta: CTA, offset: int, barrier: MBarrier, group: Array, wanted: int, parity: bool, semantics: str, scope: str
) -> None:
    engine = cta.machine
    if not engine.observed:
        return
    lanes = int(sum(1 << lane for lane in group))
    phase = barrier.phase - 1 if parity else wanted >> 40
    engine.emit(Wait(w.agent, engine.site(ins.index), BarrierId("mbarrier", cta.linear, offset), lanes, phase, semantics, scope))


@machine("mbarrier.pending_count", section=SECTION + "mbarrier.pending_count")
def pending_count(ins: Instruction) -> Handler:
    result, state = writer(ins.operands[0]), reader(ins.operands[1], np.uint64)

    def run(w: Warp, m: Array | None) -> None:
        result(w, ((state(w) >> np.uint64(20)) & np.uint64(0xFFFFF)).astype(np.uint32), m)

    return run
