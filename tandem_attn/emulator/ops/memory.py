"""Plain loads and stores and cache hints. PTX manual, "Data Movement and Conversion Instructions: ld, st, prefetch, createpolicy"."""

from __future__ import annotations

from tandem_attn.emulator.codegen.builder import PTX_TYPE, Builder, Val
from tandem_attn.emulator.ops.move import space_of
from tandem_attn.emulator.ops.registry import pure
from tandem_attn.emulator.ptx.nodes import Instruction, Memory, Operand, Vector


def elements(operand: Operand) -> tuple[Operand, ...]:
    return operand.items if isinstance(operand, Vector) else (operand,)


def address(b: Builder, ins: Instruction, operand: Operand) -> tuple[str, Val, int]:
    """The state space, the address value and the constant offset of a memory operand."""
    if not isinstance(operand, Memory):
        raise b.unsupported("a memory operand is expected")
    space = space_of(ins)
    if space == "const":
        space = "global"
    t = "u4" if space == "shared" else "u8"
    return space, b.read(operand.base, t), operand.offset


@pure("ld", "ldu", section="Data Movement and Conversion Instructions: ld, ld.global.nc, ldu")
def ld(b: Builder, ins: Instruction) -> None:
    """Vectors of 2, 4 and 8; a result register wider than the type is zero- or sign-extended."""
    t = PTX_TYPE[ins.mods[-1]]
    targets = elements(ins.operands[0])
    space, base, offset = address(b, ins, ins.operands[1])
    for target, value in zip(targets, b.load(space, base, offset, t, len(targets)), strict=True):
        b.write(target, value)


@pure("st", section="Data Movement and Conversion Instructions: st")
def st(b: Builder, ins: Instruction) -> None:
    t = PTX_TYPE[ins.mods[-1]]
    values = [b.read(item, t) for item in elements(ins.operands[1])]
    space, base, offset = address(b, ins, ins.operands[0])
    b.store(space, base, offset, values)


@pure(
    "prefetch",
    "prefetchu",
    "applypriority",
    "discard",
    "pmevent",
    "cp.async.bulk.prefetch",
    section="prefetch, applypriority, discard: no effect on values",
)
def hint(b: Builder, ins: Instruction) -> None:
    del b, ins


@pure("createpolicy", section="Data Movement and Conversion Instructions: createpolicy")
def createpolicy(b: Builder, ins: Instruction) -> None:
    """A cache policy is opaque and changes no value."""
    b.write(ins.operands[0], b.const("u8", 0))


@pure("mapa", section="Data Movement and Conversion Instructions: mapa")
def mapa(b: Builder, ins: Instruction) -> None:
    """The same offset in the window of another CTA of the cluster."""
    t = PTX_TYPE[ins.mods[-1]]
    source, rank = b.read(ins.operands[1], t), b.read(ins.operands[2], "u4")
    keep = ~(0xFF << 24)
    moved = b.and_(source, b.const(t, keep))
    b.write(ins.operands[0], b.or_(moved, b.binary("shl", b.cast(rank, t), b.const(t, 24))))


@pure("getctarank", section="Data Movement and Conversion Instructions: getctarank")
def getctarank(b: Builder, ins: Instruction) -> None:
    t = PTX_TYPE[ins.mods[-1]]
    source = b.binary("shr", b.read(ins.operands[1], t), b.const(t, 24))
    b.write(ins.operands[0], b.cast(b.and_(source, b.const(t, 255)), "u4"))
