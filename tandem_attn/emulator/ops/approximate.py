"""The .approx forms. PTX manual, "Floating-Point Instructions: div, rcp, sqrt, rsqrt, sin, cos, lg2, ex2".

ptxas makes each of a few multiplications around one operation of the multifunction unit, which flushes subnormal numbers on both sides. The
same steps are taken here. The unit interpolates in tables (Oberman and Siu, "A high-performance area-efficient multifunction interpolator",
2005): for ex2, lg2, rcp, rsqrt and sqrt so does the emulator; for the others it takes the exact result rounded to nearest.
"""

from __future__ import annotations

from tandem_attn.emulator.codegen.builder import Builder, Val
from tandem_attn.emulator.codegen.rounding import mul_flushed, mul_rounded, settle

SMALLEST, LARGE = 2.0**-126, 2.0**126
PER_TURN = 0.15915493667125702  # 1 / (2 pi) as an f32


def unit(b: Builder, op: str, x: Val) -> Val:
    """An operation of the multifunction unit on an f4."""
    x = b.flush(x)
    if op == "ex2":
        return b.flush(power_of_two(b, x))
    if op in ("sin", "cos"):
        return b.flush(turn(b, op, x))
    if op == "lg2":
        return b.flush(b.select(regular(b, x, op), logarithm_of_normal(b, x), b.unary("log2", x)))
    if op == "rcp":
        ideal = b.binary("div", b.const("f4", 1.0), x)
    else:
        root = b.unary("sqrt", x)
        ideal = root if op == "sqrt" else b.binary("div", b.const("f4", 1.0), root)
    return b.flush(b.select(regular(b, x, op), algebraic(b, op, x), ideal))


def regular(b: Builder, x: Val, op: str) -> Val:
    """Where the result comes from the table: not for 0, infinity, NaN, nor roots of negative numbers, which IEEE arithmetic gives too."""
    size = x if op != "rcp" else b.unary("abs", x)
    return b.and_(b.compare("gt", size, b.const("f4", 0.0)), b.compare("lt", size, b.const("f4", float("inf"))))


def polynomial(b: Builder, table: str, place: Val, low_bits: int) -> Val:
    """The table's polynomial (f8) at the fraction `place` (u4), whose lower bits are the place in a segment."""
    first = b.mul(b.binary("shr", place, b.const("u4", low_bits)), b.const("u4", 3))
    c0, c1, c2 = (b.lookup(table, b.add(first, b.const("u4", i))) for i in range(3))
    u = b.mul(b.cast(b.and_(place, b.const("u4", (1 << low_bits) - 1)), "f8"), b.const("f8", 2.0**-low_bits))
    return b.add(b.add(c0, b.mul(c1, u)), b.mul(b.mul(c2, u), u))


def interpolate(b: Builder, table: str, place: Val, low_bits: int) -> Val:
    """The significand (f8) that the unit finds."""
    return b.unary("floor", b.mul(polynomial(b, table, place, low_bits), b.const("f8", 1 / 256)))


def split(b: Builder, x: Val) -> tuple[Val, Val, Val]:
    """Bits (u4), fraction (u4) and exponent (i8) of a normal f4."""
    raw = b.bits(x, "u4")
    exponent = b.sub(b.cast(b.and_(b.binary("shr", raw, b.const("u4", 23)), b.const("u4", 255)), "i8"), b.const("i8", 127))
    return raw, b.and_(raw, b.const("u4", 0x7FFFFF)), exponent


def logarithm_of_normal(b: Builder, x: Val) -> Val:
    """The exponent plus the table's logarithm of the significand, cut toward zero; 0 for 1 alone."""
    _, fraction, exponent = split(b, x)
    part = b.mul(polynomial(b, "lg2", fraction, 17), b.const("f8", 2.0**-34))
    out = settle(b, b.add(part, b.cast(exponent, "f8")), "rz")
    return b.select(b.compare("eq", x, b.const("f4", 1.0)), b.const("f4", 0.0), out)


def scale(b: Builder, significand: Val, exponent: Val) -> Val:
    """significand (f8) times 2^exponent (i8), as an f4."""
    power = b.bits(b.binary("shl", b.add(exponent, b.const("i8", 1023)), b.const("i8", 52)), "f8")
    return b.cast(b.mul(significand, power), "f4")


def power_of_two(b: Builder, x: Val) -> Val:
    return b.shorter("power_of_two", composed_power_of_two, x)


def composed_power_of_two(b: Builder, x: Val) -> Val:
    """x in fixed point with 23 bits of fraction, cut, a negative one in ones' complement: its fraction goes to the table."""
    nan = b.is_nan(x)
    limited = b.clamp(b.select(nan, b.const("f4", 0.0), x), -500.0, 500.0)
    size = b.cast(b.mul(b.cast(b.unary("abs", limited), "f8"), b.const("f8", 2.0**23)), "i8")
    fixed = b.select(b.compare("lt", limited, b.const("f4", 0.0)), b.not_(size), size)
    place = b.cast(b.and_(fixed, b.const("i8", (1 << 23) - 1)), "u4")
    whole = b.binary("shr", fixed, b.const("i8", 23))
    return b.select(nan, x, scale(b, interpolate(b, "ex2", place, 17), b.sub(whole, b.const("i8", 23))))


def algebraic(b: Builder, op: str, x: Val) -> Val:
    """rcp, rsqrt and sqrt of a normal number: the fraction (and for roots the exponent's lowest bit) goes to the table."""
    raw, fraction, exponent = split(b, x)
    if op == "rcp":
        size = scale(b, interpolate(b, op, fraction, 16), b.sub(b.const("i8", -24), exponent))
        return b.bits(b.or_(b.bits(size, "u4"), b.and_(raw, b.const("u4", 1 << 31))), "f4")
    half = b.binary("shr", exponent, b.const("i8", 1))
    odd = b.cast(b.and_(exponent, b.const("i8", 1)), "u4")
    place = b.or_(fraction, b.binary("shl", odd, b.const("u4", 23)))
    if op == "rsqrt":
        half = b.sub(b.const("i8", -1), half)
    return scale(b, interpolate(b, op, place, 17), b.sub(half, b.const("i8", 23)))


def turn(b: Builder, op: str, x: Val) -> Val:
    """sin or cos of x turns."""
    wide = b.cast(x, "f8")
    part = b.sub(wide, b.unary("rint", wide))
    return b.cast(b.unary(op, b.mul(part, b.const("f8", 6.283185307179586))), "f4")


def scaled(b: Builder, op: str, x: Val, up: float, back: float) -> Val:
    """The operation on an x that is multiplied by `up` where it is subnormal, and the result by `back` then."""
    small = b.compare("lt", b.unary("abs", x), b.const("f4", SMALLEST))
    out = unit(b, op, b.select(small, b.mul(x, b.const("f4", up)), x))
    return b.select(small, b.mul(out, b.const("f4", back)), out)


def square_root(b: Builder, x: Val, ftz: bool) -> Val:
    return unit(b, "sqrt", x) if ftz else scaled(b, "sqrt", x, 2.0**24, 2.0**-12)


def reciprocal_root(b: Builder, x: Val, ftz: bool) -> Val:
    return unit(b, "rsqrt", x) if ftz else scaled(b, "rsqrt", x, 2.0**24, 2.0**12)


def reciprocal(b: Builder, x: Val, ftz: bool) -> Val:
    if ftz:
        return unit(b, "rcp", x)
    factor = b.mul(size_factor(b, x, SMALLEST, 2.0**24), size_factor(b, x, LARGE, 0.25, above=True))
    return b.mul(unit(b, "rcp", b.mul(x, factor)), factor)


def size_factor(b: Builder, x: Val, limit: float, factor: float, above: bool = False) -> Val:
    """`factor` where |x| is below (above) the limit, else 1."""
    hit = b.compare("gt" if above else "lt", b.unary("abs", x), b.const("f4", limit))
    return b.select(hit, b.const("f4", factor), b.const("f4", 1.0))


def quotient(b: Builder, x: Val, y: Val, full: bool, ftz: bool) -> Val:
    """div.approx and div.full; .full keeps large divisors in the unit's range too."""
    one = b.const("f4", 1.0)
    factor = one if ftz else size_factor(b, y, SMALLEST, 2.0**24)
    if full:
        factor = b.mul(factor, size_factor(b, y, LARGE, 0.25, above=True))
    if factor is not one:
        x, y = b.mul(x, factor), b.mul(y, factor)
    return (mul_flushed if ftz else mul_rounded)(b, unit(b, "rcp", y), x, "rn")


def exponential(b: Builder, x: Val, ftz: bool) -> Val:
    """Below -126 the half of x is taken and the result squared, which may be subnormal."""
    if ftz:
        return unit(b, "ex2", x)
    small = b.compare("lt", x, b.const("f4", -126.0))
    out = unit(b, "ex2", b.select(small, b.mul(x, b.const("f4", 0.5)), x))
    return b.select(small, b.mul(out, out), out)


def narrow_exponential(b: Builder, x: Val, kind: str) -> Val:
    """ex2 of f16 and bf16, which is cut to 16 bits afterwards; what f16 cannot hold is infinite."""
    out = power_of_two(b, x)
    return b.select(b.compare("ge", out, b.const("f4", 65536.0)), b.const("f4", float("inf")), out) if kind in ("f16", "f16x2") else out


def logarithm(b: Builder, x: Val, ftz: bool) -> Val:
    if ftz:
        return unit(b, "lg2", x)
    small = b.compare("lt", b.unary("abs", x), b.const("f4", SMALLEST))
    out = unit(b, "lg2", b.select(small, b.mul(x, b.const("f4", 2.0**24)), x))
    return b.select(small, b.sub(out, b.const("f4", 24.0)), out)


def circular(b: Builder, op: str, x: Val) -> Val:
    """The argument becomes turns by a multiplication rounded toward zero."""
    return unit(b, op, mul_rounded(b, x, b.const("f4", PER_TURN), "rz"))


def half_of_double(b: Builder, op: str, x: Val) -> Val:
    """rcp.approx.ftz.f64 and rsqrt.approx.ftz.f64: from the upper 32 bits of x the upper 32 bits of the result; the lower are zero."""
    upper = b.const("u8", 0xFFFFFFFF00000000)
    top = b.flush(b.bits(b.and_(b.bits(x, "u8"), upper), "f8"))
    root = b.unary("sqrt", top) if op == "rsqrt" else top
    exact = b.bits(b.flush(b.binary("div", b.const("f8", 1.0), root)), "u8")
    return b.select(b.is_nan(b.bits(exact, "f8")), b.raw("f8", 0x7FFFFFFF00000000), b.bits(b.and_(exact, upper), "f8"))


def double_root(b: Builder, x: Val) -> Val:
    """rsqrt.approx.f64: one step of a third-order iteration from the unit's result; specials as IEEE arithmetic has them."""
    one = b.const("f8", 1.0)
    small = b.compare("lt", x, b.const("f8", 2.0**-1022))
    normal = b.select(small, b.mul(x, b.const("f8", 2.0**54)), x)
    start = half_of_double(b, "rsqrt", normal)
    error = b.fma(normal, b.unary("neg", b.mul(start, start)), one)
    weight = b.fma(error, b.const("f8", 0.375), b.const("f8", 0.5))
    out = b.fma(weight, b.mul(start, error), start)
    out = b.select(small, b.mul(out, b.const("f8", 2.0**27)), out)
    is_regular = b.and_(b.compare("gt", x, b.const("f8", 0.0)), b.compare("lt", x, b.const("f8", float("inf"))))
    return b.select(is_regular, out, b.binary("div", one, b.unary("sqrt", x)))
