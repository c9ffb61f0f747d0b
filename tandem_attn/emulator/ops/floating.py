"""Floating-point instructions, scalar and packed. PTX manual, "Floating-Point", "Half Precision" and "Mixed Precision" instructions."""

from __future__ import annotations

from collections.abc import Callable

from tandem_attn.emulator.codegen.builder import PTX_TYPE, Builder, Val
from tandem_attn.emulator.codegen.rounding import (
    FORMATS,
    add_rounded,
    decode,
    direct,
    div_rounded,
    encode,
    flush_half,
    fma_flushed,
    fma_rounded,
    mul_flushed,
    mul_rounded,
    odd_sum,
    sqrt_rounded,
)
from tandem_attn.emulator.ops import approximate, integer
from tandem_attn.emulator.ops.registry import pure
from tandem_attn.emulator.ptx.nodes import Instruction, Operand

SCALAR = ("f32", "f64", "f16", "bf16")
HALVES = ("f16", "f16x2")
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
    if ins.has("ftz") and ins.mods[-1] not in HALVES:
        v = b.flush(v)
    if ins.has("sat"):
        v = saturate(b, v)
    return relu(b, v) if ins.has("relu") else v


def saturate(b: Builder, v: Val) -> Val:
    """.sat: to 0 .. 1; NaN and -0 become +0."""
    positive = b.compare("gt", v, b.const(v.t, 0.0))
    return b.select(positive, b.binary("min", v, b.const(v.t, 1.0)), b.const(v.t, 0.0))


def relu(b: Builder, v: Val) -> Val:
    """.relu: what is not above zero becomes +0, NaN stays."""
    return b.select(b.compare("le", v, b.const(v.t, 0.0)), b.const(v.t, 0.0), v)


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
        # The bits of a NaN in f32x2 are not known (sm_100 only): they are left as they come.
        b.write(ins.operands[0], b.join(*(b.bits(b.trusted(r), raw) for r in results)))
        return
    if kind not in SCALAR:
        raise b.unsupported(f"type .{kind}")
    b.write(ins.operands[0], one(b, ins, [b.read(o, PTX_TYPE[kind]) for o in operands], kind, compute))


def one(b: Builder, ins: Instruction, values: list[Val], kind: str, compute: Callable[..., Val]) -> Val:
    values = [widen(b, v, kind) for v in values]
    mode = "rz" if ins.has("approx") else "rn"  # the multifunction unit cuts its 16-bit results
    if not ins.has("ftz"):
        return narrow(b, finish(b, ins, compute(*values)), kind, mode)
    if kind != "f16":
        return narrow(b, finish(b, ins, compute(*(b.flush(v) for v in values))), kind, mode)
    return narrow(b, finish(b, ins, flush_half(b, compute(*(flush_half(b, v) for v in values)), result=True)), kind)


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
        minus = ins.name == "sub"
        out = b.sub(x, y) if minus and mode == "rn" else add_rounded(b, x, b.unary("neg", y) if minus else y, mode)
        return second_nan(b, y, out)

    elementwise(b, ins, ins.operands[1:3], compute)


def second_nan(b: Builder, y: Val, out: Val) -> Val:
    """f64: where the second operand is a NaN it is the result, made quiet; its sign is not changed by a subtraction."""
    return b.select(b.is_nan(y), b.add(y, y), out) if y.t == "f8" else out


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
    kind = PACKED.get(ins.mods[-1], ins.mods[-1])

    def compute(x: Val, y: Val) -> Val:
        if ins.has("ftz") and kind == "f32":
            return mul_flushed(b, x, y, mode_of(ins))
        return second_nan(b, y, mul_rounded(b, x, y, mode_of(ins)))

    elementwise(b, ins, ins.operands[1:3], compute)


@pure("fma", "mad.f32", "mad.rn", "mad.rz", "mad.rm", "mad.rp", "mad.ftz", section="Floating-Point Instructions: fma, mad")
def fma(b: Builder, ins: Instruction) -> None:
    if ins.mods[-2:] in (("f32", "bf16"), ("f32", "f16")):
        mixed(b, ins, mode_of(ins))
        return
    kind = PACKED.get(ins.mods[-1], ins.mods[-1])

    def compute(x: Val, y: Val, z: Val) -> Val:
        if kind in ("f16", "bf16"):  # exact product and sum to odd in double, then one rounding to the narrow format through f4
            return narrow_sum(b, x, y, z)
        if ins.has("ftz") and kind == "f32":
            return fma_flushed(b, x, y, z, mode_of(ins))
        return second_nan(b, y, fma_rounded(b, x, y, z, mode_of(ins)))

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
    if not is_float(ins):
        integer.divide(b, ins, "div")
        return

    def compute(x: Val, y: Val) -> Val:
        if ins.mods[1] in ("approx", "full"):
            return approximate.quotient(b, x, y, ins.mods[1] == "full", ins.has("ftz"))
        return div_rounded(b, x, y, mode_of(ins))

    elementwise(b, ins, ins.operands[1:3], compute)


@pure("rcp", "sqrt", "rsqrt", section="Floating-Point Instructions: rcp, sqrt, rsqrt")
def root(b: Builder, ins: Instruction) -> None:
    def compute(x: Val) -> Val:
        if not ins.has("approx"):
            return div_rounded(b, b.const(x.t, 1.0), x, mode_of(ins)) if ins.name == "rcp" else sqrt_rounded(b, x, mode_of(ins))
        if x.t == "f8":
            if ins.name == "rsqrt" and not ins.has("ftz"):
                return approximate.double_root(b, x)
            return approximate.half_of_double(b, ins.name, x)
        form = {"rcp": approximate.reciprocal, "sqrt": approximate.square_root, "rsqrt": approximate.reciprocal_root}[ins.name]
        return form(b, x, ins.has("ftz"))

    elementwise(b, ins, ins.operands[1:2], compute)


@pure("ex2", "lg2", "sin", "cos", "tanh", section="Floating-Point Instructions: ex2, lg2, sin, cos, tanh; Half Precision: ex2, tanh")
def transcendental(b: Builder, ins: Instruction) -> None:
    def compute(x: Val) -> Val:
        if ins.name in ("sin", "cos"):
            return approximate.circular(b, ins.name, x)
        if ins.name == "tanh":
            return b.unary("tanh", x)
        if ins.mods[-1] != "f32":
            return approximate.narrow_exponential(b, x, ins.mods[-1])
        return (approximate.exponential if ins.name == "ex2" else approximate.logarithm)(b, x, ins.has("ftz"))

    elementwise(b, ins, ins.operands[1:2], compute)


@pure("neg", "abs", section="Floating-Point / Integer Arithmetic Instructions: neg, abs")
def sign(b: Builder, ins: Instruction) -> None:
    if not is_float(ins):
        t = integer.type_of(b, ins)
        x = b.read(ins.operands[1], t)
        negated = b.sub(b.const(t, 0), x)
        b.write(ins.operands[0], negated if ins.name == "neg" else b.select(b.compare("lt", x, b.const(t, 0)), negated, x))
        return

    def compute(x: Val) -> Val:
        changed = b.unary(ins.name, x)
        return b.select(b.is_nan(x), b.add(x, x), changed) if x.t == "f8" else changed  # a NaN keeps its sign and is made quiet

    elementwise(b, ins, ins.operands[1:2], compute)


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
            xorsign = b.and_(b.binary("xor", b.bits(b.trusted(x), unsigned), b.bits(b.trusted(y), unsigned)), bit)
        if ins.has("abs"):
            x, y = b.unary("abs", x), b.unary("abs", y)
        out = b.extremum(ins.name, x, y)
        if ins.has("NaN"):
            quiet = 0x7FFFFFFF if x.t == "f4" else 0x7FFFFFFFFFFFFFFF
            out = b.select(b.or_(b.is_nan(x), b.is_nan(y)), b.raw(x.t, quiet), out)
        if xorsign is not None:
            signed = b.bits(b.or_(b.bits(b.unary("abs", out), unsigned), xorsign), x.t)
            out = b.select(b.is_nan(out), out, signed)
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
        "normal": lambda: b.not_(b.or_(subnormal, b.or_(infinite, nan))),  # zero counts as normal
        "subnormal": lambda: subnormal,
    }[ins.mods[1]]()
    b.write(ins.operands[0], outcome)
