"""cvt and cvt.pack. PTX manual, "Data Movement and Conversion Instructions: cvt"."""

from __future__ import annotations

from tandem_attn.emulator.codegen.builder import PTX_TYPE, Builder, Val, size_of
from tandem_attn.emulator.codegen.rounding import FORMATS, decode, direct, encode, settle, two_sum
from tandem_attn.emulator.ops import floating
from tandem_attn.emulator.ops.registry import pure
from tandem_attn.emulator.ptx.nodes import Instruction

INTEGERS = frozenset(f"{k}{n}" for k in "us" for n in (8, 16, 32, 64))
FLOATS = frozenset(("f16", "f32", "f64", "bf16"))
PAIRS = {f"{name}x2": name for name in ("f16", "bf16", "e4m3", "e5m2", "e2m1", "e3m2", "e2m3")}


@pure("cvt", section="Data Movement and Conversion Instructions: cvt")
def cvt(b: Builder, ins: Instruction) -> None:
    types = [
        m for m in ins.mods[1:] if m in INTEGERS or m in FLOATS or m in PAIRS or m in ("tf32", "ue8m0x2", "e4m3x4", "e5m2x4", "e2m1x4")
    ]
    if len(types) != 2:
        raise b.unsupported()
    to, source = types
    if to in PAIRS:
        pack_pair(b, ins, PAIRS[to], source)
    elif source in PAIRS:
        raise b.unsupported()
    elif to == "tf32":
        b.write(ins.operands[0], to_tf32(b, ins, b.read(ins.operands[1], "f4")))
    elif to in INTEGERS and source in INTEGERS:
        b.write(ins.operands[0], integer_to_integer(b, ins, to, source))
    elif to in INTEGERS:
        b.write(ins.operands[0], float_to_integer(b, ins, to, source))
    elif source in INTEGERS and to in FLOATS:
        b.write(ins.operands[0], integer_to_float(b, ins, to, source))
    elif to in FLOATS and source in FLOATS:
        b.write(ins.operands[0], float_to_float(b, ins, to, source))
    else:
        raise b.unsupported()


def to_tf32(b: Builder, ins: Instruction, x: Val) -> Val:
    """.rna is an addition and a mask, of which infinity and NaN show only the mask; .satfinite then takes one step from exponent 255."""
    if not ins.has("rna"):
        bits = encode(b, relu(b, ins, x), FORMATS["tf32"], "rz" if ins.has("rz") else "rn", ins.has("satfinite"))
        return b.binary("shl", bits, b.const("u4", 13))
    raw = b.bits(x, "u4")
    finite = b.compare("lt", b.unary("abs", x), b.const("f4", float("inf")))
    out = b.and_(b.select(finite, b.add(raw, b.const("u4", 0x1000)), raw), b.const("u4", 0xFFFFE000))
    if not ins.has("satfinite"):
        return out
    over = b.compare("eq", b.and_(out, b.const("u4", 0x7F800000)), b.const("u4", 0x7F800000))
    return b.select(over, b.sub(out, b.const("u4", 0x2000)), out)


def read_source(b: Builder, ins: Instruction, kind: str) -> Val:
    """The source; a register wider than the type is truncated ("Operand Size Exceeding Instruction-Type Size")."""
    return b.read(ins.operands[1], PTX_TYPE[kind])


def relu(b: Builder, ins: Instruction, v: Val) -> Val:
    return floating.relu(b, v) if ins.has("relu") else v


def pack_pair(b: Builder, ins: Instruction, to: str, source: str) -> None:
    fmt = FORMATS[to]
    mode = "rz" if ins.has("rz") else "rn"
    saturate = ins.has("satfinite")
    if source == "f32":
        if ins.has("rs"):
            raise b.unsupported("stochastic rounding is not executed")
        high, low = (relu(b, ins, b.read(o, "f4")) for o in ins.operands[1:3])
    elif source in PAIRS:
        inner = FORMATS[PAIRS[source]]
        raw = b.read(ins.operands[1], "u4" if inner.bits == 16 else "u2")
        both = b.cast(raw, "u4")
        mask = b.const("u4", (1 << inner.bits) - 1)
        step = 8 if inner.bits < 16 else 16
        step = 4 if inner.bits == 4 else step
        low = decode(b, b.and_(both, mask), inner)
        high = decode(b, b.and_(b.binary("shr", both, b.const("u4", step)), mask), inner)
        low, high = relu(b, ins, low), relu(b, ins, high)
    else:
        raise b.unsupported()
    parts = [encode(b, v, fmt, mode, saturate) for v in (low, high)]
    step = {16: 16, 4: 4}.get(fmt.bits, 8)
    packed = b.or_(parts[0], b.binary("shl", parts[1], b.const("u4", step)))
    b.write(ins.operands[0], packed if step == 16 else b.cast(packed, "u2"))


def integer_to_integer(b: Builder, ins: Instruction, to: str, source: str) -> Val:
    v = read_source(b, ins, source)
    t = PTX_TYPE[to]
    if ins.has("sat"):
        v = saturate_integer(b, v, t)
    return b.cast(v, t)


def saturate_integer(b: Builder, v: Val, t: str) -> Val:
    """Clamp an integer to the range of t, in its own type."""
    width, source_width = 8 * size_of(t), 8 * size_of(v.t)
    low, high = (-(1 << width - 1), (1 << width - 1) - 1) if t[0] == "i" else (0, (1 << width) - 1)
    own_low, own_high = (-(1 << source_width - 1), (1 << source_width - 1) - 1) if v.t[0] == "i" else (0, (1 << source_width) - 1)
    return b.clamp(v, max(low, own_low), min(high, own_high))


def float_to_integer(b: Builder, ins: Instruction, to: str, source: str) -> Val:
    """Out of range saturates; NaN gives 0, but the top bit alone in 64-bit integers and from f64 (seen on an H200)."""
    v = as_float(b, ins, source)
    if ins.has("ftz") and source == "f32":
        v = b.flush(v)
    op = "rint" if ins.has("rni") else "floor" if ins.has("rmi") else "ceil" if ins.has("rpi") else "trunc"
    wide = b.unary(op, b.cast(v, "f8"))
    t = PTX_TYPE[to]
    width = 8 * size_of(t)
    low, high = (-(2.0 ** (width - 1)), 2.0 ** (width - 1)) if t[0] == "i" else (0.0, 2.0**width)
    top = (1 << width - 1) - 1 if t[0] == "i" else (1 << width) - 1
    bottom = -(1 << width - 1) if t[0] == "i" else 0
    inside = b.and_(b.compare("ge", wide, b.const("f8", low)), b.compare("lt", wide, b.const("f8", high)))
    safe = b.select(inside, wide, b.const("f8", 0.0))
    out = b.cast(safe, t) if width == 64 else b.cast(b.cast(safe, "i8"), t)
    out = b.select(b.compare("ge", wide, b.const("f8", high)), b.const(t, top), out)
    out = b.select(b.compare("lt", wide, b.const("f8", low)), b.const(t, bottom), out)
    return b.select(b.is_nan(wide), b.const(t, 1 << width - 1), out) if width == 64 or source == "f64" else out


def as_float(b: Builder, ins: Instruction, source: str) -> Val:
    v = read_source(b, ins, source)
    return (
        decode(b, b.cast(v, "u4") if source == "bf16" else b.cast(b.bits(v, "u2"), "u4"), FORMATS[source])
        if source in ("f16", "bf16")
        else v
    )


def integer_to_float(b: Builder, ins: Instruction, to: str, source: str) -> Val:
    v = read_source(b, ins, source)
    mode = next((m for m in ins.mods if m in ("rn", "rz", "rm", "rp")), "rn")
    if mode == "rn" and to in ("f32", "f64"):
        return saturate_float(b, ins, b.cast(v, PTX_TYPE[to]))
    if to == "f64":
        if size_of(v.t) < 8:
            return b.cast(v, "f8")
        high = b.mul(b.cast(b.binary("shr", v, b.const(v.t, 32)), "f8"), b.const("f8", 2.0**32))
        low = b.cast(b.and_(b.bits(v, "u8"), b.const("u8", 0xFFFFFFFF)), "f8")
        return direct(b, *two_sum(b, high, low), mode)
    wide = exact_enough(b, v)
    if to == "f32":
        return settle(b, wide, mode)
    return b.cast(encode(b, saturate_float(b, ins, odd_float(b, wide)), FORMATS[to], mode), "u2")


def exact_enough(b: Builder, v: Val) -> Val:
    """An integer as f8 such that rounding to at most 32 bits sees the exact value: low bits of large ones are folded into a sticky bit."""
    if size_of(v.t) < 8:
        return b.cast(v, "f8")
    signed = v.t == "i8"
    negative = b.compare("lt", v, b.const(v.t, 0))
    magnitude = b.bits(b.select(negative, b.sub(b.const(v.t, 0), v), v), "u8") if signed else v
    large = b.compare("ge", magnitude, b.const("u8", 1 << 50))
    rest = b.compare("ne", b.and_(magnitude, b.const("u8", (1 << 16) - 1)), b.const("u8", 0))
    sticky = b.or_(b.binary("shr", magnitude, b.const("u8", 16)), b.select(rest, b.const("u8", 1), b.const("u8", 0)))
    scaled = b.mul(b.cast(sticky, "f8"), b.const("f8", 65536.0))
    out = b.select(large, scaled, b.cast(b.select(large, b.const("u8", 0), magnitude), "f8"))
    return b.select(negative, b.unary("neg", out), out) if signed else out


def float_to_float(b: Builder, ins: Instruction, to: str, source: str) -> Val:
    v = as_float(b, ins, source)
    if ins.has("ftz") and v.t == "f4" and "f32" in (to, source):
        v = b.flush(v)
    integral = next((m for m in ins.mods if m in ("rni", "rzi", "rmi", "rpi")), None)
    if integral:
        v = b.unary({"rni": "rint", "rzi": "trunc", "rmi": "floor", "rpi": "ceil"}[integral], v)
    mode = next((m for m in ins.mods if m in ("rn", "rz", "rm", "rp")), "rn")
    if to in ("f16", "bf16"):
        wide = v
        if v.t == "f8":
            v = odd_float(b, v)
        if ins.has("sat"):
            v = saturate_float(b, ins, v)
        out = encode(b, relu(b, ins, v), FORMATS[to], mode, ins.has("satfinite"))
        return b.cast(out if wide.t == "f4" else b.select(b.is_nan(wide), narrow_nan(b, wide, to), out), "u2")
    if to == "f32" and v.t == "f8":
        wide, v = v, settle(b, v, mode)
        if ins.has("ftz"):
            v = b.flush(v)
        v = b.select(b.is_nan(wide), b.trusted(b.cast(wide, "f4")), b.trusted(v))  # the sign and upper bits of a NaN stay
    elif (source, to) == ("f16", "f32") or ins.has("ftz"):
        v = b.quiet(b.arithmetic(v))
    out = saturate_float(b, ins, relu(b, ins, v))
    return b.cast(out, PTX_TYPE[to])


def narrow_nan(b: Builder, v: Val, to: str) -> Val:
    """f64 to a 16-bit format: the sign and the upper bits of a NaN stay, and it is made quiet."""
    top = b.cast(b.binary("shr", b.bits(v, "u8"), b.const("u8", 32)), "u4")
    sign = b.binary("shr", b.and_(top, b.const("u4", 1 << 31)), b.const("u4", 16))
    mantissa = FORMATS[to].mantissa
    payload = b.binary("shr", b.and_(top, b.const("u4", 0xFFFFF)), b.const("u4", 20 - mantissa))
    return b.or_(b.or_(sign, payload), b.const("u4", FORMATS[to].infinity | 1 << (mantissa - 1)))


def odd_float(b: Builder, v: Val) -> Val:
    """f8 -> f4 rounded to odd."""
    near = b.cast(v, "f4")
    toward_zero = direct(b, near, b.sub(v, b.cast(near, "f8")), "rz")
    inexact = b.and_(b.compare("ne", b.cast(toward_zero, "f8"), v), b.not_(b.is_nan(v)))
    finite = b.compare("lt", b.unary("abs", toward_zero), b.const("f4", float("inf")))
    odd = b.bits(b.or_(b.bits(toward_zero, "u4"), b.const("u4", 1)), "f4")
    return b.select(b.and_(inexact, finite), odd, toward_zero)


def saturate_float(b: Builder, ins: Instruction, v: Val) -> Val:
    return floating.saturate(b, v) if ins.has("sat") else v


@pure("cvt.rn.f16x2.e4m3x2", "cvt.rn.relu.f16x2.e4m3x2", "cvt.rn.f16x2.e5m2x2", "cvt.rn.relu.f16x2.e5m2x2", section="cvt: fp8 to f16")
def fp8_to_half(b: Builder, ins: Instruction) -> None:
    pack_pair(b, ins, "f16", ins.mods[-1])


@pure("cvt.pack", section="Data Movement and Conversion Instructions: cvt.pack")
def cvt_pack(b: Builder, ins: Instruction) -> None:
    """Saturate a and b to narrow integers and pack them: b lowest; with .b32 the rest of c moves up."""
    to, source = ins.mods[3], ins.mods[4]
    t = PTX_TYPE.get(to)
    if t is None or source != "s32":
        raise b.unsupported()
    width = 8 * size_of(t)
    first, second = (
        b.and_(b.bits(saturate_integer(b, b.read(o, "i4"), t), "u4"), b.const("u4", (1 << width) - 1)) for o in ins.operands[1:3]
    )
    out = b.or_(b.binary("shl", first, b.const("u4", width)), second)
    if len(ins.operands) > 3:
        out = b.or_(out, b.binary("shl", b.read(ins.operands[3], "u4"), b.const("u4", 2 * width)))
    b.write(ins.operands[0], out)
