"""ldmatrix, stmatrix, movmatrix. PTX manual, "Warp Level Matrix Instructions: ldmatrix, stmatrix, movmatrix"."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tandem_attn.emulator.errors import UnsupportedInstruction
from tandem_attn.emulator.events import AccessKind, Proxy, Space
from tandem_attn.emulator.machine.team import Team
from tandem_attn.emulator.machine.warp import Warp
from tandem_attn.emulator.memory.addresses import RANK_SHIFT
from tandem_attn.emulator.memory.faults import Fault
from tandem_attn.emulator.memory.shared import SharedMemory
from tandem_attn.emulator.ops.access import Array, compact, items, reader, shared_address, writer
from tandem_attn.emulator.ops.registry import Handler, machine, together
from tandem_attn.emulator.ptx.nodes import Instruction, Operand, Reg

_MARKED = np.ones(16, np.bool_).view(np.complex128)[0]  # `written` of a row
SECTION = "Warp Level Matrix Instructions: "


def _count(ins: Instruction) -> int:
    return int(next(m for m in ins.mods if m in ("x1", "x2", "x4"))[1:])


def _rows(w: Warp, ins: Instruction, addresses: Array, count: int, size: int, kind: AccessKind) -> tuple[SharedMemory, Array]:
    """The owner's shared memory and the offsets of the rows (8 or 16 per matrix, one address per lane)."""
    rows = addresses[:count]
    target, offsets = w.shared_target(rows)
    target.shared.check(offsets, size, size)
    engine = w.cta.machine
    if kind is AccessKind.READ and engine.check_uninitialised:
        try:
            target.shared.require_written(offsets, size)
        except Fault as fault:
            engine.report(fault, w, ins.index)
    if engine.observed:
        engine.access(w, ins.index, Space.SHARED, target.linear, kind, Proxy.GENERIC, offsets, size, np.arange(count))
    return target.shared, offsets


def _slots(operand: Operand) -> Any:
    """The registers as an index into those of several warps; None where some are constants."""
    regs = [o.slot for o in items(operand) if isinstance(o, Reg)]
    return compact(regs) if len(regs) == len(items(operand)) else None


def _b8(ins: Instruction) -> bool:
    if ins.mods[-1] not in ("b16", "b8") or any(m.startswith(("b6x16", "b4x16")) for m in ins.mods):
        raise UnsupportedInstruction("this form of a matrix move is not executed", ins.line, ins.text)
    return ins.mods[-1] == "b8"


@machine("ldmatrix", section=SECTION + "ldmatrix")
def ldmatrix(ins: Instruction) -> Handler:
    """m8n8 of 16 bits: lane i holds row i / 4, elements 2 (i % 4) and up; .trans transposes. m16n16.trans.b8: two registers."""
    count, trans = _count(ins), ins.has("trans")
    wide = _b8(ins)
    outputs = [writer(o) for o in items(ins.operands[0])]
    slots = _slots(ins.operands[0])
    addresses = shared_address(ins, ins.operands[1])
    if wide and not (ins.has("m16n16") and trans):
        raise UnsupportedInstruction("ldmatrix.b8 is executed for m16n16.trans", ins.line, ins.text)

    def run(w: Warp, m: Array | None) -> None:
        w.current = ins.index
        lanes = (16 if wide else 8) * count
        shared, offsets = _rows(w, ins, addresses(w), lanes, 16, AccessKind.READ)
        raw = shared.data[offsets[:, None] + np.arange(16)]
        if wide:
            for i in range(count):
                square = raw[16 * i : 16 * i + 16].T  # lane holds row l / 4 and l / 4 + 8, four bytes of columns 4 (l % 4)
                for half in range(2):
                    outputs[2 * i + half](w, np.ascontiguousarray(square[8 * half : 8 * half + 8]).view(np.uint32).reshape(32), m)
            return
        for i, out in enumerate(outputs):
            square = raw[8 * i : 8 * i + 8].view(np.uint16)
            out(w, np.ascontiguousarray(square.T if trans else square).view(np.uint32).reshape(32), m)

    def team(t: Team) -> bool:
        where = None if wide else _team_rows(t, addresses, 8 * count)
        if where is None or slots is None:
            return False
        shared = t.cta.shared
        if t.cta.machine.check_uninitialised and not shared.written[where[..., None] + np.arange(16)].all():
            return False
        rows = shared.data.view(np.complex128)[where >> 4].view(np.uint16).reshape(t.count, count, 8, 8)
        if trans:
            rows = rows.swapaxes(2, 3)
        t.Ru[slots] = np.ascontiguousarray(rows.swapaxes(0, 1)).view(np.uint32).reshape(count, t.count, 32)
        return True

    return together(run, team)


def _team_rows(t: Team, addresses: Callable[[Any], Array], rows: int) -> Array | None:
    """Offsets of the rows of each warp (warps, rows), where they lie in the CTA's own memory and are aligned."""
    where = np.array([addresses(w)[:rows] for w in t.warps]) - (t.cta.rank << RANK_SHIFT)
    shared = t.cta.shared
    if int(where.min()) < shared.base or int(where.max()) + 16 > shared.end or (where & 15).any():
        return None
    return where


@machine("stmatrix", section=SECTION + "stmatrix")
def stmatrix(ins: Instruction) -> Handler:
    count, trans = _count(ins), ins.has("trans")
    wide = _b8(ins)
    values = [reader(o, np.uint32) for o in items(ins.operands[1])]
    slots = _slots(ins.operands[1])
    addresses = shared_address(ins, ins.operands[0])

    def run(w: Warp, m: Array | None) -> None:
        del m
        w.current = ins.index
        lanes = (16 if wide else 8) * count
        size = 8 if wide else 16
        shared, offsets = _rows(w, ins, addresses(w), lanes, size, AccessKind.WRITE)
        rows: list[Array] = []
        for value in values:
            square = np.ascontiguousarray(value(w))
            if wide:  # m16n8.trans.b8: the register holds 8 rows of 16 bytes, stored as 16 rows of 8
                rows.append(square.view(np.uint8).reshape(8, 16).T)
            else:
                halves = square.view(np.uint16).reshape(8, 8)
                rows.append(np.ascontiguousarray(halves.T if trans else halves).view(np.uint8))
        shared.data[offsets[:, None] + np.arange(size)] = np.concatenate(rows)
        shared.changed_at(offsets)
        shared.mark(offsets, size)

    def team(t: Team) -> bool:
        where = None if wide else _team_rows(t, addresses, 8 * count)
        if where is None or slots is None:
            return False
        rows: Array = np.ascontiguousarray(t.Ru[slots]).view(np.uint16).reshape(count, t.count, 8, 8)
        if trans:
            rows = rows.swapaxes(2, 3)
        shared = t.cta.shared
        raw = np.ascontiguousarray(rows.swapaxes(0, 1)).view(np.complex128).reshape(t.count, 8 * count)
        shared.data.view(np.complex128)[where >> 4] = raw
        shared.changed_at(where)
        shared.written.view(np.complex128)[where >> 4] = _MARKED
        return True

    return together(run, team)


@machine("movmatrix", section=SECTION + "movmatrix")
def movmatrix(ins: Instruction) -> Handler:
    """Transpose an 8 x 8 matrix of 16-bit elements in registers."""
    out, value = writer(ins.operands[0]), reader(ins.operands[1], np.uint32)

    def run(w: Warp, m: Array | None) -> None:
        square = np.ascontiguousarray(value(w)).view(np.uint16).reshape(8, 8)
        out(w, np.ascontiguousarray(square.T).view(np.uint32).reshape(32), m)

    return run
