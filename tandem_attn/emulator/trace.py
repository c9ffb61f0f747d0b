"""An optional record of a run for a performance model: what each warp executed, and what it waited for.

Kept per warp as two compact arrays: the segments it ran, and the events in between. `Trace.instructions` expands them: for each
warp-instruction its unit, the instructions that produced its operands, the bytes it moved, the barrier it waited on and who released it.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

from tandem_attn.emulator.events import (
    Access,
    AccessKind,
    Arrival,
    AsyncAgent,
    BarrierId,
    Event,
    GroupWait,
    Issue,
    PhaseComplete,
    Space,
    Wait,
    WarpAgent,
)
from tandem_attn.emulator.ptx.nodes import Instruction
from tandem_attn.emulator.ptx.operands import results, sources
from tandem_attn.emulator.ptx.program import Program
from tandem_attn.emulator.report import Report
from tandem_attn.emulator.units import unit


@dataclass(frozen=True, slots=True)
class Record:
    """One executed warp-instruction. `position` counts the warp's instructions; `producers` are positions; -1 is before the trace.

    `barrier`, `phase` and `released_by` (the agent whose arrival completed the phase) are set for waits that returned, `arrivals` for
    those that the warp made itself, `serial` for asynchronous operations: the number in `Trace.operations`, whose bytes `bytes` counts.
    """

    position: int
    index: int
    unit: str
    producers: tuple[int, ...]
    bytes: int = 0
    barrier: BarrierId | None = None
    phase: int | None = None
    arrivals: tuple[tuple[BarrierId, int], ...] = ()
    released_by: WarpAgent | AsyncAgent | None = None
    serial: int = 0


@dataclass(slots=True)
class Operation:
    """An asynchronous operation: the bytes it moved, from the first to the last byte that it wrote in each memory, and its arrivals.

    `order` is that of `events.Issue`: operations with the same one take effect in the order of their serial numbers.
    """

    kind: str
    order: str
    bytes: int = 0
    written: dict[tuple[Space, int], tuple[int, int]] = field(default_factory=dict)  # by memory and CTA: [first byte, end)
    arrivals: list[tuple[BarrierId, int]] = field(default_factory=list)  # barrier and phase


Noted: TypeAlias = int | Wait | GroupWait | Issue | Arrival  # an int: bytes that the instruction moved itself


@dataclass(slots=True)
class WarpTrace:
    """`segments`: indices in order of execution; `events`: (segments executed before, instruction, what happened)."""

    segments: array[int] = field(default_factory=lambda: array("i"))
    events: list[tuple[int, int, Noted]] = field(default_factory=list)


class Trace:
    """The observer that records, and the record."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.warps: dict[tuple[int, int], WarpTrace] = {}
        self.operations: dict[int, Operation] = {}  # by serial number
        self.last_arrival: dict[tuple[BarrierId, int], WarpAgent | AsyncAgent] = {}
        self.releases: dict[tuple[BarrierId, int], WarpAgent | AsyncAgent] = {}

    def warp(self, agent: WarpAgent) -> WarpTrace:
        key = (agent.cta, agent.warp)
        if key not in self.warps:
            self.warps[key] = WarpTrace()
        return self.warps[key]

    def event(self, event: Event) -> list[Report]:
        if isinstance(event, Access):
            size = len(event.starts) * event.size
            if isinstance(event.agent, AsyncAgent):
                self._access(self.operations[event.agent.serial], event, size)
            else:
                self._note(event.agent, event.site.index, size)
        elif isinstance(event, Arrival):
            self.last_arrival[event.barrier, event.phase] = event.agent
            if isinstance(event.agent, AsyncAgent):
                self.operations[event.agent.serial].arrivals.append((event.barrier, event.phase))
            else:
                self._note(event.agent, event.site.index, event)
        elif isinstance(event, PhaseComplete):
            releaser = self.last_arrival.pop((event.barrier, event.phase), None)
            if releaser is not None:
                self.releases[event.barrier, event.phase] = releaser
        elif isinstance(event, Wait | GroupWait):
            self._note(event.agent, event.site.index, event)
        elif isinstance(event, Issue):
            self.operations[event.agent.serial] = Operation(event.agent.kind, event.order)
            self._note(event.agent.issuer, event.site.index, event)
        return []

    @staticmethod
    def _access(operation: Operation, event: Access, size: int) -> None:
        operation.bytes += size
        if event.kind is not AccessKind.READ and size:
            first, end = int(event.starts.min()), int(event.starts.max()) + event.size
            before = operation.written.get((event.space, event.cta), (first, end))
            operation.written[event.space, event.cta] = min(first, before[0]), max(end, before[1])

    def _note(self, agent: WarpAgent, index: int, event: Noted) -> None:
        warp = self.warp(agent)
        warp.events.append((len(warp.segments), index, event))

    def finish(self) -> list[Report]:
        return []

    def instructions(self, cta: int, warp: int) -> Iterator[Record]:
        """Every instruction of one warp, in order."""
        trace = self.warps[cta, warp]
        events: dict[tuple[int, int], list[Noted]] = {}
        for at, index, event in trace.events:
            events.setdefault((at, index), []).append(event)
        written: dict[tuple[str, int], int] = {}
        position = 0
        for number, segment_index in enumerate(trace.segments, 1):
            segment = self.program.segments[segment_index]
            for i in range(segment.start, segment.end):
                ins = self.program.code[i]
                producers = tuple(sorted({written.get((r.cls, r.slot), -1) for r in sources(ins)}))
                yield self._record(position, ins, producers, events.get((number, i), []))
                for reg in results(ins):
                    written[reg.cls, reg.slot] = position
                position += 1

    def _record(self, position: int, ins: Instruction, producers: tuple[int, ...], events: list[Noted]) -> Record:
        size, serial, barrier, phase, releaser, arrivals = 0, 0, None, None, None, []
        for event in events:
            if isinstance(event, int):
                size += event
            elif isinstance(event, Wait):
                barrier, phase, releaser = event.barrier, event.phase, self.releases.get((event.barrier, event.phase))
            elif isinstance(event, Arrival):
                arrivals.append((event.barrier, event.phase))
            elif isinstance(event, Issue):
                serial = event.agent.serial
                size += self.operations[serial].bytes
        return Record(position, ins.index, unit(ins.opcode), producers, size, barrier, phase, tuple(arrivals), releaser, serial)
