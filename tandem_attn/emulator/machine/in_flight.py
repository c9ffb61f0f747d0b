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
_MMA = "wgmma.mma_async"


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
        if len(left) == len(self.items):
            return
        self.items, self.writes, self.reads, self.chains = [], 0, 0, {}
        for item in left:
            self.add(item)

    def forget(self, slot: int) -> None:
        """One register has been reported."""
        items, self.items, self.writes, self.reads, self.chains = self.items, [], 0, 0, {}
        for item in items:
            item.writes &= ~(1 << slot)
            item.reads &= ~(1 << slot)
            if item.writes | item.reads:
                self.add(item)


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
    chains: dict[str, int] = field(default_factory=dict)  # those touched by wgmma as accumulators alone, by its opcode
    inside: list[tuple[str, Instruction, int]] = field(default_factory=list)  # register, operation, first use of it while in flight


class Watch:
    """Reports registers that are touched while in flight, or read before any write (a write under a guard counts as one)."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.code = machine.program.code
        self.known: dict[int, Uses] = machine.program.uses
        if not self.known:
            for segment in machine.program.segments:
                self.uses(segment)
        # Segments that use what they have started themselves, if that is of interest.
        self.suspicious = frozenset(i for i, uses in self.known.items() if any(self.asked(ins) for _, ins, _ in uses.inside))

    def asked(self, ins: Instruction) -> bool:
        return self.machine.check_load_use or not ins.opcode.startswith("tcgen05.ld")

    def uses(self, segment: Segment) -> Uses:
        found = self.known.get(segment.index)
        if found is None:
            found = self.known[segment.index] = self.scan(segment)
        return found

    def check(self, warp: Warp, segment: Segment) -> None:
        uses = self.uses(segment)
        if warp.unwritten:
            self.check_written(warp, uses)
        for name, ins, index in uses.inside if segment.index in self.suspicious else ():
            if self.asked(ins):
                self.add(warp, name, ins, index)
        flight = warp.flight
        hit = uses.touched & flight.writes | uses.written & flight.reads
        for opcode, mask in uses.chains.items():
            hit |= mask & flight.writes & ~flight.chains.get(opcode, 0)
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
        self.add(warp, uses.names[key], item.ins, index)
        warp.flight.forget(slot)

    def add(self, warp: Warp, name: str, ins: Instruction, index: int) -> None:
        kind = "tmem-load-use" if ins.opcode.startswith("tcgen05.ld") else "register-in-flight"
        message = f"{name} is used while `{ins.opcode}` of PTX line {ins.line} may still be in flight"
        self.machine.report(Fault(kind, message), warp, index)

    def scan(self, segment: Segment) -> Uses:
        uses = Uses({}, {}, {})
        started: list[tuple[Instruction, int, int]] = []
        for i in range(segment.start, segment.end):
            ins = self.code[i]
            self.scan_uses(uses, started, ins)
            if _starts(ins):
                written = bits(r.slot for r in results(ins) if r.cls == "r")
                started.append((ins, written, bits(r.slot for r in sources(ins) if r.cls == "r") & ~written))
            for regs, table in ((sources(ins), uses.reads), (results(ins), uses.writes)):
                for reg in regs:
                    table.setdefault((reg.cls, reg.slot), i)
                    uses.names[reg.cls, reg.slot] = reg.name
        return uses

    @staticmethod
    def scan_uses(uses: Uses, started: list[tuple[Instruction, int, int]], ins: Instruction) -> None:
        """Add the 32-bit registers of an instruction, and what it does to those of operations started in the same segment."""
        read, written = (bits(r.slot for r in regs if r.cls == "r") for regs in (sources(ins), results(ins)))
        accumulates = ins.opcode.startswith(_MMA)
        if accumulates:
            uses.chains[ins.opcode] = uses.chains.get(ins.opcode, 0) | written
            uses.touched |= read & ~written
        else:
            uses.touched |= read | written
        uses.written |= written
        for other, writes, reads in started:
            chained = accumulates and other.opcode == ins.opcode
            hit = (read & ~written if chained else read | written) & writes | written & reads
            if hit:
                slot = (hit & -hit).bit_length() - 1
                name = next(r.name for r in (*sources(ins), *results(ins)) if (r.cls, r.slot) == ("r", slot))
                uses.inside.append((name, other, ins.index))


def _starts(ins: Instruction) -> bool:
    """Whether registers of the instruction are in flight behind it."""
    return ins.opcode.startswith((_MMA, "tcgen05.ld")) and ins.predicate is None
