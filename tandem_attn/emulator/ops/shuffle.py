"""Exchange between the lanes of a warp. PTX manual, "shfl.sync", "vote.sync", "match.sync", "redux.sync", "elect.sync", "activemask"."""

from __future__ import annotations

from tandem_attn.emulator.codegen.builder import Builder, Val
from tandem_attn.emulator.ops.integer import pair_of, type_of
from tandem_attn.emulator.ops.registry import pure
from tandem_attn.emulator.ptx.nodes import Instruction


@pure("shfl", section="Data Movement and Conversion Instructions: shfl.sync")
def shfl(b: Builder, ins: Instruction) -> None:
    """.up .down .bfly .idx, with clamp and segment mask in operand c."""
    mode = next(m for m in ins.mods if m in ("up", "down", "bfly", "idx"))
    value = b.read(ins.operands[1], "u4")
    amount = b.and_(b.read(ins.operands[2], "u4"), b.const("u4", 31))
    control = b.read(ins.operands[3], "u4")
    segment = b.and_(b.binary("shr", control, b.const("u4", 8)), b.const("u4", 31))
    clamp = b.and_(control, b.const("u4", 31))
    lane = b.lanes()
    inside = b.and_(b.not_(segment), b.const("u4", 31))
    highest = b.or_(b.and_(lane, segment), b.and_(clamp, inside))
    lowest = b.and_(lane, segment)
    if mode == "up":
        source = b.sub(lane, amount)
        valid = b.compare("ge", b.bits(source, "i4"), b.bits(highest, "i4"))
    elif mode == "down":
        source = b.add(lane, amount)
        valid = b.compare("le", source, highest)
    elif mode == "bfly":
        source = b.binary("xor", lane, amount)
        valid = b.compare("le", source, highest)
    else:
        source = b.or_(lowest, b.and_(amount, inside))
        valid = b.compare("le", source, highest)
    source = b.and_(b.select(valid, source, lane), b.const("u4", 31))
    target, predicate = pair_of(ins.operands[0])
    out = b.permute(value, source)
    b.write(predicate, valid)
    b.write(target, out)


@pure("vote", section="Parallel Synchronization and Communication Instructions: vote.sync")
def vote(b: Builder, ins: Instruction) -> None:
    source = b.read(ins.operands[1], "b")
    on = b.active()
    held = b.ballot(b.and_(source, on))
    if ins.has("ballot"):
        b.write(ins.operands[0], held)
        return
    everyone = b.ballot(on)
    if ins.has("any"):
        outcome = b.compare("ne", held, b.const("u4", 0))
    elif ins.has("all"):
        outcome = b.compare("eq", held, everyone)
    else:
        outcome = b.or_(b.compare("eq", held, everyone), b.compare("eq", held, b.const("u4", 0)))
    b.write(ins.operands[0], outcome)


@pure("activemask", section="Parallel Synchronization and Communication Instructions: activemask")
def activemask(b: Builder, ins: Instruction) -> None:
    b.write(ins.operands[0], b.ballot(b.active()))


@pure("elect", section="Parallel Synchronization and Communication Instructions: elect.sync")
def elect(b: Builder, ins: Instruction) -> None:
    """The lowest executing lane of the member mask (the hardware's choice as well, though the manual leaves it open)."""
    members = b.and_(b.ballot(b.active()), b.read(ins.operands[1], "u4"))
    lowest = b.and_(members, b.add(b.not_(members), b.const("u4", 1)))
    leader = b.sub(b.const("u4", 31), b.unary("clz", lowest))
    target, predicate = pair_of(ins.operands[0])
    b.write(predicate, b.compare("eq", b.lanes(), leader))
    b.write(target, leader)


@pure("redux", section="Parallel Synchronization and Communication Instructions: redux.sync")
def redux(b: Builder, ins: Instruction) -> None:
    """add min max and or xor over the lanes of the member mask; min and max on f32 with .abs and .NaN."""
    op = ins.mods[2]
    t = type_of(b, ins)
    on = b.and_(b.active(), lane_in(b, b.read(ins.operands[2], "u4")))
    v = b.read(ins.operands[1], t)
    if t == "f4":
        b.write(ins.operands[0], redux_float(b, ins, op, v, on))
        return
    neutral = {"add": 0, "or": 0, "xor": 0, "and": -1}.get(op)
    if neutral is None:
        high, low = ((1 << 31) - 1, -(1 << 31)) if t == "i4" else ((1 << 32) - 1, 0)
        neutral = high if op == "min" else low
    b.write(ins.operands[0], fold(b, op, b.select(on, v, b.const(t, neutral))))


def lane_in(b: Builder, mask: Val) -> Val:
    """Whether the lane's bit is set in a mask."""
    return b.compare("ne", b.and_(b.binary("shr", mask, b.lanes()), b.const("u4", 1)), b.const("u4", 0))


def fold(b: Builder, op: str, v: Val) -> Val:
    """Combine all lanes, in every lane."""
    for distance in (16, 8, 4, 2, 1):
        other = b.permute(v, b.binary("xor", b.lanes(), b.const("u4", distance)))
        v = b.binary(op, v, other)
    return v


def redux_float(b: Builder, ins: Instruction, op: str, v: Val, on: Val) -> Val:
    if ins.has("abs"):
        v = b.unary("abs", v)
    nan = b.and_(b.is_nan(v), on)
    used = b.and_(on, b.not_(nan))
    limit = float("inf") if op == "min" else float("-inf")
    out = fold(b, op, b.select(used, v, b.const("f4", limit)))
    nans = b.ballot(nan)
    bad = b.compare("ne", nans, b.const("u4", 0)) if ins.has("NaN") else b.compare("eq", b.ballot(used), b.const("u4", 0))
    return b.select(bad, b.raw("f4", 0x7FFFFFFF), out)


@pure("match", section="Parallel Synchronization and Communication Instructions: match.sync")
def match(b: Builder, ins: Instruction) -> None:
    """.any: the lanes with the same value; .all: all lanes or none."""
    t = type_of(b, ins)
    v = b.read(ins.operands[1], t)
    on = b.and_(b.active(), lane_in(b, b.read(ins.operands[2], "u4")))
    everyone = b.ballot(on)
    same = b.const("u4", 0)
    for lane in range(32):
        theirs = b.permute(v, b.const("u4", lane))
        alike = b.ballot(b.and_(b.compare("eq", v, theirs), on))
        mine = b.compare("eq", v, theirs)
        same = b.select(mine, alike, same)
    target, predicate = pair_of(ins.operands[0])
    if ins.has("all"):
        agreed = b.compare("eq", same, everyone)
        b.write(predicate, agreed)
        b.write(target, b.select(agreed, everyone, b.const("u4", 0)))
    else:
        b.write(target, same)
