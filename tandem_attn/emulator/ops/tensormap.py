"""Descriptors made on the device. PTX manual, "tensormap.replace", "tensormap.cp_fenceproxy"."""

from __future__ import annotations

import struct

import numpy as np

from tandem_attn.emulator.errors import UnsupportedInstruction
from tandem_attn.emulator.events import AccessKind, Fence, Proxy, Space
from tandem_attn.emulator.launch import tensormap as layout
from tandem_attn.emulator.machine.warp import Warp
from tandem_attn.emulator.memory.addresses import SHARED_WINDOW, WINDOW_MASK
from tandem_attn.emulator.ops import mbarrier
from tandem_attn.emulator.ops.access import Array, global_address, lanes_of, reader, shared_address, uniform
from tandem_attn.emulator.ops.registry import Handler, machine
from tandem_attn.emulator.ptx.nodes import Instruction, Memory

# Field -> (offset of the first element, struct code, step between elements)
_FIELDS = {
    "global_address": (layout.ADDRESS, "<Q", 0),
    "rank": (layout.RANK, "<B", 0),
    "elemtype": (layout.ELEMENT, "<B", 0),
    "interleave_layout": (layout.INTERLEAVE, "<B", 0),
    "swizzle_mode": (layout.SWIZZLE, "<B", 0),
    "fill_mode": (layout.FILL, "<B", 0),
    "swizzle_atomicity": (layout.ATOMICITY, "<B", 0),
    "box_dim": (layout.BOX, "<I", 4),
    "global_dim": (layout.DIMS, "<I", 4),
    "element_stride": (layout.STEPS, "<I", 4),
    "global_stride": (layout.STRIDES, "<Q", 8),
}


def _bytes(w: Warp, address: int, shared: bool) -> Array:
    if shared:
        cta, at = mbarrier.locate(w, address)
        cta.shared.check(np.array([at]), layout.SIZE, 128)
        cta.shared.written[at : at + layout.SIZE] = True
        return cta.shared.data[at : at + layout.SIZE]
    return w.cta.machine.memory.bytes_at(address, layout.SIZE)


@machine("tensormap.replace", section="Data Movement: tensormap.replace")
def replace(ins: Instruction) -> Handler:
    """One field of a descriptor. The rank field holds the rank less one; ordinals name an element of dims, strides, box."""
    field = next((m for m in ins.mods if m in _FIELDS), None)
    if field is None:
        raise UnsupportedInstruction("this field is not known", ins.line, ins.text)
    start, code, step = _FIELDS[field]
    target = ins.operands[0]
    assert isinstance(target, Memory)
    shared = any(m.startswith("shared") for m in ins.mods)
    where = shared_address(ins, target) if shared else global_address(target)
    ordinal = uniform(ins.operands[1]) if step else None
    value = reader(ins.operands[-1], np.uint64 if code == "<Q" else np.uint32)

    def run(w: Warp, m: Array | None) -> None:
        w.current = ins.index
        addresses, values = where(w), value(w)
        for lane in lanes_of(m)[:1]:
            address = int(addresses[lane])
            in_shared = shared
            if not shared and address >= SHARED_WINDOW:
                in_shared, address = True, address & WINDOW_MASK
            raw = _bytes(w, address, in_shared)
            new = int(values[lane]) + (field == "rank")
            if field == "global_stride":
                new &= ~15  # a stride is kept in units of 16 bytes
            at = start + step * (ordinal(w, m) if ordinal is not None else 0)
            raw[:4] = np.frombuffer(layout.MAGIC, np.uint8)
            if not raw[layout.STEPS : layout.STEPS + 20].any():
                raw[layout.STEPS : layout.STEPS + 20] = np.frombuffer(struct.pack("<5I", *[1] * 5), np.uint8)
            packed = np.frombuffer(struct.pack(code, new), np.uint8)
            raw[at : at + packed.size] = packed
            engine = w.cta.machine
            if engine.observed:
                owner, place = mbarrier.locate(w, address) if in_shared else (None, address)
                space = Space.SHARED if in_shared else Space.GLOBAL
                linear = owner.linear if owner is not None else -1
                engine.access(w, ins.index, space, linear, AccessKind.WRITE, Proxy.GENERIC, [place + at], packed.size, [lane])

    return run


@machine("tensormap.cp_fenceproxy", section="Data Movement: tensormap.cp_fenceproxy")
def copy_fence(ins: Instruction) -> Handler:
    """Copy a descriptor from shared to global memory and order it for the tensormap proxy."""
    target, source = global_address(ins.operands[0]), shared_address(ins, ins.operands[1])

    def run(w: Warp, m: Array | None) -> None:
        w.current = ins.index
        lane = int(lanes_of(m)[0])
        to, come = int(target(w)[lane]), int(source(w)[lane])
        raw = _bytes(w, come, True)
        engine = w.cta.machine
        engine.memory.bytes_at(to, layout.SIZE)[:] = raw
        engine.progress += 1
        if engine.observed:
            cta, at = mbarrier.locate(w, come)
            engine.access(w, ins.index, Space.SHARED, cta.linear, AccessKind.READ, Proxy.GENERIC, [at], layout.SIZE, [lane])
            engine.access(w, ins.index, Space.GLOBAL, -1, AccessKind.WRITE, Proxy.GENERIC, [to], layout.SIZE, [lane])
            engine.emit(Fence(w.agent, engine.site(ins.index), ".".join(ins.mods), w.lane_bits(m)))

    return run
