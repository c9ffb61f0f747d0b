"""Named barriers of a CTA and the barrier of a cluster. PTX manual, "bar, barrier" and "barrier.cluster"."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tandem_attn.emulator.memory.faults import Fault

NAMED_BARRIERS = 16
WARP = 32


@dataclass(slots=True)
class NamedBarrier:
    """Counts threads by whole warps; the first arrival of a phase fixes how many threads the barrier waits for."""

    number: int
    expected: int = 0
    arrived: int = 0
    phase: int = 0
    waiting: list[Any] = field(default_factory=list)
    members: list[int] = field(default_factory=list)  # warps that came in this phase
    votes: list[tuple[Any, int]] = field(default_factory=list)  # barrier.red: (predicate lanes, lane mask)
    outcome: list[tuple[Any, int]] = field(default_factory=list)  # the votes of the last completed phase

    def arrive(self, warp: int, threads: int, expected: int) -> bool:
        """`threads` more threads; True when the barrier opens. Raises Fault for disagreeing or impossible counts."""
        if expected % WARP or not expected:
            raise Fault("barrier", f"barrier {self.number}: a thread count of {expected} is not a positive multiple of 32")
        if self.arrived and expected != self.expected:
            raise Fault("barrier", f"barrier {self.number}: a warp comes with thread count {expected}, others with {self.expected}")
        if threads == WARP and warp in self.members:
            raise Fault("barrier", f"barrier {self.number}: warp {warp} comes twice in one phase")
        self.expected = expected
        self.arrived += threads
        self.members.append(warp)
        if self.arrived > expected:
            raise Fault("barrier", f"barrier {self.number}: {self.arrived} threads came where {expected} are expected")
        if self.arrived < expected:
            return False
        self.arrived = 0
        self.phase += 1
        self.members.clear()
        self.outcome, self.votes = self.votes, []
        return True


@dataclass(slots=True)
class ClusterBarrier:
    """All threads of all CTAs of a cluster arrive; a warp that has arrived may wait."""

    threads: int
    arrived: int = 0
    phase: int = 0
    waiting: list[Any] = field(default_factory=list)

    def arrive(self, threads: int) -> bool:
        """`threads` more; True when the phase completes."""
        self.arrived += threads
        if self.arrived < self.threads:
            return False
        self.arrived = 0
        self.phase += 1
        return True

    def leave(self, threads: int) -> bool:
        """Threads that exited count as arrived for ever ("exited threads" in the manual); True when that completes the phase."""
        self.threads -= threads
        if self.threads and self.arrived >= self.threads:
            self.arrived = 0
            self.phase += 1
            return True
        return False
