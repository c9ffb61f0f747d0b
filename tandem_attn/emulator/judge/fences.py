"""A check of the text alone: registers of wgmma written without a wgmma.fence behind the write.

PTX manual, "wgmma.fence": it orders accesses to registers, so it must stand between the last write of an accumulator or an A register and
the wgmma.mma_async that uses it, but for accumulators that earlier instructions of the same shape have written. Copies (mov) are passed
over: compilers place them behind the fence, and ptxas removes them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from tandem_attn.emulator.ptx.nodes import Imm, Instruction, Reg, Vector
from tandem_attn.emulator.ptx.operands import registers, results, sources
from tandem_attn.emulator.ptx.program import EXIT, Program, Segment
from tandem_attn.emulator.report import Report

_MMA = "wgmma.mma_async"


@dataclass(frozen=True, slots=True)
class _Step:
    """What an instruction does to the registers that matter, as bit masks: a fence, a wgmma, a copy or another write."""

    kind: str
    reads: int
    writes: int
    ins: Instruction


def unfenced(program: Program) -> list[Report]:
    """One report for each wgmma.mma_async that some path reaches with a register written since the last fence."""
    found: dict[int, Report] = {}
    by_function: dict[str, list[Segment]] = {}
    for segment in program.segments:
        by_function.setdefault(segment.function.name, []).append(segment)
    for segments in by_function.values():
        bits = _bits(program, segments)
        if bits:
            _flow(segments, {s.index: list(_steps(program, s, bits)) for s in segments}, bits, found)
    return [found[index] for index in sorted(found)]


def _bits(program: Program, segments: list[Segment]) -> dict[Reg, int]:
    """A bit for each register that some wgmma needs, or that is copied into one."""
    code = [ins for s in segments for ins in program.code[s.start : s.end]]
    copies: dict[Reg, list[Reg]] = {}
    for ins in code:
        if ins.name == "mov":
            for reg in results(ins):
                copies.setdefault(reg, []).extend(sources(ins))
    work = [reg for ins in code if ins.opcode.startswith(_MMA) for reg in _needed(ins)]
    bits: dict[Reg, int] = {}
    while work:
        reg = work.pop()
        if reg not in bits:
            bits[reg] = 1 << len(bits)
            work += copies.get(reg, ())
    return bits


def _steps(program: Program, segment: Segment, bits: dict[Reg, int]) -> Iterator[_Step]:
    for ins in program.code[segment.start : segment.end]:
        writes = sum({bits[reg] for reg in results(ins) if reg in bits})
        if ins.opcode.startswith("wgmma.fence"):
            yield _Step("fence", 0, 0, ins)
        elif ins.opcode.startswith(_MMA):
            yield _Step("mma", sum(bits[reg] for reg in _needed(ins)), writes, ins)
        elif ins.name == "mov":
            yield _Step("copy", sum({bits[reg] for reg in sources(ins) if reg in bits}), writes, ins)
        elif writes:
            yield _Step("write", 0, writes, ins)


def _flow(segments: list[Segment], steps: dict[int, list[_Step]], bits: dict[Reg, int], found: dict[int, Report]) -> None:
    """Forward data flow: the registers written since the last fence, on any path."""
    at_start = dict.fromkeys(steps, 0)
    by_index = {s.index: s for s in segments}
    work = deque(segments)
    while work:
        segment = work.popleft()
        state = _through(steps[segment.index], at_start[segment.index], bits, found)
        for target in segment.targets:
            if target != EXIT and target in at_start and state & ~at_start[target]:
                at_start[target] |= state
                work.append(by_index[target])


def _through(steps: list[_Step], written: int, bits: dict[Reg, int], found: dict[int, Report]) -> int:
    for step in steps:
        if step.kind == "fence":
            written = 0
        elif step.kind == "mma":
            fresh = written & step.reads
            if fresh and step.ins.index not in found:
                names = sorted(reg.name for reg, bit in bits.items() if bit & fresh)
                message = f"{', '.join(names[:4])} written without a wgmma.fence before this wgmma.mma_async"
                found[step.ins.index] = Report(
                    "register-in-flight", message, ptx_line=step.ins.line, ptx=step.ins.text, source=step.ins.source
                )
            written &= ~step.writes
        elif step.kind == "copy" and not written & step.reads:
            written &= ~step.writes
        else:
            written |= step.writes
    return written


def _needed(ins: Instruction) -> set[Reg]:
    """Accumulators, unless they are only written, and A registers."""
    enable = ins.operands[3]
    reads_d = not (isinstance(enable, Imm) and enable.value == 0)
    a = set(registers(ins.operands[1])) if isinstance(ins.operands[1], Vector) else set()  # else a descriptor
    return a | (set(results(ins)) if reads_d else set())
