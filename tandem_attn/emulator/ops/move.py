"""Moves, selections, comparisons, permutes. PTX manual, "Data Movement", "Comparison and Selection Instructions"."""

from __future__ import annotations

from tandem_attn.emulator.codegen.builder import PTX_TYPE, Builder, Val
from tandem_attn.emulator.codegen.rounding import FORMATS, decode, flush_half
from tandem_attn.emulator.memory.addresses import LOCAL_WINDOW, PARAM_WINDOW, RANK_SHIFT, SHARED_WINDOW, WINDOW_MASK
from tandem_attn.emulator.ops.integer import type_of
from tandem_attn.emulator.ops.registry import pure
from tandem_attn.emulator.ptx.nodes import TYPE_BYTES, Instruction, Memory, Operand, Pair, Vector


@pure("mov", section="Data Movement and Conversion Instructions: mov")
def mov(b: Builder, ins: Instruction) -> None:
    """Scalar moves, and the packing and unpacking of vectors."""
    target, source = ins.operands
    t = type_of(b, ins)
    if isinstance(target, Vector):
        pieces = unpack(b, b.read(source, f"u{t[1:]}"), len(target.items))
        for item, piece in zip(target.items, pieces, strict=True):
            b.write(item, piece)
    elif isinstance(source, Vector):
        part = TYPE_BYTES[ins.mods[-1]] // len(source.items)
        b.write(target, pack(b, [b.read(item, f"u{part}") for item in source.items]))
    elif isinstance(source, Memory):  # symbol + constant
        b.write(target, b.add(b.read(source.base, t), b.const(t, source.offset)))
    else:
        b.write(target, b.read(source, t))


def unpack(b: Builder, v: Val, count: int) -> list[Val]:
    parts = [v]
    while len(parts) < count:
        size = int(parts[0].t[1:])
        if size == 2:
            parts = [p for v in parts for p in (b.cast(v, "u1"), b.cast(b.binary("shr", v, b.const("u2", 8)), "u1"))]
        else:
            parts = [p for v in parts for p in b.split(v)]
    return parts


def pack(b: Builder, parts: list[Val]) -> Val:
    while len(parts) > 1:
        if parts[0].t == "u1":
            wide = [b.cast(p, "u2") for p in parts]
            parts = [b.or_(lo, b.binary("shl", hi, b.const("u2", 8))) for lo, hi in zip(wide[::2], wide[1::2], strict=True)]
        else:
            parts = [b.join(lo, hi) for lo, hi in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


@pure("selp", section="Comparison and Selection Instructions: selp")
def selp(b: Builder, ins: Instruction) -> None:
    t = type_of(b, ins)
    raw = f"u{t[1:]}" if t[0] == "f" else t
    b.write(ins.operands[0], b.select(b.read(ins.operands[3], "b"), b.read(ins.operands[1], raw), b.read(ins.operands[2], raw)))


@pure("slct", section="Comparison and Selection Instructions: slct")
def slct(b: Builder, ins: Instruction) -> None:
    t, kind = PTX_TYPE[ins.mods[-2]], PTX_TYPE[ins.mods[-1]]
    raw = f"u{t[1:]}"
    c = b.read(ins.operands[3], kind)
    if ins.has("ftz"):
        c = b.flush(c)
    positive = b.compare("ge", c, b.const(kind, 0))
    b.write(ins.operands[0], b.select(positive, b.read(ins.operands[1], raw), b.read(ins.operands[2], raw)))


_ORDER = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}
_UNORDERED = {"equ": "eq", "neu": "ne", "ltu": "lt", "leu": "le", "gtu": "gt", "geu": "ge"}


def compare(b: Builder, op: str, x: Val, y: Val) -> Val:
    """The comparison operators of setp and set; on floats `...u` is true where unordered."""
    op = _ORDER.get(op, op)
    if x.t[0] != "f":
        return b.compare(op, x, y)
    unordered = b.or_(b.is_nan(x), b.is_nan(y))
    if op == "num":
        return b.not_(unordered)
    if op == "nan":
        return unordered
    if op in _UNORDERED:
        return b.or_(b.compare(_UNORDERED[op], x, y), unordered)
    out = b.compare(op, x, y)
    return b.and_(out, b.not_(unordered)) if op == "ne" else out


def compared(b: Builder, ins: Instruction, kind: str, at: int) -> tuple[Val, Val]:
    t = PTX_TYPE[kind]
    x, y = b.read(ins.operands[at], t), b.read(ins.operands[at + 1], t)
    if kind in ("f16", "bf16"):
        x, y = (decode(b, b.cast(b.bits(v, "u2"), "u4"), FORMATS[kind]) for v in (x, y))
    if ins.has("ftz"):
        x, y = (flush_half(b, v) if kind == "f16" else b.flush(v) for v in (x, y))
    return x, y


def combine(b: Builder, ins: Instruction, outcome: Val, at: int) -> Val:
    """The boolean operator with a further predicate, where the instruction has one."""
    bool_op = next((m for m in ins.mods[2:] if m in ("and", "or", "xor")), None)
    return b.binary(bool_op, outcome, b.read(ins.operands[at], "b")) if bool_op else outcome


@pure("setp", section="Comparison and Selection Instructions: setp")
def setp(b: Builder, ins: Instruction) -> None:
    kind = ins.mods[-1]
    target = ins.operands[0]
    if kind in ("f16x2", "bf16x2"):
        element = kind[:-2]
        halves = [b.split(b.read(o, "u4")) for o in ins.operands[1:3]]
        outcomes = []
        for half in range(2):
            x, y = (decode(b, b.cast(h[half], "u4"), FORMATS[element]) for h in halves)
            outcomes.append(combine(b, ins, compare(b, ins.mods[1], x, y), 3))
        assert isinstance(target, Pair)
        b.write(target.first, outcomes[0])
        b.write(target.second, outcomes[1])
        return
    x, y = compared(b, ins, kind, 1)
    outcome = compare(b, ins.mods[1], x, y)
    if isinstance(target, Pair):
        first, second = combine(b, ins, outcome, 3), combine(b, ins, b.not_(outcome), 3)
        b.write(target.first, first)
        b.write(target.second, second)
    else:
        b.write(target, combine(b, ins, outcome, 3))


@pure("set", section="Comparison and Selection Instructions: set")
def set_(b: Builder, ins: Instruction) -> None:
    """All ones or 0 for integer results, 1.0 or 0.0 for float ones."""
    to, kind = ins.mods[-2], ins.mods[-1]
    if kind in ("f16x2", "bf16x2"):
        set_pair(b, ins, to, kind)
        return
    x, y = compared(b, ins, kind, 1)
    outcome = combine(b, ins, compare(b, ins.mods[1], x, y), 3)
    t = PTX_TYPE[to]
    yes: Val = b.const(t, 1.0) if t[0] == "f" else b.const(t, 0x3F80 if to == "bf16" else -1)
    b.write(ins.operands[0], b.select(outcome, yes, b.const(t, 0)))


def set_pair(b: Builder, ins: Instruction, to: str, kind: str) -> None:
    """set on packed halves: 1.0 or 0.0 in each half, or for u32 and s32 all ones or zeros in each half."""
    element = kind[:-2]
    halves = [b.split(b.read(o, "u4")) for o in ins.operands[1:3]]
    yes = {"f16x2": 0x3C00, "bf16x2": 0x3F80}.get(to, 0xFFFF)
    out = []
    for half in range(2):
        x, y = (decode(b, b.cast(h[half], "u4"), FORMATS[element]) for h in halves)
        outcome = combine(b, ins, compare(b, ins.mods[1], x, y), 3)
        out.append(b.select(outcome, b.const("u2", yes), b.const("u2", 0)))
    b.write(ins.operands[0], b.join(*out))


@pure("prmt", section="Data Movement and Conversion Instructions: prmt")
def prmt(b: Builder, ins: Instruction) -> None:
    """The default mode and f4e, b4e, rc8, ecl, ecr, rc16."""
    x, y, control = (b.read(o, "u4") for o in ins.operands[1:4])
    both = b.join(x, y)
    mode = ins.mods[2] if len(ins.mods) > 2 else None
    out = b.const("u4", 0)
    for i in range(4):
        if mode is None:
            selector = b.and_(b.binary("shr", control, b.const("u4", 4 * i)), b.const("u4", 15))
        else:
            selector = prmt_mode(b, mode, control, i)
        place = b.binary("shl", b.and_(selector, b.const("u4", 7)), b.const("u4", 3))
        octet = b.and_(b.split(b.binary("shr", both, b.cast(place, "u8")))[0], b.const("u4", 255))
        sign = b.compare("ne", b.and_(selector, b.const("u4", 8)), b.const("u4", 0))
        spread = b.select(b.compare("ge", octet, b.const("u4", 128)), b.const("u4", 255), b.const("u4", 0))
        octet = b.select(sign, spread, octet)
        out = b.or_(out, b.binary("shl", octet, b.const("u4", 8 * i)))
    b.write(ins.operands[0], out)


def prmt_mode(b: Builder, mode: str, control: Val, i: int) -> Val:
    n = b.and_(control, b.const("u4", 3))
    if mode == "f4e":
        return b.add(n, b.const("u4", i))
    if mode == "b4e":
        return b.and_(b.sub(n, b.const("u4", i)), b.const("u4", 7))
    if mode == "rc8":
        return n
    if mode == "ecl":
        return b.binary("max", n, b.const("u4", i))
    if mode == "ecr":
        return b.binary("min", n, b.const("u4", i))
    if mode == "rc16":
        low = b.binary("shl", b.and_(n, b.const("u4", 1)), b.const("u4", 1))
        return b.add(low, b.const("u4", i & 1))
    raise b.unsupported(f"prmt mode {mode}")


_WINDOWS = {"shared": SHARED_WINDOW, "local": LOCAL_WINDOW, "param": PARAM_WINDOW}


def space_of(ins: Instruction) -> str:
    found = next((m for m in ins.mods if m.split("::")[0] in ("global", "const", "shared", "local", "param")), "generic")
    return found.split("::")[0]


@pure("cvta", section="Data Movement and Conversion Instructions: cvta")
def cvta(b: Builder, ins: Instruction) -> None:
    """Generic addresses of shared, local and parameter memory lie in windows; global ones are the same."""
    t = type_of(b, ins)
    v = b.read(address_operand(ins.operands[1]), t)
    window = _WINDOWS.get(space_of(ins))
    if window is not None and t == "u8":
        v = b.and_(v, b.const(t, WINDOW_MASK)) if ins.mods[1] == "to" else b.or_(v, b.const(t, window))
    b.write(ins.operands[0], v)


def address_operand(operand: Operand) -> Operand:
    return operand.base if isinstance(operand, Memory) and not operand.offset else operand


@pure("isspacep", section="Data Movement and Conversion Instructions: isspacep")
def isspacep(b: Builder, ins: Instruction) -> None:
    v = b.read(ins.operands[1], "u8")
    space = ins.mods[1].split("::")[0]
    inside = {name: b.compare("ge", v, b.const("u8", base)) for name, base in _WINDOWS.items()}
    shared, local, param = inside["shared"], inside["local"], inside["param"]
    outcome = {
        "shared": lambda: b.and_(shared, b.not_(local)),
        "local": lambda: b.and_(local, b.not_(param)),
        "param": lambda: param,
        "global": lambda: b.not_(shared),
        "const": lambda: b.const("b", 0),
    }[space]()
    if ins.mods[1] == "shared::cta":  # not that of another CTA of the cluster
        rank = b.and_(b.binary("shr", v, b.const("u8", RANK_SHIFT)), b.const("u8", 255))
        outcome = b.and_(outcome, b.compare("eq", rank, b.cast(b.read_symbol("%cluster_ctarank", "u4"), "u8")))
    b.write(ins.operands[0], outcome)
