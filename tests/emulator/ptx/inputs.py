"""Seeded input bytes that are the same on every machine: a hash stream shaped into integers or floats of any format."""

import hashlib
from dataclasses import dataclass

import numpy as np

FLOATS = {"f64": (11, 52), "f32": (8, 23), "f16": (5, 10), "bf16": (8, 7), "e4m3": (4, 3), "e5m2": (5, 2)}
UNSIGNED = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}
FILL = 0xA5  # every byte of an output before the kernel writes it


@dataclass(frozen=True)
class Input:
    """`count` elements of a kind.

    Kinds: s8 ... u64 and b1, b4 (packed in 32 bits): random bits, one in four a special value; f64, f32, f16, bf16, e4m3, e5m2:
    random bits, moderate values and special values mixed; <float>n: moderate values only (for sums that must not overflow);
    <float>w: exponents spread wide (for sums that must be aligned and cut);
    <kind>x2: pairs; divisor.<int>: neither 0 nor -1; lane: 0..47; fill: bytes of 0xA5; zero: zeros;
    raw: `values` as they are.
    """

    kind: str
    count: int
    values: bytes = b""

    @property
    def width(self) -> int:
        """Bits of one element."""
        return width_of(self.kind)

    def make(self, seed: str) -> np.ndarray:
        """The bytes, as a fresh uint8 array."""
        if self.kind == "raw":
            return np.frombuffer(self.values, np.uint8).copy()
        if self.kind in ("fill", "zero"):
            return np.full(self.count, FILL if self.kind == "fill" else 0, np.uint8)
        return _elements(self.kind, seed, self.count).view(np.uint8).copy()


def width_of(kind: str) -> int:
    kind = kind.removeprefix("divisor.")
    if kind.endswith("x2"):
        return 2 * width_of(kind[:-2])
    if kind in ("fill", "zero", "raw"):
        return 8
    if kind in ("lane", "pred", "b1", "b4"):
        return 32
    name = kind.rstrip("nw")
    if name in FLOATS:
        exponent, mantissa = FLOATS[name]
        return 1 + exponent + mantissa
    return int(name[1:])


def random_bits(seed: str, width: int, count: int) -> np.ndarray:
    stream = hashlib.shake_256(seed.encode()).digest(count * width // 8)
    return np.frombuffer(stream, UNSIGNED[width])


def _elements(kind: str, seed: str, count: int) -> np.ndarray:
    if kind.endswith("x2"):
        values = _elements(kind[:-2], seed, 2 * count)
    elif kind.startswith("divisor."):
        values = _divisors(kind.removeprefix("divisor."), seed, count)
    elif kind == "lane":
        values = random_bits(seed, 32, count) % np.uint32(48)
    elif kind == "pred":
        values = random_bits(seed, 32, count) & np.uint32(1)
    elif kind in ("b1", "b4"):
        values = random_bits(seed, 32, count)
    elif kind in FLOATS:
        values = _floats(kind, seed, count)
    elif kind[:-1] in FLOATS:
        values = _moderate(kind[:-1], seed, count) if kind[-1] == "n" else _wide(kind[:-1], seed, count)
    else:
        values = _integers(width_of(kind), seed, count)
    return values


def _divisors(kind: str, seed: str, count: int) -> np.ndarray:
    values = _integers(width_of(kind), seed, count)
    minus_one = np.iinfo(values.dtype).max if kind[0] == "s" else 0
    return np.where((values == 0) | (values == minus_one), values.dtype.type(7), values)


def _integers(width: int, seed: str, count: int) -> np.ndarray:
    dtype = UNSIGNED[width]
    top = 1 << (width - 1)
    special = np.array([0, 1, 2, 3, width - 1, width, width + 1, top, top - 1, top + 1, 2 * top - 1, 2 * top - 2], np.uint64).astype(dtype)
    choice = random_bits(seed + "/choice", 16, count)
    return np.where(choice % 4 == 0, special[(choice // 4) % len(special)], random_bits(seed, width, count))


def _moderate(fmt: str, seed: str, count: int) -> np.ndarray:
    """Random sign and mantissa, exponent -3 .. 0."""
    power = random_bits(seed + "/exponent", 8, count).astype(np.int64) % 4
    return _with_exponent(fmt, seed, -power)


def _wide(fmt: str, seed: str, count: int) -> np.ndarray:
    """Random sign and mantissa, exponent -10 .. 9 or what the format has."""
    spread = min(10, (1 << (FLOATS[fmt][0] - 1)) - 2)
    power = random_bits(seed + "/exponent", 16, count).astype(np.int64) % (2 * spread)
    return _with_exponent(fmt, seed, power - spread)


def _with_exponent(fmt: str, seed: str, power: np.ndarray) -> np.ndarray:
    exponent, mantissa = FLOATS[fmt]
    width = 1 + exponent + mantissa
    bits = random_bits(seed, width, len(power)).astype(np.uint64)
    biased = (power + (1 << (exponent - 1)) - 1).astype(np.uint64)
    keep = np.uint64((1 << (width - 1)) | ((1 << mantissa) - 1))
    return ((bits & keep) | (biased << np.uint64(mantissa))).astype(UNSIGNED[width])


def special_floats(fmt: str) -> np.ndarray:
    """Zeros, infinities, NaNs, subnormals, limits, halves (ties of integer rounding) and limits of the integer types."""
    exponent, mantissa = FLOATS[fmt]
    bias = (1 << (exponent - 1)) - 1
    one = bias << mantissa
    top = ((1 << exponent) - 1) << mantissa
    positive = [0, 1, (1 << mantissa) - 1, 1 << mantissa, one, one + 1, one - 1, top - 1, top, top | 1, top | (1 << (mantissa - 1))]
    positive += [((bias + e) << mantissa) | (1 << (mantissa - 1)) for e in (-2, -1, 0, 1, 2)]  # 0.375 .. 6
    positive += [((bias + e) << mantissa) for e in (-1, 1, 7, 8, 15, 16, 31, 32, 63, 64) if 0 < bias + e < (1 << exponent) - 1]
    sign = 1 << (exponent + mantissa)
    return np.array(positive + [sign | x for x in positive], np.uint64).astype(UNSIGNED[1 + exponent + mantissa])


def _floats(fmt: str, seed: str, count: int) -> np.ndarray:
    exponent, mantissa = FLOATS[fmt]
    special = special_floats(fmt)
    choice = random_bits(seed + "/choice", 16, count)
    raw = random_bits(seed + "/raw", 1 + exponent + mantissa, count)
    values = np.where(choice % 4 == 0, raw, _moderate(fmt, seed, count))
    return np.where(choice % 4 == 1, special[(choice // 4) % len(special)], values)
