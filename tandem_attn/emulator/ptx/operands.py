"""Which registers an instruction reads and writes. PTX manual, "Instruction Operands"."""

from __future__ import annotations

from collections.abc import Iterator

from tandem_attn.emulator.ptx.nodes import Group, Instruction, Memory, Negated, Operand, Pair, Reg, Vector

# Instructions without a destination register (their first operand is a source even where it is a register).
_NO_RESULT = frozenset(
    (
        "bra",
        "brx",
        "ret",
        "exit",
        "trap",
        "brkpt",
        "st",
        "red",
        "fence",
        "membar",
        "prefetch",
        "prefetchu",
        "nanosleep",
        "stmatrix",
        "setmaxnreg",
        "griddepcontrol",
        "discard",
        "applypriority",
        "pmevent",
        "cp",
        "tensormap",
    )
)
_NO_RESULT_PREFIX = (
    "bar.sync", "bar.arrive", "bar.cta.sync", "bar.cta.arrive", "bar.warp.sync", "barrier.sync", "barrier.arrive", "barrier.cta.sync",
    "barrier.cta.arrive", "barrier.cluster", "wgmma.fence", "wgmma.commit_group", "wgmma.wait_group", "tcgen05.mma", "tcgen05.st",
    "tcgen05.cp", "tcgen05.commit", "tcgen05.shift", "tcgen05.alloc", "tcgen05.dealloc", "tcgen05.relinquish", "tcgen05.wait",
    "tcgen05.fence", "clusterlaunchcontrol.try_cancel",
)  # fmt: skip


def registers(operand: Operand) -> Iterator[Reg]:
    """The registers that an operand names."""
    if isinstance(operand, Reg):
        yield operand
    elif isinstance(operand, Vector | Group):
        for item in operand.items:
            yield from registers(item)
    elif isinstance(operand, Memory):
        yield from registers(operand.base)
        for item in operand.more:
            yield from registers(item)
    elif isinstance(operand, Pair):
        yield from registers(operand.first)
        yield from registers(operand.second)
    elif isinstance(operand, Negated):
        yield from registers(operand.operand)


def result_count(ins: Instruction) -> int:
    """How many of the leading operands are destinations."""
    if not ins.operands or ins.name in _NO_RESULT or ins.opcode.startswith(_NO_RESULT_PREFIX):
        return 0
    if ins.name == "call":
        return 0
    if isinstance(ins.operands[0], Memory):
        return 0
    return 2 if ins.opcode.startswith("tcgen05.ld.red") else 1


def results(ins: Instruction) -> list[Reg]:
    """The registers that an instruction writes."""
    found = [reg for operand in ins.operands[: result_count(ins)] for reg in registers(operand)]
    if "cc" in ins.mods:
        found.append(CARRY)
    return found


def sources(ins: Instruction) -> list[Reg]:
    """The registers that an instruction reads, its guard included (and its results where the write is partial)."""
    count = result_count(ins)
    found = [reg for operand in ins.operands[count:] for reg in registers(operand)]
    if ins.predicate is not None:
        found.append(ins.predicate)
        found += results(ins)
    if ins.opcode.startswith("wgmma.mma_async"):
        found += results(ins)
    if ins.name in ("addc", "subc", "madc"):
        found.append(CARRY)
    return found


CARRY = Reg("%carry", "pred", "p", 0)  # the condition code register of add.cc; the parser keeps predicate slot 0 free for it
