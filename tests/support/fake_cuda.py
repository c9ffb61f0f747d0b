"""A stand-in for a Hopper GPU and its driver: CPU tensors, kernels compiled for real, launches recorded instead of run.

It shows what would be launched, and with which arguments; nothing is computed.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import hashlib
import itertools
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from tandem_attn.api import backends, repeated
from tandem_attn.kernels import backend, bound, cuda
from tandem_attn.kernels.prepare import POINTERS

FORWARD = "forward"  # name of the forward kernels; beside them small ones are launched


@dataclass(frozen=True)
class Launched:
    """One launch of a forward: where, and the bytes of its argument block."""

    function: int
    grid: int
    stream: int
    descriptors: tuple[tuple[int, bytes], ...]  # address and a digest of everything else, as they lie in the block
    pointers: tuple[int, ...]
    numbers: bytes

    @staticmethod
    def read(function: int, grid: int, stream: int, params: Sequence[int]) -> Launched:
        """From the addresses of the parameters: descriptors lie 128 bytes apart, pointers 8."""
        places = sorted(set(params))
        first = next(i for i, (a, b) in enumerate(itertools.pairwise(places)) if b - a == struct.calcsize("Q"))
        maps = [ctypes.string_at(place, 40) for place in places[:first]]
        pointers = struct.unpack(f"{len(POINTERS)}Q", ctypes.string_at(places[first], 8 * len(POINTERS)))
        rest = places[first + len(POINTERS)]
        descriptors = tuple((int.from_bytes(x[:8], "little"), x[8:]) for x in maps)
        return Launched(function, grid, stream, descriptors, pointers, ctypes.string_at(rest, places[-1] + 8 - rest))


@dataclass
class Device:
    """State of the stand-in: what was launched, how many descriptors were encoded, and what a test may set."""

    launches: list[Launched] = field(default_factory=list)  # of forwards
    order: list[str] = field(default_factory=list)  # names of all kernels, as launched
    encoded: int = 0
    index: int | None = None  # of the current device; CPU tensors have None
    stream: int = 0x5EED
    capturing: bool = False
    recording: bool = True
    counters: dict[int, Tensor] = field(default_factory=dict)

    def counter(self, device: int, stream: int) -> Tensor:  # noqa: ARG002
        return self.counters.setdefault(stream, torch.zeros(1, dtype=torch.int32))

    def tensor_map(self, dtype: str, address: int, shape: Sequence[int], strides: Sequence[int], box: Sequence[int], swizzle: int) -> bytes:
        self.encoded += 1
        rest = repr((dtype, tuple(shape), tuple(strides), tuple(box), swizzle)).encode()
        return address.to_bytes(8, "little") + hashlib.sha256(rest).digest() + bytes(cuda.TENSOR_MAP_BYTES - 40)


_names: dict[int, str] = {}  # of loaded functions, which stay loaded from one stand-in to the next


def _load_function(cubin: bytes, name: str, shared_bytes: int) -> int:
    function = len(_names) + 1
    _names[function] = name
    return function


def _launch_class(device: Device) -> type:
    class Launch:
        def __init__(self, function: int, threads: int, shared_bytes: int, params: Any) -> None:  # noqa: ARG002
            self.function, self.params = function, list(params)

        def __call__(self, grid: int, stream: int) -> None:
            if not device.recording:
                return
            device.order.append(_names[self.function])
            if device.order[-1] == FORWARD:
                device.launches.append(Launched.read(self.function, grid, stream, self.params))

    return Launch


@contextlib.contextmanager
def fake_cuda() -> Iterator[Device]:
    """While it is open, ``backend="tandem"`` takes CPU tensors and launches on a recorded device."""
    device = Device()
    patches = (
        (cuda, "tensor_map", device.tensor_map),
        (cuda, "load_function", _load_function),
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
