"""A forward bound to the properties of its tensors: all that a call does is laid out, but for addresses.

What the forward does beside its launches depends on properties alone: it allocates, fills, and lays out arguments. So binding carries it
out once, watched through PyTorch's dispatcher and without launching, and keeps what was allocated and filled, and an argument block for
each launch with a note of where its addresses come from. A forward that does anything else, convert an input say, is not bound.

A bound call runs in every repeated call and counts in microseconds: that is why it is written out, and asks PyTorch for the stream in the
short way that the code of PyTorch's compiler does.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from operator import getitem, itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tandem_attn.kernels.compile import Kernel
from tandem_attn.kernels.description import LaunchDescription, in_order
from tandem_attn.kernels.forward import attend
from tandem_attn.kernels.launch import ArgumentBlock, encode
from tandem_attn.kernels.prepare import prepare
from tandem_attn.spec.inputs import Inputs
from tandem_attn.spec.plan import Plan
from tandem_attn.spec.problem import Problem

_INPUTS = tuple(field.name for field in dataclasses.fields(Inputs))
_REQUIRED = 3  # q, k, v; the others may be None
_MAPS_KEPT = 512  # addresses whose encoded descriptors each tensor of a bound call keeps
_ALIGN = 16  # bytes, of what TMA reads

_aten = torch.ops.aten
_ALLOCATIONS = (_aten.empty.memory_format, _aten.new_empty.default, _aten.empty_like.default, _aten.empty_strided.default)
_CONSTANTS = (_aten.full.default,)
_FILLS = {_aten.zero_.default: lambda _: 0.0, _aten.fill_.Scalar: lambda args: args[1]}
_VIEWS = (_aten.view.default, _aten.expand.default, _aten.alias.default, _aten.detach.default, _aten.unsqueeze.default)

# Missing in builds for a CPU only, where nothing is bound.
_current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", lambda: -1)
_current_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", lambda _: 0)
_capturing: Callable[[], bool] = getattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: False)
_empty_like, _data_ptr = torch.empty_like, Tensor.data_ptr

Counter = Callable[[int, int], Tensor]  # the dynamic scheduler's, of a device and a stream


class _NotBoundError(Exception):
    """The forward does something that a bound call does not repeat."""


class _Recorder(TorchDispatchMode):
    """Watches what PyTorch does."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[Tensor] = []
        self.constants: list[Tensor] = []
        self.fills: list[tuple[Tensor, float]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _ALLOCATIONS:
            self.made.append(result)
        elif func in _CONSTANTS:
            self.constants.append(result)
        elif func in _FILLS:
            self.fills.append((args[0], _FILLS[func](args)))
        elif func not in _VIEWS:
            raise _NotBoundError(str(func))
        return result


def bind(kernel: Kernel, problem: Problem, plan: Plan, inputs: Inputs, device: int, sms: int, counter: Counter) -> Bound | None:
    """Binds a call; its device, of index ``device``, is current. None where a call does more than ``Bound`` repeats."""
    inputs = _apart(inputs)
    scheduler = torch.zeros(1, dtype=torch.int32, device=inputs.q.device)
    launches: list[LaunchDescription] = []

    def execute(problem: Problem, plan: Plan, inputs: Inputs, out: Tensor, lse: Tensor) -> None:
        launches.extend(in_order(prepare(kernel, problem, plan, inputs, out, lse, sms=sms, counter=scheduler)))

    recorder = _Recorder()
    try:
        with recorder:
            out, lse = attend(problem, plan, inputs, execute)
        outputs = (out.data_ptr(), lse.data_ptr())  # what the dispatcher saw are other objects for the same memory
        made = [out, lse, *(x for x in recorder.made if x.data_ptr() not in outputs)]
        return Bound(inputs, made, scheduler, recorder, launches, device, counter) if launches else None
    except _NotBoundError:
        return None


def _apart(inputs: Inputs) -> Inputs:
    """The inputs, each optional one at an address of its own; values are not read."""
    seen: set[int] = set()
    fresh: dict[str, Tensor] = {}
    for name in _INPUTS[_REQUIRED:]:
        x = getattr(inputs, name)
        if x is not None and x.data_ptr() in seen:
            fresh[name] = x = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
        if x is not None:
            seen.add(x.data_ptr())
    return dataclasses.replace(inputs, **fresh) if fresh else inputs


class _Maps(dict[int, bytes]):
    """Encoded descriptors of one tensor, its head's and (where there is one) its tail's, by its address."""

    def __init__(self, launch: LaunchDescription, index: int) -> None:
        super().__init__()
        start, half = launch.described[index].data_ptr(), len(launch.maps) // 2
        used = (index, index + half) if launch.kernel.has_tails else (index,)
        self._parts = [(launch.maps[i], launch.maps[i].address - start) for i in used]

    def __missing__(self, address: int) -> bytes:
        if len(self) >= _MAPS_KEPT:
            self.clear()
        found = self[address] = b"".join(encode(x, address + offset) for x, offset in self._parts)
        return found


class _Step:
    """One launch: an argument block, and which of a call's addresses go where.

    Args:
        numbers: of an address of the call that was bound, its place in the list of a call's addresses; None: it stays as it is.
    """

    def __init__(self, launch: LaunchDescription, numbers: dict[int, int | None], device: int) -> None:
        block = ArgumentBlock(launch.kernel, device)
        block.write(launch)
        self._launch, self._grid = block.launch, launch.grid * launch.kernel.ctas
        self._maps_view, self._words = block.maps, block.words
        sources = (0, 1, 2, numbers[launch.described[3].data_ptr()] or 0) if launch.maps else ()  # q, k, v, O
        self._maps = [_Maps(launch, i) for i in range(len(sources))]
        self._described = itemgetter(*sources) if sources else tuple
        self._pointers = []
        for place, x in block.tensors(launch):
            if x.data_ptr() not in numbers:
                raise _NotBoundError(f"an address within a tensor: word {place}")
            if (source := numbers[x.data_ptr()]) is not None:
                self._pointers.append((place, source))

    def __call__(self, addresses: list[int], stream: int) -> None:
        self._maps_view[:] = b"".join(map(getitem, self._maps, self._described(addresses)))
        words = self._words
        for place, source in self._pointers:
            words[place] = addresses[source]
        self._launch(self._grid, stream)


class Bound:
    """Takes the tensors of ``Inputs`` in their order; returns O and LSE. For one device and one thread.

    None is returned where a call has to be prepared by itself: TMA cannot read its tensors where they lie, or a CUDA graph is captured.
    """

    def __init__(
        self, inputs: Inputs, made: list[Tensor], scheduler: Tensor, recorder: _Recorder, launches: list[LaunchDescription], device: int,
        counter: Counter,
    ) -> None:  # fmt: skip
        given = [getattr(inputs, name) for name in _INPUTS]
        self._read = itemgetter(*(i for i, x in enumerate(given) if x is not None))
        numbers: dict[int, int | None] = {x.data_ptr(): None for x in recorder.constants}
        numbers |= {x.data_ptr(): i for i, x in enumerate([*self._read(given), *made, scheduler])}
        self._steps = [_Step(launch, numbers, device) for launch in launches]
        self._constants = recorder.constants
        self._like = [x.new_empty(1).expand(x.shape) for x in made]
        places = {x.data_ptr(): i for i, x in enumerate(made)}
        self._fills = [(places[x.data_ptr()], value) for x, value in recorder.fills]
        self._device, self._counter_of, self._counter, self._stream = device, counter, scheduler, -1

    def __call__(self, tensors: tuple[Any, ...]) -> tuple[Tensor, Tensor] | None:
        addresses = [*map(_data_ptr, self._read(tensors))]
        if (addresses[0] | addresses[1] | addresses[2]) % _ALIGN or _capturing():
            return None
        device = self._device
        if _current_device() != device:
            with torch.cuda.device(device):
                return self(tensors)
        stream = _current_stream(device)
        if stream != self._stream:
            self._stream, self._counter = stream, self._counter_of(device, stream)
        made = [*map(_empty_like, self._like)]
        for i, value in self._fills:
            made[i].fill_(value)
        addresses += map(_data_ptr, made)
        addresses.append(self._counter.data_ptr())
        for step in self._steps:
            step(addresses, stream)
        return made[0], made[1]
