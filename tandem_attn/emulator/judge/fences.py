"""A check of the text alone: registers of wgmma written without a wgmma.fence behind the write.

PTX manual, "wgmma.fence": it orders accesses to registers, so it must stand between the last write of an accumulator or an A register and
the wgmma.mma_async that uses it, but for accumulators that earlier instructions of the same shape have written. Copies (mov) are passed
over: compilers place them behind the fence, and ptxas removes them.
"""

from __future__ import annotations

from tandem_attn.emulator.ptx.nodes import Imm, Instruction, Reg, Vector
from tandem_attn.emulator.ptx.operands import registers, results, sources
from tandem_attn.emulator.ptx.program import EXIT, Program, Segment
from tandem_attn.emulator.report import Report

_MMA = "wgmma.mma_async"


def unfenced(program: Program) -> list[Report]:
    """One report for each wgmma.mma_async that some path reaches with a register written since the last fence."""
    found: dict[int, Report] = {}
    functions = {s.function.name for s in program.segments for i in program.code[s.start : s.end] if i.opcode.startswith(_MMA)}
    for name in functions:
        _function(program, [s for s in program.segments if s.function.name == name], found)
    return [found[index] for index in sorted(found)]


def _function(program: Program, segments: list[Segment], found: dict[int, Report]) -> None:
    """Forward data flow: the registers written since the last fence, on any path."""
    at_start: dict[int, frozenset[Reg]] = {s.index: frozenset() for s in segments}
    work = [s.index for s in segments]
    while work:
        segment = program.segments[work.pop()]
        state = _through(program, segment, at_start[segment.index], found)
        for target in segment.targets:
            if target != EXIT and target in at_start and not state <= at_start[target]:
                at_start[target] |= state
                work.append(target)


def _through(program: Program, segment: Segment, entry: frozenset[Reg], found: dict[int, Report]) -> frozenset[Reg]:
    written = set(entry)
    for ins in program.code[segment.start : segment.end]:
        if ins.opcode.startswith("wgmma.fence"):
            written.clear()
        elif ins.opcode.startswith(_MMA):
            fresh = sorted(r.name for r in _needed(ins) if r in written)
            if fresh and ins.index not in found:
                message = f"{', '.join(fresh[:4])} written without a wgmma.fence before this wgmma.mma_async"
                found[ins.index] = Report("register-in-flight", message, ptx_line=ins.line, ptx=ins.text, source=ins.source)
            written -= set(results(ins))
        elif ins.name == "mov":
            copied = any(r in written for r in sources(ins))
            for reg in results(ins):
                (written.add if copied else written.discard)(reg)
        else:
            written |= set(results(ins))
    return frozenset(written)


def _needed(ins: Instruction) -> set[Reg]:
    """Accumulators, unless they are only written, and A registers."""
    enable = ins.operands[3]
    reads_d = not (isinstance(enable, Imm) and enable.value == 0)
    a = set(registers(ins.operands[1])) if isinstance(ins.operands[1], Vector) else set()  # else a descriptor
    return a | (set(results(ins)) if reads_d else set())
