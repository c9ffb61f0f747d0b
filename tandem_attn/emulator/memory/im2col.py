"""Columns of images: what one TMA copy in im2col mode moves. PTX manual, "Tensors: im2col mode"; driver API, cuTensorMapEncodeIm2col.

The pixels of a batch of images are walked through along W, then H, then D inside a bounding box, then image by image; at each one the copy
takes some channels of the pixel that lies `offsets` beside it (the place in the filter). Pixels outside their image are filled.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tandem_attn.emulator.launch.tensormap import TensorMap
from tandem_attn.emulator.memory.faults import Fault
from tandem_attn.emulator.memory.globalmem import GlobalMemory

Array = NDArray[Any]
_NAN = {2: 0x7FF7, 4: 0x7FF77FF7, 8: 0x7FF77FF77FF77FF7}


class Columns:
    """The pixels of one copy at coordinates (c, w, [h, [d,]] n), in the order of shared memory; the interface of `tiles.Box`."""

    def __init__(self, memory: GlobalMemory, tensor: TensorMap, coordinates: Sequence[int], offsets: Sequence[int]) -> None:
        if len(coordinates) != tensor.rank or len(offsets) != tensor.rank - 2:
            raise Fault(
                "undefined", f"{len(coordinates)} coordinates and {len(offsets)} offsets for an im2col tensor of rank {tensor.rank}"
            )
        if tensor.interleave:
            raise Fault("undefined", "interleaved layouts are not modelled")
        self.memory, self.tensor = memory, tensor
        self.channels, self.pixels = tensor.box[0], tensor.box[1]
        self.global_bytes = self.shared_bytes = tensor.size  # of an element
        self.row = self.channels * tensor.size
        self.size = self.counted = self.pixels * self.row
        channel = coordinates[0]
        count = min(self.channels, tensor.dims[0] - channel) if 0 <= channel < tensor.dims[0] else 0
        self.inside = count * tensor.size  # bytes of a row that exist
        walk = self._walk([int(c) for c in coordinates[1:]])
        self.starts: list[int | None] = [self._start(channel, pixel, offsets) for pixel in walk]

    def _walk(self, first: list[int]) -> list[tuple[int, ...]]:
        """The filter's base at each pixel. It must begin inside the bounding box."""
        dims, steps = self.tensor.dims[1:-1], self.tensor.steps[1:-1]
        low = [lower for lower, _ in self.tensor.corners]
        high = [dim - 1 + upper for dim, (_, upper) in zip(dims, self.tensor.corners, strict=True)]
        if any(not lo <= c <= hi for lo, c, hi in zip(low, first, high, strict=False)):
            raise Fault("undefined", f"im2col base {first[:-1]} lies outside the bounding box from {low} to {high}")
        at, found = list(first), []
        for _ in range(self.pixels):
            found.append(tuple(at))
            for axis in range(len(low)):
                at[axis] += steps[axis]
                if at[axis] <= high[axis]:
                    break
                at[axis] = low[axis]
            else:
                at[-1] += 1
        return found

    def _start(self, channel: int, pixel: tuple[int, ...], offsets: Sequence[int]) -> int | None:
        """Address of a pixel's channels; None outside the image."""
        *place, image = (p + o for p, o in zip(pixel, (*offsets, 0), strict=True))
        where = (*place, image)
        if not self.inside or any(not 0 <= p < dim for p, dim in zip(where, self.tensor.dims[1:], strict=True)):
            return None
        return self.tensor.address + channel * self.tensor.size + sum(p * s for p, s in zip(where, self.tensor.strides, strict=True))

    @property
    def empty(self) -> bool:
        return all(start is None for start in self.starts)

    def rows(self) -> tuple[Array, int]:
        """First bytes and size of the pieces of global memory that are touched."""
        return np.array([start for start in self.starts if start is not None], np.int64), self.inside

    def load(self) -> Array:
        """Bytes in the order of shared memory, unswizzled."""
        size = self.tensor.size
        fill = _NAN.get(size, 0) if self.tensor.nan_fill else 0
        out = np.full((self.pixels, self.channels), fill, f"u{size}").view(np.uint8).reshape(self.pixels, self.row)
        for row, start in zip(out, self.starts, strict=True):
            if start is not None:
                row[: self.inside] = self.memory.bytes_at(start, self.inside)
        return out.reshape(-1)

    def store(self, raw: Array) -> None:
        """Write what lies inside the images."""
        for row, start in zip(raw.reshape(self.pixels, self.row), self.starts, strict=True):
            if start is not None:
                self.memory.bytes_at(start, self.inside)[:] = row[: self.inside]
