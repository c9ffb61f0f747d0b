"""Matrix operands of wgmma and tcgen05.mma in shared memory. PTX manual, "Matrix Descriptor", "Strides", "Canonical Layouts".

A tile of `rows` (M or N) by 32 bytes of K is gathered by 16-byte chunks: K-major chunks hold consecutive K of one row, MN-major chunks hold
consecutive rows of one K.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tandem_attn.emulator.memory.faults import Fault
from tandem_attn.emulator.memory.tiles import SWIZZLE_MASK

Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class Descriptor:
    """A decoded matrix descriptor: bytes. `swizzle` is the span (0, 32, 64, 128), `atom` what it moves as one piece (16, 32).

    `base`: in which 128-byte row of the address space, of eight, the swizzle's pattern begins.
    """

    start: int
    leading: int
    stride: int
    swizzle: int
    base: int = 0
    atom: int = 16


_WGMMA_SWIZZLE = {0: 0, 1: 128, 2: 64, 3: 32}
_TCGEN05_SWIZZLE = {0: 0, 1: 128, 2: 128, 4: 64, 6: 32}
_WIDE_ATOM = 1  # the mode of 128 bytes with 32-byte atoms


def _fields(raw: int) -> tuple[int, int, int]:
    return (raw & 0x3FFF) << 4, (raw >> 16 & 0x3FFF) << 4, (raw >> 32 & 0x3FFF) << 4


@lru_cache(maxsize=1024)
def wgmma_descriptor(raw: int) -> Descriptor:
    """PTX manual, "Asynchronous Warpgroup Level Matrix ... Matrix Descriptor Format"."""
    return Descriptor(*_fields(raw), _WGMMA_SWIZZLE[raw >> 62 & 3], raw >> 49 & 7)


@lru_cache(maxsize=1024)
def tcgen05_descriptor(raw: int) -> Descriptor:
    """PTX manual, "Tensor Core 5th Generation: Shared memory descriptor". Raises Fault for modes that are not modelled."""
    mode = raw >> 61 & 7
    if mode not in _TCGEN05_SWIZZLE:
        raise Fault("undefined", f"matrix descriptor {raw:#x}: there is no swizzle mode {mode}")
    if raw >> 52 & 1:
        raise Fault("undefined", f"matrix descriptor {raw:#x}: an absolute leading dimension address is not modelled")
    if raw >> 46 & 7 != 1:
        raise Fault("undefined", f"matrix descriptor {raw:#x}: bits 46-48 are {raw >> 46 & 7:#b}, the manual wants 0b001")
    return Descriptor(*_fields(raw), _TCGEN05_SWIZZLE[mode], raw >> 49 & 7, 32 if mode == _WIDE_ATOM else 16)


@lru_cache(maxsize=8192)
def chunk_indices(d: Descriptor, rows: int, k_bytes: int, element: int, mn_major: bool) -> Array:
    """Indices of the 16-byte chunks: (rows, k_bytes / 16) K-major, (rows * element / 16, k) MN-major."""
    deep = 8 if d.atom == 16 else 4  # rows of the swizzle's pattern: places along K, or along MN
    if d.atom == 32 and not mn_major:
        raise Fault("undefined", "a K-major operand with a 128-byte swizzle of 32-byte atoms")
    if not mn_major:
        r, k = np.arange(rows)[:, None], np.arange(k_bytes // 16)[None, :]
        pitch, step = (d.swizzle, 16) if d.swizzle else (16, d.leading)
        where = r // 8 * d.stride + r % 8 * pitch + k * step
    else:
        per_chunk = 16 // element
        r, k = np.arange(rows // per_chunk)[:, None], np.arange(k_bytes // element)[None, :]
        if d.swizzle:
            across = d.swizzle // 16
            where = r // across * d.leading + r % across * 16 + k // deep * d.stride + k % deep * d.swizzle
        else:
            where = r * d.stride + k // 8 * d.leading + k % 8 * 16
    where = where + d.start
    row = (where >> 7) - d.base  # in the pattern
    where = (where ^ ((row & SWIZZLE_MASK[d.swizzle]) << 4 if d.atom == 16 else (row & 3) << 5)) // 16
    where.setflags(write=False)
    return where


@dataclass(frozen=True, slots=True)
class Layout:
    """Which chunks hold the tiles of consecutive steps along K, side by side."""

    index: Array
    low: int  # first byte, and the byte behind the last
    high: int


@lru_cache(maxsize=4096)
def layout(steps: tuple[Descriptor, ...], rows: int, k_bytes: int, element: int, mn_major: bool) -> Layout:
    """The chunks of several steps, joined along K."""
    parts = [chunk_indices(d, rows, k_bytes, element, mn_major) for d in steps]
    index = np.concatenate(parts, axis=1) if len(parts) > 1 else parts[0]
    index.setflags(write=False)
    return Layout(index, int(index.min()) * 16, int(index.max()) * 16 + 16)


def gather(data: Array, where: Layout, rows: int, element: int, mn_major: bool) -> Array:
    """The tile's raw elements, shape (rows, k). `data` is the CTA's shared memory as bytes."""
    words = data.view(np.complex128)[where.index].view(f"u{element}")
    if not mn_major:
        return words.reshape(rows, -1)
    per_chunk = 16 // element
    steps = where.index.shape[1]
    return words.reshape(rows // per_chunk, steps, per_chunk).transpose(0, 2, 1).reshape(rows, steps)


# ---- element formats
def _table(decode: Any, bits: int) -> Array:
    table = np.array([decode(i) for i in range(1 << bits)], np.float32)
    table.setflags(write=False)
    return table


def _narrow(exponent: int, mantissa: int, special: str) -> Any:
    bias = (1 << exponent - 1) - 1

    def decode(i: int) -> float:
        sign = -1.0 if i >> (exponent + mantissa) & 1 else 1.0
        e, m = i >> mantissa & ((1 << exponent) - 1), i & ((1 << mantissa) - 1)
        top = e == (1 << exponent) - 1
        if special == "ieee" and top:
            return float("nan") if m else sign * float("inf")
        if special == "finite" and top and m == (1 << mantissa) - 1:
            return float("nan")
        value: float = (m / (1 << mantissa)) * 2.0 ** (1 - bias) if e == 0 else (1 + m / (1 << mantissa)) * 2.0 ** (e - bias)
        return sign * value

    return decode


_TABLES = {
    "e4m3": _table(_narrow(4, 3, "finite"), 8),
    "e5m2": _table(_narrow(5, 2, "ieee"), 8),
    "e2m3": _table(_narrow(2, 3, "none"), 8),
    "e3m2": _table(_narrow(3, 2, "none"), 8),
    "e2m1": _table(_narrow(2, 1, "none"), 8),
}
ELEMENT_BYTES = {
    "e2m1x2": 1,
    "f16": 2,
    "bf16": 2,
    "tf32": 4,
    "e4m3": 1,
    "e5m2": 1,
    "e2m3": 1,
    "e3m2": 1,
    "e2m1": 1,
    "s8": 1,
    "u8": 1,
    "b1": 1,
}


def to_float(raw: Array, kind: str) -> Array:
    """Raw elements -> f4, exact (tf32: the low 13 bits are ignored, as the tensor core does; b1: eight elements of each byte)."""
    if kind in _DECODE:
        value: Array = _DECODE[kind](raw)
        return value
    bits = {"e2m3": 0x3F, "e3m2": 0x3F, "e2m1": 0x0F}.get(kind)
    return _TABLES[kind][raw & np.uint8(bits)] if bits else _TABLES[kind][raw]


def _nibbles(raw: Array) -> Array:
    """Two elements of each byte, the one in the low half first."""
    return _TABLES["e2m1"][np.stack([raw & np.uint8(15), raw >> np.uint8(4)], axis=-1).reshape(*raw.shape[:-1], -1)]


_DECODE: dict[str, Any] = {
    "b1": lambda raw: np.unpackbits(raw, axis=-1).astype(np.float32),
    "bf16": lambda raw: (raw.astype(np.uint32) << np.uint32(16)).view(np.float32),
    "f16": lambda raw: raw.view(np.float16).astype(np.float32),
    "tf32": lambda raw: (raw & np.uint32(0xFFFFE000)).view(np.float32),
    "s8": lambda raw: raw.view(np.int8).astype(np.float32),
    "u8": lambda raw: raw.astype(np.float32),
    "e2m1x2": _nibbles,
}
