"""Launch on a GPU: a launch description becomes an argument block, with encoded TMA descriptors, for a module of each device.

A call costs microseconds of host time, so everything that repeats is kept: encoded descriptors, loaded functions, and argument blocks with
their pointers.
"""

from __future__ import annotations

import ctypes
import functools
import struct
import threading
from collections.abc import Iterator

from torch import Tensor

from tandem_attn.kernels import cuda
from tandem_attn.kernels.compile import Kernel
from tandem_attn.kernels.description import LaunchDescription, TensorMap, in_order


class ArgumentBlock:
    """The arguments of one kernel, for one thread: descriptors, pointers, numbers, and the array of their addresses.

    Attributes:
        launch: runs the kernel with what the block holds, as ``launch(grid, stream)``.
        maps: the descriptors, each tensor's head beside its tail (where the kernel has tails).
        words: everything else, as 64-bit words.
    """

    def __init__(self, kernel: Kernel, device: int) -> None:
        self._values, self._order = _values(kernel), _map_order(kernel)
        maps_bytes = len(self._order) * cuda.TENSOR_MAP_BYTES
        memory = ctypes.create_string_buffer(maps_bytes + self._values.size + cuda.TENSOR_MAP_ALIGN)
        address = ctypes.addressof(memory)
        start = -address % cuda.TENSOR_MAP_ALIGN
        self.maps = memoryview(memory).cast("B")[start : start + maps_bytes]
        self._numbers = memoryview(memory).cast("B")[start + maps_bytes : start + maps_bytes + self._values.size]
        self.words = self._numbers.cast("Q")
        self.launch = cuda.Launch(
            _function(kernel, device), kernel.threads, kernel.ctas, kernel.shared_bytes, _pointers(address + start, kernel)
        )

    def write(self, launch: LaunchDescription) -> None:
        """Fills the whole block."""
        self.maps[:] = _encoded(tuple(launch.maps[i] for i in self._order))
        values = [_value(x) for x in (*launch.pointers, *launch.numbers, *launch.extras)]
        self._values.pack_into(self._numbers, 0, *values, 0, 0)

    def tensors(self, launch: LaunchDescription) -> Iterator[tuple[int, Tensor]]:
        """The tensors among a launch's values, but for empty ones, each with the number of its word."""
        codes = launch.kernel.codes
        for i, x in enumerate((*launch.pointers, *launch.numbers, *launch.extras)):
            if isinstance(x, Tensor) and x.numel():
                yield _place(codes, i) // struct.calcsize("Q"), x


def _map_order(kernel: Kernel) -> list[int]:
    """Numbers of the descriptors as they lie in the block: a tensor's head, then its tail; a kernel without tails reads heads for them."""
    half = len(kernel.descriptors) // 2
    return [i for head in range(half) for i in ((head, half + head) if kernel.has_tails else (head,))]


def _value(x: Tensor | float | None) -> int | float:
    return 0 if x is None else x if isinstance(x, (int, float)) else x.data_ptr()


@functools.lru_cache(maxsize=1024)
def _encoded(maps: tuple[TensorMap, ...]) -> bytes:
    return b"".join([_encoded_one(each) for each in maps])


@functools.lru_cache(maxsize=8192)
def _encoded_one(x: TensorMap) -> bytes:
    return encode(x, x.address)


def encode(x: TensorMap, address: int) -> bytes:
    """A descriptor, as ``x`` says, of another address."""
    return cuda.tensor_map(x.dtype, address, x.sizes, x.strides, x.box, x.swizzle)


def _values(kernel: Kernel) -> struct.Struct:
    """Pointers, numbers and extras, and at the end the two scratch pointers that Triton appends, here always null."""
    return struct.Struct(f"{kernel.codes}0Q2Q")


def _place(codes: str, i: int) -> int:
    """Bytes before the i-th value."""
    return struct.calcsize(codes[: i + 1]) - struct.calcsize(codes[i])


def _pointers(start: int, kernel: Kernel) -> ctypes.Array[ctypes.c_void_p]:
    """Address of every kernel parameter. After each descriptor come its shape and strides, which our kernels do not read."""
    order, half = _map_order(kernel), len(kernel.descriptors) // 2
    values = start + len(order) * cuda.TENSOR_MAP_BYTES
    zeros = values + _values(kernel).size - 2 * struct.calcsize("Q")
    addresses: list[int] = []
    for i, (_, box) in enumerate(kernel.descriptors):
        place = order.index(i if kernel.has_tails else i % half)
        addresses += [start + place * cuda.TENSOR_MAP_BYTES, *[zeros] * (2 * len(box))]
    addresses += [values + _place(kernel.codes, i) for i in range(len(kernel.codes))]
    addresses += [zeros, zeros + struct.calcsize("Q")]
    return (ctypes.c_void_p * len(addresses))(*addresses)


_functions: dict[tuple[int, int], tuple[Kernel, int]] = {}  # with its kernel, whose id then names nothing else
_loading = threading.Lock()


def _function(kernel: Kernel, device: int) -> int:
    """Handle of the kernel on the current device, whose index is ``device``; loaded once."""
    key = (id(kernel), device)
    with _loading:
        if key not in _functions:
            _functions[key] = (kernel, cuda.load_function(kernel.cubin, kernel.name, kernel.shared_bytes))
        return _functions[key][1]


_local = threading.local()


def run(launch: LaunchDescription, device: int, stream: int) -> None:
    """Runs a launch and those it needs before and after it, on a stream, given by its handle, of the current device, ``device``."""
    blocks: dict[tuple[int, int], ArgumentBlock] = _local.__dict__.setdefault("blocks", {})
    for each in in_order(launch):
        key = (id(each.kernel), device)
        block = blocks.get(key)
        if block is None:
            block = blocks[key] = ArgumentBlock(each.kernel, device)
        block.write(each)
        block.launch(each.grid * each.kernel.ctas, stream)
