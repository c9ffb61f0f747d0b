"""Registers of asynchronous instructions that are still in flight."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tandem_attn.emulator.machine.async_ops import AsyncOp
from tandem_attn.emulator.machine.warp import Warp
from tandem_attn.emulator.ptx.nodes import Instruction, Reg
from tandem_attn.emulator.ptx.operands import results, sources


@dataclass(slots=True)
class InFlight:
    """A register of `op`. `writes`: the operation will write it, so nobody may touch it; else it only reads it, so nobody may write it.

    `chain`: later instructions of this opcode may use it (wgmma accumulates in order on the same registers).
    """

    op: AsyncOp
    ins: Instruction
    writes: bool
    chain: str = ""

    def conflict(self, code: Sequence[Instruction], reg: Reg) -> int | None:
        """The first instruction of a segment that must not touch the register."""
        for ins in code:
            if self.chain and ins.opcode == self.chain and reg in results(ins):
                continue
            if reg in results(ins) or (self.writes and reg in sources(ins)):
                return ins.index
        return None


def release(w: Warp, done: Callable[[InFlight], bool]) -> None:
    """Forget the registers of operations that a wait has covered."""
    w.in_flight = {key: item for key, item in w.in_flight.items() if not done(item)}
