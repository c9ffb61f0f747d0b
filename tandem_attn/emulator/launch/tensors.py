"""Tensors as memory ranges: torch (CPU) and numpy, without copy."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tandem_attn.emulator.errors import LaunchError
from tandem_attn.emulator.memory.globalmem import GlobalMemory


def is_tensor(value: Any) -> bool:
    return isinstance(value, np.ndarray) or (hasattr(value, "data_ptr") and hasattr(value, "element_size"))


def address(value: Any) -> int:
    """Address of the first element."""
    return int(value.ctypes.data) if isinstance(value, np.ndarray) else int(value.data_ptr())


def element_size(value: Any) -> int:
    return int(value.itemsize) if isinstance(value, np.ndarray) else int(value.element_size())


def shape_strides(value: Any) -> tuple[list[int], list[int]]:
    """Shape, and strides in elements."""
    if isinstance(value, np.ndarray):
        return list(value.shape), [s // value.itemsize for s in value.strides]
    return [int(n) for n in value.shape], [int(s) for s in value.stride()]


def register(memory: GlobalMemory, name: str, value: Any) -> int:
    """Make a tensor's elements reachable and return its address. A view gives the bytes between its first and last element.

    Raises LaunchError for a tensor that is not on the CPU.
    """
    device = getattr(value, "device", None)
    if not isinstance(value, np.ndarray) and device is not None and getattr(device, "type", "cpu") != "cpu":
        raise LaunchError(f"argument {name} is on {device}; the emulator needs a CPU tensor")
    shape, strides = shape_strides(value)
    base = address(value)
    if any(n == 0 for n in shape):
        return base
    low = sum((n - 1) * s for n, s in zip(shape, strides, strict=True) if s < 0)
    high = sum((n - 1) * s for n, s in zip(shape, strides, strict=True) if s > 0)
    size = element_size(value)
    start, count = base + low * size, (high - low + 1) * size
    memory.add(name, start, view_bytes(start, count), value)
    return base


def view_bytes(start: int, count: int) -> NDArray[np.uint8]:
    """The bytes at an address of this process; the caller keeps the owner alive."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * count).from_address(start))
