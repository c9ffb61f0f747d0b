"""Instructions that steer warps and clusters. PTX manual, "setmaxnreg", "nanosleep", "griddepcontrol", "clusterlaunchcontrol"."""

from __future__ import annotations

import time

import numpy as np

from tandem_attn.emulator.events import AccessKind, Fence, Proxy, Space
from tandem_attn.emulator.machine.async_ops import AsyncOp
from tandem_attn.emulator.machine.warp import Blocked, Warp
from tandem_attn.emulator.memory.addresses import OFFSET_MASK
from tandem_attn.emulator.memory.faults import Fault
from tandem_attn.emulator.ops import mbarrier
from tandem_attn.emulator.ops.access import Array, lanes_of, shared_address, uniform, writer
from tandem_attn.emulator.ops.registry import Handler, machine
from tandem_attn.emulator.ptx.nodes import Instruction, Reg, Vector


@machine("setmaxnreg", section="Miscellaneous Instructions: setmaxnreg")
def setmaxnreg(ins: Instruction) -> Handler:
    """A multiple of 8 from 24 to 256. A rise waits until the CTA's pool (what it was launched with) has the registers."""
    count = uniform(ins.operands[0])
    rise = ins.has("inc")

    def run(w: Warp, m: Array | None) -> Blocked | None:
        wanted = count(w, m)
        cta, engine = w.cta, w.cta.machine
        if not 24 <= wanted <= 256 or wanted % 8:
            raise Fault("register-budget", f"setmaxnreg to {wanted}: a multiple of 8 from 24 to 256 is required")
        if wanted < w.max_registers if rise else wanted > w.max_registers:
            text = f"setmaxnreg.{'inc' if rise else 'dec'} to {wanted} from {w.max_registers}"
            engine.report(Fault("register-budget", text), w, ins.index)
        held = sum(other.max_registers for other in cta.warps if other is not w and not other.done)
        pool = cta.launch.registers * len(cta.warps)
        if held + wanted > pool and rise:
            cta.register_waiters.append(w)
            return Blocked(f"waits for {wanted} registers per thread: the other warps hold {held} of {pool} (sum over warps)")
        w.max_registers = wanted
        engine.progress += 1
        waiting, cta.register_waiters = cta.register_waiters, []
        for other in waiting:
            engine.wake(other)
        return None

    return run


@machine("nanosleep", section="Miscellaneous Instructions: nanosleep")
def nanosleep(ins: Instruction) -> Handler:
    del ins

    def run(w: Warp, m: Array | None) -> None:
        del m
        w.yielding = True

    return run


@machine("griddepcontrol", section="Parallel Synchronization: griddepcontrol")
def griddepcontrol(ins: Instruction) -> Handler:
    """One grid runs at a time, so .wait finds its prerequisites complete."""
    kind = ".".join(ins.mods)

    def run(w: Warp, m: Array | None) -> None:
        if w.cta.machine.observed:
            w.cta.machine.emit(Fence(w.agent, w.cta.machine.site(ins.index), kind, w.lane_bits(m)))

    return run


@machine("mov.clock", section="Special Registers: %clock, %clock64, %globaltimer")
def clock(ins: Instruction) -> Handler:
    """Clocks advance with the instructions of the machine, %globaltimer with real time; neither models the chip."""
    result = writer(ins.operands[0])
    source = ins.operands[1]
    name = source.name if isinstance(source, Reg) else ""

    def run(w: Warp, m: Array | None) -> None:
        engine = w.cta.machine
        value = time.time_ns() if "globaltimer" in name else w.instructions + engine.statistics.instructions + engine.progress
        if name.endswith("_hi"):
            value >>= 32
        result(w, np.full(32, value & 0xFFFFFFFFFFFFFFFF, np.uint64), m)

    return run


@machine("clusterlaunchcontrol.try_cancel", section="Parallel Synchronization: clusterlaunchcontrol.try_cancel")
def try_cancel(ins: Instruction) -> Handler:
    """Asynchronously take the next cluster that has not been launched; 16 bytes of response arrive with complete-tx on the mbarrier."""
    to, bar = shared_address(ins, ins.operands[0]), shared_address(ins, ins.operands[1])
    multicast = any(m.startswith("multicast") for m in ins.mods)

    def run(w: Warp, m: Array | None) -> Blocked | None:
        lanes = lanes_of(m)
        targets, bars = to(w), bar(w)
        engine = w.cta.machine
        for lane in lanes:
            target, signal = int(targets[lane]), int(bars[lane])

            def stage(target: int = target, signal: int = signal) -> None:
                taken = engine.waiting_clusters.popleft()[1][0] if engine.waiting_clusters else None
                response = np.zeros(4, np.uint32)
                if taken is not None:
                    response[:] = (*taken, 1)
                    engine.cancelled += 1
                ctas = w.cta.cluster.ctas if multicast else [w.cta.peer(target >> 24)]
                for cta in ctas:
                    offset = target & OFFSET_MASK
                    cta.shared.check(np.array([offset]), 16, 16)
                    if engine.observed:
                        engine.access(w, ins.index, Space.SHARED, cta.linear, AccessKind.WRITE, Proxy.ASYNC, [offset], 16)
                    cta.shared.store(np.array([offset]), list(response[:, None]))
                    bar_cta = cta if multicast else w.cta.peer(signal >> 24)
                    mbarrier.complete_tx(w, bar_cta, signal & OFFSET_MASK, 16)

            engine.engine.submit(AsyncOp("try_cancel", w, 1 << int(lane), ins.index, [stage]))
        return None

    return run


@machine("clusterlaunchcontrol.query_cancel", section="Parallel Synchronization: clusterlaunchcontrol.query_cancel")
def query_cancel(ins: Instruction) -> Handler:
    """Decode a response: .is_canceled, .get_first_ctaid (a vector or one coordinate)."""
    source = ins.operands[1]
    assert isinstance(source, Reg)
    whole = "is_canceled" in ins.mods
    axis = next((m.split("::")[1] for m in ins.mods if m.startswith("get_first_ctaid::")), "")
    target = ins.operands[0]
    outputs = [writer(o) for o in (target.items if isinstance(target, Vector) else (target,))]

    def run(w: Warp, m: Array | None) -> None:
        words = np.ascontiguousarray(w.Q[source.slot]).view(np.uint32).reshape(32, 4)
        if whole:
            outputs[0](w, words[:, 3] != 0, m)
        elif axis:
            outputs[0](w, words[:, "xyz".index(axis)].copy(), m)
        else:
            for i, out in enumerate(outputs):
                out(w, words[:, min(i, 3)].copy() if i < 3 else np.zeros(32, np.uint32), m)

    return run
