"""How Hopper's tensor cores add. The PTX manual leaves order and precision open; this is what an H200 does (docs/emulator_hardware.md).

For one instruction's K: the products are exact; they and the addend are aligned to the largest exponent among them (a product's is the
sum of its factors'), cut toward zero `FRACTION` bits below it and added exactly; the sum is cut to an f32, or rounded to the nearest f16.
Measured with tests/emulator/ptx/probes.py; cf. Fasi et al., "Numerical behavior of NVIDIA tensor cores" (2021), on earlier chips.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from tandem_attn.emulator.codegen import native_tensor_core, native_tensor_core_chain
from tandem_attn.emulator.ops.access import Array

FRACTION = 25
FP8_FRACTION = 13  # wgmma on e4m3 and e5m2, which also leaves 13 bits of mantissa in an f32 sum
F32_MANTISSA, EXACT = 23, 52
F16_NAN, F32_NAN = 0x7FFF, 0x7FFFFFFF
LOWEST = {
    "f16": -14,
    "bf16": -126,
    "tf32": -126,
    "e4m3": -6,
    "e5m2": -14,
    "s8": 0,
    "u8": 0,
    "b1": 0,
}  # exponent of the smallest normal number, and of subnormals
Packed: TypeAlias = tuple[NDArray[np.float32], NDArray[np.int16]]
NOTHING = -700  # exponent of a zero: below that of any product


@dataclass(frozen=True)
class Operand:
    """Factors (rows, K) and their exponents; `largest` is at least the largest exponent."""

    values: NDArray[np.float32]
    exponents: NDArray[np.int16]
    finite: bool
    largest: int

    def negated(self) -> Operand:
        return Operand(-self.values, self.exponents, self.finite, self.largest)

    def part(self, columns: list[int] | slice) -> Operand:
        """Some places along K."""
        return Operand(self.values[:, columns], self.exponents[:, columns], self.finite, self.largest)

    @cached_property
    def packed(self) -> Packed:
        """As the right factor of the compiled product."""
        return native_tensor_core_chain.packed(self.values, self.exponents)


def operand(values: Array, kind: str) -> Operand:
    """A matrix of f4 values of a format, prepared."""
    raw = np.ascontiguousarray(values).view(np.uint32)
    fields = (raw >> np.uint32(23)).astype(np.int16) & np.int16(0xFF)
    exponents = np.maximum(fields - np.int16(127), np.int16(LOWEST[kind]))
    exponents[(raw & np.uint32(0x7FFFFFFF)) == 0] = NOTHING
    return Operand(values, exponents, int(fields.max(initial=0)) < 0xFF, int(exponents.max(initial=NOTHING)))


def joined(parts: list[Operand]) -> Operand:
    """One behind the other along K."""
    if len(parts) == 1:
        return parts[0]
    finite = all(p.finite for p in parts)
    values, exponents = np.concatenate([p.values for p in parts], axis=1), np.concatenate([p.exponents for p in parts], axis=1)
    return Operand(values, exponents, finite, max(p.largest for p in parts))


def accumulate(a: Operand, b: Operand, c: Array, step: int, fraction: int = FRACTION, mantissa: int = F32_MANTISSA) -> Array:
    """Instructions of `step` places along K one after the other: c (M, N) plus a (M, K) times b (N, K) transposed."""
    chain = native_tensor_core_chain
    if c.dtype == np.float32 and a.finite and b.finite and a.largest <= chain.MOST_A and b.largest <= chain.MOST_B and chain.available():
        out = chain.accumulate(a.values, a.exponents, b.packed, c, step, fraction, mantissa)
        if out is not None:
            return out
    for start in range(0, a.values.shape[1], step):
        places = slice(start, start + step)
        c = multiply_add(a.part(places), b.part(places), c, fraction, mantissa)
    return c


def multiply_add(a: Operand, b: Operand, c: Array, fraction: int = FRACTION, mantissa: int = F32_MANTISSA) -> Array:
    """a (M, K) times b (N, K) transposed plus c (M, N), an f4 or f2: the sum in the format of c.

    As machine code where llvmlite is installed.
    """
    half = c.dtype == np.float16
    sum_terms = native_tensor_core.sum_terms if native_tensor_core.available() else sum_terms_numpy
    factors = a.values.astype(np.float64), a.exponents.astype(np.int32), b.values.astype(np.float64), b.exponents.astype(np.int32)
    total = sum_terms(*factors, c.astype(np.float64), fraction, EXACT if half else mantissa)
    with np.errstate(over="ignore"):
        out = total.astype(c.dtype)  # rounds for an f2, is exact (or infinite) for an f4
    return with_specials(a, b, c, out)


def sum_terms_numpy(
    a: NDArray[np.float64], a_exponents: NDArray[np.int32], b: NDArray[np.float64], b_exponents: NDArray[np.int32],
    c: NDArray[np.float64], fraction: int, mantissa: int,
) -> NDArray[np.float64]:  # fmt: skip
    """a (M, K), b (N, K), c (M, N): the aligned and cut terms, added exactly, the sum cut to `mantissa` bits of an f32's range."""
    largest = np.maximum(np.where(c == 0, NOTHING, np.frexp(c)[1] - 1), NOTHING).astype(np.int32)
    for k in range(a.shape[1]):
        np.maximum(largest, a_exponents[:, k, None] + b_exponents[None, :, k], out=largest)
    scale = np.ldexp(1.0, fraction - largest)
    with np.errstate(all="ignore"):  # infinities and NaNs are seen to later
        total = np.trunc(c * scale)
        for k in range(a.shape[1]):
            total += np.trunc(a[:, k, None] * scale * b[None, :, k])
        total /= scale
        kept = (total.view(np.uint64) & np.uint64(-1 << (52 - mantissa) & (1 << 64) - 1)).view(np.float64)
        return np.where(np.abs(total) < 2.0**-126, np.trunc(total * 2.0**149) * 2.0**-149, kept)


def with_specials(a: Operand, b: Operand, c: Array, out: Array) -> Array:
    """Infinities and NaNs as arithmetic has them; a NaN has all bits of its mantissa set."""
    if a.finite and b.finite and np.isfinite(c).all():
        return out
    with np.errstate(all="ignore"):
        plain = np.matmul(a.values.astype(np.float64), b.values.T.astype(np.float64)) + c.astype(np.float64)
    out = np.where(np.isfinite(plain), out, plain.astype(c.dtype))
    return quiet(out)


def quiet(x: Array) -> Array:
    """NaNs as the chip makes them: all bits but the sign set."""
    bits = {np.dtype(np.float16): np.uint16(F16_NAN), np.dtype(np.float32): np.uint32(F32_NAN)}[x.dtype]
    return np.where(np.isnan(x), np.array(bits).view(x.dtype), x)
