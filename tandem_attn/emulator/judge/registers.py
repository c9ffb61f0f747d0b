"""Registers that the code behind a setmaxnreg needs, against its count. PTX manual, "setmaxnreg".

From machine code (`cuobjdump -sass`) the need is exact: the highest register that an instruction names. From PTX alone the registers that
live at one point are only what ptxas starts from: it may keep values in uniform registers, compute them again or spill them, so more of
them than the count is worth a look (kind "register-pressure", asked for by name), not an error.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from tandem_attn.emulator.ptx.nodes import Imm, Instruction, Reg
from tandem_attn.emulator.ptx.operands import results, sources
from tandem_attn.emulator.ptx.program import EXIT, Program, Segment
from tandem_attn.emulator.report import Report

# 32-bit registers per virtual one; two 16-bit ones can share one, predicates have registers of their own.
_UNITS = {"p": 0.0, "h": 0.5, "r": 1.0, "d": 2.0, "q": 4.0}
_LINE = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(@!?U?P\w+\s+)?([A-Z][\w.]*)\s*([^;]*);")
_REGISTER = re.compile(r"(?<![\w.])R(\d+)\b")
_WIDE = re.compile(r"\.(64|128)\b")


# ---- machine code
@dataclass(frozen=True, slots=True)
class Line:
    """An instruction of machine code."""

    address: int
    opcode: str
    operands: str
    guarded: bool

    @property
    def highest(self) -> int:
        """The highest register that it names, -1 for none; the last of a wide memory operand."""
        found = [int(n) for n in _REGISTER.findall(self.operands)]
        if not found:
            return -1
        wide = _WIDE.search(self.opcode) if self.opcode.startswith(("LD", "ST")) else None
        return max(found) + (int(wide[1]) // 32 - 1 if wide else 0)

    @property
    def count(self) -> int | None:
        """Of a USETMAXREG, its count."""
        return int(self.operands.split(",")[-1].strip(), 0) if self.opcode.startswith("USETMAXREG") else None

    @property
    def target(self) -> int | None:
        """Where a branch or call goes, when the text says so."""
        found = re.findall(r"\b0x[0-9a-f]+\b", self.operands)
        return int(found[-1], 16) if self.opcode.startswith(("BRA", "CALL")) and found else None


def parse_sass(text: str) -> list[Line]:
    """The instructions of a disassembly of one kernel. Raises ValueError when there are none."""
    lines = [Line(int(m[1], 16), m[3], m[4].strip(), bool(m[2])) for m in _LINE.finditer(text)]
    if not lines:
        raise ValueError("sass: no instruction found; the output of `cuobjdump -sass` is expected")
    return lines


def over_budget(text: str) -> list[Report]:
    """One report for each USETMAXREG behind which code names a register that its count does not cover."""
    lines = parse_sass(text)
    place = {line.address: i for i, line in enumerate(lines)}
    budget: dict[int, int] = {}  # instruction -> the largest count that it can be reached with
    origin: dict[int, int] = {}
    for start, line in enumerate(lines):
        if line.count is not None:
            for i in _reached(lines, place, start):
                if line.count > budget.get(i, 0):
                    budget[i], origin[i] = line.count, start
    worst: dict[int, int] = {}
    for i, count in budget.items():
        if lines[i].highest >= count and lines[i].highest > lines[worst.get(origin[i], i)].highest - (origin[i] not in worst):
            worst[origin[i]] = i
    return [_report(lines[start], lines[i]) for start, i in sorted(worst.items())]


def _report(setter: Line, user: Line) -> Report:
    text = (
        f"machine code at {user.address:#x} uses register R{user.highest}, but the setmaxnreg at {setter.address:#x} leaves {setter.count} "
        f"registers: `{user.opcode} {user.operands}`"
    )
    return Report("register-budget", text)


def _reached(lines: list[Line], place: dict[int, int], start: int) -> Iterable[int]:
    """Instructions that can follow, up to the next USETMAXREG; an indirect branch ends a path."""
    seen: set[int] = set()
    work = [start + 1]
    while work:
        i = work.pop()
        if i in seen or i >= len(lines) or lines[i].count is not None:
            continue
        seen.add(i)
        line = lines[i]
        target = line.target
        if target is not None and target in place:
            work.append(place[target])
        always = line.opcode.startswith(("EXIT", "BRX", "RET", "JMX")) or (line.opcode.startswith("BRA") and "," not in line.operands)
        if line.guarded or not always:
            work.append(i + 1)
    return seen


# ---- PTX
def pressure(program: Program) -> list[Report]:
    """One report for each setmaxnreg behind which more registers live at one point than its count."""
    found: list[Report] = []
    setters = [s for s in program.segments if program.code[s.last].name == "setmaxnreg"]
    budget: dict[int, int] = {}
    origin: dict[int, Instruction] = {}
    for setter in setters:
        ins = program.code[setter.last]
        count = ins.operands[0]
        if not isinstance(count, Imm):
            continue
        for segment in _behind(program, setter):
            if count.value > budget.get(segment.index, 0):
                budget[segment.index], origin[segment.index] = count.value, ins
    worst: dict[int, tuple[float, Instruction, int]] = {}
    for index, count_of in budget.items():
        most, where = _most_live(program, program.segments[index])
        known = worst.get(origin[index].index)
        if most > count_of and (known is None or most > known[0]):
            worst[origin[index].index] = (most, where, count_of)
    for index, (most, where, count_of) in sorted(worst.items()):
        ins = program.code[index]
        text = (
            f"{most:g} registers of 32 bits live at PTX line {where.line}, behind this setmaxnreg to {count_of}: ptxas must spill, compute "
            "again or use uniform registers (liveness of the PTX; machine code decides)"
        )
        found.append(Report("register-pressure", text, ptx_line=ins.line, ptx=ins.text, source=ins.source))
    return found


def _behind(program: Program, setter: Segment) -> list[Segment]:
    """Segments that can follow, up to the next setmaxnreg."""
    seen: dict[int, Segment] = {}
    work = list(setter.targets)
    while work:
        index = work.pop()
        if index == EXIT or index in seen:
            continue
        segment = program.segments[index]
        seen[index] = segment
        if program.code[segment.last].name != "setmaxnreg":
            work += segment.targets
    return list(seen.values())


def _most_live(program: Program, segment: Segment) -> tuple[float, Instruction]:
    """The largest sum of live registers behind an instruction of the segment, and the instruction."""
    live: set[Reg] = set(segment.live_out)
    best, where = _units(live), program.code[segment.last]
    for i in range(segment.last, segment.start - 1, -1):
        ins = program.code[i]
        live.difference_update(results(ins))
        live.update(sources(ins))
        size = _units(live)
        if size > best:
            best, where = size, ins
    return best, where


def _units(live: Iterable[Reg]) -> float:
    return sum(_UNITS[reg.cls] for reg in live if not reg.name.startswith("%tid"))
