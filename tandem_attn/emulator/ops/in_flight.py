"""Registers of asynchronous instructions that are still in flight."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
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
    """A register of `op`. `writes`: the operation will write it, so nobody may touch it; else it only reads it, so nobody may write it.

    `chain`: later instructions of this opcode may use it (wgmma accumulates in order on the same registers).
    """

    op: AsyncOp
    ins: Instruction
    writes: bool
    chain: str = ""


@dataclass(slots=True)
class Uses:
    """First instruction of a segment that reads and that writes each register."""

    reads: dict[Key, int]
    writes: dict[Key, int]
    names: dict[Key, str]


def release(w: Warp, done: Callable[[InFlight], bool]) -> None:
    """Forget the registers of operations that a wait has covered."""
    w.in_flight = {key: item for key, item in w.in_flight.items() if not done(item)}


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
        for key in uses.names.keys() & warp.unwritten:
            first = uses.reads.get(key)
            if first is not None and first <= uses.writes.get(key, first) and not self.code[first].opcode.startswith("wgmma"):
                self.machine.report(Fault("uninitialised-register", f"{uses.names[key]} is read, but nothing has written it"), warp, first)
            warp.unwritten.discard(key)
        for key in uses.names.keys() & warp.in_flight.keys():
            item = warp.in_flight[key]
            index = uses.writes.get(key)
            if item.writes and (index is None or uses.reads.get(key, index) < index):
                index = uses.reads.get(key, index)
            if index is None or (item.chain and self.code[index].opcode == item.chain):
                continue
            kind = "tmem-load-use" if item.op.kind == "tcgen05.ld" else "register-in-flight"
            message = f"{uses.names[key]} is used while `{item.ins.opcode}` of PTX line {item.ins.line} may still be in flight"
            self.machine.report(Fault(kind, message), warp, index)
            del warp.in_flight[key]

    def scan(self, segment: Segment) -> Uses:
        uses = Uses({}, {}, {})
        for i in range(segment.start, segment.end):
            ins = self.code[i]
            for regs, table in ((sources(ins), uses.reads), (results(ins), uses.writes)):
                for reg in regs:
                    table.setdefault((reg.cls, reg.slot), i)
                    uses.names[reg.cls, reg.slot] = reg.name
        return uses
