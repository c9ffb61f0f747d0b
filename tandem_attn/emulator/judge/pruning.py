"""Records of the race tracker by number, and the removal of those that no cell of shadow memory remembers any more.

A long run makes millions of accesses, but a cell holds its last write and the reads since: what later accesses have taken the place of can
never be reported again. The numbers of forgotten records are given out anew.
"""

from __future__ import annotations

from collections.abc import Iterable

from tandem_attn.emulator.judge.record import Record
from tandem_attn.emulator.judge.shadow import Sets, Shadow, distinct

LEAST = 20_000  # new records before a look is worth its time


class Records:
    """Number -> record; number 0 is none."""

    def __init__(self) -> None:
        self.items: list[Record | None] = [None]
        self.free: list[int] = []
        self.fresh = 0  # records since the last look
        self.limit = LEAST

    def __getitem__(self, number: int) -> Record | None:
        return self.items[number]

    def add(self, record: Record) -> int:
        self.fresh += 1
        if self.free:
            number = self.free.pop()
            self.items[number] = record
            return number
        self.items.append(record)
        return len(self.items) - 1

    @property
    def due(self) -> bool:
        return self.fresh >= self.limit

    def prune(self, shadows: Iterable[Shadow], sets: Sets) -> None:
        """Forget records and sets that no cell holds. The next look comes when as many new ones have been made as are left."""
        live: set[int] = set()
        used: set[int] = set()
        for shadow in shadows:
            for writes, reads in shadow.pages.values():
                live.update(value >> 6 for value in distinct(writes))
                for value in distinct(reads):
                    used.add(-value) if value < 0 else live.add(value >> 6)
        live.update(member >> 6 for number in used for member in sets.members[number])
        sets.keep(used)
        self.free = [number for number in range(1, len(self.items)) if number not in live]
        for number in self.free:
            self.items[number] = None
        self.fresh, self.limit = 0, max(LEAST, len(live))
