"""2^x on FMA units: Cody-Waite range reduction and a polynomial, beside the hardware's MUFU.EX2.

``2^x = 2^floor(x) * p(x - floor(x))`` with p close to 2^f on [0, 1) (FlashAttention-4, arXiv 2603.05451, section on software exp2). The
coefficients minimise the largest relative error under p(0) = 1, so that integers, and the row maximum (x = 0) above all, come out exact.
They were rounded to float32 one after the other, the rest fitted anew each time; ``tests/spec/test_exp2.py`` checks them against Remez'
optimum. The scalar model below is the kernel's instruction sequence, rounding by rounding.
"""

from __future__ import annotations

import functools
import itertools
import math
import struct
from dataclasses import dataclass

# c0, c1, ... of p; every literal is a float32 value.
COEFFICIENTS: dict[int, tuple[float, ...]] = {
    3: (1.0, 0.6951168179512024, 0.22764486074447632, 0.07706715166568756),
    4: (1.0, 0.6930448412895203, 0.2412802278995514, 0.05224243924021721, 0.013426698744297028),
    5: (1.0, 0.6931512951850891, 0.2401645928621292, 0.055799514055252075, 0.009017480537295341, 0.0018669525161385536),
}
DEGREES = tuple(COEFFICIENTS)
CLAMP = -127.0  # 2^-127 has exponent field 0: the integer add below then yields +0.0
MAGIC = 1.5 * 2.0**23  # float32 values in [2^23, 2^24) are one apart: an add rounded down leaves floor(x) in the low mantissa bits

_INTERVALS = 1 << 14
_HALF_ULP = 2.0**-24  # relative to the power of two below a value; float32 has 24 significand bits


def exp2_poly(x: float, degree: int = 3) -> float:
    """2^x as the kernel's FMA path computes it.

    Every operation is rounded to float32; -inf and all x <= -127 give 0. Between -127 and -126 the result is a wrong subnormal below 2^-126
    (the hardware's flush-to-zero path has none of these either). NaN gives 0, as ``max.f32`` drops it.

    Args:
        x: exponent; below 128.
        degree: 3, 4 or 5.
    """
    coefficients = _coefficients(degree)
    x = CLAMP if math.isnan(x) else max(round_to_float32(x), CLAMP)  # max.f32 (PTX ISA): a NaN operand loses
    if x >= 128.0:
        raise ValueError(f"x must be below 128 (2^x leaves float32), got {x}")
    whole = round_to_float32(_add_round_down(x, MAGIC) - MAGIC)
    part = round_to_float32(x - whole)
    p = coefficients[-1]
    for c in reversed(coefficients[:-1]):
        p = fma_float32(p, part, c)
    return _float32_from_bits(_bits_of_float32(p) + (int(whole) << 23))


def approximation_error(degree: int) -> float:
    """Upper bound of ``|p(f) / 2^f - 1|`` over [0, 1] in real arithmetic, for the float32 coefficients."""
    return max(_approximation_errors(degree))


def error_bound(degree: int) -> float:
    """Upper bound of the relative error of ``exp2_poly`` for -126 <= x < 128: polynomial, range reduction and float32 Horner roundings."""
    both = zip(_approximation_errors(degree), _rounding_errors(degree), strict=True)
    return max(approximation + rounding * (1 + approximation) for approximation, rounding in both)


@dataclass(frozen=True)
class Exp2Split:
    """Which columns of a score row take the polynomial; all others take MUFU.EX2.

    Columns come in pairs (2i, 2i + 1), the operand of packed f32x2 instructions. Of each ``group_pairs`` pairs the ``fma_pairs`` from
    ``first_pair`` on run on FMA units.
    """

    degree: int = 3
    fma_pairs: int = 0
    group_pairs: int = 16
    first_pair: int = 0

    def __post_init__(self) -> None:
        if self.degree not in COEFFICIENTS:
            raise ValueError(f"exp2.degree must be one of {DEGREES}, got {self.degree!r}")
        for name in ("fma_pairs", "group_pairs", "first_pair"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ValueError(f"exp2.{name} must be an int >= 0, got {value!r}")
        if self.group_pairs < 1 or self.first_pair + self.fma_pairs > self.group_pairs:
            raise ValueError(f"exp2: first_pair + fma_pairs must fit group_pairs >= 1, got {self}")

    @property
    def fraction(self) -> float:
        """Share of the elements on FMA units."""
        return self.fma_pairs / self.group_pairs

    def columns(self, tile_n: int) -> tuple[int, ...]:
        """Column indices of a ``tile_n`` wide score tile that take the polynomial, ascending."""
        chosen = range(self.first_pair, self.first_pair + self.fma_pairs)
        return tuple(column for column in range(tile_n) if (column // 2) % self.group_pairs in chosen)

    def __str__(self) -> str:
        if not self.fma_pairs:
            return "MUFU only"
        last = self.first_pair + self.fma_pairs - 1
        return f"{self.fraction:.2%} on FMA (pairs {self.first_pair}-{last} of {self.group_pairs}, degree {self.degree})"


def fma_float32(a: float, b: float, c: float) -> float:
    """``a * b + c`` of float32 values with one rounding, as ``fma.rn.f32``.

    The product is exact in double. Rounding the double sum to odd (Boldo and Melquiond, 2008) makes the second rounding to float32 the
    only one.
    """
    product = a * b
    total = product + c
    back = total - product
    error = (product - (total - back)) + (c - back)  # two-sum: exactly what the double addition lost
    if error and not _bits_of_double(total) & 1:
        total = math.nextafter(total, math.copysign(math.inf, error))
    return round_to_float32(total)


def round_to_float32(x: float) -> float:
    """The nearest float32; beyond its range, infinity."""
    try:
        return float(struct.unpack("<f", struct.pack("<f", x))[0])
    except OverflowError:
        return math.copysign(math.inf, x)


def _coefficients(degree: int) -> tuple[float, ...]:
    if degree not in COEFFICIENTS:
        raise ValueError(f"degree must be one of {DEGREES}, got {degree!r}")
    return COEFFICIENTS[degree]


def _add_round_down(x: float, magic: float) -> float:
    return math.floor(x) + magic  # add.rm.f32: neighbours are 1 apart around magic, and |x| < 2^22


def _bits_of_float32(x: float) -> int:
    return int(struct.unpack("<i", struct.pack("<f", x))[0])


def _float32_from_bits(bits: int) -> float:
    return float(struct.unpack("<f", struct.pack("<i", bits))[0])


def _bits_of_double(x: float) -> int:
    return int(struct.unpack("<q", struct.pack("<d", x))[0])


def _evaluate(coefficients: tuple[float, ...], f: float) -> float:
    value = 0.0
    for c in reversed(coefficients):
        value = value * f + c
    return value


@functools.cache
def _approximation_errors(degree: int) -> tuple[float, ...]:
    """A bound of the relative error on each of the equal intervals of [0, 1].

    With e(f) = p(f) 2^-f - 1, e'' = 2^-f q(f), q = p'' - 2 ln2 p' + ln2^2 p. Between two points h apart a function leaves its chord by at
    most h^2/8 max|e''|; |q| is at most the sum of its absolute coefficients. 1e-15 covers the double evaluation.
    """
    c = (*_coefficients(degree), 0.0, 0.0)
    ln2 = math.log(2.0)
    q = [(k + 2) * (k + 1) * c[k + 2] - 2 * ln2 * (k + 1) * c[k + 1] + ln2**2 * c[k] for k in range(degree + 1)]
    slack = sum(abs(term) for term in q) / (8 * _INTERVALS**2) + 1e-15
    at = [abs(_evaluate(c, i / _INTERVALS) * 2.0 ** -(i / _INTERVALS) - 1.0) for i in range(_INTERVALS + 1)]
    return tuple(max(left, right) + slack for left, right in itertools.pairwise(at))


@functools.cache
def _rounding_errors(degree: int) -> tuple[float, ...]:
    """A bound of the relative rounding error on each interval: half an ulp a Horner step, carried through the later ones."""
    coefficients = _coefficients(degree)
    bounds = []
    for i in range(_INTERVALS):
        f = (i + 1) / _INTERVALS
        value, error = coefficients[-1], 0.0
        for c in reversed(coefficients[:-1]):
            value = value * f + c  # all coefficients are positive: the right end is the largest
            error = error * f + _HALF_ULP * 2.0 ** math.floor(math.log2(value + error * f))
        # x - floor(x) is exact but for -0.5 < x < 0 (Sterbenz). p'/p is ln 2 to within 1 %.
        reduction = 1.01 * math.log(2.0) * 2.0**-25 if f > 0.5 else 0.0
        bounds.append(error / 2.0 ** (i / _INTERVALS) + reduction)
    return tuple(bounds)
