"""Roundings and narrow floating-point formats, in primitives.

PTX manual, "Floating Point Rounding Modifiers" and "Alternate Floating-Point Data Formats".
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tandem_attn.emulator.codegen.builder import TINY, Builder, Val, size_of


def step(b: Builder, v: Val, up: Val) -> Val:
    """The next number up (where `up` holds) or down; v is f4 or f8 and not NaN."""
    signed = f"i{v.t[1:]}"
    raw = b.bits(v, signed)
    one = b.const(signed, 1)
    positive = b.compare("gt", v, b.const(v.t, 0.0))
    moved = b.select(b.binary("xor", positive, b.not_(up)), b.add(raw, one), b.sub(raw, one))
    smallest_up = b.const(signed, 1)
    smallest_down = b.const(signed, -(1 << 8 * size_of(v.t) - 1) + 1)
    at_zero = b.compare("eq", v, b.const(v.t, 0.0))
    return b.bits(b.select(at_zero, b.select(up, smallest_up, smallest_down), moved), v.t)


def direct(b: Builder, v: Val, error: Val, mode: str) -> Val:
    """v is a result rounded to nearest, `error` has the sign of (exact - v): the result of rounding by `mode` (rm, rp, rz).

    An overflow to infinity comes with an infinite error; an exact infinity with a NaN, and stays.
    """
    zero = b.const(error.t, 0.0)
    below, above = b.compare("lt", error, zero), b.compare("gt", error, zero)
    if mode == "rm":
        move, up = below, b.const("b", 0)
    elif mode == "rp":
        move, up = above, b.const("b", 1)
    else:
        nothing = b.const(v.t, 0.0)
        negative, positive = b.compare("lt", v, nothing), b.compare("gt", v, nothing)
        move, up = b.or_(b.and_(negative, above), b.and_(positive, below)), negative
    return b.select(move, step(b, v, up), v)


def overflowed(b: Builder, v: Val, error: Val, *operands: Val) -> Val:
    """The error of v, infinite where v is and the operands are not."""
    infinity = b.const(v.t, float("inf"))
    over = b.compare("eq", b.unary("abs", v), infinity)
    for x in operands:
        over = b.and_(over, b.compare("lt", b.unary("abs", x), infinity))
    return b.select(over, b.unary("neg", v), error)


def two_sum(b: Builder, x: Val, y: Val) -> tuple[Val, Val]:
    """x + y rounded to nearest, and its exact error (Knuth); of an overflow the error is infinite."""
    s = b.add(x, y)
    part = b.sub(s, x)
    error = b.add(b.sub(x, b.sub(s, part)), b.sub(y, part))
    return s, overflowed(b, s, error, x, y)


def settle(b: Builder, wide: Val, mode: str) -> Val:
    """f8 -> f4 by `mode`; `wide` is exact, or rounded to odd."""
    near = b.cast(wide, "f4")
    return near if mode == "rn" else direct(b, near, b.sub(wide, b.cast(near, "f8")), mode)


def cancelled(b: Builder, out: Val, x: Val, y: Val, mode: str) -> Val:
    """An exact zero sum of numbers of opposite sign is -0 when rounding down."""
    if mode != "rm":
        return out
    signed = f"i{x.t[1:]}"
    opposite = b.compare("lt", b.binary("xor", b.bits(x, signed), b.bits(y, signed)), b.const(signed, 0))
    return b.select(b.and_(b.compare("eq", b.add(x, y), b.const(x.t, 0.0)), opposite), b.const(out.t, -0.0), out)


def add_rounded(b: Builder, x: Val, y: Val, mode: str) -> Val:
    if mode == "rn":
        return b.add(x, y)
    if x.t == "f4":
        wide = b.cast(x, "f8"), b.cast(y, "f8")
        return cancelled(b, settle(b, odd_sum(b, *wide), mode), *wide, mode)
    s, error = two_sum(b, x, y)
    return cancelled(b, direct(b, s, error, mode), x, y, mode)


def mul_rounded(b: Builder, x: Val, y: Val, mode: str) -> Val:
    if mode == "rn":
        return b.mul(x, y)
    if x.t == "f4":
        return settle(b, b.mul(b.cast(x, "f8"), b.cast(y, "f8")), mode)
    product = b.mul(x, y)
    # A product below 2^-900 and its factors (then below 2^174) are scaled up, so that the error does not underflow.
    up = b.select(b.compare("lt", b.unary("abs", product), b.const("f8", 2.0**-900)), b.const("f8", 2.0**600), b.const("f8", 1.0))
    whole = b.mul(b.mul(product, up), up)
    error = b.fma(b.mul(x, up), b.mul(y, up), b.unary("neg", whole))
    return direct(b, product, overflowed(b, product, error, x, y), mode)


def div_rounded(b: Builder, x: Val, y: Val, mode: str) -> Val:
    """The sign of the remainder tells on which side of the quotient the exact one lies (Markstein)."""
    if mode == "rn":
        return b.binary("div", x, y)
    if x.t == "f4":
        wide = b.cast(x, "f8"), b.cast(y, "f8")
        quotient = b.binary("div", *wide)
        return settle(b, odd(b, quotient, remainder(b, quotient, *wide)), mode)
    quotient = b.binary("div", x, y)
    error = overflowed(b, quotient, remainder(b, quotient, x, y), x, b.binary("div", b.const("f8", 1.0), y))
    return direct(b, quotient, error, mode)


def remainder(b: Builder, quotient: Val, x: Val, y: Val) -> Val:
    """f8 with the sign of x / y - quotient; small x are scaled up, so that it does not underflow."""
    up = b.select(b.compare("lt", b.unary("abs", x), b.const("f8", 2.0**-700)), b.const("f8", 2.0**300), b.const("f8", 1.0))
    rest = b.fma(b.mul(quotient, up), y, b.unary("neg", b.mul(x, up)))
    return b.select(b.compare("lt", y, b.const("f8", 0.0)), rest, b.unary("neg", rest))


def sqrt_rounded(b: Builder, x: Val, mode: str) -> Val:
    if mode == "rn":
        return b.unary("sqrt", x)
    wide = b.cast(x, "f8")
    root = b.unary("sqrt", wide)
    up = b.select(b.compare("lt", wide, b.const("f8", 2.0**-400)), b.const("f8", 2.0**200), b.const("f8", 1.0))
    scaled = b.mul(root, up)
    error = b.unary("neg", b.fma(scaled, scaled, b.unary("neg", b.mul(b.mul(wide, up), up))))
    return settle(b, odd(b, root, error), mode) if x.t == "f4" else direct(b, root, error, mode)


def odd(b: Builder, v: Val, error: Val) -> Val:
    """v (f8, rounded to nearest) rounded to odd: what a later rounding to fewer bits sees is as good as exact (Boldo, Melquiond)."""
    even = b.compare("eq", b.and_(b.bits(v, "i8"), b.const("i8", 1)), b.const("i8", 0))
    inexact = b.and_(b.compare("ne", error, b.const("f8", 0.0)), b.not_(b.is_nan(error)))
    return b.select(b.and_(even, inexact), step(b, v, b.compare("gt", error, b.const("f8", 0.0))), v)


def odd_sum(b: Builder, x: Val, y: Val) -> Val:
    """x + y (f8) rounded to odd."""
    return odd(b, *two_sum(b, x, y))


def fma_rounded(b: Builder, x: Val, y: Val, z: Val, mode: str) -> Val:
    if mode == "rn":
        return b.fma(x, y, z)
    if x.t == "f4":
        product, addend = b.mul(b.cast(x, "f8"), b.cast(y, "f8")), b.cast(z, "f8")
        return cancelled(b, settle(b, odd_sum(b, product, addend), mode), product, addend, mode)
    near = b.fma(x, y, z)
    error = overflowed(b, near, fma_error(b, x, y, z, near), x, y, z)
    return cancelled(b, direct(b, near, error, mode), b.mul(x, y), z, mode)


LIFT = 2.0**64  # brings numbers around 2^-126 to where nothing is subnormal


def mul_flushed(b: Builder, x: Val, y: Val, mode: str) -> Val:
    """x * y with .ftz; x and y are f4 and not subnormal.

    A result counts as subnormal when rounding with an unbounded exponent would leave it below 2^-126, though rounding to the multiples
    of 2^-149 may have made it 2^-126 (seen on an H200; IEEE 754 calls it tininess after rounding). Sums of two are exact there.
    """
    out = mul_rounded(b, x, y, mode)
    return _flushed(b, "flush_product", mode, _flush_product, out, x, y)


def fma_flushed(b: Builder, x: Val, y: Val, z: Val, mode: str) -> Val:
    """x * y + z with .ftz, as `mul_flushed`."""
    out = fma_rounded(b, x, y, z, mode)
    return _flushed(b, "flush_sum", mode, _flush_sum, out, x, y, z)


def _flushed(b: Builder, name: str, mode: str, composition: Callable[..., Val], *values: Val) -> Val:
    out = b.shorter(name, composition, *values) if mode == "rn" else composition(b, *values, mode=mode)
    out.flushed = True
    return out


def _flush_product(b: Builder, out: Val, x: Val, y: Val, mode: str = "rn") -> Val:
    # Where a lifted operand overflows the result is either zero or far from subnormal.
    return _zero_below(b, out, mul_rounded(b, b.mul(x, b.const("f4", LIFT)), y, mode))


def _flush_sum(b: Builder, out: Val, x: Val, y: Val, z: Val, mode: str = "rn") -> Val:
    lift = b.const("f4", LIFT)
    return _zero_below(b, out, fma_rounded(b, b.mul(x, lift), y, b.mul(z, lift), mode))


def _zero_below(b: Builder, out: Val, lifted: Val) -> Val:
    return b.zero_where(b.compare("lt", b.unary("abs", lifted), b.const("f4", TINY["f4"] * LIFT)), out)


def fma_error(b: Builder, x: Val, y: Val, z: Val, near: Val) -> Val:
    """f8 with the sign of x y + z - near.

    The error of a fused multiply-add is the sum of two numbers (Boldo, Muller). A product that underflows is scaled up together with z, or
    beside a large z replaced by another that is as negligible.
    """
    zero, one = b.const("f8", 0.0), b.const("f8", 1.0)
    nonzero = b.and_(b.compare("ne", x, zero), b.compare("ne", y, zero))
    tiny = b.and_(b.compare("lt", b.unary("abs", b.mul(x, y)), b.const("f8", 2.0**-900)), nonzero)
    scale = b.and_(tiny, b.compare("lt", b.unary("abs", z), b.const("f8", 2.0**-200)))
    replace = b.and_(tiny, b.not_(scale))
    up = b.select(scale, b.const("f8", 2.0**600), one)

    def stand_in(v: Val) -> Val:
        small = b.select(b.compare("lt", v, zero), b.const("f8", -(2.0**-400)), b.const("f8", 2.0**-400))
        return b.select(replace, small, b.mul(v, up))

    x, y, z, near = stand_in(x), stand_in(y), b.mul(b.mul(z, up), up), b.mul(b.mul(near, up), up)
    product = b.mul(x, y)
    low = b.fma(x, y, b.unary("neg", product))
    first, first_error = two_sum(b, z, low)
    second, second_error = two_sum(b, product, first)
    return b.add(b.add(b.sub(second, near), second_error), first_error)


@dataclass(frozen=True, slots=True)
class Format:
    """A narrow format: exponent and mantissa bits; `finite`: e4m3 has NaN but no infinity; `none`: e2m1, e3m2, e2m3 have neither."""

    bits: int
    exponent: int
    mantissa: int
    finite: bool = False
    none: bool = False

    @property
    def bias(self) -> int:
        return (1 << self.exponent - 1) - 1

    @property
    def top(self) -> int:
        """Encoding of the largest finite number."""
        if self.none:
            return (1 << self.bits - 1) - 1
        if self.finite:
            return (1 << self.bits - 1) - 2
        return (((1 << self.exponent) - 1) << self.mantissa) - 1

    @property
    def infinity(self) -> int:
        return ((1 << self.exponent) - 1) << self.mantissa

    @property
    def nan(self) -> int:
        return (1 << self.bits - 1) - 1


FORMATS = {
    "bf16": Format(16, 8, 7),
    "f16": Format(16, 5, 10),
    "tf32": Format(19, 8, 10),
    "e4m3": Format(8, 4, 3, finite=True),
    "e5m2": Format(8, 5, 2),
    "e2m1": Format(4, 2, 1, none=True),
    "e3m2": Format(6, 3, 2, none=True),
    "e2m3": Format(6, 2, 3, none=True),
}


def encode(b: Builder, v: Val, fmt: Format, mode: str = "rn", saturate: bool = False) -> Val:
    """f4 -> the format's bits in a u4, by integer arithmetic on the encoding. Modes rn, rna, rz, rm, rp."""
    raw = b.bits(b.trusted(v), "u4")
    magnitude = b.and_(raw, b.const("u4", 0x7FFFFFFF))
    drop = 23 - fmt.mantissa
    # Below the format's normal range the mantissa is shifted further: drop + (1 - e) bits, the hidden bit made explicit.
    rebias = (127 - fmt.bias) << 23
    if fmt.exponent == 8:
        body, shift = magnitude, b.const("u4", drop)
    else:
        exponent = b.binary("shr", magnitude, b.const("u4", 23))
        lowest = b.const("u4", 128 - fmt.bias)
        small = b.compare("lt", exponent, lowest)
        explicit = b.or_(b.and_(magnitude, b.const("u4", 0x7FFFFF)), b.const("u4", 0x800000))
        distance = b.binary("min", b.sub(lowest, exponent), b.const("u4", 30 - drop))
        normal = b.sub(magnitude, b.const("u4", rebias))
        body = b.select(small, explicit, normal)
        shift = b.select(small, b.add(distance, b.const("u4", drop)), b.const("u4", drop))
    rounded = _round_shift(b, body, shift, mode, raw)
    nan = b.compare("gt", magnitude, b.const("u4", 0x7F800000))
    infinite = b.compare("eq", magnitude, b.const("u4", 0x7F800000))
    if fmt.exponent != 8:
        huge = b.compare("gt", magnitude, b.const("u4", rebias + ((fmt.top + 1) << drop)))
        rounded = b.select(huge, b.const("u4", fmt.top + 1), rounded)
    return _limits(b, raw, rounded, fmt, saturate, nan, infinite, mode)


def _round_shift(b: Builder, body: Val, shift: Val, mode: str, raw: Val) -> Val:
    one = b.const("u4", 1)
    kept = b.binary("shr", body, shift)
    if mode == "rz":
        return kept
    half = b.binary("shl", one, b.sub(shift, one))
    if mode == "rna":
        return b.binary("shr", b.add(body, half), shift)
    if mode in ("rm", "rp"):  # away from zero on one side
        rest = b.sub(b.binary("shl", one, shift), one)
        nonzero = b.compare("ne", b.binary("shl", raw, one), b.const("u4", 0))
        return b.select(b.and_(away(b, raw, mode), nonzero), b.binary("shr", b.add(body, rest), shift), kept)
    return b.binary("shr", b.add(b.add(body, b.sub(half, one)), b.and_(kept, one)), shift)


def away(b: Builder, raw: Val, mode: str) -> Val:
    """Whether .rm or .rp rounds a number (f4 bits) away from zero."""
    return b.compare("lt" if mode == "rm" else "gt", b.bits(raw, "i4"), b.const("i4", 0))


def _limits(b: Builder, raw: Val, rounded: Val, fmt: Format, saturate: bool, nan: Val, infinite: Val, mode: str) -> Val:
    top = b.const("u4", fmt.top)
    over = b.compare("gt", rounded, top)
    limit = top if saturate or fmt.none else b.const("u4", fmt.nan if fmt.finite else fmt.infinity)
    limited = b.select(b.or_(over, infinite), limit, rounded)
    if mode in ("rz", "rm", "rp") and not saturate and not fmt.finite and not fmt.none:
        cut = b.select(infinite, limit, b.binary("min", rounded, top))
        limited = cut if mode == "rz" else b.select(away(b, raw, mode), limited, cut)
    sign = b.binary("shl", b.binary("shr", raw, b.const("u4", 31)), b.const("u4", fmt.bits - 1))
    signed = b.or_(limited, sign)
    if fmt.none:  # NaN becomes the largest positive number
        return b.select(nan, top, signed)
    return b.select(nan, b.const("u4", fmt.nan), signed)


def decode(b: Builder, v: Val, fmt: Format) -> Val:
    """The format's bits in a u4 -> f4, exact."""
    sign = b.binary("shl", b.binary("shr", v, b.const("u4", fmt.bits - 1)), b.const("u4", 31))
    magnitude = b.and_(v, b.const("u4", (1 << fmt.bits - 1) - 1))
    drop = 23 - fmt.mantissa
    placed = b.binary("shl", magnitude, b.const("u4", drop))
    if fmt.exponent == 8:
        return b.bits(b.or_(placed, sign), "f4")
    # Read as a number of exponent bias 127 and scale by the difference: exact, subnormal numbers included.
    scaled = b.mul(b.bits(placed, "f4"), b.const("f4", 2.0 ** (127 - fmt.bias)))
    out = b.bits(scaled, "u4")
    if not fmt.none:
        special = b.const("u4", fmt.infinity if not fmt.finite else fmt.nan)
        is_special = b.compare("ge" if not fmt.finite else "eq", magnitude, special)
        keep = b.or_(b.const("u4", 0x7F800000), b.and_(placed, b.const("u4", 0x7FFFFF)))
        if fmt.finite:
            keep = b.const("u4", 0x7FFFFFFF)
        out = b.select(is_special, keep, out)
    return b.bits(b.or_(out, sign), "f4")


def flush_half(b: Builder, v: Val, result: bool = False) -> Val:
    """f4 with the value of an f16, or an f16's result before it is rounded: what is subnormal becomes zero of its sign.

    A result is subnormal when rounding with more exponents would leave it below 2^-14 (seen on an H200).
    """
    small = b.compare("lt", b.unary("abs", v), b.const("f4", 2.0**-14 * (1 - 2.0**-12) if result else 2.0**-14))
    raw = b.bits(b.trusted(v), "u4")
    return b.bits(b.select(small, b.and_(raw, b.const("u4", 1 << 31)), raw), "f4")
