"""Tensor memory of one CTA: 512 columns x 128 lanes x 32 bits. PTX manual, "Tensor Memory Addressing" and "Tensor Memory Allocation"."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tandem_attn.emulator.memory.faults import Fault

COLUMNS, LANES = 512, 128
GRANULE = 32  # allocations are powers of two of at least 32 columns


class TensorMemory:
    """Stored by column, so that one register of a warp is one contiguous row."""

    def __init__(self) -> None:
        self.data: NDArray[np.uint32] = np.zeros((COLUMNS, LANES), np.uint32)
        self.written: NDArray[np.bool_] = np.zeros((COLUMNS, LANES), np.bool_)
        self.owner: list[int] = [-1] * COLUMNS  # serial number of the allocation that holds the column
        self.sizes: dict[int, int] = {}  # first column -> columns
        self.serial = 0
        self.relinquished = False
        self.track = True

    def allocate(self, columns: int) -> int | None:
        """First column of a free aligned run, or None where there is none now (the instruction blocks)."""
        for first in range(0, COLUMNS - columns + 1, GRANULE):
            if all(owner < 0 for owner in self.owner[first : first + columns]):
                self.owner[first : first + columns] = [self.serial] * columns
                self.sizes[first] = columns
                self.serial += 1
                self.written[first : first + columns] = False
                return first
        return None

    def free(self, first: int, columns: int) -> None:
        """Give back an allocation. Raises Fault when it is none, or has another size."""
        if self.sizes.get(first) != columns:
            held = self.sizes.get(first)
            what = f"it holds {held} columns" if held else "nothing is allocated there"
            raise Fault("tmem-allocation", f"dealloc of {columns} columns at column {first}: {what}")
        del self.sizes[first]
        self.owner[first : first + columns] = [-1] * columns

    def require_allocated(self, first: int, columns: int) -> None:
        """Raise Fault unless the columns exist and are allocated."""
        if first < 0 or first + columns > COLUMNS:
            raise Fault("out-of-bounds", f"TMEM columns {first} .. {first + columns - 1} are outside 0 .. {COLUMNS - 1}")
        if min(self.owner[first : first + columns]) < 0:
            raise Fault("tmem-allocation", f"TMEM columns {first} .. {first + columns - 1} are used but not (all) allocated")

    def require_written(self, columns: slice, lanes: slice) -> None:
        """Raise a Fault (not fatal) when a cell was never written."""
        if self.track and not self.written[columns, lanes].all():
            where = np.argwhere(~self.written[columns, lanes])[0]
            column, lane = int(where[0]) + columns.start, int(where[1]) + lanes.start
            raise Fault("uninitialised", f"TMEM column {column} lane {lane} was never written", fatal=False)
