"""The .approx forms. PTX manual, "Floating-Point Instructions: div, rcp, sqrt, rsqrt, sin, cos, lg2, ex2".

ptxas makes each of a few multiplications around one operation of the multifunction unit, which flushes subnormal numbers on both sides. The
same steps are taken here; the unit's own result is the exact one rounded to nearest (docs/emulator_hardware.md says how far the chip is).
"""

from __future__ import annotations

from tandem_attn.emulator.codegen.builder import Builder, Val
from tandem_attn.emulator.codegen.rounding import mul_rounded

SMALLEST, LARGE = 2.0**-126, 2.0**126
PER_TURN = 0.15915493667125702  # 1 / (2 pi) as an f32


def unit(b: Builder, op: str, x: Val) -> Val:
    """An operation of the multifunction unit on an f4."""
    x = b.flush(x)
    if op == "rcp":
        out = b.binary("div", b.const("f4", 1.0), x)
    elif op == "sqrt":
        out = b.unary("sqrt", x)
    elif op == "rsqrt":
        out = b.cast(b.binary("div", b.const("f8", 1.0), b.unary("sqrt", b.cast(x, "f8"))), "f4")
    elif op in ("sin", "cos"):
        out = turn(b, op, x)
    else:
        out = b.unary({"ex2": "exp2", "lg2": "log2"}[op], x)
    return b.flush(out)


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
    return b.mul(unit(b, "rcp", y), x)


def exponential(b: Builder, x: Val, ftz: bool) -> Val:
    """Below -126 the half of x is taken and the result squared, which may be subnormal."""
    if ftz:
        return unit(b, "ex2", x)
    small = b.compare("lt", x, b.const("f4", -126.0))
    out = unit(b, "ex2", b.select(small, b.mul(x, b.const("f4", 0.5)), x))
    return b.select(small, b.mul(out, out), out)


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
    near = b.and_(b.add(exact, b.const("u8", 1 << 31)), upper)
    return b.select(b.is_nan(b.bits(exact, "f8")), b.raw("f8", 0x7FFFFFFF00000000), b.bits(near, "f8"))
