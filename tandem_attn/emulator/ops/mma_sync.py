"""mma.sync. PTX manual, "Warp Level Matrix Instructions: mma" (fragment layouts of m16n8k4 .. m16n8k32).

All forms share a layout in bytes: A is 16 rows of 16 or 32 bytes (8 rows x 16 bytes per register), B 8 columns of as many, D 16 x 8.
"""

from __future__ import annotations

import re

import numpy as np

from tandem_attn.emulator.errors import UnsupportedInstruction
from tandem_attn.emulator.machine.warp import Warp
from tandem_attn.emulator.memory.operands import ELEMENT_BYTES, to_float
from tandem_attn.emulator.ops.access import Array, items, reader, writer
from tandem_attn.emulator.ops.registry import Handler, machine
from tandem_attn.emulator.ptx.nodes import Instruction

_SHAPE = re.compile(r"m16n8k(\d+)")


@machine("mma", section="Warp Level Matrix Instructions: mma")
def mma(ins: Instruction) -> Handler:
    shape = next((_SHAPE.fullmatch(m) for m in ins.mods if _SHAPE.fullmatch(m)), None)
    kinds = [m for m in ins.mods if m in ELEMENT_BYTES or m in ("f32", "s32", "f64")]
    if shape is None or len(kinds) != 4 or "f64" in kinds or any(m.startswith(("sp", "block_scale")) for m in ins.mods):
        raise UnsupportedInstruction("this form of mma is not executed", ins.line, ins.text)
    k = int(shape[1])
    d_kind, a_kind, b_kind, c_kind = kinds
    element = ELEMENT_BYTES[a_kind]
    size = k * element  # bytes of a row: 16 or 32
    if size not in (16, 32):
        raise UnsupportedInstruction("this shape of mma is not executed", ins.line, ins.text)
    d = [writer(o) for o in items(ins.operands[0])]
    a, b, c = ([reader(o, np.uint32) for o in items(operand)] for operand in ins.operands[1:4])

    def matrix(regs: Array, kind: str) -> Array:
        """(registers, 32 lanes) -> rows of elements; registers run over row halves first (A), then K halves."""
        raw = np.ascontiguousarray(regs).view(np.uint8).reshape(size // 16, -1, 8, 16)  # (k half, row half, row, byte)
        rows = raw.transpose(1, 2, 0, 3).reshape(-1, size)
        return to_float(np.ascontiguousarray(rows).view(f"u{element}"), kind)

    def run(w: Warp, m: Array | None) -> None:
        left = matrix(np.stack([r(w) for r in a]), a_kind)
        right = matrix(np.stack([r(w) for r in b]), b_kind)
        product = left @ right.T  # (16, 8)
        new = product.reshape(2, 8, 4, 2).transpose(0, 3, 1, 2).reshape(4, 32)  # register (row half, pair) x lane
        addend = np.stack([r(w) for r in c])
        old = addend.view(np.float32) if c_kind == "f32" else addend.view(np.int32) if c_kind == "s32" else unpack(addend)
        if d_kind == "s32":
            total = new.astype(np.int64) + old
            total = np.clip(total, -(2**31), 2**31 - 1) if ins.has("satfinite") else total
            bits = total.astype(np.int32).view(np.uint32)
        elif d_kind == "f32":
            bits = (new + old).astype(np.float32).view(np.uint32)
        else:
            halves = (new + old).astype(np.float16).reshape(2, 2, 32).transpose(0, 2, 1)
            bits = np.ascontiguousarray(halves).view(np.uint32).reshape(2, 32)
        for out, value in zip(d, bits, strict=True):
            out(w, value, m)
        w.cta.machine.statistics.mma_flops += 2 * 16 * 8 * k

    return run


def unpack(regs: Array) -> Array:
    """f16 accumulators: two per register -> (4, 32) floats."""
    return regs.view(np.float16).reshape(2, 32, 2).transpose(0, 2, 1).reshape(4, 32).astype(np.float32)
