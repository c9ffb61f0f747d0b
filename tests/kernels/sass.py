"""What a cubin says about itself: registers, spills, instruction counts, and ptxas's warnings for its PTX. Needs no GPU."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import triton

_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
_INSTRUCTION = re.compile(r"^\s+/\*([0-9a-f]{4,6})\*/\s+(@!?U?P\d+\s+)?([A-Z0-9_.]+)(.*?);", re.M)


@dataclass(frozen=True)
class Sass:
    """Instructions of one kernel in order."""

    instructions: tuple[tuple[str, str], ...]  # opcode with modifiers, operands
    addresses: tuple[int, ...] = ()
    predicates: tuple[str, ...] = ()

    def count(self, opcode: str) -> int:
        return sum(name == opcode or name.startswith(opcode + ".") for name, _ in self.instructions)

    @property
    def counts(self) -> Counter[str]:
        return Counter(name.split(".")[0] for name, _ in self.instructions)

    @property
    def register_budgets(self) -> list[int]:
        """Operands of setmaxnreg in program order."""
        return [int(rest.split(",")[-1].strip(" ;"), 16) for name, rest in self.instructions if name.startswith("USETMAXREG")]

    @property
    def spills(self) -> int:
        return self.count("STL") + self.count("LDL")

    def loops(self, opcode: str, least: int) -> list[Sass]:
        """The innermost loops with at least ``least`` of an opcode, in program order.

        A loop ends in a conditional backward branch; unconditional ones come back from code that lies out of line.
        """
        places = {address: i for i, address in enumerate(self.addresses)}
        spans = []
        for i, (name, rest) in enumerate(self.instructions):
            target = re.search(r"(U?P\d+, )?0x([0-9a-f]+)", rest) if name.startswith("BRA") else None
            if target and (self.predicates[i] or target[1]):
                start = places.get(int(target[2], 16), i)
                if start < i and self._slice(start, i + 1).count(opcode) >= least:
                    spans.append((start, i + 1))
        inner = [a for a in spans if not any(a != b and a[0] <= b[0] and b[1] <= a[1] for b in spans)]
        return [self._slice(start, stop) for start, stop in sorted(inner)]

    def _slice(self, start: int, stop: int) -> Sass:
        return Sass(self.instructions[start:stop], self.addresses[start:stop], self.predicates[start:stop])


def disassemble(cubin: bytes) -> Sass:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        text = subprocess.run([_TOOLS / "cuobjdump", "-sass", path], capture_output=True, text=True, check=True).stdout
    found = _INSTRUCTION.findall(text)
    addresses, predicates, names, rests = zip(*found, strict=True)
    return Sass(tuple(zip(names, rests, strict=True)), tuple(int(address, 16) for address in addresses), predicates)


def ptxas_messages(ptx: str) -> str:
    """What ptxas prints for a kernel, warnings included."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.ptx"
        path.write_text(ptx)
        tool = next(tool for tool in (_TOOLS / "ptxas-blackwell", _TOOLS / "ptxas") if tool.exists())
        command = [tool, "-v", "--regAllocOptLevel=2", "--gpu-name=sm_90a", path, "-o", Path(folder) / "out.cubin"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stderr
