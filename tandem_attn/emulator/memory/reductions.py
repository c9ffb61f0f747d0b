"""How atomics and reducing copies combine elements. PTX manual, "atom", "red", "cp.reduce.async.bulk"; NaNs as on an H200."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
_INTEGER = {"add": np.add, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}
_DTYPE = {"u8": "u1", "u16": "u2", "u32": "u4", "s32": "i4", "u64": "u8", "s64": "i8", "f16": "f2", "f32": "f4", "f64": "f8"}
_NAN16, _NAN32 = np.uint16(0x7FFF), np.uint32(0x7FFFFFFF)


def combine(op: str, kind: str, old: Array, new: Array, ftz: bool = False) -> Array:
    """old op new on raw words; `kind` is the PTX element type (b32 and the like are unsigned).

    ftz: an addition of f32 flushes subnormal numbers, as the memory system's own adder does.
    """
    words = np.dtype(f"u{old.dtype.itemsize}")
    a, b = np.ascontiguousarray(old).view(words), np.ascontiguousarray(new).view(words)
    if op in ("inc", "dec"):
        out = count(op, a, b)
    elif kind in ("f16", "bf16"):
        out = halves(op, kind, a, b)
    elif kind == "f32":
        out = singles(op, a, b, ftz)
    elif kind == "f64":
        out = doubles(op, a, b)
    else:
        t = _DTYPE.get(kind, words.str)
        out = np.asarray(_INTEGER[op](a.view(t), b.view(t)), t).view(words)
    return out.view(old.dtype)


def count(op: str, held: Array, bound: Array) -> Array:
    one = held.dtype.type(1)
    if op == "inc":
        return np.where(held >= bound, held * 0, held + one)
    return np.where((held == 0) | (held > bound), bound, held - one)


def number(op: str, a: Array, b: Array, bits_a: Array, bits_b: Array) -> Array:
    """The bits of min or max: a NaN loses against a number, -0 is below +0."""
    with np.errstate(invalid="ignore"):
        first = a < b if op == "min" else a > b
    top = bits_a.dtype.type(1 << (8 * bits_a.dtype.itemsize - 1))
    tie = a == b
    zero = bits_a | (bits_b & top) if op == "min" else bits_a & (bits_b | ~top)
    out = np.where(first, bits_a, bits_b)
    out = np.where(tie, zero, out)
    out = np.where(np.isnan(a), bits_b, out)
    return np.where(np.isnan(b), bits_a, out)


def halves(op: str, kind: str, a: Array, b: Array) -> Array:
    """f16 and bf16: every NaN that comes out is 0x7fff."""
    if kind == "f16":
        x, y = a.view(np.float16).astype(np.float32), b.view(np.float16).astype(np.float32)
    else:
        x, y = ((v.astype(np.uint32) << np.uint32(16)).view(np.float32) for v in (a, b))
    if op != "add":
        return np.where(np.isnan(x) & np.isnan(y), _NAN16, number(op, x, y, a, b))
    with np.errstate(all="ignore"):
        total = x + y
        out = total.astype(np.float16).view(np.uint16) if kind == "f16" else round_bf16(total)
    return np.where(np.isnan(total), _NAN16, out)


def singles(op: str, a: Array, b: Array, ftz: bool) -> Array:
    x, y = a.view(np.float32), b.view(np.float32)
    if op != "add":
        return np.where(np.isnan(x) & np.isnan(y), _NAN32, number(op, x, y, a, b))
    if ftz:
        x, y = flushed(a).view(np.float32), flushed(b).view(np.float32)
    with np.errstate(all="ignore"):
        total = np.asarray(x + y, np.float32)
    out = np.where(np.isnan(total), _NAN32, total.view(np.uint32))
    return flushed(out) if ftz else out


def doubles(op: str, a: Array, b: Array) -> Array:
    """An operand that is a NaN is the result as it is, signalling or not."""
    x, y = a.view(np.float64), b.view(np.float64)
    if op != "add":
        return number(op, x, y, a, b)
    with np.errstate(all="ignore"):
        out = np.asarray(x + y, np.float64).view(np.uint64)
    return np.where(np.isnan(y), b, np.where(np.isnan(x), a, out))


def flushed(words: Array) -> Array:
    return np.where(words & np.uint32(0x7F800000) == 0, words & np.uint32(0x80000000), words)


def round_bf16(x: Array) -> Array:
    """f4 -> bf16 bits, to nearest even."""
    raw = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((raw + np.uint32(0x7FFF) + ((raw >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype(np.uint16)
