"""Floating-point instructions, scalar and packed. PTX manual, "Floating-Point", "Half Precision" and "Mixed Precision" instructions."""

from __future__ import annotations

from collections.abc import Callable

from tandem_attn.emulator.codegen.builder import PTX_TYPE, Builder, Val
from tandem_attn.emulator.codegen.rounding import FORMATS, add_rounded, decode, direct, encode, fma_rounded, mul_rounded, odd_sum
from tandem_attn.emulator.ops import integer
from tandem_attn.emulator.ops.registry import pure
from tandem_attn.emulator.ptx.nodes import Instruction, Operand

SCALAR = ("f32", "f64", "f16", "bf16")
PACKED = {"f32x2": "f32", "f16x2": "f16", "bf16x2": "bf16"}


def mode_of(ins: Instruction) -> str:
    return next((m for m in ins.mods if m in ("rn", "rz", "rm", "rp")), "rn")


def widen(b: Builder, v: Val, kind: str) -> Val:
    """A scalar's bits -> the f4 or f8 that arithmetic is done in."""
    if kind in ("f16", "bf16"):
        return decode(b, b.cast(b.bits(v, "u2"), "u4"), FORMATS[kind])
    return v


def narrow(b: Builder, v: Val, kind: str, mode: str = "rn") -> Val:
    if kind in ("f16", "bf16"):
        return b.cast(encode(b, v, FORMATS[kind], mode), "u2")
    return v


def finish(b: Builder, ins: Instruction, v: Val) -> Val:
    """.ftz, .sat and .relu on a result in f4 or f8."""
    if ins.has("ftz"):
        v = b.flush(v)
    if ins.has("sat"):
        v = b.binary("min", b.binary("max", v, b.const(v.t, 0.0)), b.const(v.t, 1.0))  # fmax turns NaN into 0, as .sat does
    if ins.has("relu"):
        nan = b.is_nan(v)
        v = b.select(nan, v, b.binary("max", v, b.const(v.t, 0.0)))
    return v


def elementwise(b: Builder, ins: Instruction, operands: tuple[Operand, ...], compute: Callable[..., Val]) -> None:
    """Apply `compute` to each element of the type that the opcode ends in: a scalar, or the two halves of a packed type."""
    kind = ins.mods[-1]
    if kind in PACKED:
        element = PACKED[kind]
        whole = PTX_TYPE[kind]
        parts = [b.split(b.read(o, whole)) for o in operands]
        t = PTX_TYPE[element]
        results = []
        for half in range(2):
            results.append(one(b, ins, [b.bits(p[half], t) for p in parts], element, compute))
        raw = f"u{t[1:]}"
        b.write(ins.operands[0], b.join(*(b.bits(r, raw) for r in results)))
        return
    if kind not in SCALAR:
        raise b.unsupported(f"type .{kind}")
    b.write(ins.operands[0], one(b, ins, [b.read(o, PTX_TYPE[kind]) for o in operands], kind, compute))


def one(b: Builder, ins: Instruction, values: list[Val], kind: str, compute: Callable[..., Val]) -> Val:
    values = [widen(b, v, kind) for v in values]
    if ins.has("ftz"):
        values = [b.flush(v) for v in values]
    out = compute(*values)
    return narrow(b, finish(b, ins, b.canonical(out) if kind == "f32" else out), kind)


def is_float(ins: Instruction) -> bool:
    return ins.mods[-1] in SCALAR or ins.mods[-1] in PACKED


@pure("add", "sub", section="Floating-Point / Integer Arithmetic Instructions: add, sub")
def add(b: Builder, ins: Instruction) -> None:
    if not is_float(ins):
        integer.arithmetic(b, ins, ins.name)
        return
    mode = mode_of(ins)
    if ins.mods[-2:] in (("f32", "bf16"), ("f32", "f16")):
        mixed(b, ins, mode)
        return

    def compute(x: Val, y: Val) -> Val:
        return add_rounded(b, x, b.unary("neg", y) if ins.name == "sub" and mode != "rn" else y, mode) if not plain else b.sub(x, y)

    plain = ins.name == "sub" and mode == "rn"
    elementwise(b, ins, ins.operands[1:3], compute)


def mixed(b: Builder, ins: Instruction, mode: str) -> None:
    """add/sub/fma.f32.bf16: the narrow operands are widened exactly. "Mixed Precision Floating Point Instructions"."""
    kind = ins.mods[-1]
    first = widen(b, b.read(ins.operands[1], "u2"), kind)
    if ins.name == "fma":
        second, third = widen(b, b.read(ins.operands[2], "u2"), kind), b.read(ins.operands[3], "f4")
        out = fma_rounded(b, first, second, third, mode)
    else:
        other = b.read(ins.operands[2], "f4")
        out = add_rounded(b, first, b.unary("neg", other) if ins.name == "sub" else other, mode)
    b.write(ins.operands[0], finish(b, ins, out))


@pure("mul", section="Floating-Point / Integer Arithmetic Instructions: mul")
def mul(b: Builder, ins: Instruction) -> None:
    if not is_float(ins):
        integer.multiply(b, ins)
        return
    elementwise(b, ins, ins.operands[1:3], lambda x, y: mul_rounded(b, x, y, mode_of(ins)))


@pure("fma", "mad.f32", "mad.rn", "mad.rz", "mad.rm", "mad.rp", "mad.ftz", section="Floating-Point Instructions: fma, mad")
def fma(b: Builder, ins: Instruction) -> None:
    if ins.mods[-2:] in (("f32", "bf16"), ("f32", "f16")):
        mixed(b, ins, mode_of(ins))
        return
    kind = PACKED.get(ins.mods[-1], ins.mods[-1])

    def compute(x: Val, y: Val, z: Val) -> Val:
        if kind in ("f16", "bf16"):  # exact product and sum to odd in double, then one rounding to the narrow format through f4
            return narrow_sum(b, x, y, z)
        return fma_rounded(b, x, y, z, mode_of(ins))

    elementwise(b, ins, ins.operands[1:4], compute)


def narrow_sum(b: Builder, x: Val, y: Val, z: Val) -> Val:
    """x * y + z as an f4 rounded to odd, so that the rounding to 16 bits behind it is the only one."""
    product = b.mul(b.cast(x, "f8"), b.cast(y, "f8"))

    wide = odd_sum(b, product, b.cast(z, "f8"))
    near = direct(b, b.cast(wide, "f4"), b.sub(wide, b.cast(b.cast(wide, "f4"), "f8")), "rz")
    raw = b.bits(near, "u4")
    inexact = b.and_(b.compare("ne", wide, b.cast(near, "f8")), b.compare("lt", b.unary("abs", near), b.const("f4", float("inf"))))
    return b.bits(b.select(inexact, b.or_(raw, b.const("u4", 1)), raw), "f4")


@pure("div", section="Floating-Point / Integer Arithmetic Instructions: div")
def div(b: Builder, ins: Instruction) -> None:
    """.rn is IEEE; .approx and .full (2 ulp) are given the IEEE quotient too."""
    if not is_float(ins):
        integer.divide(b, ins, "div")
        return
    elementwise(b, ins, ins.operands[1:3], lambda x, y: quotient(b, x, y, mode_of(ins)))


def quotient(b: Builder, x: Val, y: Val, mode: str) -> Val:
    """x / y; for the directed modes the sign of the remainder decides (Markstein)."""
    near = b.binary("div", x, y)
    if mode == "rn":
        return near
    rest = b.unary("neg", b.fma(near, y, b.unary("neg", x)))
    return direct(b, near, b.select(b.compare("lt", y, b.const(y.t, 0.0)), b.unary("neg", rest), rest), mode)


@pure("rcp", section="Floating-Point Instructions: rcp")
def rcp(b: Builder, ins: Instruction) -> None:
    """.approx is given the IEEE result too."""
    elementwise(b, ins, ins.operands[1:2], lambda x: quotient(b, b.const(x.t, 1.0), x, mode_of(ins)))


@pure("sqrt", section="Floating-Point Instructions: sqrt")
def sqrt(b: Builder, ins: Instruction) -> None:
    def compute(x: Val) -> Val:
        root = b.unary("sqrt", x)
        mode = mode_of(ins)
        return root if mode == "rn" else direct(b, root, b.unary("neg", b.fma(root, root, b.unary("neg", x))), mode)

    elementwise(b, ins, ins.operands[1:2], compute)


@pure("rsqrt", section="Floating-Point Instructions: rsqrt")
def rsqrt(b: Builder, ins: Instruction) -> None:
    def compute(x: Val) -> Val:
        wide = b.cast(x, "f8") if x.t == "f4" else x
        return b.cast(b.binary("div", b.const("f8", 1.0), b.unary("sqrt", wide)), x.t)

    elementwise(b, ins, ins.operands[1:2], compute)


@pure("ex2", "lg2", "sin", "cos", "tanh", section="Floating-Point Instructions: ex2, lg2, sin, cos, tanh; Half Precision: ex2, tanh")
def transcendental(b: Builder, ins: Instruction) -> None:
    """.approx: evaluated in double and rounded; the hardware's tables differ within the manual's error bound."""
    op = {"ex2": "exp2", "lg2": "log2"}.get(ins.name, ins.name)
    elementwise(b, ins, ins.operands[1:2], lambda x: b.unary(op, x))


@pure("neg", "abs", section="Floating-Point / Integer Arithmetic Instructions: neg, abs")
def sign(b: Builder, ins: Instruction) -> None:
    if not is_float(ins):
        t = integer.type_of(b, ins)
        x = b.read(ins.operands[1], t)
        negated = b.sub(b.const(t, 0), x)
        b.write(ins.operands[0], negated if ins.name == "neg" else b.select(b.compare("lt", x, b.const(t, 0)), negated, x))
        return
    kind = ins.mods[-1]
    t = PTX_TYPE[kind]
    unsigned = f"u{t[1:]}"
    bit = {"f32": 1 << 31, "f64": 1 << 63, "f16": 1 << 15, "bf16": 1 << 15, "f16x2": 0x80008000, "bf16x2": 0x80008000}.get(kind)
    if bit is None:
        bit = 0x8000000080000000
    x = b.read(ins.operands[1], t)
    raw = b.bits(b.flush(x) if ins.has("ftz") and kind == "f32" else x, unsigned)
    mask = b.const(unsigned, bit)
    b.write(ins.operands[0], b.bits(b.binary("xor", raw, mask) if ins.name == "neg" else b.and_(raw, b.not_(mask)), t))


@pure("copysign", section="Floating-Point Instructions: copysign")
def copysign(b: Builder, ins: Instruction) -> None:
    t = PTX_TYPE[ins.mods[-1]]
    unsigned = f"u{t[1:]}"
    bit = b.const(unsigned, 1 << 8 * int(t[1:]) - 1)
    from_sign, magnitude = b.read(ins.operands[1], unsigned), b.read(ins.operands[2], unsigned)
    b.write(ins.operands[0], b.bits(b.or_(b.and_(from_sign, bit), b.and_(magnitude, b.not_(bit))), t))


@pure("min", "max", section="Floating-Point / Integer Arithmetic Instructions: min, max")
def extremum(b: Builder, ins: Instruction) -> None:
    """The number where one operand is NaN (with .NaN: NaN); -0 is below +0; up to three operands; .xorsign.abs."""
    if not is_float(ins):
        integer.arithmetic(b, ins, ins.name)
        return

    def pick(x: Val, y: Val) -> Val:
        unsigned = f"u{x.t[1:]}"
        xorsign = None
        if ins.has("xorsign"):
            bit = b.const(unsigned, 1 << 8 * int(x.t[1:]) - 1)
            xorsign = b.and_(b.binary("xor", b.bits(x, unsigned), b.bits(y, unsigned)), bit)
        if ins.has("abs"):
            x, y = b.unary("abs", x), b.unary("abs", y)
        out = b.extremum(ins.name, x, y)
        if ins.has("NaN"):
            quiet = 0x7FFFFFFF if x.t == "f4" else 0x7FFFFFFFFFFFFFFF
            out = b.select(b.or_(b.is_nan(x), b.is_nan(y)), b.raw(x.t, quiet), out)
        if xorsign is not None:
            out = b.bits(b.or_(b.bits(b.unary("abs", out), unsigned), xorsign), x.t)
        return out

    def compute(*values: Val) -> Val:
        out = pick(values[0], values[1])
        return pick(out, values[2]) if len(values) == 3 else out

    elementwise(b, ins, ins.operands[1:], compute)


@pure("testp", section="Floating-Point Instructions: testp")
def testp(b: Builder, ins: Instruction) -> None:
    t = PTX_TYPE[ins.mods[-1]]
    x = b.read(ins.operands[1], t)
    size = b.unary("abs", x)
    infinite = b.compare("eq", size, b.const(t, float("inf")))
    nan = b.is_nan(x)
    tiny = b.const(t, 2.0**-126 if t == "f4" else 2.0**-1022)
    subnormal = b.and_(b.compare("lt", size, tiny), b.compare("gt", size, b.const(t, 0.0)))
    outcome = {
        "finite": lambda: b.not_(b.or_(infinite, nan)),
        "infinite": lambda: infinite,
        "number": lambda: b.not_(nan),
        "notanumber": lambda: nan,
        "normal": lambda: b.and_(b.compare("ge", size, tiny), b.not_(infinite)),
        "subnormal": lambda: subnormal,
    }[ins.mods[1]]()
    b.write(ins.operands[0], outcome)
