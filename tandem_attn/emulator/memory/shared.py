"""Shared memory of one CTA: bytes, and which of them were ever written."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tandem_attn.emulator.memory.faults import Fault

_BLOCK = 10
_MARKED = {size: int.from_bytes(bytes([1]) * size, "little") for size in (1, 2, 4, 8)}  # `written` of whole elements


class SharedMemory:
    """`size` bytes at offsets `base` .. `base + size` of the CTA's window."""

    def __init__(self, base: int, size: int) -> None:
        self.base, self.size, self.end = base, size, base + size
        room = -(-self.end // 16) * 16
        self.data: NDArray[np.uint8] = np.zeros(room, np.uint8)
        self.written: NDArray[np.bool_] = np.zeros(room, np.bool_)
        self.views: dict[Any, NDArray[Any]] = {np.dtype(t): self.data.view(t) for t in (np.uint8, np.uint16, np.uint32, np.uint64)}
        self.views |= {np.dtype(t): self.data.view(t) for t in (np.int8, np.int16, np.int32, np.int64, np.float32, np.float64, np.float16)}
        self.marks = {size: self.written.view(f"u{size}") for size in _MARKED}
        self.track = True  # follow initialised-ness
        self.version = 0  # counts writes
        self.stamps: NDArray[np.int64] = np.zeros((room >> _BLOCK) + 1, np.int64)  # of the last write to each KiB, for copies that are kept

    def check(self, offsets: NDArray[np.int64], size: int, align: int) -> None:
        """Raise Fault unless every [offset, offset + size) lies inside and is aligned."""
        self.check_span(int(offsets.min()), int(offsets.max()), size)
        if align > 1 and (offsets & (align - 1)).any():
            bad = int(offsets[((offsets & (align - 1)) != 0).argmax()])
            raise Fault("misaligned", f"shared offset {bad:#x} is not a multiple of {align}")

    def check_span(self, low: int, high: int, size: int) -> None:
        """Raise Fault unless pieces of `size` bytes from `low` to `high` lie inside."""
        if low < self.base or high + size > self.end:
            bad = low if low < self.base else high
            raise Fault("out-of-bounds", f"shared offset {bad:#x} ({size} bytes) is outside {self.base:#x} .. {self.end:#x}")

    def require_written(self, offsets: NDArray[np.int64], size: int) -> None:
        """Raise a Fault (not fatal) when a byte of the aligned pieces was never written."""
        if not self.track:
            return
        view = self.marks.get(size)
        if view is not None:
            known = view[offsets // size] == _MARKED[size]
        else:
            known = self.written[offsets[..., None] + np.arange(size)].all(axis=-1)
        if not known.all():
            bad = int(offsets[~known][0])
            raise Fault("uninitialised", f"shared memory at offset {bad:#x} ({size} bytes) was never written", fatal=False)

    def mark(self, offsets: NDArray[np.int64], size: int) -> None:
        """Remember that the aligned pieces were written."""
        if not self.track:
            return
        view = self.marks.get(size)
        if view is not None:
            view[offsets // size] = _MARKED[size]
        else:
            self.written[offsets[..., None] + np.arange(size)] = True

    def load(self, offsets: NDArray[np.int64], dtype: Any, count: int) -> NDArray[Any]:
        """`count` consecutive elements at each offset: shape (count, n). No checks."""
        index = offsets // dtype.itemsize
        view = self.views[dtype]
        return view[index[None, :] + np.arange(count)[:, None]] if count > 1 else view[index][None]

    def store(self, offsets: NDArray[np.int64], values: Sequence[NDArray[Any]]) -> None:
        """Write values[j] as element j of the pieces at offsets. No checks."""
        width = values[0].itemsize
        index = offsets // width
        view = self.views[values[0].dtype]
        for j, value in enumerate(values):
            view[index + j if j else index] = value
        self.changed_at(offsets)
        self.mark(offsets, width * len(values))

    def changed_at(self, offsets: NDArray[np.int64]) -> None:
        """Pieces that cross no KiB were written."""
        self.version += 1
        self.stamps[offsets >> _BLOCK] = self.version

    def changed(self, low: int, high: int) -> None:
        """Bytes low .. high - 1 were written."""
        self.version += 1
        self.stamps[low >> _BLOCK : (high - 1 >> _BLOCK) + 1] = self.version

    def same_since(self, version: int, low: int, high: int) -> bool:
        """Whether no write has come near bytes low .. high - 1."""
        return bool(self.stamps[low >> _BLOCK : (high - 1 >> _BLOCK) + 1].max() <= version)
