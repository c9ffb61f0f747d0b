"""Registers of asynchronous instructions that are still in flight."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tandem_attn.emulator.memory.faults import Fault
from tandem_attn.emulator.ptx.nodes import Instruction
from tandem_attn.emulator.ptx.operands import results, sources
from tandem_attn.emulator.ptx.program import Segment

if TYPE_CHECKING:
    from tandem_attn.emulator.machine.async_ops import AsyncOp
    from tandem_attn.emulator.machine.machine import Machine
    from tandem_attn.emulator.machine.warp import Warp

Key = tuple[str, int]


@dataclass(slots=True)
class InFlight:
    """32-bit registers of `op`, as bits by slot: it will write some, which nobody may touch, and reads others, which nobody may write.

    `chain`: later instructions of this opcode may use those it writes (wgmma accumulates in order on the same registers).
    """

    op: AsyncOp
    ins: Instruction
    writes: int
    reads: int = 0
    chain: str = ""


@dataclass(slots=True)
class Flight:
    """What is in flight in one warp. The unions are there for a quick test of a whole segment."""

    items: list[InFlight] = field(default_factory=list)
    writes: int = 0
    reads: int = 0
    chains: dict[str, int] = field(default_factory=dict)

    def add(self, item: InFlight) -> None:
        self.items.append(item)
        self.writes |= item.writes
        self.reads |= item.reads
        if item.chain:
            self.chains[item.chain] = self.chains.get(item.chain, 0) | item.writes

    def release(self, done: Callable[[InFlight], bool]) -> None:
        """Forget the registers of operations that a wait has covered."""
        left = [item for item in self.items if not done(item)]
        self.items, self.writes, self.reads, self.chains = [], 0, 0, {}
        for item in left:
            self.add(item)

    def forget(self, slot: int) -> None:
        """One register has been reported."""
        for item in self.items:
            item.writes &= ~(1 << slot)
            item.reads &= ~(1 << slot)
        self.release(lambda item: not item.writes | item.reads)


def bits(slots: Iterable[int]) -> int:
    """Register slots as a number."""
    out = 0
    for slot in slots:
        out |= 1 << slot
    return out


@dataclass(slots=True)
class Uses:
    """First instruction of a segment that reads and that writes each register; the 32-bit ones also as bits by slot."""

    reads: dict[Key, int]
    writes: dict[Key, int]
    names: dict[Key, str]
    touched: int = 0
    written: int = 0
    opcode: str = ""  # of its only instruction


class Watch:
    """Reports registers that are touched while in flight, or read before any write (a write under a guard counts as one)."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.code = machine.program.code
        self.known: dict[int, Uses] = {}

    def check(self, warp: Warp, segment: Segment) -> None:
        uses = self.known.get(segment.index)
        if uses is None:
            uses = self.known[segment.index] = self.scan(segment)
        if warp.unwritten:
            self.check_written(warp, uses)
        flight = warp.flight
        hit = uses.touched & flight.writes & ~flight.chains.get(uses.opcode, 0) | uses.written & flight.reads
        while hit:
            slot = (hit & -hit).bit_length() - 1
            hit &= hit - 1
            self.report(warp, uses, slot)

    def check_written(self, warp: Warp, uses: Uses) -> None:
        for key in uses.names.keys() & warp.unwritten:
            first = uses.reads.get(key)
            if first is not None and first <= uses.writes.get(key, first) and not self.code[first].opcode.startswith("wgmma"):
                self.machine.report(Fault("uninitialised-register", f"{uses.names[key]} is read, but nothing has written it"), warp, first)
            warp.unwritten.discard(key)

    def report(self, warp: Warp, uses: Uses, slot: int) -> None:
        """A register in flight is touched; the youngest operation on it is named."""
        key = ("r", slot)
        item = next(item for item in reversed(warp.flight.items) if (item.writes | item.reads) >> slot & 1)
        index = uses.writes.get(key)
        if item.writes >> slot & 1 and (index is None or uses.reads.get(key, index) < index):
            index = uses.reads.get(key, index)
        if index is None or (item.chain and self.code[index].opcode == item.chain):
            return
        kind = "tmem-load-use" if item.op.kind == "tcgen05.ld" else "register-in-flight"
        message = f"{uses.names[key]} is used while `{item.ins.opcode}` of PTX line {item.ins.line} may still be in flight"
        self.machine.report(Fault(kind, message), warp, index)
        warp.flight.forget(slot)

    def scan(self, segment: Segment) -> Uses:
        uses = Uses({}, {}, {})
        for i in range(segment.start, segment.end):
            ins = self.code[i]
            for regs, table in ((sources(ins), uses.reads), (results(ins), uses.writes)):
                for reg in regs:
                    table.setdefault((reg.cls, reg.slot), i)
                    uses.names[reg.cls, reg.slot] = reg.name
        uses.touched = bits(slot for cls, slot in uses.names if cls == "r")
        uses.written = bits(slot for cls, slot in uses.writes if cls == "r")
        if segment.end == segment.start + 1:
            uses.opcode = self.code[segment.start].opcode
        return uses
