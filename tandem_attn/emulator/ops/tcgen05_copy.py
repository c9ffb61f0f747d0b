"""Shared memory to TMEM, and shifts in it. PTX manual, "Tensor Core 5th Generation Instructions: tcgen05.cp, tcgen05.shift"."""

from __future__ import annotations

import numpy as np

from tandem_attn.emulator.events import AccessKind, Proxy, Space
from tandem_attn.emulator.machine.async_ops import AsyncOp
from tandem_attn.emulator.machine.cta import CTA
from tandem_attn.emulator.machine.warp import Warp
from tandem_attn.emulator.memory.faults import Fault
from tandem_attn.emulator.memory.operands import gather, layout, tcgen05_descriptor
from tandem_attn.emulator.ops.access import (
    Array,
    uniform,
)
from tandem_attn.emulator.ops.registry import Handler, machine
from tandem_attn.emulator.ops.tcgen05_mma import order_key, pair, report, unpack
from tandem_attn.emulator.ops.wgmma import check_read
from tandem_attn.emulator.ptx.nodes import Instruction, Memory

SECTION = "Tensor Core 5th Generation Instructions: "


_COPIES = {"128x256b": (128, 32), "4x256b": (4, 32), "128x128b": (128, 16), "64x128b": (64, 16), "32x128b": (32, 16)}


def _copy_lanes(ins: Instruction, shape: str) -> list[Array]:
    """Where the rows go: one array of lanes per copy. Multicast forms write several quarters."""
    row = np.arange(_COPIES[shape][0])
    if shape == "4x256b":
        return [row * 32]
    if shape == "32x128b":
        return [row + 32 * q for q in range(4)]
    if shape == "64x128b":
        first = (0, 1) if ins.has("warpx2::01_23") else (0, 2)
        second = (2, 3) if ins.has("warpx2::01_23") else (1, 3)
        return [np.concatenate([np.arange(32) + 32 * a, np.arange(32) + 32 * b]) for a, b in zip(first, second, strict=True)]
    return [row]


@machine("tcgen05.cp", section=SECTION + "tcgen05.cp")
def cp(ins: Instruction) -> Handler:
    """Shared memory -> TMEM, optionally unpacking 4- or 6-bit elements to bytes."""
    shape = next(m for m in ins.mods if m in _COPIES)
    rows, size = _COPIES[shape]
    target = ins.operands[0]
    assert isinstance(target, Memory)
    address, offset, desc = uniform(target.base, np.uint32), target.offset, uniform(ins.operands[1], np.uint64)
    group = 2 if ins.has("cta_group::2") else 1
    bits = 6 if ins.has("b6x16_p32") else 4 if ins.has("b4x16_p64") else 0
    lanes = _copy_lanes(ins, shape)

    def run(w: Warp, m: Array | None) -> None:
        w.current = ins.index
        at, raw = address(w, m) + offset, desc(w, m)

        def one(cta: CTA) -> None:
            where = layout((tcgen05_descriptor(raw),), rows, size, 1, False)
            check_read(w, cta, where, "tcgen05.cp")
            data = gather(cta.shared.data, where, rows, 1, False)
            engine = cta.machine
            if engine.observed:
                engine.access(w, ins.index, Space.SHARED, cta.linear, AccessKind.READ, Proxy.ASYNC, where.index * 16, 16)
            if bits:
                data = unpack(data, bits)
            cells_ = np.ascontiguousarray(data).view(np.uint32).T  # (columns, rows)
            column = at & 0xFFFF
            cta.tmem.require_allocated(column, cells_.shape[0])
            for to in lanes:
                cta.tmem.data[column : column + cells_.shape[0], to] = cells_
                cta.tmem.written[column : column + cells_.shape[0], to] = True
                if engine.observed:
                    starts = (np.arange(column, column + cells_.shape[0])[:, None] * 128 + to[None, :]) * 4
                    engine.access(w, ins.index, Space.TMEM, cta.linear, AccessKind.WRITE, Proxy.TENSOR, starts, 4)

        def stage() -> None:
            for cta in pair(w, group):
                one(cta)

        w.cta.machine.engine.submit(AsyncOp("tcgen05.cp", w, w.lane_bits(m), ins.index, [stage], order=order_key(w), via="tcgen05-order"))

    return run


@machine("tcgen05.shift", section=SECTION + "tcgen05.shift")
def shift(ins: Instruction) -> Handler:
    """.down: 32 bytes of every row but the last move one row down, in the 32 lanes of the address's quarter."""
    target = ins.operands[0]
    assert isinstance(target, Memory)
    address, offset = uniform(target.base, np.uint32), target.offset
    group = 2 if ins.has("cta_group::2") else 1

    def run(w: Warp, m: Array | None) -> None:
        w.current = ins.index
        at = address(w, m) + offset
        column, lane = at & 0xFFFF, at >> 16
        if lane % 32:
            raise Fault("misaligned", f"tcgen05.shift at lane {lane}: a multiple of 32 is required")

        def stage() -> None:
            for cta in pair(w, group):
                cta.tmem.require_allocated(column, 8)
                if cta.machine.observed:
                    starts = (np.arange(column, column + 8)[:, None] * 128 + np.arange(lane, lane + 32)) * 4
                    for kind, part in ((AccessKind.READ, starts[:, :-1]), (AccessKind.WRITE, starts[:, 1:])):
                        cta.machine.access(w, ins.index, Space.TMEM, cta.linear, kind, Proxy.TENSOR, part, 4)
                if cta.tmem.track and not cta.tmem.written[column : column + 8, lane : lane + 32].all():
                    report(w, Fault("uninitialised", f"tcgen05.shift moves TMEM columns {column} .. {column + 7}, not all written"))
                block = cta.tmem.data[column : column + 8, lane : lane + 32]
                block[:, 1:] = block[:, :-1].copy()

        w.cta.machine.engine.submit(
            AsyncOp("tcgen05.shift", w, w.lane_bits(m), ins.index, [stage], order=order_key(w), via="tcgen05-order")
        )

    return run
