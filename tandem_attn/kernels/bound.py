"""A forward bound to the properties of its tensors: all that a call does is laid out, but for addresses.

What the forward does beside its launches depends on properties alone: it allocates, fills, and lays out arguments. So binding carries it
out once, watched through PyTorch's dispatcher and without launching, and keeps what was allocated and filled, and an argument block for
each launch with a note of where its addresses come from. A forward that does anything else, convert an input say, is not bound.

A bound call runs in every repeated call and counts in microseconds: that is why it is written out, and asks PyTorch for the stream in the
short way that the code of PyTorch's compiler does.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
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
_SPACE_ALIGN = 256  # bytes, of each tensor in a space
_SPACES_KEPT = 256  # streams

_aten = torch.ops.aten
_ALLOCATIONS = (_aten.empty.memory_format, _aten.new_empty.default, _aten.empty_like.default, _aten.empty_strided.default)
_CONSTANTS = (_aten.full.default,)
_FILLS = {_aten.zero_.default: lambda _: 0.0, _aten.fill_.Scalar: lambda args: args[1]}
_VIEWS = (_aten.view.default, _aten.expand.default, _aten.alias.default, _aten.detach.default, _aten.unsqueeze.default)

# Missing in builds for a CPU only, where nothing is bound.
_current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", lambda: -1)
_current_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", lambda _: 0)
_capturing: Callable[[], bool] = getattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: False)
_guards = getattr(getattr(torch._C, "_dynamo", None), "guards", None)
_empty_on_cuda: Callable[..., Tensor] | None = getattr(_guards, "_empty_strided_cuda", None)
_data_ptr = Tensor.data_ptr

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
        results, unread = ([out, lse], 0) if problem.return_lse or problem.backward else ([out], lse.data_ptr())
        return Bound(inputs, results, unread, scheduler, recorder, launches, device, counter) if launches else None
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


class _Space:
    """Memory for what a call needs only while it runs. Kernels of one stream run one after the other, so that all of them share it."""

    def __init__(self) -> None:
        self.memory: Tensor | None = None

    def at_least(self, size: int, device: torch.device) -> Tensor:
        if self.memory is None or self.memory.numel() < size:
            self.memory = torch.empty(size, dtype=torch.uint8, device=device)
        return self.memory


class _Spaces(threading.local):
    """One for each stream, and each thread: the launches of two threads' calls may alternate in one stream."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, int], _Space] = {}

    def of(self, device: int, stream: int) -> _Space:
        if len(self._known) >= _SPACES_KEPT:
            self._known.clear()
        return self._known.setdefault((device, stream), _Space())


_spaces = _Spaces()


@dataclasses.dataclass(frozen=True)
class _Places:
    """Where the addresses of a bound call come from, by those of the call that was recorded.

    Attributes:
        new: numbers in the list of what each call brings: inputs, and what is allocated anew.
        scratch: bytes into the space of its stream.
        fixed: constants, which stay.
        counter: the scheduler's.
    """

    new: dict[int, int]
    scratch: dict[int, int]
    fixed: frozenset[int]
    counter: int


class _Step:
    """One launch: an argument block, and which of a call's addresses go where."""

    def __init__(self, launch: LaunchDescription, places: _Places, device: int) -> None:
        block = ArgumentBlock(launch.kernel, device)
        block.write(launch)
        self._launch, self._grid = block.launch, launch.grid * launch.kernel.ctas
        self._maps_view, self._words = block.maps, block.words
        sources = (0, 1, 2, places.new[launch.described[3].data_ptr()]) if launch.maps else ()  # q, k, v, O
        self._maps = [_Maps(launch, i) for i in range(len(sources))]
        self._described = itemgetter(*sources) if sources else tuple
        self._new: list[tuple[int, int]] = []
        self._scratch: list[tuple[int, int]] = []
        self._counters: list[int] = []
        for word, x in block.tensors(launch):
            self._place(word, x.data_ptr(), places)

    def _place(self, word: int, address: int, places: _Places) -> None:
        if address in places.new:
            self._new.append((word, places.new[address]))
        elif address in places.scratch:
            self._scratch.append((word, places.scratch[address]))
        elif address == places.counter:
            self._counters.append(word)
        elif address not in places.fixed:
            raise _NotBoundError(f"an address within a tensor: word {word}")

    def settle(self, space: int, counter: int) -> None:
        """Writes the addresses that stay while the stream and its space do."""
        for word, offset in self._scratch:
            self._words[word] = space + offset
        for word in self._counters:
            self._words[word] = counter

    def __call__(self, addresses: list[int], stream: int) -> None:
        if self._maps:
            self._maps_view[:] = b"".join(map(getitem, self._maps, self._described(addresses)))
        for word, source in self._new:
            self._words[word] = addresses[source]
        self._launch(self._grid, stream)


class Bound:
    """Takes the tensors of ``Inputs`` in their order; returns O and LSE, or O twice where the problem asks for no LSE and for no backward,
    which reads it. For one device and one thread.

    None is returned where a call has to be prepared by itself: TMA cannot read its tensors where they lie, or a CUDA graph is captured.
    """

    def __init__(
        self, inputs: Inputs, results: list[Tensor], unread: int, scheduler: Tensor, recorder: _Recorder, launches: list[LaunchDescription],
        device: int, counter: Counter,
    ) -> None:  # fmt: skip
        given = [getattr(inputs, name) for name in _INPUTS]
        self._read = itemgetter(*(i for i, x in enumerate(given) if x is not None))
        made = {x.data_ptr(): x for x in recorder.made}
        lost = set(made) - {x.data_ptr() for x in results}  # nobody gets them; what is filled is made anew all the same
        fills = [(x.data_ptr(), value) for x, value in recorder.fills if x.data_ptr() != unread]
        anew = [*results, *(made[address] for address in dict.fromkeys(address for address, _ in fills) if address in lost)]
        order = {x.data_ptr(): i for i, x in enumerate(anew)}
        self._size, scratch = _laid_out([x for address, x in made.items() if address not in order])
        new = {x.data_ptr(): i for i, x in enumerate([*self._read(given), *anew])}
        places = _Places(new, scratch, frozenset(x.data_ptr() for x in recorder.constants), scheduler.data_ptr())
        self._steps = [_Step(launch, places, device) for launch in launches]
        self._constants = recorder.constants
        self._anew = [_maker(x) for x in anew]
        self._fills = [(order[address], value) for address, value in fills]
        self._lse = len(results) - 1
        self._device, self._counter_of, self._stream = device, counter, -1
        self._space, self._counter = _Space(), scheduler
        self._settled: Tensor | None = None

    def __call__(self, tensors: tuple[Any, ...]) -> tuple[Tensor, Tensor] | None:
        addresses = [*map(_data_ptr, self._read(tensors))]
        if (addresses[0] | addresses[1] | addresses[2]) % _ALIGN or _capturing():
            return None
        device = self._device
        if _current_device() != device:
            with torch.cuda.device(device):
                return self(tensors)
        stream = _current_stream(device)
        if stream != self._stream or self._space.memory is not self._settled:
            self._settle(stream, tensors[0].device)
        made = [make() for make in self._anew]
        for i, value in self._fills:
            made[i].fill_(value)
        addresses += map(_data_ptr, made)
        for step in self._steps:
            step(addresses, stream)
        return made[0], made[self._lse]

    def _settle(self, stream: int, device: torch.device) -> None:
        """Writes the addresses that depend on the stream; its space may have grown for another call, and moved."""
        self._stream, self._counter = stream, self._counter_of(self._device, stream)
        self._space = _spaces.of(self._device, stream)
        memory = self._settled = self._space.at_least(self._size, device)
        for step in self._steps:
            step.settle(memory.data_ptr(), self._counter.data_ptr())


def _laid_out(tensors: list[Tensor]) -> tuple[int, dict[int, int]]:
    """Bytes of a space for the tensors, and where in it each begins, by its address."""
    size, offsets = 0, {}
    for x in tensors:
        offsets[x.data_ptr()] = size
        size += -(-x.numel() * x.element_size() // _SPACE_ALIGN) * _SPACE_ALIGN
    return size, offsets


def _maker(x: Tensor) -> Callable[[], Tensor]:
    """Makes tensors like ``x``, which are contiguous; on the current device, by the function that PyTorch's compiled code calls."""
    if x.is_cuda and _empty_on_cuda is not None:
        return functools.partial(_empty_on_cuda, tuple(x.shape), x.stride(), x.dtype)
    return functools.partial(torch.empty_like, x.new_empty(1).expand(x.shape))
