"""Shared memory of one CTA: bytes, and which of them were ever written."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tandem_attn.emulator.memory.faults import Fault


class SharedMemory:
    """`size` bytes at offsets `base` .. `base + size` of the CTA's window."""

    def __init__(self, base: int, size: int) -> None:
        self.base, self.size, self.end = base, size, base + size
        room = -(-self.end // 16) * 16
        self.data: NDArray[np.uint8] = np.zeros(room, np.uint8)
        self.written: NDArray[np.bool_] = np.zeros(room, np.bool_)
        self.views: dict[Any, NDArray[Any]] = {np.dtype(t): self.data.view(t) for t in (np.uint8, np.uint16, np.uint32, np.uint64)}
        self.views |= {np.dtype(t): self.data.view(t) for t in (np.int8, np.int16, np.int32, np.int64, np.float32, np.float64, np.float16)}
        self.track = True  # follow initialised-ness
        self.version = 0  # changes with every write, for copies that are kept

    def check(self, offsets: NDArray[np.int64], size: int, align: int) -> None:
        """Raise Fault unless every [offset, offset + size) lies inside and is aligned."""
        low, high = int(offsets.min()), int(offsets.max())
        if low < self.base or high + size > self.end:
            bad = low if low < self.base else high
            raise Fault("out-of-bounds", f"shared offset {bad:#x} ({size} bytes) is outside {self.base:#x} .. {self.end:#x}")
        if align > 1 and (offsets % align).any():
            bad = int(offsets[(offsets % align).argmax()])
            raise Fault("misaligned", f"shared offset {bad:#x} is not a multiple of {align}")

    def require_written(self, offsets: NDArray[np.int64], size: int) -> None:
        """Raise a Fault (not fatal) when a byte of the pieces was never written."""
        if not self.track:
            return
        known = self.written[offsets] if size == 1 else self.written[offsets[..., None] + np.arange(size)]
        if not known.all():
            bad = int(offsets[..., None].repeat(size, -1)[~known.reshape(*offsets.shape, size)][0])
            raise Fault("uninitialised", f"shared memory at offset {bad:#x} ({size} bytes) was never written", fatal=False)

    def mark(self, offsets: NDArray[np.int64], size: int) -> None:
        """Remember that the pieces were written."""
        if self.track:
            self.written[offsets if size == 1 else offsets[..., None] + np.arange(size)] = True

    def load(self, offsets: NDArray[np.int64], dtype: Any, count: int) -> NDArray[Any]:
        """`count` consecutive elements at each offset: shape (count, n). No checks."""
        width = dtype.itemsize
        index = offsets // width
        view = self.views[dtype]
        return view[index[None, :] + np.arange(count)[:, None]] if count > 1 else view[index][None]

    def store(self, offsets: NDArray[np.int64], values: NDArray[Any]) -> None:
        """Write values[(count, n)], column i at offsets[i]. No checks."""
        index = offsets // values.itemsize
        view = self.views[values.dtype]
        for j in range(values.shape[0]):
            view[index + j] = values[j]
        self.version += 1
        self.mark(offsets, values.itemsize * values.shape[0])
