"""Launch on a GPU: a launch description becomes an argument block, with encoded TMA descriptors, for a module of each device.

A call costs microseconds of host time, so everything that repeats is kept: encoded descriptors, and for each kernel, device and thread the
argument block and its pointers.
"""

from __future__ import annotations

import ctypes
import functools
import struct
import threading

from torch import Tensor

from tandem_attn.kernels import cuda
from tandem_attn.kernels.compile import Kernel
from tandem_attn.kernels.description import LaunchDescription, TensorMap


class Launcher:
    """One kernel on one device, for one thread."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._function = cuda.load_function(kernel.cubin, kernel.name, kernel.shared_bytes)
        self._maps_bytes = len(kernel.descriptors) * cuda.TENSOR_MAP_BYTES
        self._values = _values(kernel)
        self._memory = ctypes.create_string_buffer(self._maps_bytes + self._values.size + cuda.TENSOR_MAP_ALIGN)
        start = ctypes.addressof(self._memory)
        self._offset = -start % cuda.TENSOR_MAP_ALIGN
        self._view = memoryview(self._memory).cast("B")
        self._params = _pointers(start + self._offset, kernel)

    def __call__(self, launch: LaunchDescription, stream: int) -> None:
        """Runs the kernel on a CUDA stream, given by its handle."""
        self._view[self._offset : self._offset + self._maps_bytes] = _encoded(launch.maps)
        pointers = [0 if x is None else x.data_ptr() for x in launch.pointers]
        values = (*launch.numbers, *(_value(x) for x in launch.extras)) if launch.extras else launch.numbers
        self._values.pack_into(self._view, self._offset + self._maps_bytes, *pointers, *values, 0, 0)
        kernel = self._kernel
        cuda.launch(self._function, launch.grid * kernel.ctas, kernel.threads, kernel.shared_bytes, stream, self._params)


def run(launch: LaunchDescription, device: int, stream: int) -> None:
    """Runs a launch and those it needs before and after it, in order, on a stream of the current device."""
    for each in launch.before:
        run(each, device, stream)
    launcher(launch.kernel, device)(launch, stream)
    for each in launch.after:
        run(each, device, stream)


def _value(x: Tensor | float | None) -> int | float:
    return 0 if x is None else x if isinstance(x, (int, float)) else x.data_ptr()


@functools.lru_cache(maxsize=1024)
def _encoded(maps: tuple[TensorMap, ...]) -> bytes:
    return b"".join([_encoded_one(each) for each in maps])


@functools.lru_cache(maxsize=8192)
def _encoded_one(x: TensorMap) -> bytes:
    return cuda.tensor_map(x.dtype, x.address, x.sizes, x.strides, x.box, x.swizzle)


def _values(kernel: Kernel) -> struct.Struct:
    """Pointers, numbers and extras, and at the end the two scratch pointers that Triton appends, here always null."""
    return struct.Struct(f"{kernel.codes}0Q2Q")


def _pointers(start: int, kernel: Kernel) -> ctypes.Array[ctypes.c_void_p]:
    """Address of every kernel parameter. After each descriptor come its shape and strides, which our kernels do not read."""
    values = start + len(kernel.descriptors) * cuda.TENSOR_MAP_BYTES
    zeros = values + _values(kernel).size - 2 * struct.calcsize("Q")
    addresses: list[int] = []
    for i, (_, box) in enumerate(kernel.descriptors):
        addresses += [start + i * cuda.TENSOR_MAP_BYTES, *[zeros] * (2 * len(box))]
    for i, code in enumerate(kernel.codes):
        addresses.append(values + struct.calcsize(kernel.codes[: i + 1]) - struct.calcsize(code))
    addresses += [zeros, zeros + struct.calcsize("Q")]
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
