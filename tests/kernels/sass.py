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
_INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]{4,6}\*/\s+(?:@!?U?P\d+\s+)?([A-Z0-9_.]+)(.*?);", re.M)


@dataclass(frozen=True)
class Sass:
    """Instructions of one kernel in order."""

    instructions: tuple[tuple[str, str], ...]  # opcode with modifiers, operands

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


def disassemble(cubin: bytes) -> Sass:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        text = subprocess.run([_TOOLS / "cuobjdump", "-sass", path], capture_output=True, text=True, check=True).stdout
    return Sass(tuple(_INSTRUCTION.findall(text)))


def ptxas_messages(ptx: str) -> str:
    """What ptxas prints for a kernel, warnings included."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.ptx"
        path.write_text(ptx)
        tool = next(tool for tool in (_TOOLS / "ptxas-blackwell", _TOOLS / "ptxas") if tool.exists())
        command = [tool, "-v", "--regAllocOptLevel=2", "--gpu-name=sm_90a", path, "-o", Path(folder) / "out.cubin"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stderr
