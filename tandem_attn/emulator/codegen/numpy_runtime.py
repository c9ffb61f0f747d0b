"""What generated NumPy code calls: the primitives that are more than one NumPy operation."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tandem_attn.emulator.codegen.unit_tables import TABLES

Array = NDArray[Any]

LANES: NDArray[np.uint32] = np.arange(32, dtype=np.uint32)
_MIDPOINT_MASK, _MIDPOINT = np.uint64(0x1FFFFFFF), np.uint64(0x10000000)
_NO, _YES = bytes([0]), bytes([1])  # looking for a byte is faster than any() and all()
_NORMAL32, _ZERO = np.float32(2.0**-126), np.float32(0)
_LIFT, _LIFTED_NORMAL = np.float32(2.0**64), np.float32(2.0**-62)
_HALF_RANGE = np.float32(500)
_EX2 = np.array(TABLES["ex2"], np.float64).reshape(-1, 3).T.copy()
_NAN = np.array(0x7FFFFFFF, np.uint32).view(np.float32)[()]


def fma32(a: Array, b: Array, c: Array) -> Array:
    """a * b + c rounded once: in double the product is exact and the sum decides, but where it lies on a midpoint of two floats."""
    wide = np.multiply(a, b, dtype=np.float64)
    total = wide + c
    out: Array = total.astype(np.float32)
    doubtful = (total.view(np.uint64) & _MIDPOINT_MASK) == _MIDPOINT
    small = np.abs(out) < _NORMAL32
    doubtful |= small
    if _YES in doubtful.tobytes():
        out[doubtful] = _odd_sum(
            np.broadcast_to(wide, out.shape)[doubtful], np.broadcast_to(c, out.shape)[doubtful].astype(np.float64)
        ).astype(np.float32)
    return out


def _odd_sum(x: Array, y: Array) -> Array:
    """x + y rounded to odd (Boldo, Melquiond: Emulation of FMA and correctly rounded sums)."""
    s = x + y
    part = s - x
    error = (x - (s - part)) + (y - part)
    raw = s.view(np.int64)
    move = (error != 0) & ((raw & 1) == 0) & np.isfinite(s) & np.isfinite(error)
    toward = np.nextafter(s, np.where(error > 0, np.inf, -np.inf))
    return np.where(move, toward, s)


def fmax(a: Array, b: Array) -> Array:
    """The larger number; a NaN loses, -0 is below +0, NaN of two NaNs is canonical."""
    out: Array = np.fmax(a, b)
    return _settle(out, a, b, np.bitwise_and) if _NO in (np.abs(out) > _ZERO).tobytes() else out


def fmin(a: Array, b: Array) -> Array:
    out: Array = np.fmin(a, b)
    return _settle(out, a, b, np.bitwise_or) if _NO in (np.abs(out) > _ZERO).tobytes() else out


def _settle(out: Array, a: Array, b: Array, merge: Any) -> Array:
    merged = merge(a.view(np.uint32), b.view(np.uint32)).view(np.float32)
    out = np.where(a == b, merged, out)
    return np.where(np.isnan(out), _NAN, out)


def flush(a: Array) -> Array:
    """Subnormal numbers become zero of their sign."""
    small = np.abs(a) < _NORMAL32
    return np.where(small, np.copysign(_ZERO, a), a) if _YES in small.tobytes() else a


def flush_product(out: Array, a: Array, b: Array) -> Array:
    """`codegen/rounding.py`: mul_flushed behind the product `out`, the same bits in fewer steps."""
    size = np.abs(out)
    small = size <= _NORMAL32
    if 1 not in small.tobytes():
        return out
    if 1 in (size == _NORMAL32).tobytes():
        small &= np.abs(a * _LIFT * b) < _LIFTED_NORMAL
    return np.where(small, np.copysign(_ZERO, out), out)


def flush_sum(out: Array, a: Array, b: Array, c: Array) -> Array:
    """`codegen/rounding.py`: fma_flushed behind the sum `out`, the same bits in fewer steps."""
    size = np.abs(out)
    small = size <= _NORMAL32
    if 1 not in small.tobytes():
        return out
    if 1 in (size == _NORMAL32).tobytes():
        small &= np.abs(fma32(a * _LIFT, b, c * _LIFT)) < _LIFTED_NORMAL
    return np.where(small, np.copysign(_ZERO, out), out)


def quiet(a: Array) -> Array:
    """Every NaN becomes the chip's."""
    nan = a != a  # noqa: PLR0124 - the fastest test
    return np.where(nan, _NAN, a) if _YES in nan.tobytes() else a


def power_of_two(a: Array) -> Array:
    """`ops/approximate.py`: power_of_two, the same bits in fewer steps."""
    x = np.fmin(np.fmax(a, -_HALF_RANGE), _HALF_RANGE)  # a NaN becomes a number here
    size = (np.abs(x) * np.float64(2.0**23)).astype(np.int64)
    fixed = size ^ -(x < 0).astype(np.int64)
    segment = (fixed >> 17) & 63
    u = (fixed & 0x1FFFF) * 2.0**-17
    total = _EX2[0][segment] + _EX2[1][segment] * u + _EX2[2][segment] * u * u
    # The significand added to the exponent's field: what is too small or too large ends at 0 or infinity.
    bits = (total * (1 / 256)).astype(np.int64) + ((fixed >> 23) + 126 << 23)
    out: Array = np.minimum(np.maximum(bits, 0), 0x7F800000).astype(np.uint32).view(np.float32)
    nan = a != a  # noqa: PLR0124 - the fastest test
    return np.where(nan, a, out) if _YES in nan.tobytes() else out


def fma64(a: Array, b: Array, c: Array) -> Array:
    """a * b + c in double, rounded once (through rational arithmetic: rare in kernels)."""
    out: Array = a * b + c
    a, b, c = (np.broadcast_to(x, out.shape) for x in (a, b, c))
    for i in zip(*np.nonzero(np.isfinite(a) & np.isfinite(b) & np.isfinite(c)), strict=True):
        exact = Fraction(float(a[i])) * Fraction(float(b[i])) + Fraction(float(c[i]))
        if exact:
            try:
                out[i] = float(exact)
            except OverflowError:
                out[i] = np.inf if exact > 0 else -np.inf
    return out


def mulhi32(a: Array, b: Array) -> Array:
    signed = a.dtype.kind == "i"
    wide = np.int64 if signed else np.uint64
    out: Array = ((a.astype(wide) * b.astype(wide)) >> wide(32)).astype(a.dtype)
    return out


def mulhi64(a: Array, b: Array) -> Array:
    a, b = np.broadcast_arrays(a, b)
    return np.array([(int(x) * int(y)) >> 64 for x, y in zip(a.flat, b.flat, strict=True)], dtype=a.dtype).reshape(a.shape)


def divide(a: Array, b: Array) -> Array:
    """Integer division truncated toward zero; the divisor is not zero."""
    if a.dtype.kind == "u":
        return a // b
    quotient: Array = a // b
    inexact = (quotient * b != a) & ((a < 0) != (b < 0))
    return quotient + inexact.astype(a.dtype)


def remainder(a: Array, b: Array) -> Array:
    if a.dtype.kind == "u":
        return a % b
    return a - divide(a, b) * b


def popc(a: Array) -> Array:
    return np.bitwise_count(a).astype(np.uint32)


def clz(a: Array) -> Array:
    bits = a.dtype.itemsize * 8
    out = np.zeros(a.shape, np.uint32)
    rest = a.copy()
    width = bits
    while width > 1:
        width //= 2
        top = rest >> np.array(bits - width, a.dtype) == 0
        out += np.where(top, np.uint32(width), np.uint32(0))
        rest = np.where(top, rest << np.array(width, a.dtype), rest)
    return np.where(a == 0, np.uint32(bits), out)


def brev(a: Array) -> Array:
    size = a.dtype.itemsize
    octets = np.unpackbits(a.view(np.uint8).reshape(-1, size), axis=1, bitorder="little")
    flipped: Array = np.packbits(octets[:, ::-1], axis=1, bitorder="little").copy().view(a.dtype).reshape(a.shape)
    return flipped


def ballot(p: Array) -> Array:
    words: Array = np.packbits(p, axis=-1, bitorder="little").view(np.uint32)
    return np.repeat(words, 32, axis=-1)


def permute(a: Array, index: Array) -> Array:
    """a[index] in each warp."""
    if a.ndim == 1:
        picked: Array = a[index]
        return picked
    return np.take_along_axis(a, np.broadcast_to(index, a.shape), axis=-1)


def exp2(a: Array) -> Array:
    """2^a rounded from double precision."""
    return np.exp2(a, dtype=np.float64).astype(np.float32) if a.dtype == np.float32 else np.exp2(a)


def wide(function: Any, a: Array) -> Array:
    """A function of a float, evaluated in double and rounded."""
    out: Array = function(a, dtype=np.float64).astype(a.dtype)
    return out


def join32(low: Array, high: Array) -> Array:
    out = np.empty((*(low.shape if low.ndim > high.ndim else high.shape), 2), np.uint32)
    out[..., 0] = low
    out[..., 1] = high
    joined: Array = out.view(np.uint64)[..., 0]
    return joined


def join16(low: Array, high: Array) -> Array:
    out = np.empty((*(low.shape if low.ndim > high.ndim else high.shape), 2), np.uint16)
    out[..., 0] = low
    out[..., 1] = high
    joined: Array = out.view(np.uint32)[..., 0]
    return joined
