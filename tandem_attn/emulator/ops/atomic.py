"""Atomics. PTX manual, "Parallel Synchronization and Communication Instructions: atom, red"."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tandem_attn.emulator.codegen.builder import PTX_TYPE
from tandem_attn.emulator.errors import UnsupportedInstruction
from tandem_attn.emulator.events import AccessKind, Proxy, Space
from tandem_attn.emulator.machine.warp import Warp
from tandem_attn.emulator.memory.addresses import LOCAL_WINDOW, OFFSET_MASK, RANK_SHIFT, SHARED_WINDOW, WINDOW_MASK
from tandem_attn.emulator.memory.faults import Fault
from tandem_attn.emulator.memory.reductions import combine
from tandem_attn.emulator.ops.access import Array, items, lanes_of, reader, writer
from tandem_attn.emulator.ops.registry import Handler, machine
from tandem_attn.emulator.ptx.nodes import Discard, Instruction, Memory, Reg

_OPS = ("add", "min", "max", "inc", "dec", "and", "or", "xor", "exch", "cas")
_ELEMENT = {"f16x2": ("f16", 2), "bf16x2": ("bf16", 2)}


def _dtype(kind: str) -> np.dtype[Any]:
    code = PTX_TYPE[kind]
    return np.dtype({"f": "u", "u": "u", "i": "u"}[code[0]] + code[1:])


class _Cell:
    """Finds the bytes that an address names, checks them, tells the observers."""

    def __init__(self, ins: Instruction, operand: Memory, size: int) -> None:
        self.ins, self.size, self.offset = ins, size, operand.offset
        space = next((m.split("::")[0] for m in ins.mods if m.split("::")[0] in ("global", "shared")), "generic")
        self.space = space
        self.read = reader(operand.base, np.uint32 if space == "shared" and getattr(operand.base, "cls", "r") == "r" else np.uint64)

    def addresses(self, w: Warp) -> Array:
        return self.read(w).astype(np.int64) + self.offset

    def bytes(self, w: Warp, address: int, lane: int) -> Array:
        shared = self.space == "shared"
        if self.space == "generic" and address >= SHARED_WINDOW:
            if address >= LOCAL_WINDOW:
                raise Fault("undefined", f"an atomic on address {address:#x}, which is neither global nor shared")
            shared, address = True, address & WINDOW_MASK
        machine_ = w.cta.machine
        if address % self.size:
            raise Fault("misaligned", f"atomic on address {address:#x}, not a multiple of {self.size}")
        if not shared:
            if machine_.observed:
                machine_.access(w, self.ins.index, Space.GLOBAL, -1, AccessKind.ATOMIC, Proxy.GENERIC, [address], self.size, [lane])
            return machine_.memory.bytes_at(address, self.size)
        cta = w.cta.peer(address >> RANK_SHIFT)
        at = address & OFFSET_MASK
        cta.shared.check(np.array([at]), self.size, self.size)
        if machine_.check_uninitialised and not cta.shared.written[at : at + self.size].all():
            machine_.report(Fault("uninitialised", f"an atomic on shared offset {at:#x}, which was never written"), w, self.ins.index)
        if machine_.observed:
            machine_.access(w, self.ins.index, Space.SHARED, cta.linear, AccessKind.ATOMIC, Proxy.GENERIC, [at], self.size, [lane])
        cta.shared.written[at : at + self.size] = True
        cta.shared.changed(at, at + self.size)
        return cta.shared.data[at : at + self.size]


def update(op: str, kind: str, old: Array, values: list[Array], ftz: bool = False) -> Array:
    """The new content (raw words) of a cell that holds `old`; ftz: added in global memory, where f32 sums are flushed (manual)."""
    if op == "exch":
        return values[0]
    if op == "cas":
        return values[1] if (old == values[0]).all() else old
    element, parts = _ELEMENT.get(kind, (kind, 1))
    if parts == 2:
        return combine(op, element, old.view(np.uint16), values[0].view(np.uint16)).view(old.dtype)
    out = combine(op, element, old, values[0], ftz)
    if kind == "f64" and not ftz:  # added by the CTA's own unit, which makes a NaN quiet
        out = np.where(np.isnan(out.view(np.float64)), out | np.uint64(1 << 51), out)
    return out


def handler(ins: Instruction, target: Any, cell_operand: Memory, value_operands: tuple[Any, ...]) -> Handler:
    op = next((m for m in ins.mods if m in _OPS), None)
    kind = ins.mods[-1]
    if op is None or kind not in PTX_TYPE:
        raise UnsupportedInstruction("this atomic is not executed", ins.line, ins.text)
    dtype = _dtype(kind)
    width = next((int(m[1:]) for m in ins.mods if m in ("v2", "v4", "v8")), 1)
    cell = _Cell(ins, cell_operand, dtype.itemsize * width)
    sources: list[list[Callable[[Warp], Array]]] = [[reader(o, dtype) for o in items(v)] for v in value_operands]
    outputs = [writer(o) for o in items(target)] if target is not None else []

    def run(w: Warp, m: Array | None) -> None:
        w.current = ins.index
        where = cell.addresses(w)
        values = [[r(w) for r in group] for group in sources]
        got = np.zeros((width, 32), dtype)
        changed = False
        for lane in lanes_of(m):
            raw = cell.bytes(w, int(where[lane]), int(lane)).view(dtype)
            old = raw.copy()
            got[:, lane] = old
            new = update(op, kind, old, [np.array([v[lane] for v in group]) for group in values], cell.space != "shared")
            if (new != old).any():
                raw[:] = new
                changed = True
        if changed:
            w.cta.machine.progress += 1
        elif outputs:
            w.yielding = True  # a lock that is held: let its owner run
        for out, value in zip(outputs, got, strict=False):
            out(w, value, m)

    return run


def handler128(ins: Instruction, target: Any, cell_operand: Memory, value_operands: tuple[Any, ...]) -> Handler:
    """exch and cas of 128-bit registers."""
    if not all(isinstance(v, Reg) for v in value_operands) or not isinstance(target, Reg | Discard):
        raise UnsupportedInstruction("this 128-bit atomic is not executed", ins.line, ins.text)
    cell = _Cell(ins, cell_operand, 16)
    compare = "cas" in ins.mods

    def run(w: Warp, m: Array | None) -> None:
        w.current = ins.index
        where, values = cell.addresses(w), [w.get(v) for v in value_operands]
        got = np.zeros((32, 2), np.uint64)
        for lane in lanes_of(m):
            raw = cell.bytes(w, int(where[lane]), int(lane)).view(np.uint64)
            got[lane] = raw
            if not compare or (raw == values[0][lane]).all():
                raw[:] = values[-1][lane]
        w.cta.machine.progress += 1
        if isinstance(target, Reg):
            w.put(target, got, m)

    return run


@machine("atom", section="Parallel Synchronization and Communication Instructions: atom")
def atom(ins: Instruction) -> Handler:
    """On lanes in order; a result may be discarded or a vector."""
    target, cell = ins.operands[:2]
    assert isinstance(cell, Memory)
    values = ins.operands[2:4] if "cas" in ins.mods else ins.operands[2:3]
    if "b128" in ins.mods:
        return handler128(ins, target, cell, values)
    return handler(ins, target, cell, values)


@machine("red", section="Parallel Synchronization and Communication Instructions: red")
def red(ins: Instruction) -> Handler:
    """As atom, without a result. red.async is in `dsmem`."""
    cell = ins.operands[0]
    assert isinstance(cell, Memory)
    return handler(ins, None, cell, ins.operands[1:2])
