"""An executed trace replayed with the roofline's rates: when each step would be, if throughput and signals alone decided.

The emulator's trace knows the order of things and who waits for whom, not time. Here every warp is a chain of legs, each ended by what
others can see: a wait, an arrival, the issue of a product or a copy. A leg asks its SM's sub-partition (warp number mod 4) for issue
slots (one an instruction, one a cycle; none for moves of registers, which ptxas mostly removes), and for its quarter of ``Arch.mufu``
and ``Arch.fma`` (packed pairs count twice); legs of several warps share each of these evenly, and one has ended when all that it asked
for is done. A wait ends with the last arrival of its phase. A tcgen05.mma takes the tensor cores for its FLOP over ``Arch.mma_flops``,
in the order of issue; a commit arrives when those before it have ended. Everything else takes no time: latencies, copies between
memories, loads and stores of tensor memory. So it is the roofline with the kernel's own dependences, and no simulation of a chip.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tandem_attn.spec.arch import Arch, get_arch
from tandem_attn.spec.plan import ELEMENT_BYTES

if TYPE_CHECKING:
    from tandem_attn.emulator.trace import Record, Trace

SUB_PARTITIONS = 4  # of an SM, each with a warp scheduler (CUDA C++ Programming Guide, compute capabilities 9.0 and 10.0)
_LANES = 32
_TMEM_COLUMN_BYTES = 512  # 128 lanes of 4 bytes
_STEP_BYTES = 32  # along K of one tcgen05.mma (PTX ISA, tcgen05.mma: K is 32 bytes of A's elements for every dense kind)
_NOTHING = 1e-6  # cycles
ISSUE, TENSOR = "issue", "tensor"
MMA, COMMIT = "tcgen05.mma", "tcgen05.commit"

Phase = tuple[Any, int]  # a barrier (``emulator.events.BarrierId``) and the number of its phase
WarpKey = tuple[int, int]  # CTA and warp


@dataclass(frozen=True)
class Step:
    """What ended a leg: a wait, from ``since`` to ``at``, arrivals, or an operation with its serial number. Times in cycles."""

    at: float
    since: float
    waited: Phase | None
    arrived: tuple[Phase, ...]
    serial: int


@dataclass(frozen=True)
class Product:
    """A tcgen05.mma: its cycles on the tensor cores of ``cta`` (of a pair the first one), and the first column it writes."""

    cta: int
    column: int
    start: float
    end: float


@dataclass
class Replay:
    """``phases``: when each was complete; ``busy``: cycles of each unit of a CTA's SM, those of a sub-partition on an average."""

    steps: dict[WarpKey, list[Step]] = field(default_factory=lambda: defaultdict(list))
    products: list[Product] = field(default_factory=list)
    phases: dict[Phase, float] = field(default_factory=dict)
    busy: dict[tuple[int, str], float] = field(default_factory=lambda: defaultdict(float))


def replay(trace: Trace, arch: Arch | str, dtype: str) -> Replay:
    """Times of a trace of a kernel whose matrix products are tcgen05.mma with operands of ``dtype``, each CTA on an SM of its own.

    Raises:
        ValueError: the chip lacks a rate, or a warp waits for something that never comes (the trace of a run that was cut short).
    """
    chip = get_arch(arch) if isinstance(arch, str) else arch
    rate = chip.mma_rate(dtype)
    if rate is None or chip.mufu is None or chip.fma is None or chip.tmem_columns is None:
        raise ValueError(f"arch must be a chip with tcgen05 and known rates for {dtype}, got {chip.name}")
    cycles = {"mufu": SUB_PARTITIONS * _LANES / chip.mufu, "fma": SUB_PARTITIONS * _LANES / chip.fma}
    return _Machine(trace, cycles, 2 * _STEP_BYTES / ELEMENT_BYTES[dtype] / rate).run()


@dataclass
class _Leg:
    asks: dict[str, float]  # cycles of each unit
    record: Record  # that ends it


@dataclass
class _Part:
    """A sub-partition: what each of its warps still asks for, as of ``time``."""

    left: dict[WarpKey, dict[str, float]] = field(default_factory=dict)
    time: float = 0.0
    version: int = 0

    def advance(self, now: float) -> None:
        """Serves all until ``now``, before which nobody has had enough of anything."""
        shares = Counter(unit for asks in self.left.values() for unit in asks)
        for asks in self.left.values():
            for unit in list(asks):
                asks[unit] -= (now - self.time) / shares[unit]
                if asks[unit] <= _NOTHING:
                    del asks[unit]
        self.time = now

    def next(self) -> float:
        """When the next one has had enough of something."""
        shares = Counter(unit for asks in self.left.values() for unit in asks)
        return self.time + min(shares[unit] * cycles for asks in self.left.values() for unit, cycles in asks.items())


class _Machine:
    """The SMs of a trace. Events are looks at a sub-partition and arrivals of operations that have ended."""

    def __init__(self, trace: Trace, cycles: dict[str, float], cycles_an_element: float) -> None:
        self.trace, self.cycles, self.cycles_an_element = trace, cycles, cycles_an_element
        records = {key: list(trace.instructions(*key)) for key in sorted(trace.warps)}
        self.missing = Counter(phase for each in records.values() for record in each for phase in record.arrivals)
        self.missing.update(phase for operation in trace.operations.values() for phase in operation.arrivals)
        self.legs: dict[WarpKey, Iterator[_Leg]] = {key: self._legs(each) for key, each in records.items()}
        self.current: dict[WarpKey, _Leg] = {}
        self.parts: dict[tuple[int, int], _Part] = defaultdict(_Part)
        self.queue: dict[str, float] = defaultdict(float)  # when the tensor cores of an order of operations are free
        self.waiting: dict[Phase, list[tuple[WarpKey, float]]] = defaultdict(list)
        self.events: list[tuple[float, int, Any]] = []
        self.pushed = 0
        self.result = Replay()

    def run(self) -> Replay:
        for key in self.legs:
            self._next_leg(key, 0.0)
        while self.events:
            now, _, (what, version) = heapq.heappop(self.events)
            if version is None:
                self._arrive(what, now)
            elif version == self.parts[what].version:
                self._look(what, now)
        for phase, warps in self.waiting.items():
            raise ValueError(f"trace: warp {warps[0][0]} waits for phase {phase[1]} of {phase[0]}, which never comes")
        return self.result

    def _legs(self, records: list[Record]) -> Iterator[_Leg]:
        asks: dict[str, float] = defaultdict(float)
        for record in records:
            opcode = self.trace.program.code[record.index].opcode
            if not opcode.startswith("mov."):
                asks[ISSUE] += 1
            if record.unit in self.cycles:
                asks[record.unit] += self.cycles[record.unit] * (2 if opcode.endswith("f32x2") else 1)
            if record.barrier is not None or record.arrivals or (record.serial and record.unit != "tmem"):
                yield _Leg(dict(asks), record)
                asks = defaultdict(float)

    def _push(self, at: float, what: Any, version: int | None = None) -> None:
        self.pushed += 1
        heapq.heappush(self.events, (at, self.pushed, (what, version)))

    def _next_leg(self, key: WarpKey, now: float) -> None:
        leg = next(self.legs[key], None)
        if leg is None:
            return
        place = key[0], key[1] % SUB_PARTITIONS
        part = self.parts[place]
        part.advance(now)
        self.current[key] = leg
        part.left[key] = dict(leg.asks)
        for unit, cycles in leg.asks.items():
            self.result.busy[key[0], unit] += cycles / SUB_PARTITIONS
        self._schedule(place)

    def _schedule(self, place: tuple[int, int]) -> None:
        part = self.parts[place]
        part.version += 1
        if any(part.left.values()):
            self._push(part.next(), place, part.version)

    def _look(self, place: tuple[int, int], now: float) -> None:
        part = self.parts[place]
        part.advance(now)
        ended = [key for key, asks in part.left.items() if not asks]
        for key in ended:
            del part.left[key]
        self._schedule(place)
        for key in ended:
            self._end_leg(key, now)

    def _end_leg(self, key: WarpKey, now: float) -> None:
        record = self.current[key].record
        self._arrive(record.arrivals, now)
        if record.serial:
            self._issue(record.serial, now)
        if record.barrier is not None and record.phase is not None and self.missing[record.barrier, record.phase]:
            self.waiting[record.barrier, record.phase].append((key, now))
        else:
            self._note(key, now, now)

    def _note(self, key: WarpKey, now: float, since: float) -> None:
        record = self.current[key].record
        waited = None if record.barrier is None or record.phase is None else (record.barrier, record.phase)
        self.result.steps[key].append(Step(now, since, waited, record.arrivals, record.serial))
        self._next_leg(key, now)

    def _issue(self, serial: int, now: float) -> None:
        operation = self.trace.operations[serial]
        end = now
        if operation.kind == MMA:
            (_, cta), (first, last) = min(operation.written.items(), key=lambda item: item[0][1])
            start = max(now, self.queue[operation.order])
            self.queue[operation.order] = end = start + (last - first) / 4 * self.cycles_an_element
            self.result.products.append(Product(cta, first // _TMEM_COLUMN_BYTES, start, end))
            for _, each in operation.written:
                self.result.busy[each, TENSOR] += end - start
        elif operation.kind == COMMIT:
            end = max(now, self.queue[operation.order])
        if operation.arrivals:
            self._push(end, tuple(operation.arrivals))

    def _arrive(self, phases: tuple[Phase, ...], now: float) -> None:
        for phase in phases:
            self.missing[phase] -= 1
            if not self.missing[phase]:
                self.result.phases[phase] = now
                for key, since in self.waiting.pop(phase, ()):
                    self._note(key, now, since)
