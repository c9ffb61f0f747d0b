"""Boxes of tensors: global memory to packed bytes and back, and the swizzled order in shared memory. PTX manual, "Tensors"."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided
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
        self.start = tensor.address + sum((c + lo * k) * s for c, lo, k, s in zip(first, self.low, steps, element, strict=True))
        self.strides = tuple(s * k for s, k in zip(element, steps, strict=True))
        self.word = np.dtype(_WORDS[self.global_bytes])

    @property
    def size(self) -> int:
        """Bytes in shared memory."""
        return int(np.prod(self.shape)) * self.shared_bytes

    def view(self) -> Array:
        """The elements in bounds, as a strided view of global memory. Raises Fault when they are outside every tensor."""
        extent = [h - lo for lo, h in zip(self.low, self.high, strict=True)]
        last = sum((n - 1) * s for n, s in zip(extent, self.strides, strict=True)) + self.global_bytes
        raw = self.memory.bytes_at(self.start, last)
        usable = raw[: len(raw) // self.global_bytes * self.global_bytes].view(self.word)
        return as_strided(usable, tuple(reversed(extent)), tuple(reversed(self.strides)))

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
            tile = self._filled()
            if not self.empty:
                tile[self.inside()] = self.view()
        raw = tile.reshape(-1).view(np.uint8)
        if self.shared_bytes != self.global_bytes:
            wide = np.zeros((raw.size // self.global_bytes, self.shared_bytes), np.uint8)
            wide[:, : self.global_bytes] = raw.reshape(-1, self.global_bytes)
            raw = wide.reshape(-1)
        return raw

    def _filled(self) -> Array:
        if not self.tensor.nan_fill:
            return np.zeros(self.shape, self.word)
        # The manual's OOB-NaN: a special CNAN; 0x7fff and 0x7fffffff are the canonical NaNs of 16 and 32 bits.
        return np.full(self.shape, {2: 0x7FFF, 4: 0x7FFFFFFF, 8: 0x7FFFFFFFFFFFFFFF}[self.global_bytes], self.word)

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
def swizzled(offset: int, size: int, span: int, atom: int = 16) -> Array:
    """Indices of 16-byte chunks of shared memory that hold `size` bytes from `offset`, for a swizzle of `span` bytes.

    PTX manual, "Swizzling Modes": the address bits above bit 6 are xored into the chunk's place inside the span.
    """
    chunks = (offset + 16 * np.arange(-(-size // 16))).astype(np.int64)
    if span:
        shift = {16: 4, 32: 5}[atom]
        mask = SWIZZLE_MASK[span] if atom == 16 else 3
        chunks ^= (chunks >> 7 & mask) << shift
    chunks //= 16
    chunks.setflags(write=False)
    return chunks


def swizzle_of(tensor: TensorMap) -> tuple[int, int]:
    """Span and atom in bytes. Raises Fault for the 128-byte modes with flipped or 64-byte atoms."""
    if tensor.swizzle in (5, 6):
        raise Fault("undefined", "swizzle modes 128B with flipped or 64-byte atoms are not modelled")
    return SWIZZLE_BYTES[tensor.swizzle], 32 if tensor.swizzle == 4 else 16


# How a reduction combines elements: by name of the operation.
_COMBINE = {"add": np.add, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}
_NUMPY = {"u8": "u1", "u16": "u2", "u32": "u4", "s32": "i4", "u64": "u8", "s64": "i8", "f16": "f2", "f32": "f4", "f64": "f8"}


def combine(op: str, kind: str, old: Array, new: Array) -> Array:
    """old op new on raw words; `kind` is the PTX element type (b32 and the like are unsigned). bf16 is added in f32 and rounded."""
    if op in ("inc", "dec"):
        bound = new.view(_NUMPY[kind])
        held = old.view(_NUMPY[kind])
        one = bound.dtype.type(1)
        out = np.where(held >= bound, held * 0, held + one) if op == "inc" else np.where((held == 0) | (held > bound), bound, held - one)
        return out.view(old.dtype)
    if kind == "bf16":
        a, b = ((x.astype(np.uint32) << np.uint32(16)).view(np.float32) for x in (old, new))
        return round_bf16(np.fmin(a, b) if op == "min" else np.fmax(a, b) if op == "max" else _COMBINE[op](a, b))
    t = _NUMPY.get(kind, "u" + str(old.dtype.itemsize))
    function: Any = {"min": np.fmin, "max": np.fmax}.get(op, _COMBINE[op]) if t[0] == "f" else _COMBINE[op]
    out = function(old.view(t), new.view(t))
    return np.asarray(out, t).view(old.dtype)


def round_bf16(x: Array) -> Array:
    """f4 -> bf16 bits, to nearest even, NaN canonical."""
    raw = np.ascontiguousarray(x, np.float32).view(np.uint32)
    out = ((raw + np.uint32(0x7FFF) + ((raw >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype(np.uint16)
    return np.where(np.isnan(x), np.uint16(0x7FFF), out)
