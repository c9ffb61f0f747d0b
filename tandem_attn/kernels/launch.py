"""Launch of a compiled kernel: argument block, TMA descriptors, module per device.

A call costs microseconds of host time, so everything that repeats is kept: the argument block and its pointers for each kernel, device
and thread. Encoded descriptors are kept by ``backend``.
"""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Sequence

from tandem_attn.kernels import cuda
from tandem_attn.kernels.compile import Kernel

DESCRIPTORS = 8  # q, k, v, o and their tails
_SCALARS = struct.Struct("10Q4i2f11i4x2Q")  # in the order of the kernel's arguments; at the end the two scratch pointers Triton appends
_MAPS_BYTES = DESCRIPTORS * cuda.TENSOR_MAP_BYTES
_SIZES = {"Q": 8, "i": 4, "f": 4}


class Launcher:
    """One kernel on one device, for one thread."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._function = cuda.load_function(kernel.cubin, kernel.name, kernel.shared_bytes)
        self._memory = ctypes.create_string_buffer(_MAPS_BYTES + _SCALARS.size + cuda.TENSOR_MAP_ALIGN)
        start = ctypes.addressof(self._memory)
        self._offset = -start % cuda.TENSOR_MAP_ALIGN
        self._view = memoryview(self._memory).cast("B")
        self._params = _pointers(start + self._offset, kernel)

    def __call__(self, grid: int, stream: int, maps: Sequence[bytes], scalars: Sequence[int | float]) -> None:
        """Runs the kernel.

        Args:
            grid: CTAs.
            stream: CUDA stream handle.
            maps: encoded descriptors of q, k, v, o and their tails.
            scalars: pointers and numbers in the order of the kernel's arguments.
        """
        self._view[self._offset : self._offset + _MAPS_BYTES] = b"".join(maps)
        _SCALARS.pack_into(self._view, self._offset + _MAPS_BYTES, *scalars, 0, 0)
        cuda.launch(self._function, grid, self._kernel.threads, self._kernel.shared_bytes, stream, self._params)


def _pointers(start: int, kernel: Kernel) -> ctypes.Array[ctypes.c_void_p]:
    """Address of every kernel parameter. After each descriptor come its shape and strides, which our kernels do not read."""
    zeros = start + _MAPS_BYTES + _SCALARS.size - 16
    addresses: list[int] = []
    for i, (_, box) in enumerate(kernel.descriptors):
        addresses += [start + i * cuda.TENSOR_MAP_BYTES, *[zeros] * (2 * len(box))]
    offset = start + _MAPS_BYTES
    for code in "QQQQQQQQQQiiiiffiiiiiiiiiii":
        addresses.append(offset)
        offset += _SIZES[code]
    addresses += [zeros, zeros + 8]
    return (ctypes.c_void_p * len(addresses))(*addresses)


_local = threading.local()


def launcher(kernel: Kernel, device: int) -> Launcher:
    """The launcher of a kernel on the current device, whose index is ``device``."""
    cache: dict[tuple[int, int], Launcher] = _local.__dict__.setdefault("launchers", {})
    key = (id(kernel), device)
    found = cache.get(key)
    if found is None:
        found = cache[key] = Launcher(kernel)
    return found
