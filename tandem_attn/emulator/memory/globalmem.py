"""Global memory: the bytes of the tensors given, addressed by their real addresses, and nothing else."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tandem_attn.emulator.memory.faults import Fault


@dataclass(slots=True)
class Range:
    """One allocation: `data` are its bytes, `owner` keeps them alive."""

    name: str
    base: int
    size: int
    data: NDArray[np.uint8]
    owner: Any = None
    views: dict[Any, NDArray[Any]] = field(default_factory=dict)

    def view(self, dtype: Any) -> NDArray[Any]:
        """The whole elements of a type, from the base on."""
        found = self.views.get(dtype)
        if found is None:
            width = np.dtype(dtype).itemsize
            found = self.views[dtype] = self.data[: self.size // width * width].view(dtype)
        return found


class GlobalMemory:
    """A set of ranges. Addresses outside them are faults."""

    def __init__(self) -> None:
        self.ranges: list[Range] = []
        self.bases: list[int] = []
        self.last: Range | None = None

    def add(self, name: str, base: int, data: NDArray[np.uint8], owner: Any = None) -> Range:
        """Make `data` reachable at `base`. A range inside a known one adds nothing; one that covers known ones replaces them."""
        for known in self.ranges:
            if known.base <= base and base + data.size <= known.base + known.size:
                return known
        self.ranges = [r for r in self.ranges if not (base <= r.base and r.base + r.size <= base + data.size)]
        found = Range(name, base, data.size, data, owner)
        self.ranges.append(found)
        self.ranges.sort(key=lambda r: r.base)
        self.bases = [r.base for r in self.ranges]
        return found

    def allocate(self, name: str, size: int, align: int = 128) -> Range:
        """New zeroed memory."""
        backing = np.zeros(size + align, np.uint8)
        skip = -backing.ctypes.data % align
        return self.add(name, backing.ctypes.data + skip, backing[skip : skip + size], backing)

    def find(self, address: int, size: int) -> Range:
        """The range that holds [address, address + size). Raises Fault where there is none."""
        last = self.last
        if last is not None and last.base <= address and address + size <= last.base + last.size:
            return last
        at = bisect_right(self.bases, address) - 1
        if at >= 0:
            found = self.ranges[at]
            if address + size <= found.base + found.size:
                self.last = found
                return found
        raise Fault("out-of-bounds", self.explain(address, size))

    def explain(self, address: int, size: int) -> str:
        """Where an address outside every range lies."""
        if not self.ranges:
            return f"global address {address:#x} ({size} bytes): the kernel was given no memory"
        nearest = min(self.ranges, key=lambda r: max(r.base - address, address - (r.base + r.size), 0))
        where = (
            f"{nearest.base - address} bytes before"
            if address < nearest.base
            else f"{address - nearest.base - nearest.size} bytes behind the end of"
        )
        if nearest.base <= address < nearest.base + nearest.size:
            where = f"{nearest.base + nearest.size - address} bytes before the end of"
        return f"global address {address:#x} ({size} bytes) is {where} {nearest.name} ({nearest.size} bytes at {nearest.base:#x})"

    def bytes_at(self, address: int, size: int) -> NDArray[np.uint8]:
        """A view of `size` bytes."""
        found = self.find(address, size)
        return found.data[address - found.base : address - found.base + size]

    def load(self, addresses: NDArray[np.int64], dtype: Any, count: int) -> NDArray[Any]:
        """`count` consecutive elements at each address: shape (count, n)."""
        width = np.dtype(dtype).itemsize
        low = int(addresses.min())
        span = int(addresses.max()) - low + width * count
        try:
            found = self.find(low, span)
        except Fault:
            return self._load_each(addresses, dtype, count)
        offsets = addresses - found.base
        if found.base % width:
            return self._load_each(addresses, dtype, count)
        index = offsets // width
        view = found.view(dtype)
        return view[index[None, :] + np.arange(count)[:, None]] if count > 1 else view[index][None]

    def _load_each(self, addresses: NDArray[np.int64], dtype: Any, count: int) -> NDArray[Any]:
        size = np.dtype(dtype).itemsize * count
        out = np.empty((count, len(addresses)), dtype)
        for i, address in enumerate(addresses.tolist()):
            out[:, i] = self.bytes_at(address, size).view(dtype)
        return out

    def store(self, addresses: NDArray[np.int64], values: NDArray[Any]) -> None:
        """Write values[(count, n)]: column i at addresses[i]; a later lane wins where two write the same place."""
        count, width = values.shape[0], values.itemsize
        low = int(addresses.min())
        span = int(addresses.max()) - low + width * count
        try:
            found = self.find(low, span)
        except Fault:
            found = None
        if found is None or found.base % width:
            for i, address in enumerate(addresses.tolist()):
                self.bytes_at(address, width * count)[:] = np.ascontiguousarray(values[:, i]).view(np.uint8)
            return
        index = (addresses - found.base) // width
        view = found.view(values.dtype)
        for j in range(count):
            view[index + j] = values[j]
