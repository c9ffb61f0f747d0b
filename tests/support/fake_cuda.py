"""A stand-in for a Hopper GPU and its driver: CPU tensors, kernels compiled for real, launches recorded instead of run.

It shows what would be launched, and with which arguments; nothing is computed.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import hashlib
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from tandem_attn.api import backends, repeated
from tandem_attn.kernels import backend, bound, cuda, launch
from tandem_attn.kernels.compile import Kernel
from tandem_attn.kernels.prepare import POINTERS


@dataclass(frozen=True)
class Launched:
    """One launch: which kernel, where, and its arguments."""

    kernel: Kernel
    grid: int
    stream: int
    descriptors: tuple[tuple[int, bytes], ...]  # address and a digest of everything else, as they lie in the block
    values: tuple[int | float, ...]  # pointers and numbers

    @staticmethod
    def read(kernel: Kernel, grid: int, stream: int, params: Sequence[int]) -> Launched:
        """From the addresses of the parameters; the values lie behind the descriptors, which are 128 bytes each."""
        values = params[-2 - len(kernel.codes)]
        maps = [ctypes.string_at(place, 40) for place in sorted(set(params)) if place < values]
        block = ctypes.string_at(values, struct.calcsize(kernel.codes))
        descriptors = tuple((int.from_bytes(x[:8], "little"), x[8:]) for x in maps)
        return Launched(kernel, grid, stream, descriptors, struct.unpack(kernel.codes, block))

    def pointer(self, name: str) -> int:
        """Of a forward's own launch."""
        return int(self.values[POINTERS.index(name)])


@dataclass
class Device:
    """State of the stand-in: what was launched, how many descriptors were encoded, and what a test may set."""

    launches: list[Launched] = field(default_factory=list)
    encoded: int = 0
    index: int | None = None  # of the current device; CPU tensors have None
    stream: int = 0x5EED
    capturing: bool = False
    recording: bool = True
    functions: list[Kernel] = field(default_factory=list)  # a handle is a kernel's place
    counters: dict[int, Tensor] = field(default_factory=dict)

    def function(self, kernel: Kernel, device: int | None) -> int:  # noqa: ARG002
        if kernel not in self.functions:
            self.functions.append(kernel)
        return self.functions.index(kernel)

    def counter(self, device: int, stream: int) -> Tensor:  # noqa: ARG002
        return self.counters.setdefault(stream, torch.zeros(1, dtype=torch.int32))

    def tensor_map(self, dtype: str, address: int, shape: Sequence[int], strides: Sequence[int], box: Sequence[int], swizzle: int) -> bytes:
        self.encoded += 1
        rest = repr((dtype, tuple(shape), tuple(strides), tuple(box), swizzle)).encode()
        return address.to_bytes(8, "little") + hashlib.sha256(rest).digest() + bytes(cuda.TENSOR_MAP_BYTES - 40)


def _launch_class(device: Device) -> type:
    class Launch:
        def __init__(self, function: int, threads: int, cluster: int, shared_bytes: int, params: Any) -> None:  # noqa: ARG002
            self.kernel, self.params = device.functions[function], list(params)

        def __call__(self, grid: int, stream: int) -> None:
            if device.recording:
                device.launches.append(Launched.read(self.kernel, grid, stream, self.params))

    return Launch


@contextlib.contextmanager
def fake_cuda() -> Iterator[Device]:
    """While it is open, ``backend="tandem"`` takes CPU tensors and launches on a recorded device."""
    device = Device()
    patches = (
        (cuda, "tensor_map", device.tensor_map),
        (launch, "_function", device.function),
        (cuda, "Launch", _launch_class(device)),
        (backend, "_sms", lambda _: 132),
        (backend, "_counter", device.counter),
        (backend, "_eager_counter", device.counter),
        (bound, "_current_device", lambda: device.index),
        (bound, "_current_stream", lambda _: device.stream),
        (bound, "_capturing", lambda: device.capturing),
        (torch.cuda, "current_device", lambda: device.index),
        (torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=device.stream)),
        (torch.cuda, "device", lambda index: _entered(device, index)),
    )
    with contextlib.ExitStack() as stack:
        for owner, name, value in patches:
            stack.enter_context(mock.patch.object(owner, name, value))
        tandem = dataclasses.replace(backends.BACKENDS["tandem"], missing=backend.lacks)
        stack.enter_context(mock.patch.dict(backends.BACKENDS, tandem=tandem))
        stack.callback(repeated.forget)
        repeated.forget()
        yield device


@contextlib.contextmanager
def _entered(device: Device, index: int | None) -> Iterator[None]:
    before, device.index = device.index, index
    try:
        yield
    finally:
        device.index = before
