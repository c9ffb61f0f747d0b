"""How Hopper's tensor cores add. The PTX manual leaves order and precision open; this is what an H200 does (docs/emulator_hardware.md).

For one instruction's K: the products are exact; they and the addend are aligned to the largest exponent among them (a product's is the
sum of its factors'), cut toward zero `FRACTION` bits below it and added exactly; the sum is cut to an f32, or rounded to the nearest f16.
Measured with tests/emulator/ptx/probes.py; cf. Fasi et al., "Numerical behavior of NVIDIA tensor cores" (2021), on earlier chips.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tandem_attn.emulator.codegen import native_tensor_core
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
NOTHING = -700  # exponent of a zero: below that of any product


@dataclass(frozen=True, slots=True)
class Operand:
    """Factors (rows, K) as f64 and their exponents as i32."""

    values: NDArray[np.float64]
    exponents: NDArray[np.int32]
    finite: bool

    def negated(self) -> Operand:
        return Operand(-self.values, self.exponents, self.finite)

    def part(self, columns: list[int] | slice) -> Operand:
        """Some places along K."""
        return Operand(self.values[:, columns], self.exponents[:, columns], self.finite)


def operand(values: Array, kind: str) -> Operand:
    """A matrix of f4 values of a format, prepared."""
    wide = values.astype(np.float64)
    exponents = np.maximum(np.frexp(wide)[1] - 1, LOWEST[kind]).astype(np.int32)
    return Operand(wide, np.where(wide == 0, NOTHING, exponents).astype(np.int32), bool(np.isfinite(wide).all()))


def joined(parts: list[Operand]) -> Operand:
    """One behind the other along K."""
    if len(parts) == 1:
        return parts[0]
    finite = all(p.finite for p in parts)
    return Operand(np.concatenate([p.values for p in parts], axis=1), np.concatenate([p.exponents for p in parts], axis=1), finite)


def multiply_add(a: Operand, b: Operand, c: Array, fraction: int = FRACTION, mantissa: int = F32_MANTISSA) -> Array:
    """a (M, K) times b (N, K) transposed plus c (M, N), an f4 or f2: the sum in the format of c.

    As machine code where llvmlite is installed.
    """
    half = c.dtype == np.float16
    sum_terms = native_tensor_core.sum_terms if native_tensor_core.available() else sum_terms_numpy
    total = sum_terms(a.values, a.exponents, b.values, b.exponents, c.astype(np.float64), fraction, EXACT if half else mantissa)
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
        plain = np.matmul(a.values, b.values.T) + c.astype(np.float64)
    out = np.where(np.isfinite(plain), out, plain.astype(c.dtype))
    return quiet(out)


def quiet(x: Array) -> Array:
    """NaNs as the chip makes them: all bits but the sign set."""
    bits = {np.dtype(np.float16): np.uint16(F16_NAN), np.dtype(np.float32): np.uint32(F32_NAN)}[x.dtype]
    return np.where(np.isnan(x), np.array(bits).view(x.dtype), x)
