"""Integer and logic instructions. PTX manual, "Integer Arithmetic Instructions", "Logic and Shift Instructions", "Extended-Precision"."""

from __future__ import annotations

from tandem_attn.emulator.codegen.builder import PTX_TYPE, Builder, Val, size_of
from tandem_attn.emulator.ops.registry import pure
from tandem_attn.emulator.ptx.nodes import Discard, Instruction, Operand, Pair
from tandem_attn.emulator.ptx.operands import CARRY


def type_of(b: Builder, ins: Instruction, at: int = -1) -> str:
    """The value type that an opcode's type modifier names."""
    found = PTX_TYPE.get(ins.mods[at])
    if found is None:
        raise b.unsupported(f"type .{ins.mods[at]}")
    return found


def halves(b: Builder, v: Val, t: str) -> tuple[Val, Val]:
    low, high = b.split(v)
    return b.bits(low, t), b.bits(high, t)


def arithmetic(b: Builder, ins: Instruction, op: str) -> None:
    """add, sub, min, max on integers; .sat on s32; .cc; the x2 forms of 16 bits."""
    kind = ins.mods[-1]
    if kind in ("u16x2", "s16x2"):
        t = "i2" if kind[0] == "s" else "u2"
        first, second = (halves(b, b.read(o, "u4"), t) for o in ins.operands[1:3])
        results = [b.binary(op, p, q) for p, q in zip(first, second, strict=True)]
        if ins.has("relu"):
            results = [b.binary("max", r, b.const(t, 0)) for r in results]
        low, high = (b.bits(r, "u2") for r in results)
        b.write(ins.operands[0], b.join(low, high))
        return
    t = type_of(b, ins)
    x, y = b.read(ins.operands[1], t), b.read(ins.operands[2], t)
    if ins.has("sat"):
        wide = b.clamp(b.binary(op, b.cast(x, "i8"), b.cast(y, "i8")), -(1 << 31), (1 << 31) - 1)
        b.write(ins.operands[0], b.cast(wide, t))
        return
    out = b.binary(op, x, y)
    if ins.has("relu"):
        out = b.binary("max", out, b.const(t, 0))
    if ins.has("cc"):
        unsigned = f"u{t[1:]}"
        ux, uy, uo = b.bits(x, unsigned), b.bits(y, unsigned), b.bits(out, unsigned)
        b.write(CARRY, b.compare("lt", uo, ux) if op == "add" else b.compare("lt", ux, uy))
    b.write(ins.operands[0], out)


@pure("addc", "subc", section="Extended-Precision Integer Arithmetic Instructions: addc, subc")
def add_with_carry(b: Builder, ins: Instruction) -> None:
    t = type_of(b, ins)
    unsigned = f"u{t[1:]}"
    x, y = b.read(ins.operands[1], unsigned), b.read(ins.operands[2], unsigned)
    carry = b.select(b.read(CARRY, "b"), b.const(unsigned, 1), b.const(unsigned, 0))
    op = "add" if ins.name == "addc" else "sub"
    first = b.binary(op, x, y)
    out = b.binary(op, first, carry)
    if ins.has("cc"):
        if op == "add":
            over = b.or_(b.compare("lt", first, x), b.compare("lt", out, first))
        else:
            over = b.or_(b.compare("lt", x, y), b.compare("lt", first, carry))
        b.write(CARRY, over)
    b.write(ins.operands[0], out)


def product(b: Builder, ins: Instruction) -> Val:
    """mul and the product of mad: .lo, .hi, .wide."""
    t = type_of(b, ins)
    x, y = b.read(ins.operands[1], t), b.read(ins.operands[2], t)
    if ins.has("wide"):
        wide = f"{t[0]}{2 * size_of(t)}"
        return b.mul(b.cast(x, wide), b.cast(y, wide))
    if ins.has("hi"):
        if size_of(t) == 2:
            wide = f"{t[0]}4"
            full = b.mul(b.cast(x, wide), b.cast(y, wide))
            return b.cast(b.binary("shr", full, b.const(wide, 16)), t)
        return b.mulhi(x, y)
    return b.mul(x, y)


def multiply(b: Builder, ins: Instruction) -> None:
    b.write(ins.operands[0], product(b, ins))


@pure("mad", "madc", section="Integer Arithmetic Instructions: mad")
def multiply_add(b: Builder, ins: Instruction) -> None:
    """mad: the product plus c, with .hi.sat.s32; madc adds the carry."""
    out = product(b, ins)
    c = b.read(ins.operands[3], out.t)
    if ins.has("sat"):
        b.write(ins.operands[0], b.cast(b.clamp(b.add(b.cast(out, "i8"), b.cast(c, "i8")), -(1 << 31), (1 << 31) - 1), out.t))
        return
    unsigned = f"u{out.t[1:]}"
    first = b.bits(b.add(out, c), unsigned)
    over = b.compare("lt", first, b.bits(c, unsigned))
    if ins.name == "madc":
        carry = b.select(b.read(CARRY, "b"), b.const(unsigned, 1), b.const(unsigned, 0))
        total = b.add(first, carry)
        over = b.or_(over, b.compare("lt", total, first))
        first = total
    if ins.has("cc"):
        b.write(CARRY, over)
    b.write(ins.operands[0], first)


@pure("mul24", "mad24", section="Integer Arithmetic Instructions: mul24, mad24")
def multiply24(b: Builder, ins: Instruction) -> None:
    t = type_of(b, ins)
    wide = f"{t[0]}8"

    def low24(v: Val) -> Val:
        up = b.binary("shl", b.cast(v, wide), b.const(wide, 40))
        return b.binary("shr", up, b.const(wide, 40))

    full = b.mul(low24(b.read(ins.operands[1], t)), low24(b.read(ins.operands[2], t)))
    out = b.cast(b.binary("shr", full, b.const(wide, 16)) if ins.has("hi") else full, t)
    if ins.name == "mad24":
        c = b.read(ins.operands[3], t)
        exact = b.add(b.cast(out, "i8"), b.cast(c, "i8"))
        out = b.cast(b.clamp(exact, -(1 << 31), (1 << 31) - 1), t) if ins.has("sat") else b.add(out, c)
    b.write(ins.operands[0], out)


@pure("sad", section="Integer Arithmetic Instructions: sad")
def absolute_difference(b: Builder, ins: Instruction) -> None:
    t = type_of(b, ins)
    x, y = b.read(ins.operands[1], t), b.read(ins.operands[2], t)
    apart = b.sub(b.binary("max", x, y), b.binary("min", x, y))
    b.write(ins.operands[0], b.add(b.read(ins.operands[3], t), apart))


def divide(b: Builder, ins: Instruction, op: str) -> None:
    """div and rem; by zero the result is unspecified in the manual: all ones, and the dividend, as the hardware gives."""
    t = type_of(b, ins)
    x, y = b.read(ins.operands[1], t), b.read(ins.operands[2], t)
    zero = b.compare("eq", y, b.const(t, 0))
    safe = b.select(zero, b.const(t, 1), y)
    if t[0] == "i":  # the most negative number by -1 wraps
        minus = b.compare("eq", safe, b.const(t, -1))
        safe = b.select(minus, b.const(t, 1), safe)
        quotient = b.binary("div", x, safe)
        quotient = b.select(minus, b.unary("neg", quotient), quotient)
        rest = b.select(minus, b.const(t, 0), b.binary("rem", x, safe))
    else:
        quotient, rest = b.binary("div", x, safe), b.binary("rem", x, safe)
    out = b.select(zero, b.const(t, -1), quotient) if op == "div" else b.select(zero, x, rest)
    b.write(ins.operands[0], out)


@pure("rem", section="Integer Arithmetic Instructions: rem")
def rem(b: Builder, ins: Instruction) -> None:
    divide(b, ins, "rem")


@pure("and", "or", "xor", section="Logic and Shift Instructions: and, or, xor")
def logic(b: Builder, ins: Instruction) -> None:
    t = type_of(b, ins)
    b.write(ins.operands[0], b.binary(ins.name, b.read(ins.operands[1], t), b.read(ins.operands[2], t)))


@pure("not", section="Logic and Shift Instructions: not")
def invert(b: Builder, ins: Instruction) -> None:
    b.write(ins.operands[0], b.not_(b.read(ins.operands[1], type_of(b, ins))))


@pure("cnot", section="Logic and Shift Instructions: cnot")
def cnot(b: Builder, ins: Instruction) -> None:
    t = type_of(b, ins)
    is_zero = b.compare("eq", b.read(ins.operands[1], t), b.const(t, 0))
    b.write(ins.operands[0], b.select(is_zero, b.const(t, 1), b.const(t, 0)))


def pair_of(operand: Operand) -> tuple[Operand, Operand]:
    """`d|p` as its two destinations; the second is discarded where there is none."""
    return (operand.first, operand.second) if isinstance(operand, Pair) else (operand, Discard())


@pure("lop3", section="Logic and Shift Instructions: lop3")
def lop3(b: Builder, ins: Instruction) -> None:
    x, y, z = (b.read(o, "u4") for o in ins.operands[1:4])
    table = getattr(ins.operands[4], "value", None)
    if table is None:
        raise b.unsupported("lop3 with a table that is no constant")
    out = b.const("u4", 0)
    for row in range(8):
        if table >> row & 1:
            term = x if row & 4 else b.not_(x)
            term = b.and_(term, y if row & 2 else b.not_(y))
            out = b.or_(out, b.and_(term, z if row & 1 else b.not_(z)))
    target, predicate = pair_of(ins.operands[0])
    if ins.mods[1] in ("or", "and"):  # .BoolOp: the result compared with zero, combined with a predicate
        b.write(predicate, b.binary(ins.mods[1], b.compare("ne", out, b.const("u4", 0)), b.read(ins.operands[5], "b")))
    b.write(target, out)


@pure("shl", "shr", section="Logic and Shift Instructions: shl, shr")
def shift(b: Builder, ins: Instruction) -> None:
    """Amounts above the width are clamped to it."""
    t = type_of(b, ins)
    width = 8 * size_of(t)
    x, amount = b.read(ins.operands[1], t), b.read(ins.operands[2], "u4")
    over = b.compare("ge", amount, b.const("u4", width))
    safe = b.binary("min", amount, b.const("u4", width - 1))
    out = b.binary(ins.name, x, b.cast(safe, t))
    fill = b.binary("shr", x, b.const(t, width - 1)) if ins.name == "shr" and t[0] == "i" else b.const(t, 0)
    b.write(ins.operands[0], b.select(over, fill, out))


@pure("shf", section="Logic and Shift Instructions: shf")
def funnel_shift(b: Builder, ins: Instruction) -> None:
    low, high, amount = (b.read(o, "u4") for o in ins.operands[1:4])
    limit = b.const("u4", 32)
    n = b.binary("min", amount, limit) if ins.has("clamp") else b.and_(amount, b.const("u4", 31))
    both = b.join(low, high)
    if ins.has("l"):
        out = b.split(b.binary("shl", both, b.cast(b.binary("min", n, b.const("u4", 32)), "u8")))[1]
    else:
        out = b.split(b.binary("shr", both, b.cast(n, "u8")))[0]
    b.write(ins.operands[0], out)


def field_size(b: Builder, operand: Operand, width: int) -> Val:
    """A field's position or length: 8 bits of the operand (manual); the 64-bit forms, made of shifts, take all 32 (seen on an H200)."""
    v = b.read(operand, "u4")
    return b.and_(v, b.const("u4", 255)) if width == 32 else v


@pure("bfe", section="Integer Arithmetic Instructions: bfe")
def extract(b: Builder, ins: Instruction) -> None:
    t = type_of(b, ins)
    width = 8 * size_of(t)
    x = b.read(ins.operands[1], t)
    position, length = (field_size(b, o, width) for o in ins.operands[2:4])
    full = b.const("u4", width)
    position = b.binary("min", position, full)
    length = b.binary("min", length, full)
    end = b.binary("min", b.add(position, length), full)  # the field ends at bit `end`
    left = b.sub(full, end)
    zero_length = b.compare("eq", length, b.const("u4", 0))
    outside = b.compare("ge", position, full)
    top = b.const("u4", width - 1)
    unsigned = f"u{t[1:]}"
    up = b.binary("shl", b.bits(x, unsigned), b.cast(b.binary("min", left, top), unsigned))
    down = b.binary("shr", b.bits(up, t), b.cast(b.binary("min", b.sub(full, b.sub(end, position)), top), t))
    sign = b.binary("shr", x, b.const(t, width - 1)) if t[0] == "i" else b.const(t, 0)
    out = b.select(outside, sign, down)
    b.write(ins.operands[0], b.select(zero_length, b.const(t, 0), out))


@pure("bfi", section="Integer Arithmetic Instructions: bfi")
def insert(b: Builder, ins: Instruction) -> None:
    t = type_of(b, ins)
    width = 8 * size_of(t)
    x, into = b.read(ins.operands[1], t), b.read(ins.operands[2], t)
    position, length = (field_size(b, o, width) for o in ins.operands[3:5])
    full, top = b.const("u4", width), b.const("u4", width - 1)
    length = b.binary("min", length, full)
    ones = b.const(t, -1)
    field = b.select(
        b.compare("ge", length, full), ones, b.sub(b.binary("shl", b.const(t, 1), b.cast(b.binary("min", length, top), t)), b.const(t, 1))
    )
    at = b.cast(b.binary("min", position, top), t)
    mask = b.binary("shl", field, at)
    out = b.or_(b.and_(into, b.not_(mask)), b.and_(b.binary("shl", x, at), mask))
    keep = b.compare("ge", position, full)
    b.write(ins.operands[0], b.select(keep, into, out))


@pure("bmsk", section="Integer Arithmetic Instructions: bmsk")
def bit_mask(b: Builder, ins: Instruction) -> None:
    start, length = (b.read(o, "u4") for o in ins.operands[1:3])
    if ins.has("wrap"):
        start, length = (b.and_(v, b.const("u4", 31)) for v in (start, length))
    wide = b.const("u8", 1)
    length64 = b.cast(b.binary("min", length, b.const("u4", 32)), "u8")
    ones = b.sub(b.binary("shl", wide, length64), wide)
    placed = b.binary("shl", ones, b.cast(b.binary("min", start, b.const("u4", 32)), "u8"))
    b.write(ins.operands[0], b.split(placed)[0])


@pure("szext", section="Integer Arithmetic Instructions: szext")
def sign_zero_extend(b: Builder, ins: Instruction) -> None:
    t = type_of(b, ins)
    x, n = b.read(ins.operands[1], t), b.read(ins.operands[2], "u4")
    n = b.and_(n, b.const("u4", 31)) if ins.has("wrap") else b.binary("min", n, b.const("u4", 32))
    zero = b.compare("eq", n, b.const("u4", 0))
    gap = b.cast(b.binary("min", b.sub(b.const("u4", 32), n), b.const("u4", 31)), t)
    out = b.binary("shr", b.binary("shl", x, gap), gap)
    b.write(ins.operands[0], b.select(zero, b.const(t, 0), out))


@pure("popc", "clz", "brev", section="Integer Arithmetic Instructions: popc, clz, brev")
def count_bits(b: Builder, ins: Instruction) -> None:
    t = type_of(b, ins)
    b.write(ins.operands[0], b.unary(ins.name, b.read(ins.operands[1], t)))


@pure("bfind", section="Integer Arithmetic Instructions: bfind")
def find_bit(b: Builder, ins: Instruction) -> None:
    """The position of the highest bit that differs from the sign; 0xffffffff where there is none."""
    t = type_of(b, ins)
    width = 8 * size_of(t)
    x = b.read(ins.operands[1], t)
    if t[0] == "i":
        x = b.binary("xor", x, b.binary("shr", x, b.const(t, width - 1)))
    unsigned = b.bits(x, f"u{t[1:]}")
    lead = b.unary("clz", unsigned)
    none = b.compare("eq", unsigned, b.const(unsigned.t, 0))
    out = lead if ins.has("shiftamt") else b.sub(b.const("u4", width - 1), lead)
    b.write(ins.operands[0], b.select(none, b.const("u4", -1), out))


@pure("dp2a", section="Integer Arithmetic Instructions: dp2a")
def dot2(b: Builder, ins: Instruction) -> None:
    """Two 16-bit elements of a by two bytes of b, the low (.lo) or the high (.hi) ones."""
    ta, tb = (("i", "u")[m == "u32"] for m in ins.mods[2:4])
    x, y = b.read(ins.operands[1], "u4"), b.read(ins.operands[2], "u4")
    total = b.read(ins.operands[3], "i4")
    for i in range(2):
        first = b.cast(b.bits(b.cast(b.binary("shr", x, b.const("u4", 16 * i)), "u2"), f"{ta}2"), "i4")
        place = b.const("u4", 8 * i + (16 if ins.has("hi") else 0))
        second = b.cast(b.bits(b.cast(b.binary("shr", y, place), "u1"), f"{tb}1"), "i4")
        total = b.add(total, b.mul(first, second))
    b.write(ins.operands[0], total)


@pure("fns", section="Integer Arithmetic Instructions: fns")
def find_nth_set(b: Builder, ins: Instruction) -> None:
    """The n-th set bit from `base` on, upwards for n > 0, downwards for n < 0; base itself for n = 0; all ones where there is none."""
    mask, base = b.read(ins.operands[1], "u4"), b.read(ins.operands[2], "u4")
    n = b.read(ins.operands[3], "i4")
    out, seen_up, seen_down = b.const("u4", -1), b.const("i4", 0), b.const("i4", 0)
    one, none = b.const("i4", 1), b.const("i4", 0)
    for i in range(32):
        for bit, up in ((i, True), (31 - i, False)):
            is_set = b.compare("ne", b.and_(mask, b.const("u4", 1 << bit)), b.const("u4", 0))
            inside = b.compare("le" if up else "ge", base, b.const("u4", bit))
            counts = b.and_(is_set, inside)
            if up:
                seen_up = b.add(seen_up, b.select(counts, one, none))
                hit = b.and_(b.and_(counts, b.compare("eq", seen_up, n)), b.compare("gt", n, none))
            else:
                seen_down = b.sub(seen_down, b.select(counts, one, none))
                hit = b.and_(b.and_(counts, b.compare("eq", seen_down, n)), b.compare("lt", n, none))
            out = b.select(hit, b.const("u4", bit), out)
    at_base = b.binary("shr", mask, b.and_(base, b.const("u4", 31)))
    zeroth = b.select(b.compare("ne", b.and_(at_base, b.const("u4", 1)), b.const("u4", 0)), base, b.const("u4", -1))
    b.write(ins.operands[0], b.select(b.compare("eq", n, none), zeroth, out))


@pure("dp4a", section="Integer Arithmetic Instructions: dp4a")
def dot4(b: Builder, ins: Instruction) -> None:
    ta, tb = (("i1" if m == "s32" else "u1") for m in ins.mods[1:3])
    x, y = b.read(ins.operands[1], "u4"), b.read(ins.operands[2], "u4")
    total = b.read(ins.operands[3], "i4")
    for i in range(4):
        place = b.const("u4", 8 * i)
        pieces = [b.cast(b.bits(b.cast(b.binary("shr", v, place), "u1"), t), "i4") for v, t in ((x, ta), (y, tb))]
        total = b.add(total, b.mul(*pieces))
    b.write(ins.operands[0], total)
