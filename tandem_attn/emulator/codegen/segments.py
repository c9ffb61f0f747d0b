"""The executable form of a program: functions of segments, made when first needed."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from tandem_attn.emulator.codegen import llvm_backend, native
from tandem_attn.emulator.codegen.numpy_backend import compile_range
from tandem_attn.emulator.ops.registry import Handler, lookup
from tandem_attn.emulator.ptx.link import Links
from tandem_attn.emulator.ptx.nodes import Instruction, Reg
from tandem_attn.emulator.ptx.operands import results, sources
from tandem_attn.emulator.ptx.program import Program, Segment

Key = tuple[str, int]
Function = Callable[[Any, Any], None]
HOT = 24  # executions after which a segment is worth compiling (compiling costs as much as about a hundred in NumPy)
SMALL = 3  # pure instructions below which a native call gains nothing
_MEMORY = ("ld", "ldu", "st")


def _nothing(warp: Any, mask: Any) -> None:
    """A segment that is one control or blocking instruction."""


class NumpySegments:
    """Runs segments as generated NumPy code."""

    name = "numpy"

    def __init__(self, program: Program, links: Links) -> None:
        self.program, self.links = program, links
        self.functions: tuple[dict[int, Function | None], dict[int, Function | None]] = ({}, {})
        self.handlers: dict[int, Handler] = {}
        self.codegen_s = 0.0
        self.settled: list[Function | None] = [None] * len(program.segments)  # what to call when all lanes are active, once decided
        self.teams: list[Function | None] = [None] * len(program.segments)  # the same for several warps

    def run(self, segment: Segment, warp: Any, mask: Any) -> None:
        cache = self.functions[mask is not None]
        try:
            function = cache[segment.index]
        except KeyError:
            function = cache[segment.index] = self.timed(lambda: self.make(segment, mask is not None))
        if function is not None:
            function(warp, mask)
        if mask is None:
            self.settle(segment, function)

    def settle(self, segment: Segment, function: Function | None) -> None:
        """From now on the machine calls this function itself."""
        self.settled[segment.index] = function or _nothing

    def run_team(self, segment: Segment, team: Any) -> None:
        """All lanes of several warps."""
        function = self.teams[segment.index]
        if function is None:
            function = self.teams[segment.index] = self.timed(lambda: self.make_team(segment)) or _nothing
        function(team, None)

    def make_team(self, segment: Segment) -> Function | None:
        end = self.end_of(segment)
        return None if end == segment.start else self.range(range(segment.start, end), self.live_behind(segment), False, team=True)

    def timed(self, make: Callable[[], Any]) -> Any:
        began = time.perf_counter()
        try:
            return make()
        finally:
            self.codegen_s += time.perf_counter() - began

    def end_of(self, segment: Segment) -> int:
        """Where the part ends that generated code executes: control and blocking instructions are the machine's business."""
        return segment.end if segment.kind == "next" else segment.last

    def make(self, segment: Segment, masked: bool) -> Function | None:
        end = self.end_of(segment)
        if end == segment.start:
            return None
        return self.range(range(segment.start, end), self.live_behind(segment), masked)

    def live_behind(self, segment: Segment) -> set[Key]:
        """Registers that are read behind the generated part."""
        live = {(r.cls, r.slot) for r in segment.live_out}
        if segment.kind != "next":
            last = self.program.code[segment.last]
            live |= {(r.cls, r.slot) for r in sources(last) + results(last)}
        return live

    def range(self, indices: Sequence[int], live: set[Key], masked: bool, team: bool = False) -> Function:
        return compile_range(self.program, indices, live, masked, self.resolve, self.handler, team)

    def resolve(self, name: str) -> Reg:
        return self.links.registers[name]

    def handler(self, index: int) -> Handler:
        """The handler of a machine instruction, made once."""
        found = self.handlers.get(index)
        if found is None:
            ins = self.program.code[index]
            factory = lookup(ins).machine
            assert factory is not None, ins.text
            found = self.handlers[index] = factory(ins)
        return found


class LlvmSegments(NumpySegments):
    """Runs hot segments as machine code where they are pure, everything else as NumPy code."""

    name = "llvm"

    def __init__(self, program: Program, links: Links, hot: int = HOT) -> None:
        super().__init__(program, links)
        self.hot = hot
        self.compiler = native.Compiler(program.module.text)
        self.counts: dict[int, int] = {}
        self.cold_teams: dict[int, Function] = {}
        self.natives: dict[str, Function] = {}
        self.arranged: dict[int, list[tuple[bool, list[int]]]] = {}

    def settle(self, segment: Segment, function: Function | None) -> None:
        """Until it is hot a segment is counted; one without a pure run long enough stays in NumPy."""
        if function is None or not any(fast for fast, _ in self.pieces(segment)):
            super().settle(segment, function)

    def run(self, segment: Segment, warp: Any, mask: Any) -> None:
        if mask is None and self.ready(segment, 1):
            made = self.timed(lambda: self.compiled(segment))
            if made is not None:
                super().settle(segment, made)
                made(warp, None)
                return
        super().run(segment, warp, mask)

    def run_team(self, segment: Segment, team: Any) -> None:
        index = segment.index
        ready = self.ready(segment, team.count)
        made = self.timed(lambda: self.compiled(segment, team=True)) if ready else None
        if made is None:
            made = self.cold_teams.get(index)
            if made is None:
                made = self.cold_teams[index] = self.timed(lambda: self.make_team(segment)) or _nothing
            if not ready and any(fast for fast, _ in self.pieces(segment)):
                made(team, None)
                return
        self.teams[index] = made
        made(team, None)

    def ready(self, segment: Segment, warps: int) -> bool:
        """Count an execution; whether the segment is hot, or compiled already in an earlier process."""
        count = self.counts[segment.index] = self.counts.get(segment.index, 0) + warps
        return count >= self.hot or (count == warps and self.compiler.cached(self.first(segment)))

    def pieces(self, segment: Segment) -> list[tuple[bool, list[int]]]:
        """(native, instructions) of alternating runs of pure and of other instructions."""
        found = self.arranged.get(segment.index)
        if found is None:
            found = self.arranged[segment.index] = self.arrange(segment)
        return found

    def arrange(self, segment: Segment) -> list[tuple[bool, list[int]]]:
        """The runs of a segment in an order that leaves few of them.

        A pure instruction joins the run of pure ones before it, unless an instruction between depends on it, or it on that one.
        """
        found: list[tuple[bool, list[int]]] = []
        read: set[Key] = set()  # by the instructions behind the last run of pure ones
        written: set[Key] = set()
        for i in range(segment.start, self.end_of(segment)):
            ins = self.program.code[i]
            gets, sets = ({(r.cls, r.slot) for r in regs} for regs in (sources(ins), results(ins)))
            if lookup(ins).pure is None or ins.name in _MEMORY:
                if not found or found[-1][0]:
                    found.append((False, []))
                found[-1][1].append(i)
                read |= gets
                written |= sets
                continue
            last = next((run for pure, run in reversed(found) if pure), None)
            if last is None or gets & written or sets & (read | written):
                last = []
                found.append((True, last))
                read, written = set(), set()
            last.append(i)
        merged: list[tuple[bool, list[int]]] = []
        for pure, run in found:  # short pure runs stay with their neighbours in NumPy
            fast = pure and len(run) >= SMALL
            if merged and not fast and not merged[-1][0]:
                merged[-1][1].extend(run)
            else:
                merged.append((fast, run))
        return merged

    def first(self, segment: Segment) -> str:
        """The name of the segment's first native part."""
        return next((f"s{segment.index}_{n}" for n, (fast, _) in enumerate(self.pieces(segment)) if fast), "none")

    def compiled(self, segment: Segment, team: bool = False) -> Function | None:
        pieces = self.pieces(segment)
        if not any(fast for fast, _ in pieces):
            return None
        live = self.live_behind(segment)
        steps: list[Function] = []
        for number in range(len(pieces) - 1, -1, -1):
            fast, indices = pieces[number]
            code = [self.program.code[i] for i in indices]
            if fast:
                steps.append(self.native_step(f"s{segment.index}_{number}", code, set(live)))
            else:
                steps.append(self.range(indices, set(live), False, team))
            live |= {(r.cls, r.slot) for ins in code for r in sources(ins)}
        steps.reverse()
        if len(steps) == 1:
            return steps[0]

        def run(warp: Any, mask: Any) -> None:
            for step in steps:
                step(warp, mask)

        return run

    def native_step(self, name: str, code: list[Instruction], live: set[Key]) -> Function:
        found = self.natives.get(name)
        if found is not None:
            return found
        function = self.compiler.function(name, lambda: llvm_backend.function_text(name, code, live, self.resolve))

        def run(warp: Any, mask: Any) -> None:
            del mask
            function(warp.files, warp.count)

        self.natives[name] = run
        return run
