"""What a run leaves: reports (judgement as data), statistics, and the result that holds both."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from tandem_attn.emulator.errors import JudgementError
from tandem_attn.emulator.units import unit

# Every kind of report, with what it means. A report's kind is one of these keys.
KINDS = {
    "deadlock": "no warp can make progress",
    "out-of-bounds": "an access outside the memory that it names",
    "misaligned": "an address that is not a multiple of what the instruction requires",
    "uninitialised": "a read of shared memory, TMEM or a register that nothing has written",
    "uninitialised-register": "a register read before any write (compilers leave harmless ones; asked for by name only)",
    "register-in-flight": "a register touched while an asynchronous instruction still reads or writes it",
    "tmem-load-use": "a result of tcgen05.ld used before tcgen05.wait::ld (Triton's kernels do, relying on ptxas; asked for by name only)",
    "tmem-allocation": "TMEM columns over 512, never freed, freed twice, or used without an allocation",
    "shared-capacity": "more shared memory than the chip has",
    "register-budget": "setmaxnreg outside its range, budgets over the register file, or machine code over its budget (`run`'s sass)",
    "register-pressure": "more registers live in the PTX than a setmaxnreg leaves (ptxas may cope with it; asked for by name only)",
    "unelected": "a non-idempotent asynchronous operation issued by several lanes with the same operands",
    "mbarrier": "an mbarrier used wrongly: not initialised, too many arrivals, transaction count out of range, phase reused",
    "barrier": "a named or cluster barrier used wrongly",
    "trap": "a trap instruction, as compilers leave where a kernel exceeds a capacity",
    "assert": "a device assertion (Triton's device_assert and ConSan report this way)",
    "race": "two accesses that nothing orders",
    "missing-proxy-fence": "accesses through different proxies without the proxy fence between them",
    "missing-tcgen05-fence": "tcgen05 accesses of two threads, ordered but without tcgen05.fence (Triton emits none; by name only)",
    "nondeterministic": "floating-point additions to one location in no fixed order (asked for by name, of kernels declared deterministic)",
    "undefined": "behaviour that the PTX manual calls undefined",
}


@dataclass(frozen=True, slots=True)
class Source:
    """A line of the kernel's own language, from `.loc`."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass(frozen=True, slots=True)
class Report:
    """One finding. `cta` is the CTA's (x, y, z), `warp` its index in the CTA; either is None where it does not apply."""

    kind: str
    message: str
    cta: tuple[int, int, int] | None = None
    warp: int | None = None
    lanes: int = 0
    ptx_line: int | None = None
    ptx: str = ""
    source: Source | None = None
    details: dict[str, Any] = field(default_factory=dict, compare=False)

    def __str__(self) -> str:
        who = "" if self.cta is None else f" CTA {self.cta}"
        who += "" if self.warp is None else f" warp {self.warp}"
        where = "" if self.ptx_line is None else f" at PTX line {self.ptx_line}"
        where += "" if self.source is None else f" ({self.source})"
        return f"[{self.kind}]{who}{where}: {self.message}" + (f"\n    {self.ptx}" if self.ptx else "")


@dataclass(slots=True)
class Statistics:
    """Counts of one run. `instructions` counts warp-instructions, `opcodes` by dotted name; times are seconds."""

    instructions: int = 0
    ctas: int = 0
    warps: int = 0
    parse_s: float = 0.0
    codegen_s: float = 0.0
    run_s: float = 0.0
    backend: str = ""
    opcodes: Counter[str] = field(default_factory=Counter)
    tma_bytes: int = 0
    mma_flops: int = 0

    @property
    def rate(self) -> float:
        """Warp-instructions per second of execution, code generation and parsing left out."""
        return self.instructions / self.run_s if self.run_s else 0.0

    @property
    def units(self) -> Counter[str]:
        """Warp-instructions of each unit of an SM (`units.UNITS`, "fma", "alu")."""
        found: Counter[str] = Counter()
        for opcode, count in self.opcodes.items():
            found[unit(opcode)] += count
        return found


@dataclass(slots=True)
class Result:
    """What `run` returns: the tensors given are changed in place, the judgement is here."""

    reports: list[Report]
    statistics: Statistics
    finished: bool = True  # False when a deadlock, trap or fault ended the run early
    trace: Any = None

    @property
    def ok(self) -> bool:
        """True when every CTA ran to its end and nothing was reported."""
        return self.finished and not self.reports

    def raise_for_reports(self) -> None:
        """Raise JudgementError with every report when there is one."""
        if not self.ok:
            raise JudgementError(self)
