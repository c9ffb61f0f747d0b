"""TMEM management and ordering. PTX manual, "Tensor Core 5th Generation Instructions": alloc, dealloc, fence, wait, commit."""

from __future__ import annotations

import numpy as np

from tandem_attn.emulator.events import AccessKind, Fence, GroupWait, Proxy, Space, TmemAllocation
from tandem_attn.emulator.machine.async_ops import AsyncOp
from tandem_attn.emulator.machine.warp import Blocked, Warp
from tandem_attn.emulator.memory.addresses import OFFSET_MASK, RANK_SHIFT
from tandem_attn.emulator.memory.faults import Fault
from tandem_attn.emulator.memory.tmem import COLUMNS
from tandem_attn.emulator.ops import mbarrier
from tandem_attn.emulator.ops.access import (
    Array,
    lane_list,
    lanes_of,
    scalar,
    shared_address,
    shared_scalar,
    uniform,
)
from tandem_attn.emulator.ops.registry import Handler, machine, together
from tandem_attn.emulator.ops.tcgen05_mma import order_key
from tandem_attn.emulator.ptx.nodes import Instruction

SECTION = "Tensor Core 5th Generation Instructions: "


@machine("tcgen05.alloc", section=SECTION + "tcgen05.alloc")
def alloc(ins: Instruction) -> Handler:
    """Blocks while no run of columns is free; writes the address to shared memory."""
    to, columns = shared_address(ins, ins.operands[0]), uniform(ins.operands[1], np.uint32)

    def run(w: Warp, m: Array | None) -> Blocked | None:
        count = columns(w, m)
        if not 32 <= count <= COLUMNS or count & (count - 1):
            raise Fault("tmem-allocation", f"tcgen05.alloc of {count} columns: a power of two from 32 to {COLUMNS} is required")
        memory = w.cta.tmem
        if memory.relinquished:
            raise Fault("tmem-allocation", "tcgen05.alloc after relinquish_alloc_permit")
        first = memory.allocate(count)
        if first is None:
            held = sum(memory.sizes.values())
            w.cta.tmem_waiters.append(w)
            return Blocked(f"waits for {count} free TMEM columns; {held} of {COLUMNS} are allocated in the CTA")
        address = to(w)
        lane = int(lanes_of(m)[0])
        target, offset = w.shared_target(address[lane : lane + 1])
        target.shared.check(offset, 4, 4)
        engine = w.cta.machine
        if engine.observed:
            engine.emit(TmemAllocation(w.agent, engine.site(ins.index), w.cta.linear, first, count))
            engine.access(w, ins.index, Space.SHARED, target.linear, AccessKind.WRITE, Proxy.GENERIC, offset, 4, [lane])
        target.shared.store(offset, [np.array([first], np.uint32)])
        engine.progress += 1
        return None

    return run


@machine("tcgen05.dealloc", section=SECTION + "tcgen05.dealloc")
def dealloc(ins: Instruction) -> Handler:
    where, columns = uniform(ins.operands[0], np.uint32), uniform(ins.operands[1], np.uint32)

    def run(w: Warp, m: Array | None) -> None:
        w.current = ins.index
        first, count = where(w, m) & 0xFFFF, columns(w, m)
        w.cta.tmem.free(first, count)
        engine = w.cta.machine
        engine.progress += 1
        if engine.observed:
            engine.emit(TmemAllocation(w.agent, engine.site(ins.index), w.cta.linear, first, -count))
        waiting, w.cta.tmem_waiters = w.cta.tmem_waiters, []
        for other in waiting:
            engine.wake(other)

    return run


@machine("tcgen05.relinquish_alloc_permit", section=SECTION + "tcgen05.relinquish_alloc_permit")
def relinquish(ins: Instruction) -> Handler:
    del ins

    def run(w: Warp, m: Array | None) -> None:
        del m
        w.cta.tmem.relinquished = True

    return run


@machine("tcgen05.fence", section=SECTION + "tcgen05.fence")
def fence(ins: Instruction) -> Handler:
    kind = ".".join(ins.mods)

    def run(w: Warp, m: Array | None) -> None:
        if w.cta.machine.observed:
            w.cta.machine.emit(Fence(w.agent, w.cta.machine.site(ins.index), kind, w.lane_bits(m)))

    return together(run, lambda _: True)  # nobody looks on


@machine("tcgen05.wait", section=SECTION + "tcgen05.wait")
def wait(ins: Instruction) -> Handler:
    loads = "wait::ld" in ins.mods

    def run(w: Warp, m: Array | None) -> Blocked | None:
        pending = w.tmem_loads if loads else w.tmem_stores
        for op in pending:
            if not op.done:
                op.waiters.append(w)
                return Blocked(f"waits for {op.kind} of PTX line {w.cta.machine.site(op.index).ptx_line}")
        engine = w.cta.machine
        if engine.observed:
            members = tuple(op.agent for op in pending if op.agent is not None)
            name = "tcgen05.ld" if loads else "tcgen05.st"
            engine.emit(GroupWait(w.agent, engine.site(ins.index), name, w.lane_bits(m), 0, False, members))
        pending.clear()
        if loads:
            w.flight.release(lambda item: item.op.kind == "tcgen05.ld")
        return None

    return together(run, lambda t: not any(w.tmem_loads or w.tmem_stores for w in t.warps))


@machine("tcgen05.commit", section=SECTION + "tcgen05.commit")
def commit(ins: Instruction) -> Handler:
    """An arrival on the mbarrier (of every CTA in the mask) once the thread's earlier tcgen05 operations are complete."""
    bar = shared_scalar(ins, ins.operands[0])
    mask = scalar(ins.operands[1]) if len(ins.operands) > 1 else None

    def run(w: Warp, m: Array | None) -> None:
        w.current = ins.index
        for lane in lane_list(m):
            where = bar(w, lane)
            ranks = [where >> RANK_SHIFT] if mask is None else [r for r in range(16) if mask(w, lane) >> r & 1]

            def stage(ranks: list[int] = ranks, offset: int = where & OFFSET_MASK) -> None:
                for rank in ranks:
                    mbarrier.arrive_async(w, w.cta.peer(rank), offset)

            w.cta.machine.engine.submit(AsyncOp("tcgen05.commit", w, 1 << lane, ins.index, [stage], order=order_key(w)))

    return run
