"""The executable form of a program: functions of segments, made when first needed."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from tandem_attn.emulator.codegen.numpy_backend import compile_segment
from tandem_attn.emulator.ops.registry import Handler, Pure, lookup
from tandem_attn.emulator.ptx.link import Links
from tandem_attn.emulator.ptx.nodes import Instruction, Reg
from tandem_attn.emulator.ptx.program import Program, Segment


class NumpySegments:
    """Runs segments as generated NumPy code."""

    name = "numpy"

    def __init__(self, program: Program, links: Links) -> None:
        self.program, self.links = program, links
        self.functions: tuple[dict[int, Callable[[Any, Any], None] | None], ...] = ({}, {})
        self.handlers: dict[int, Handler] = {}
        self.codegen_s = 0.0

    def run(self, segment: Segment, warp: Any, mask: Any) -> None:
        cache = self.functions[mask is not None]
        try:
            function = cache[segment.index]
        except KeyError:
            function = cache[segment.index] = self.make(segment, mask is not None)
        if function is not None:
            function(warp, mask)

    def make(self, segment: Segment, masked: bool) -> Callable[[Any, Any], None] | None:
        if segment.kind != "next" and segment.end - segment.start == 1:
            return None
        began = time.perf_counter()
        function = compile_segment(self.program, segment, masked, self.resolve, self.pure, self.handler_of)
        self.codegen_s += time.perf_counter() - began
        return function

    def resolve(self, name: str) -> Reg:
        return self.links.registers[name]

    def pure(self, ins: Instruction) -> Pure | None:
        return lookup(ins).pure

    def handler_of(self, ins: Instruction) -> Handler:
        return self.handler(ins.index)

    def handler(self, index: int) -> Handler:
        """The handler of a machine instruction, made once."""
        found = self.handlers.get(index)
        if found is None:
            ins = self.program.code[index]
            factory = lookup(ins).machine
            assert factory is not None, ins.text
            found = self.handlers[index] = factory(ins)
        return found
