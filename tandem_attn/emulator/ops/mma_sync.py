"""mma.sync. PTX manual, "Warp Level Matrix Instructions: mma" (fragment layouts of m8n8k4 .. m16n8k256).

All forms share a layout in words (8 bytes for f64, else 4): a register of A holds 8 rows of 4 words, one word per lane; registers run over
the halves of M first, then along K. B has columns for rows; D is 8 or 16 by 8, two neighbours of a row per lane.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np

from tandem_attn.emulator.codegen.numpy_runtime import fma64
from tandem_attn.emulator.errors import UnsupportedInstruction
from tandem_attn.emulator.machine.warp import Warp
from tandem_attn.emulator.memory.operands import ELEMENT_BYTES, to_float
from tandem_attn.emulator.ops import tensor_core
from tandem_attn.emulator.ops.access import Array, items, reader, writer
from tandem_attn.emulator.ops.registry import Handler, machine
from tandem_attn.emulator.ptx.nodes import Instruction

_SHAPE = re.compile(r"m(8|16)n8k(\d+)")
_KINDS = frozenset((*ELEMENT_BYTES, "f32", "s32", "f64", "s4", "u4", "b1"))
Product = Callable[[Array, Array, Array], Array]  # raw bytes of A (M, size) and B (8, size), C (M, 8) -> D


@machine("mma", section="Warp Level Matrix Instructions: mma")
def mma(ins: Instruction) -> Handler:
    shape = next((found for m in ins.mods if (found := _SHAPE.fullmatch(m))), None)
    kinds = [m for m in ins.mods if m in _KINDS]
    for mod, what in (("sp", "sparse mma (mma.sp)"), ("block_scale", "block-scaled mma.sync (sm_120a)"), ("kind", "mma.sync with a kind")):
        if any(m.split("::")[0] == mod for m in ins.mods):
            raise UnsupportedInstruction(f"{what} is not executed", ins.line, ins.text)
    if shape is None or len(kinds) != 4 or kinds[0] != kinds[3]:
        raise UnsupportedInstruction("this form of mma is not executed", ins.line, ins.text)
    rows, k = int(shape[1]), int(shape[2])
    acc = kinds[0]
    word = np.dtype("u8" if acc == "f64" else "u4")
    c_type = {"f16": np.float16, "f32": np.float32, "f64": np.float64, "s32": np.int32}[acc]
    d = [writer(o) for o in items(ins.operands[0])]
    a, b, c = ([reader(o, word) for o in items(operand)] for operand in ins.operands[1:4])
    product = _product(ins, kinds[1], kinds[2], acc)

    def run(w: Warp, m: Array | None) -> None:
        left = matrix(np.stack([r(w) for r in a]), rows)
        right = matrix(np.stack([r(w) for r in b]), 8)
        addend = np.stack([r(w) for r in c]).view(c_type).reshape(rows // 8, -1, 32, word.itemsize // np.dtype(c_type).itemsize)
        # (row half, pair, lane, 1) or for f16 (row half, 1, lane, pair) -> (row half, lane = row x thread, pair)
        old = addend.transpose(0, 2, 1, 3).reshape(rows, 8)
        new = product(left, right, old).reshape(rows // 8, 32, addend.shape[1], addend.shape[3]).transpose(0, 2, 1, 3)
        for out, value in zip(d, np.ascontiguousarray(new).view(word).reshape(-1, 32), strict=True):
            out(w, value, m)
        w.cta.machine.statistics.mma_flops += 2 * rows * 8 * k

    return run


def matrix(registers: Array, rows: int) -> Array:
    """(registers, 32 lanes) of words -> the bytes of `rows` rows."""
    words = registers.reshape(-1, rows // 8, 8, 4)  # (along K, row half, row, word)
    return np.ascontiguousarray(words.transpose(1, 2, 0, 3)).reshape(rows, -1).view(np.uint8)


def _product(ins: Instruction, a: str, b: str, acc: str) -> Product:
    if acc == "f64":
        return double
    if acc == "s32":
        if a == "b1":
            return lambda x, y, c: c + bit_counts(x, y, "xor" in ins.mods)
        return lambda x, y, c: integer_sum(integers(x, a) @ integers(y, b).T, c, ins.has("satfinite"))
    if a in ("e4m3", "e5m2"):
        return lambda x, y, c: through_halves(to_float(x, a), to_float(y, b), c)

    def floats(x: Array, y: Array, c: Array) -> Array:
        width = f"u{ELEMENT_BYTES[a]}"
        return tensor_core.multiply_add(
            tensor_core.operand(to_float(x.view(width), a), a), tensor_core.operand(to_float(y.view(width), b), b), c
        )

    return floats


def integers(raw: Array, kind: str) -> Array:
    if kind in ("s8", "u8"):
        return raw.view("i1" if kind == "s8" else "u1").astype(np.int64)
    nibbles = np.stack([raw & 15, raw >> 4], axis=-1).reshape(len(raw), -1).astype(np.int64)
    return np.where(nibbles > 7, nibbles - 16, nibbles) if kind == "s4" else nibbles


def integer_sum(product: Array, c: Array, saturate: bool) -> Array:
    total = product + c
    return (np.clip(total, -(2**31), 2**31 - 1) if saturate else total).astype(np.int32)


def bit_counts(x: Array, y: Array, xor: bool) -> Array:
    pairs = x[:, None, :] ^ y[None, :, :] if xor else x[:, None, :] & y[None, :, :]
    return np.bitwise_count(pairs).sum(-1).astype(np.int32)


def through_halves(x: Array, y: Array, c: Array) -> Array:
    """fp8 on Hopper: ptxas makes f16 of the factors, multiplies the even pairs along K, adds the odd pairs, and adds C at the end."""
    left, right = tensor_core.operand(x, "f16"), tensor_core.operand(y, "f16")
    total = np.zeros_like(c)
    for pair in (0, 2):
        places = [k for k in range(x.shape[1]) if k & 2 == pair]
        total = tensor_core.multiply_add(left.part(places), right.part(places), total)
    with np.errstate(all="ignore"):
        return tensor_core.quiet(total + c)


def double(x: Array, y: Array, c: Array) -> Array:
    """One fused multiply-add after the other along K."""
    left, right = x.view(np.float64), y.view(np.float64)
    total: Array = c.reshape(-1)
    with np.errstate(all="ignore"):
        for k in range(left.shape[1]):
            first, second = np.broadcast_arrays(left[:, k, None], right[None, :, k])
            total = fma64(first.reshape(-1), second.reshape(-1), total)
    return total.reshape(c.shape)
