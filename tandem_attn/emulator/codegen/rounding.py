"""Roundings and narrow floating-point formats, in primitives.

PTX manual, "Floating Point Rounding Modifiers" and "Alternate Floating-Point Data Formats".
"""

from __future__ import annotations

from dataclasses import dataclass

from tandem_attn.emulator.codegen.builder import Builder, Val, size_of


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
    """v is a sum or product rounded to nearest, `error` has the sign of (exact - v): the result of rounding by `mode` (rm, rp, rz)."""
    zero = b.const(error.t, 0.0)
    below, above = b.compare("lt", error, zero), b.compare("gt", error, zero)
    finite = b.compare("lt", b.unary("abs", v), b.const(v.t, float("inf")))
    if mode == "rm":
        move, up = below, b.const("b", 0)
    elif mode == "rp":
        move, up = above, b.const("b", 1)
    else:
        negative = b.compare("lt", v, b.const(v.t, 0.0))
        move, up = b.select(negative, above, below), negative
    return b.select(b.and_(move, finite), step(b, v, up), v)


def two_sum(b: Builder, x: Val, y: Val) -> tuple[Val, Val]:
    """x + y rounded to nearest, and its exact error (Knuth)."""
    s = b.add(x, y)
    part = b.sub(s, x)
    return s, b.add(b.sub(x, b.sub(s, part)), b.sub(y, part))


def add_rounded(b: Builder, x: Val, y: Val, mode: str) -> Val:
    if mode == "rn":
        return b.add(x, y)
    s, error = two_sum(b, x, y)
    out = direct(b, s, error, mode)
    if mode == "rm":  # an exact zero sum of opposite numbers is -0 when rounding down
        cancel = b.and_(b.compare("eq", s, b.const(s.t, 0.0)), b.compare("ne", x, b.const(x.t, 0.0)))
        out = b.select(cancel, b.const(s.t, -0.0), out)
    return out


def mul_rounded(b: Builder, x: Val, y: Val, mode: str) -> Val:
    if mode == "rn":
        return b.mul(x, y)
    product = b.mul(x, y)
    return direct(b, product, b.fma(x, y, b.unary("neg", product)), mode)


def odd_sum(b: Builder, x: Val, y: Val) -> Val:
    """x + y (f8) rounded to odd: what a later rounding to fewer bits sees is as good as exact (Boldo, Melquiond)."""
    s, error = two_sum(b, x, y)
    raw = b.bits(s, "i8")
    even = b.compare("eq", b.and_(raw, b.const("i8", 1)), b.const("i8", 0))
    inexact = b.and_(b.compare("ne", error, b.const("f8", 0.0)), b.not_(b.is_nan(error)))
    toward = step(b, s, b.compare("gt", error, b.const("f8", 0.0)))
    return b.select(b.and_(even, inexact), toward, s)


def fma_rounded(b: Builder, x: Val, y: Val, z: Val, mode: str) -> Val:
    if mode == "rn":
        return b.fma(x, y, z)
    if x.t != "f4":
        raise b.unsupported(f"fma.{mode}.f64 is not executed")
    wide = odd_sum(b, b.mul(b.cast(x, "f8"), b.cast(y, "f8")), b.cast(z, "f8"))
    near = b.cast(wide, "f4")
    return direct(b, near, b.sub(wide, b.cast(near, "f8")), mode)


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
    """f4 -> the format's bits in a u4, by integer arithmetic on the encoding. Modes rn, rna, rz."""
    raw = b.bits(v, "u4")
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
    rounded = _round_shift(b, body, shift, mode)
    nan = b.compare("gt", magnitude, b.const("u4", 0x7F800000))
    infinite = b.compare("eq", magnitude, b.const("u4", 0x7F800000))
    if fmt.exponent != 8:
        huge = b.compare("gt", magnitude, b.const("u4", rebias + ((fmt.top + 1) << drop)))
        rounded = b.select(huge, b.const("u4", fmt.top + 1), rounded)
    return _limits(b, raw, rounded, fmt, saturate, nan, infinite, mode)


def _round_shift(b: Builder, body: Val, shift: Val, mode: str) -> Val:
    one = b.const("u4", 1)
    kept = b.binary("shr", body, shift)
    if mode == "rz":
        return kept
    half = b.binary("shl", one, b.sub(shift, one))
    if mode == "rna":
        return b.binary("shr", b.add(body, half), shift)
    odd = b.and_(kept, one)
    return b.binary("shr", b.add(b.add(body, b.sub(half, one)), odd), shift)


def _limits(b: Builder, raw: Val, rounded: Val, fmt: Format, saturate: bool, nan: Val, infinite: Val, mode: str) -> Val:
    top = b.const("u4", fmt.top)
    over = b.compare("gt", rounded, top)
    limit = top if saturate or fmt.none else b.const("u4", fmt.nan if fmt.finite else fmt.infinity)
    limited = b.select(b.or_(over, infinite), limit, rounded)
    if mode == "rz" and not saturate and not fmt.finite and not fmt.none:
        limited = b.select(infinite, limit, b.binary("min", rounded, top))
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
