"""TMEM to registers and back. PTX manual, "Tensor Core 5th Generation Instructions: tcgen05.ld, tcgen05.st"."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np

from tandem_attn.emulator.errors import UnsupportedInstruction
from tandem_attn.emulator.events import AccessKind, Proxy, Space
from tandem_attn.emulator.machine.async_ops import AsyncOp
from tandem_attn.emulator.machine.in_flight import InFlight, bits
from tandem_attn.emulator.machine.team import Team
from tandem_attn.emulator.machine.warp import Warp
from tandem_attn.emulator.memory.faults import Fault
from tandem_attn.emulator.memory.tmem import COLUMNS, LANES
from tandem_attn.emulator.ops.access import (
    Array,
    compact,
    items,
    reader,
    uniform,
)
from tandem_attn.emulator.ops.registry import Handler, machine, together
from tandem_attn.emulator.ptx.nodes import Imm, Instruction, Memory, Reg

SECTION = "Tensor Core 5th Generation Instructions: "


@lru_cache(maxsize=512)
def cells(shape: str, count: int, split: int, packed: bool) -> tuple[Array, Array]:
    """Lane and column of each register's 32 (or, packed, of each register's 2 x 32) cells, relative to the address.

    Shapes: PTX manual, "Data Movement Shape: Memory Layout". With .pack::16b a register holds two 16-bit cells of adjacent columns.
    Returns arrays of shape (registers, 32, 1 or 2).
    """
    t, j = np.arange(32)[None, :], np.arange(count)[:, None]
    if shape == "32x32b":
        lane, column = t + 0 * j, j + 0 * t
    elif shape == "16x64b":
        lane, column = t // 4 + t % 2 * 8 + 0 * j, 2 * j + t // 2 % 2
    elif shape == "16x128b":
        lane, column = t // 4 + j % 2 * 8, j // 2 * 4 + t % 4
    elif shape == "16x256b":
        lane, column = t // 4 + j // 2 % 2 * 8, j // 4 * 8 + t % 4 * 2 + j % 2
    else:  # 16x32bx2
        lane, column = t % 16 + 0 * j, j + t // 16 * split
    if packed:
        column = 2 * j + t // 16 * split if shape == "16x32bx2" else 2 * column
        return np.stack([lane, lane], -1), np.stack([column, column + 1], -1)
    return lane[..., None], column[..., None]


def _shape(ins: Instruction) -> tuple[str, int]:
    shape = next(m for m in ins.mods if m in ("32x32b", "16x64b", "16x128b", "16x256b", "16x32bx2"))
    repeat = int(next(m for m in ins.mods if m[0] == "x" and m[1:].isdigit())[1:])
    return shape, repeat * {"16x128b": 2, "16x256b": 4}.get(shape, 1)


def _check_place(w: Warp, address: int, last_lane: int, columns: int) -> tuple[int, int]:
    """First column and lane. Raises Fault outside the warp's quarter of the lanes and outside allocations."""
    base_lane, base_column = address >> 16, address & 0xFFFF
    quarter = w.index % 4 * 32
    if not quarter <= base_lane <= quarter + 31 - last_lane:
        raise Fault(
            "out-of-bounds",
            f"warp {w.index} accesses TMEM lanes {base_lane} .. {base_lane + last_lane}; its are {quarter} .. {quarter + 31}",
        )
    w.cta.tmem.require_allocated(base_column, columns)
    return base_column, base_lane


def _observe(w: Warp, index: int, columns: Array, lanes: Array, kind: AccessKind) -> None:
    engine = w.cta.machine
    if engine.observed:
        starts = ((columns * 128 + lanes) * 4).reshape(-1)
        engine.access(w, index, Space.TMEM, w.cta.linear, kind, Proxy.TENSOR, np.unique(starts), 4)


@machine("tcgen05.ld", section=SECTION + "tcgen05.ld, tcgen05.ld.red")
def ld(ins: Instruction) -> Handler:
    """TMEM -> registers; the registers are in flight until tcgen05.wait::ld."""
    shape, count = _shape(ins)
    red = ins.has("red")
    source = ins.operands[2 if red else 1]
    assert isinstance(source, Memory)
    split = ins.operands[-1].value if isinstance(ins.operands[-1], Imm) else 0
    targets = [r for r in items(ins.operands[0]) if isinstance(r, Reg)]
    if len(targets) != count:
        raise UnsupportedInstruction(f"{len(targets)} registers where {count} are moved", ins.line, ins.text)
    lane, column = cells(shape, count, split, ins.has("pack::16b"))
    address, offset = uniform(source.base, np.uint32), source.offset
    slots = compact([r.slot for r in targets])
    last_lane, width = int(lane.max()), int(column.max()) + 1
    simple = shape == "32x32b" and not ins.has("pack::16b")
    reduced = ins.operands[1] if red else None
    kind = ins.mods[-1]
    written = bits(reg.slot for reg in (*targets, reduced) if isinstance(reg, Reg))

    def run(w: Warp, m: Array | None) -> None:
        first, low = _check_place(w, address(w, m) + offset, last_lane, width)
        part: Any = (slice(first, first + count), slice(low, low + 32)) if simple else (column + first, lane + low)

        engine = w.cta.machine.engine

        def stage() -> None:
            memory = w.cta.tmem
            if memory.track and not memory.written[part].all():
                where = int((column + first)[~memory.written[column + first, lane + low]][0])
                w.cta.machine.report(Fault("uninitialised", f"TMEM column {where} is read, but was not written in all lanes"), w, ins.index)
            _observe(w, ins.index, column + first, lane + low, AccessKind.READ)
            got = memory.data[part]
            value = (
                got if simple else got[..., 0] if got.shape[-1] == 1 else (got[..., 0] & np.uint32(0xFFFF)) | got[..., 1] << np.uint32(16)
            )
            if m is None:
                w.Ru[slots] = value
            else:
                w.Ru[slots] = np.where(m, value, w.Ru[slots])
            if isinstance(reduced, Reg):
                w.put(reduced, reduce(value, ins, kind), m)

        if engine.unseen and not w.cta.machine.check_load_use:
            stage()
            return
        op = AsyncOp("tcgen05.ld", w, w.lane_bits(m), ins.index, [stage], via="tcgen05-order")
        engine.submit(op, now=True)  # ptxas keeps register dependences of a load, so its result is never late
        w.tmem_loads.append(op)
        if not w.cta.machine.check_load_use:
            return
        w.flight.add(InFlight(op, ins, written))

    return together(run, lambda t: simple and reduced is None and load_together(t, address, offset, slots, count))


def load_together(t: Team, address: Callable[[Warp, Array | None], int], offset: int, slots: Any, count: int) -> bool:
    """All columns of all lanes at once, when the warps read the same columns, each of its own lanes, and nothing is wrong."""
    engine = t.cta.machine
    if not engine.engine.unseen or engine.check_load_use:
        return False
    first = same_columns(t, [address(w, None) + offset for w in t.warps])
    memory = t.cta.tmem
    if first is None or first + count > COLUMNS or min(memory.owner[first : first + count], default=0) < 0:
        return False
    if memory.track and not memory.written[first : first + count].all():
        return False
    t.Ru[slots] = memory.data[first : first + count].reshape(count, 4, 32)
    return True


def same_columns(t: Team, addresses: list[int]) -> int | None:
    """The first column, when the addresses of four warps name the same one, each with its warp's first lane."""
    column = addresses[0] & 0xFFFF
    own = [column | 32 * i << 16 for i in range(4)]
    return column if addresses == own and t.first.index % 4 == 0 else None


def reduce(value: Array, ins: Instruction, kind: str) -> Array:
    """.red: minimum or maximum over the registers of each lane."""
    if ins.has("pack::16b") or kind not in ("f32", "u32", "s32"):
        raise Fault("undefined", "tcgen05.ld.red on packed or 16-bit data is not modelled")
    typed = value.view({"f32": np.float32, "u32": np.uint32, "s32": np.int32}[kind])
    if ins.has("abs"):
        typed = np.abs(typed)
    low = ins.has("min")
    if kind == "f32":
        propagate = np.minimum if low else np.maximum
        ignore = np.fmin if low else np.fmax
        function: Any = propagate if ins.has("NaN") else ignore
    else:
        function = np.minimum if low else np.maximum
    out: Array = np.ascontiguousarray(function.reduce(typed, axis=0)).view(np.uint32)
    return out


@machine("tcgen05.st", section=SECTION + "tcgen05.st")
def st(ins: Instruction) -> Handler:
    """Registers -> TMEM; visible to the warp after tcgen05.wait::st."""
    shape, count = _shape(ins)
    target = ins.operands[0]
    assert isinstance(target, Memory)
    split = ins.operands[1].value if isinstance(ins.operands[1], Imm) else 0
    values = [reader(o, np.uint32) for o in items(ins.operands[-1])]
    if len(values) != count:
        raise UnsupportedInstruction(f"{len(values)} registers where {count} are moved", ins.line, ins.text)
    lane, column = cells(shape, count, split, ins.has("unpack::16b"))
    address, offset = uniform(target.base, np.uint32), target.offset
    last_lane, width = int(lane.max()), int(column.max()) + 1
    registers = [o.slot for o in items(ins.operands[-1]) if isinstance(o, Reg)]
    plain = len(registers) == count
    slots = compact(registers)
    simple = shape == "32x32b" and not ins.has("unpack::16b")

    def submit(w: Warp, part: Any, data: Array, where: tuple[Array, Array], m: Array | None) -> None:
        def stage() -> None:
            _observe(w, ins.index, *where, AccessKind.WRITE)
            w.cta.tmem.data[part] = data
            w.cta.tmem.written[part] = True

        if w.cta.machine.engine.unseen:
            stage()
            return
        op = AsyncOp("tcgen05.st", w, w.lane_bits(m), ins.index, [stage], via="tcgen05-order")
        w.cta.machine.engine.submit(op)
        w.tmem_stores.append(op)

    def run(w: Warp, m: Array | None) -> None:
        w.current = ins.index
        first, low = _check_place(w, address(w, m) + offset, last_lane, width)
        data = w.Ru[slots] if plain else np.stack([v(w) for v in values])
        where = (column + first, lane + low)
        if simple and m is None:
            submit(w, (slice(first, first + count), slice(low, low + 32)), data.copy(), where, m)
            return
        data = np.stack([data & np.uint32(0xFFFF), data >> np.uint32(16)], -1) if where[0].shape[-1] == 2 else data[..., None].copy()
        chosen = data
        if m is not None:
            where, chosen = (where[0][:, m], where[1][:, m]), data[:, m]
        submit(w, where, chosen, where, m)

    def team(t: Team) -> bool:
        """All lanes of some columns at once."""
        if not simple or not plain or not t.cta.machine.engine.unseen:
            return False
        first = same_columns(t, [address(w, None) + offset for w in t.warps])
        memory = t.cta.tmem
        if first is None or first + count > COLUMNS or min(memory.owner[first : first + count], default=0) < 0:
            return False
        memory.data[first : first + count] = t.Ru[slots].reshape(count, LANES)
        memory.written[first : first + count] = True
        return True

    return together(run, team)
