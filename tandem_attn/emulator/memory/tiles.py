"""Boxes of tensors: global memory to packed bytes and back, and the swizzled order in shared memory. PTX manual, "Tensors"."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tandem_attn.emulator.launch.tensormap import SWIZZLE_BYTES, TensorMap
from tandem_attn.emulator.memory.faults import Fault
from tandem_attn.emulator.memory.globalmem import GlobalMemory

Array = NDArray[Any]
# Packed sub-byte types: elements in a group, bytes of the group in global and in shared memory.
_PACKED = {"b4x16": (16, 8, 8), "b4x16p64": (16, 8, 16), "b6p2x16": (16, 12, 16)}
_WORDS = {1: "u1", 2: "u2", 4: "u4", 8: "u8", 12: "V12"}
SWIZZLE_MASK = {0: 0, 32: 1, 64: 3, 128: 7}


class Box:
    """The part of a tensor that one copy moves, at given coordinates (innermost first)."""

    def __init__(self, memory: GlobalMemory, tensor: TensorMap, coordinates: Sequence[int]) -> None:
        if len(coordinates) != tensor.rank:
            raise Fault("undefined", f"{len(coordinates)} coordinates for a tensor of rank {tensor.rank}")
        if tensor.interleave:
            raise Fault("undefined", "interleaved layouts are not modelled")
        self.memory, self.tensor = memory, tensor
        group, self.global_bytes, self.shared_bytes = _PACKED.get(tensor.element, (1, tensor.size, tensor.size))
        first = list(coordinates)
        dims, box = list(tensor.dims), list(tensor.box)
        if group > 1:
            if first[0] % group or box[0] % group:
                raise Fault("misaligned", f"coordinate {first[0]} or box {box[0]} is not a multiple of {group} packed elements")
            first[0], dims[0], box[0] = first[0] // group, dims[0] // group, box[0] // group
        steps = (1, *tensor.steps[1:])  # the traversal stride of the innermost dimension is ignored without interleave (driver API)
        box = [-(-n // step) for n, step in zip(box, steps, strict=True)]
        self.shape = tuple(reversed(box))
        self.low = [max(0, -(c // step)) for c, step in zip(first, steps, strict=True)]
        ends = [-(-(d - c) // step) for d, c, step in zip(dims, first, steps, strict=True)]
        self.high = [max(low, min(n, end)) for low, n, end in zip(self.low, box, ends, strict=True)]
        self.empty = any(h <= lo for lo, h in zip(self.low, self.high, strict=True))
        self.full = self.low == [0] * len(box) and self.high == box
        element = (self.global_bytes, *tensor.strides)
        offset = sum((c + lo * k) * s for c, lo, k, s in zip(first, self.low, steps, element, strict=True))
        self.start = (tensor.address + offset) % 2**64  # Triton's ragged descriptors rest on it, and an H200 executes them
        self.strides = tuple(s * k for s, k in zip(element, steps, strict=True))
        self.word = np.dtype(_WORDS[self.global_bytes])

    @property
    def row(self) -> int:
        """Bytes of an innermost row in shared memory."""
        return self.shape[-1] * self.shared_bytes

    @property
    def size(self) -> int:
        """Bytes in shared memory."""
        return math.prod(self.shape) * self.shared_bytes

    @property
    def counted(self) -> int:
        """Bytes that an mbarrier counts: the padding of packed elements is none of them."""
        return math.prod(self.shape) * self.global_bytes

    def view(self) -> Array:
        """The elements in bounds, as a strided view of global memory. Raises Fault when they are outside every tensor."""
        extent = [h - lo for lo, h in zip(self.low, self.high, strict=True)]
        last = sum((n - 1) * s for n, s in zip(extent, self.strides, strict=True)) + self.global_bytes
        raw = self.memory.bytes_at(self.start, last)
        return np.ndarray(tuple(reversed(extent)), self.word, raw, 0, tuple(reversed(self.strides)))

    def inside(self) -> tuple[slice, ...]:
        return tuple(slice(lo, h) for lo, h in zip(reversed(self.low), reversed(self.high), strict=True))

    def rows(self) -> tuple[Array, int]:
        """First bytes and size of the contiguous pieces of global memory that are touched."""
        if self.empty:
            return np.empty(0, np.int64), 0
        starts = np.array([self.start], np.int64)
        for low, high, stride in zip(self.low[1:], self.high[1:], self.strides[1:], strict=True):
            starts = (starts[None, :] + (np.arange(high - low) * stride)[:, None]).reshape(-1)
        return starts, (self.high[0] - self.low[0]) * self.global_bytes

    def load(self) -> Array:
        """The box as bytes in the order of shared memory, unswizzled; out of bounds is filled with zero or NaN."""
        if self.full:
            tile = np.ascontiguousarray(self.view())
        else:
            if self.empty:
                self._touch_base()
            tile = self._filled()
            if not self.empty:
                tile[self.inside()] = self.view()
        if self.tensor.element in ("tf32", "tf32_ftz", "f32_ftz"):
            tile = as_loaded(tile, self.tensor.element)
            if self.tensor.nan_fill and not self.full:
                outside = np.ones(self.shape, np.bool_)
                outside[() if self.empty else self.inside()] = self.empty
                tile = np.where(outside, self.word.type(0x7FF77FF7), tile)
        raw = np.ascontiguousarray(tile).reshape(-1).view(np.uint8)
        if self.shared_bytes != self.global_bytes:
            wide = np.zeros((raw.size // self.global_bytes, self.shared_bytes), np.uint8)
            wide[:, : self.global_bytes] = raw.reshape(-1, self.global_bytes)
            raw = wide.reshape(-1)
        return raw

    def _touch_base(self) -> None:
        """A load that is out of bounds as a whole still touches the descriptor's base: an H200 faults where nothing is mapped there."""
        try:
            self.memory.bytes_at(self.tensor.address, self.global_bytes)
        except Fault as fault:
            words = f"a box wholly out of bounds, of a descriptor whose base address {self.tensor.address:#x} lies in no tensor"
            raise Fault("out-of-bounds", words) from fault

    def _filled(self) -> Array:
        if not self.tensor.nan_fill:
            return np.zeros(self.shape, self.word)
        # The manual's OOB-NaN, as an H200 writes it for every type: 0x7ff7 in each 16 bits.
        return np.full(self.shape, {2: 0x7FF7, 4: 0x7FF77FF7, 8: 0x7FF77FF77FF77FF7}[self.global_bytes], self.word)

    def narrow(self, raw: Array) -> Array:
        """Bytes in the order of shared memory -> the array of elements in bounds."""
        if self.shared_bytes != self.global_bytes:
            raw = np.ascontiguousarray(raw.reshape(-1, self.shared_bytes)[:, : self.global_bytes]).reshape(-1)
        tile = raw.view(self.word).reshape(self.shape)
        return tile if self.full else tile[self.inside()]

    def store(self, raw: Array) -> None:
        if not self.empty:
            self.view()[...] = self.narrow(raw)


@lru_cache(maxsize=4096)
def swizzled(offset: int, size: int, row: int, span: int, atom: int = 16) -> Array:
    """Indices of the 16-byte chunks of shared memory that hold `size` bytes in rows of `row` bytes, for a swizzle of `span` bytes.

    PTX manual, "Swizzling Modes": the address bits above bit 6 are xored into the chunk's place inside the span. A row narrower than the
    span still takes a span (an H200 faults where only the packed rows fit).
    """
    index = np.arange(-(-size // 16))
    if row < span and row % 16 == 0:
        index = index // (row // 16) * (span // 16) + index % (row // 16)
    chunks = (offset + 16 * index).astype(np.int64)
    if span:
        shift = {16: 4, 32: 5}[atom]
        mask = SWIZZLE_MASK[span] if atom == 16 else 3
        chunks ^= (chunks >> 7 & mask) << shift
    chunks //= 16
    chunks.setflags(write=False)
    return chunks


def placed_bytes(size: int, row: int, span: int) -> int:
    """How much shared memory `size` bytes in rows of `row` bytes take."""
    return size // row * span if row < span and row % 16 == 0 else size


def swizzle_of(tensor: TensorMap) -> tuple[int, int]:
    """Span and atom in bytes. Raises Fault for the 128-byte modes with flipped or 64-byte atoms."""
    if tensor.swizzle in (5, 6):
        raise Fault("undefined", "swizzle modes 128B with flipped or 64-byte atoms are not modelled")
    return SWIZZLE_BYTES[tensor.swizzle], 32 if tensor.swizzle == 4 else 16


def as_loaded(words: Array, element: str) -> Array:
    """What a load makes of f32 words: tf32 is rounded to nearest even with NaN 0x7fffe000; .ftz types lose subnormal numbers."""
    out = words
    magnitude = words & np.uint32(0x7FFFFFFF)
    if element.startswith("tf32"):
        even = (words + np.uint32(0xFFF) + (words >> np.uint32(13) & np.uint32(1))) & np.uint32(0xFFFFE000)
        out = np.where(magnitude > 0x7F800000, np.uint32(0x7FFFE000), even)
    if element.endswith("ftz"):
        out = np.where(out & np.uint32(0x7F800000) == 0, out & np.uint32(0x80000000), out)
    return out
