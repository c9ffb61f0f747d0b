"""Shadow memory: for every granule of a memory its last write and the reads since, as indices of access records.

A cell holds `record << 6 | lane` (lane ALL: several lanes or an asynchronous operation), 0 for nothing; a negative read cell is the
number of a set of such values. Granules start at 16 bytes and are halved when a finer access comes, so that no two pieces of one access
share a granule by accident.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
PAGE_BYTES = 1 << 16


def distinct(values: Array) -> list[int]:
    """The different values of an integer array: mostly there is one only, and sorting is several times as fast as `np.unique`'s hashing."""
    flat = values.reshape(-1)
    if not len(flat):
        return []
    if (flat == flat[0]).all():
        return [int(flat[0])]
    ordered = np.sort(flat)
    return [int(ordered[0]), *ordered[1:][ordered[1:] != ordered[:-1]].tolist()]


class Sets:
    """Sets of readers, each kept once."""

    def __init__(self) -> None:
        self.members: list[tuple[int, ...]] = [()]
        self.numbers: dict[tuple[int, ...], int] = {}
        self.free: list[int] = []

    def of(self, value: int) -> tuple[int, ...]:
        return self.members[-value] if value < 0 else (value,) if value else ()

    def number(self, members: tuple[int, ...]) -> int:
        """The cell value of a set."""
        if len(members) <= 1:
            return members[0] if members else 0
        members = tuple(sorted(members))
        found = self.numbers.get(members)
        if found is None:
            if self.free:
                found = self.free.pop()
                self.members[found] = members
            else:
                found = len(self.members)
                self.members.append(members)
            self.numbers[members] = found
        return -found

    def keep(self, used: set[int]) -> None:
        """Forget the sets that no cell holds."""
        self.free = [number for number in range(1, len(self.members)) if number not in used]
        for number in self.free:
            self.numbers.pop(self.members[number], None)
            self.members[number] = ()


class Shadow:
    """Of one memory: shared memory or TMEM of a CTA, or global memory."""

    def __init__(self) -> None:
        self.shift = 4
        self.pages: dict[int, tuple[Array, Array]] = {}

    def refine(self, shift: int) -> None:
        """Make granules of 2^shift bytes."""
        ratio = 1 << (self.shift - shift)
        self.pages = {page: (np.repeat(w, ratio), np.repeat(r, ratio)) for page, (w, r) in self.pages.items()}
        self.shift = shift

    def granules(self, starts: Array, size: int) -> Array:
        """Granule numbers, one row per piece."""
        bits = int(np.bitwise_or.reduce(starts)) | size if len(starts) else size
        fine = min(4, (bits & -bits).bit_length() - 1)
        if fine < self.shift:
            self.refine(fine)
        first = starts >> self.shift
        count = size >> self.shift
        return first[:, None] if count == 1 else first[:, None] + np.arange(count)

    def parts(self, granules: Array, rows: Array) -> list[tuple[Array, Array, Array, Array]]:
        """(writes, reads, index, row of each) per page: the two arrays of the page and where in them."""
        flat = granules.reshape(-1)
        width = 16 - self.shift
        page = flat >> width
        inside = flat & ((1 << width) - 1)
        low, high = int(page.min()), int(page.max())
        if low == high:
            return [(*self.page(low), inside, rows)]
        found = []
        for number in distinct(page):
            at = page == number
            found.append((*self.page(number), inside[at], rows[at]))
        return found

    def page(self, number: int) -> tuple[Array, Array]:
        found = self.pages.get(number)
        if found is None:
            size = PAGE_BYTES >> self.shift
            found = self.pages[number] = (np.zeros(size, np.int64), np.zeros(size, np.int64))
        return found
