"""The mbarrier state machine. PTX manual, "Parallel Synchronization and Communication Instructions: mbarrier"."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tandem_attn.emulator.memory.faults import Fault

# PTX manual, "Size and alignment ... valid range": expected and pending arrivals 1 .. 2^20 - 1, tx-count -(2^20 - 1) .. 2^20 - 1.
MAX_COUNT = (1 << 20) - 1


@dataclass(slots=True)
class MBarrier:
    """An mbarrier object: `count` arrivals complete a phase once the transaction count is zero."""

    count: int
    pending: int
    tx: int = 0
    phase: int = 0  # phases completed; the current phase has this number
    waiters: list[Any] = field(default_factory=list)
    arrivals: list[Any] = field(default_factory=list)  # who arrived in the current phase, for the deadlock report

    @classmethod
    def init(cls, count: int) -> MBarrier:
        if not 1 <= count <= MAX_COUNT:
            raise Fault("mbarrier", f"mbarrier.init with count {count}, not in 1 .. {MAX_COUNT}")
        return cls(count, count)

    def expect_tx(self, size: int) -> None:
        """Raise the transaction count of the current phase."""
        self.tx += size
        self._check_tx()

    def complete_tx(self, size: int) -> bool:
        """Lower the transaction count; True when that completed the phase."""
        self.tx -= size
        self._check_tx()
        return self._advance()

    def arrive(self, count: int = 1) -> bool:
        """`count` arrivals; True when they completed the phase. Raises Fault for more than are pending."""
        if count > self.pending:
            raise Fault("mbarrier", f"{count} arrivals where {self.pending} of {self.count} are pending in phase {self.phase}")
        self.pending -= count
        return self._advance()

    def drop(self, count: int = 1) -> bool:
        """arrive_drop: as arrive, and later phases expect fewer arrivals."""
        self.count -= count
        return self.arrive(count)

    def done(self, parity: int) -> bool:
        """Whether the phase of that parity is complete (try_wait.parity: the current phase or the one before)."""
        return (self.phase & 1) != (parity & 1)

    def state(self) -> int:
        """The opaque state that an arrival returns: enough for test_wait and pending_count."""
        return (self.phase << 40) | (self.pending << 20) | self.count

    def passed(self, state: int) -> bool:
        """Whether the phase in which `state` was returned is complete; by its parity, so that two phases on it seems not to be (H200)."""
        return self.done(state >> 40)

    def _check_tx(self) -> None:
        if abs(self.tx) > MAX_COUNT:
            raise Fault("mbarrier", f"transaction count {self.tx} is out of range (at most {MAX_COUNT} either way)")

    def _advance(self) -> bool:
        if self.pending or self.tx:
            return False
        self.phase += 1
        self.pending = self.count
        self.arrivals.clear()
        return True

    def __str__(self) -> str:
        tx = f", {self.tx} bytes expected" if self.tx else ""
        return f"phase {self.phase} with {self.count - self.pending} of {self.count} arrivals{tx}"
