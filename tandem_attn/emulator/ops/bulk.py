"""Non-tensor bulk copies, cp.async, distributed shared memory.

PTX manual, "cp.async.bulk", "cp.reduce.async.bulk", "cp.async", "st.async", "red.async".
"""

from __future__ import annotations

import numpy as np

from tandem_attn.emulator.codegen.builder import PTX_TYPE
from tandem_attn.emulator.errors import UnsupportedInstruction
from tandem_attn.emulator.events import AccessKind, Proxy, Space
from tandem_attn.emulator.machine.async_ops import AsyncOp
from tandem_attn.emulator.machine.warp import Warp
from tandem_attn.emulator.memory.addresses import OFFSET_MASK, RANK_SHIFT
from tandem_attn.emulator.memory.faults import Fault
from tandem_attn.emulator.memory.reductions import combine
from tandem_attn.emulator.ops import mbarrier
from tandem_attn.emulator.ops.access import Array, global_address, items, lanes_of, one_copy, reader, shared_address, uniform
from tandem_attn.emulator.ops.groups import add_to_group
from tandem_attn.emulator.ops.registry import Handler, machine
from tandem_attn.emulator.ops.tma import REDUCTIONS
from tandem_attn.emulator.ptx.nodes import Instruction


def read_bytes(w: Warp, space: str, address: int, size: int) -> Array:
    """A copy of shared or global bytes, for the asynchronous operation that is acting."""
    engine = w.cta.machine
    if space == "global":
        if engine.observed:
            engine.access(w, w.current, Space.GLOBAL, -1, AccessKind.READ, Proxy.ASYNC, [address], size)
        return engine.memory.bytes_at(address, size).copy()
    cta, at = mbarrier.locate(w, address)
    cta.shared.check(np.array([at]), size, 1)
    if engine.check_uninitialised and not cta.shared.written[at : at + size].all():
        bad = at + int((~cta.shared.written[at : at + size]).argmax())
        op = engine.acting
        engine.report(
            Fault("uninitialised", f"a bulk copy reads shared offset {bad:#x}, which was never written"), w, op.index if op else w.current
        )
    if engine.observed:
        engine.access(w, w.current, Space.SHARED, cta.linear, AccessKind.READ, Proxy.ASYNC, [at], size)
    return cta.shared.data[at : at + size].copy()


def write_bytes(w: Warp, space: str, address: int, data: Array, proxy: Proxy = Proxy.ASYNC) -> None:
    engine = w.cta.machine
    if space == "global":
        if engine.observed:
            engine.access(w, w.current, Space.GLOBAL, -1, AccessKind.WRITE, proxy, [address], data.size)
        engine.memory.bytes_at(address, data.size)[:] = data
        return
    cta, at = mbarrier.locate(w, address)
    cta.shared.check(np.array([at]), data.size, 1)
    if engine.observed:
        engine.access(w, w.current, Space.SHARED, cta.linear, AccessKind.WRITE, proxy, [at], data.size)
    cta.shared.data[at : at + data.size] = data
    cta.shared.written[at : at + data.size] = True
    cta.shared.changed(at, at + data.size)


def _spaces(ins: Instruction) -> list[str]:
    return [m.split("::")[0] for m in ins.mods if m.split("::")[0] in ("shared", "global")]


def _aligned(*values: int) -> None:
    for value in values:
        if value % 16:
            raise Fault("misaligned", f"bulk copy with address or size {value:#x}, not a multiple of 16")


@machine("cp.async.bulk", section="Data Movement: cp.async.bulk")
def copy(ins: Instruction) -> Handler:
    """To shared (also multicast, also from shared of the cluster): mbarrier; to global: bulk group, perhaps with a byte mask."""
    to, come = _spaces(ins)[:2]
    target = shared_address(ins, ins.operands[0]) if to == "shared" else global_address(ins.operands[0])
    source = shared_address(ins, ins.operands[1]) if come == "shared" else global_address(ins.operands[1])
    size = reader(ins.operands[2], np.uint32)
    signal = shared_address(ins, ins.operands[3]) if to == "shared" else None
    multicast = ins.has("multicast::cluster")
    masks = reader(ins.operands[4], np.uint16) if multicast else None
    byte_mask = reader(ins.operands[-1], np.uint16) if "cp_mask" in ins.mods else None

    def run(w: Warp, m: Array | None) -> None:
        w.current = ins.index
        lanes = lanes_of(m)
        targets, sources, sizes = target(w), source(w), size(w)
        bars = signal(w) if signal is not None else sizes
        acting, dropped = one_copy(lanes, targets, sources, sizes, bars)
        for lane in acting:
            d, s, n = int(targets[lane]), int(sources[lane]), int(sizes[lane])
            _aligned(d, s, n)
            bar = int(bars[lane])
            ranks = [r for r in range(16) if masks is not None and int(masks(w)[lane]) >> r & 1]
            keep = int(byte_mask(w)[lane]) if byte_mask is not None else 0xFFFF
            held: list[Array] = []

            def read(s: int = s, n: int = n, held: list[Array] = held) -> None:
                held.append(read_bytes(w, come, s, n))

            def write(d: int = d, n: int = n, held: list[Array] = held, bar: int = bar, ranks: list[int] = ranks, keep: int = keep) -> None:
                data = held[0]
                if keep != 0xFFFF:
                    on = np.tile([bool(keep >> i & 1) for i in range(16)], n // 16)
                    data = np.where(on, data, w.cta.machine.memory.bytes_at(d, n))
                places = (
                    [(d, bar)]
                    if not ranks
                    else [((r << RANK_SHIFT) | d & OFFSET_MASK, (r << RANK_SHIFT) | bar & OFFSET_MASK) for r in ranks]
                )
                for place, where in places:
                    write_bytes(w, to, place, data)
                    if to == "shared":
                        cta, at = mbarrier.locate(w, where)
                        mbarrier.complete_tx(w, cta, at, n)

            op = AsyncOp("bulk-copy", w, w.lane_bits(m), ins.index, [read, write], via="mbarrier" if to == "shared" else "bulk-group")
            if to == "global":
                add_to_group(w, "bulk", lanes if dropped else [lane], op)
            w.cta.machine.engine.submit(op)

    return run


@machine("cp.reduce.async.bulk", section="Data Movement: cp.reduce.async.bulk")
def reduce(ins: Instruction) -> Handler:
    """shared -> global (bulk group), or shared -> shared of the cluster (mbarrier)."""
    to = _spaces(ins)[0]
    op_name = next(m for m in ins.mods if m in REDUCTIONS)
    kind = ins.mods[-1]
    dtype = np.dtype("u" + PTX_TYPE[kind][1:])
    target = shared_address(ins, ins.operands[0]) if to == "shared" else global_address(ins.operands[0])
    source, size = shared_address(ins, ins.operands[1]), reader(ins.operands[2], np.uint32)
    signal = shared_address(ins, ins.operands[3]) if to == "shared" else None

    def run(w: Warp, m: Array | None) -> None:
        w.current = ins.index
        lanes = lanes_of(m)
        targets, sources, sizes = target(w), source(w), size(w)
        bars = signal(w) if signal is not None else sizes
        acting, dropped = one_copy(lanes, targets, sources, sizes, bars)
        engine = w.cta.machine
        if dropped:
            text = f"{len(lanes)} lanes issue the same reduction; one elected lane should"
            engine.report(Fault("unelected", text), w, ins.index)
        for lane in acting:
            d, s, n, bar = int(targets[lane]), int(sources[lane]), int(sizes[lane]), int(bars[lane])
            _aligned(d, s, n)
            held: list[Array] = []

            def read(s: int = s, n: int = n, held: list[Array] = held) -> None:
                held.append(read_bytes(w, "shared", s, n))

            def write(d: int = d, n: int = n, held: list[Array] = held, bar: int = bar) -> None:
                if to == "global":
                    raw = engine.memory.bytes_at(d, n)
                    if engine.observed:
                        engine.access(w, w.current, Space.GLOBAL, -1, AccessKind.ATOMIC, Proxy.ASYNC, [d], n)
                else:
                    cta, at = mbarrier.locate(w, d)
                    cta.shared.check(np.array([at]), n, 1)
                    raw = cta.shared.data[at : at + n]
                    cta.shared.changed(at, at + n)
                    if engine.observed:
                        engine.access(w, w.current, Space.SHARED, cta.linear, AccessKind.ATOMIC, Proxy.ASYNC, [at], n)
                old = np.ascontiguousarray(raw).view(dtype)
                raw[:] = np.ascontiguousarray(combine(op_name, kind, old, held[0].view(dtype))).view(np.uint8)
                if to == "shared":
                    cta, at = mbarrier.locate(w, bar)
                    mbarrier.complete_tx(w, cta, at, n)

            op = AsyncOp("bulk-reduce", w, w.lane_bits(m), ins.index, [read, write], via="mbarrier" if to == "shared" else "bulk-group")
            if to == "global":
                add_to_group(w, "bulk", lanes if dropped else [lane], op)
            engine.engine.submit(op)

    return run


@machine("cp.async.ca", "cp.async.cg", section="Data Movement: cp.async")
def cp_async(ins: Instruction) -> Handler:
    """4, 8 or 16 bytes per lane; src-size fewer are filled with zeros; an ignore-src predicate writes zeros."""
    target, source = shared_address(ins, ins.operands[0]), global_address(ins.operands[1])
    width = uniform(ins.operands[2])
    hinted = any("cache_hint" in m for m in ins.mods)
    given = ins.operands[3] if len(ins.operands) > 3 + hinted else None
    ignore = reader(given, np.bool_) if given is not None and getattr(given, "cls", "") == "p" else None
    count = reader(given, np.uint32) if given is not None and ignore is None else None

    def run(w: Warp, m: Array | None) -> None:
        w.current = ins.index
        lanes = lanes_of(m)
        size = width(w, m)
        targets, sources = target(w).copy(), source(w).copy()
        sizes = count(w).copy() if count is not None else np.full(32, size, np.uint32)
        if ignore is not None:
            sizes = np.where(ignore(w), np.uint32(0), sizes)
        w.cta.shared.check(targets[lanes] & OFFSET_MASK, size, size)

        def stage() -> None:
            engine = w.cta.machine
            for lane in lanes:
                n = int(sizes[lane])
                data = np.zeros(size, np.uint8)
                if n:
                    address = int(sources[lane])
                    if address % size:
                        raise Fault("misaligned", f"cp.async from {address:#x}, not a multiple of {size}")
                    data[:n] = engine.memory.bytes_at(address, n)
                at = int(targets[lane]) & OFFSET_MASK
                w.cta.shared.data[at : at + size] = data
                w.cta.shared.written[at : at + size] = True
            w.cta.shared.changed_at(targets[lanes] & OFFSET_MASK)
            if engine.observed:
                full = lanes[sizes[lanes] > 0]
                if len(full):
                    engine.access(w, ins.index, Space.GLOBAL, -1, AccessKind.READ, Proxy.GENERIC, sources[full], size)
                engine.access(w, ins.index, Space.SHARED, w.cta.linear, AccessKind.WRITE, Proxy.GENERIC, targets[lanes] & OFFSET_MASK, size)

        op = AsyncOp("cp.async", w, w.lane_bits(m), ins.index, [stage], via="cp.async-group")
        add_to_group(w, "cp.async", lanes, op)
        w.cp_async.append(op)
        w.cta.machine.engine.submit(op)

    return run


@machine("cp.async.mbarrier.arrive", section="Data Movement: cp.async.mbarrier.arrive")
def cp_async_arrive(ins: Instruction) -> Handler:
    """An arrival per lane when its earlier cp.async are complete; without .noinc the pending count is raised first."""
    bar = shared_address(ins, ins.operands[0])
    noinc = any("noinc" in m for m in ins.mods)

    def run(w: Warp, m: Array | None) -> None:
        w.current = ins.index
        bars = bar(w).copy()
        lanes = lanes_of(m)
        before = [op for op in w.cp_async if not op.done]
        w.cp_async = []
        for lane in lanes:
            if not noinc:
                mbarrier.find(w, int(bars[lane]))[2].pending += 1

        def stage() -> None:
            for op in before:
                while not op.done:
                    op.stages[op.stage]()
                    op.stage += 1
            for lane in lanes:
                cta, at = mbarrier.locate(w, int(bars[lane]))
                mbarrier.arrive_async(w, cta, at)

        w.cta.machine.engine.submit(AsyncOp("cp.async", w, w.lane_bits(m), ins.index, [stage]))

    return run


@machine("st.async", section="Data Movement: st.async")
def st_async(ins: Instruction) -> Handler:
    """A store to the shared memory of a CTA of the cluster, with complete-tx on an mbarrier of the same CTA."""
    if "mmio" in ins.mods or "global" in ins.mods:
        raise UnsupportedInstruction("this form of st.async is not executed", ins.line, ins.text)
    dtype = np.dtype("u" + PTX_TYPE[ins.mods[-1]][1:])
    target, signal = shared_address(ins, ins.operands[0]), shared_address(ins, ins.operands[2])
    values = [reader(o, dtype) for o in items(ins.operands[1])]

    def run(w: Warp, m: Array | None) -> None:
        w.current = ins.index
        lanes = lanes_of(m)
        where, bars = target(w).copy(), signal(w).copy()
        data = np.stack([v(w) for v in values], axis=1)

        def stage() -> None:
            for lane in lanes:
                if where[lane] >> RANK_SHIFT != bars[lane] >> RANK_SHIFT:
                    raise Fault("undefined", "st.async with its data and its mbarrier in different CTAs")
                raw = np.ascontiguousarray(data[lane]).view(np.uint8)
                if int(where[lane]) % raw.size:
                    raise Fault(
                        "misaligned", f"st.async to shared offset {int(where[lane]) & OFFSET_MASK:#x}, not a multiple of {raw.size}"
                    )
                write_bytes(w, "shared", int(where[lane]), raw)
                cta, at = mbarrier.locate(w, int(bars[lane]))
                mbarrier.complete_tx(w, cta, at, raw.size)

        w.cta.machine.engine.submit(AsyncOp("st.async", w, w.lane_bits(m), ins.index, [stage]))

    return run


@machine("red.async", section="Parallel Synchronization: red.async")
def red_async(ins: Instruction) -> Handler:
    """An atomic on shared memory of the cluster, with complete-tx on an mbarrier of the same CTA."""
    op_name, kind = next(m for m in ins.mods if m in REDUCTIONS), ins.mods[-1]
    dtype = np.dtype("u" + PTX_TYPE[kind][1:])
    target, signal = shared_address(ins, ins.operands[0]), shared_address(ins, ins.operands[2])
    value = reader(ins.operands[1], dtype)

    def run(w: Warp, m: Array | None) -> None:
        w.current = ins.index
        lanes = lanes_of(m)
        where, bars, data = target(w).copy(), signal(w).copy(), value(w).copy()

        def stage() -> None:
            for lane in lanes:
                cta, at = mbarrier.locate(w, int(where[lane]))
                cta.shared.check(np.array([at]), dtype.itemsize, dtype.itemsize)
                raw = cta.shared.data[at : at + dtype.itemsize].view(dtype)
                raw[:] = combine(op_name, kind, raw.copy(), data[lane : lane + 1])
                cta.shared.changed(at, at + dtype.itemsize)
                engine = w.cta.machine
                if engine.observed:
                    engine.access(w, ins.index, Space.SHARED, cta.linear, AccessKind.ATOMIC, Proxy.ASYNC, [at], dtype.itemsize)
                bar_cta, bar_at = mbarrier.locate(w, int(bars[lane]))
                mbarrier.complete_tx(w, bar_cta, bar_at, dtype.itemsize)

        w.cta.machine.engine.submit(AsyncOp("st.async", w, w.lane_bits(m), ins.index, [stage]))

    return run
