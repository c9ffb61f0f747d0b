"""Scale factors of block-scaled tcgen05.mma. PTX manual, "Tensor Core 5th Generation Instructions: Block Scaling", "Scale Factor A ID".

(A x scale_A)(B x scale_B) + D: each row of A and each column of B has one factor per block of 32 or 16 places along K. The factors of 32
rows lie in one 32-bit column of tensor memory, a row per lane, the same in all four groups of 32 lanes; the ID of the instruction
descriptor says in which byte of the word a row's factors begin.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from tandem_attn.emulator.errors import UnsupportedInstruction
from tandem_attn.emulator.memory.faults import Fault
from tandem_attn.emulator.memory.operands import to_float
from tandem_attn.emulator.ops.access import Scalar, scalar
from tandem_attn.emulator.ptx.nodes import Instruction, Memory, Operand

if TYPE_CHECKING:
    from tandem_attn.emulator.machine.cta import CTA
    from tandem_attn.emulator.machine.warp import Warp

# Factors per row by kind and qualifier (manual, "Valid combinations of scale_vectorsize with types and MMA-Kind"; K = 96 is not here).
_FACTORS = {
    "mxf8f6f4": {"": 1, "scale_vec::1X": 1, "block32": 1},
    "mxf4": {"": 2, "scale_vec::2X": 2, "block32": 2},
    "mxf4nvf4": {"scale_vec::2X": 2, "block32": 2, "scale_vec::4X": 4, "block16": 4},
}
_IDS = {1: (0, 1, 2, 3), 2: (0, 2), 4: (0,)}
KINDS = frozenset(_FACTORS)


@dataclass(frozen=True, slots=True)
class Scales:
    """Where the factors of one instruction are: TMEM addresses, first bytes, factors per row, format."""

    a: int
    b: int
    a_byte: int
    b_byte: int
    count: int
    kind: str  # ue8m0 or ue4m3


class ScaleOperands:
    """The two scale operands of an instruction."""

    def __init__(self, ins: Instruction, kind: str, a: Operand, b: Operand) -> None:
        given = next((m for m in ins.mods if m.startswith(("scale_vec", "block16", "block32"))), "")
        count = _FACTORS[kind].get(given)
        if count is None or not (isinstance(a, Memory) and isinstance(b, Memory)):
            raise UnsupportedInstruction(f"kind::{kind} with {given or 'no scale vector size'}", ins.line, ins.text)
        self.kind, self.count = kind, count
        self.a, self.b = scalar(a.base), scalar(b.base)
        self.offsets = a.offset, b.offset

    def read(self, w: Warp, lane: int, idesc: Scalar) -> Scales:
        raw = idesc(w, lane)
        a_byte, b_byte = raw >> 29 & 3, raw >> 4 & 3
        if a_byte not in _IDS[self.count] or b_byte not in _IDS[self.count]:
            raise Fault(
                "undefined", f"instruction descriptor {raw:#x}: scale factor IDs {a_byte}, {b_byte} with {self.count} factors a row"
            )
        kind = "ue8m0" if raw >> 23 & 1 else "ue4m3"
        if kind == "ue4m3" and self.count != 4:
            raise Fault("undefined", f"instruction descriptor {raw:#x}: factors of type ue4m3 with {self.count} a row")
        if raw >> 31:
            raise Fault("undefined", f"instruction descriptor {raw:#x}: K = 96 is not modelled")
        places = self.a(w, lane) + self.offsets[0], self.b(w, lane) + self.offsets[1]
        return Scales(*places, a_byte, b_byte, self.count, kind)


def columns_of(rows: int) -> int:
    return -(-rows // 32)


def factors(cta: CTA, address: int, rows: int, byte: int, scales: Scales) -> NDArray[np.float64]:
    """(rows, factors a row). Raises Fault where the four groups of lanes differ."""
    first, count = address & 0xFFFF, columns_of(rows)
    memory = cta.tmem
    groups = memory.data[first : first + count].reshape(count, 4, 32)
    if (groups != groups[:, :1]).any():
        raise Fault(
            "undefined", f"scale factors in TMEM columns {first} .. {first + count - 1} are not the same in all four groups of lanes"
        )
    octets = np.ascontiguousarray(groups[:, 0]).view(np.uint8).reshape(count * 32, 4)[:rows, byte : byte + scales.count]
    if scales.kind == "ue8m0":  # an exponent alone; 255 is NaN
        return np.where(octets == 0xFF, np.nan, np.ldexp(1.0, octets.astype(np.int64) - 127))
    return to_float(octets & np.uint8(0x7F), "e4m3").astype(np.float64)


def scaled(values: NDArray[np.float32], by: NDArray[np.float64]) -> NDArray[np.float64]:
    """(rows, K) times its factors, in double precision: exact."""
    with np.errstate(invalid="ignore"):
        return values.astype(np.float64) * np.repeat(by, values.shape[1] // by.shape[1], axis=1)
