"""A forward bound to the properties of its tensors: all of its launch is laid out, but for addresses.

Binding prepares one call in full (``prepare``) and keeps the argument block, and from where each pointer and descriptor comes. A call then
allocates O and LSE, writes addresses, and launches. It runs in every repeated call and counts in microseconds: that is why it is written
out, and asks PyTorch for the stream in the short way that the code of PyTorch's compiler does.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tandem_attn.kernels import helpers
from tandem_attn.kernels.compile import Kernel
from tandem_attn.kernels.description import LaunchDescription
from tandem_attn.kernels.launch import ArgumentBlock, encode, run
from tandem_attn.kernels.prepare import POINTERS, aligned, prepare
from tandem_attn.spec.inputs import Inputs
from tandem_attn.spec.mask_tree import has_data
from tandem_attn.spec.plan import Plan
from tandem_attn.spec.problem import Problem

_INPUTS = tuple(field.name for field in dataclasses.fields(Inputs))
_CU_Q, _CU_K, _USED_K = (_INPUTS.index(name) for name in ("cu_seqlens_q", "cu_seqlens_k", "seqused_k"))
_LSE, _COUNTER, _ORDER, _STARTS = (POINTERS.index(name) for name in ("lse", "counter", "order", "starts"))
_PER_CALL = (_LSE, _COUNTER, _ORDER, _STARTS)
_LENGTHS = ("seqused_q", "seqused_k")
_GIVEN = {  # inputs that kernels may read where they lie
    "cu_q": "cu_seqlens_q", "cu_k": "cu_seqlens_k", "used_q": "seqused_q", "used_k": "seqused_k", "sink": "sink", "slopes": "alibi_slopes",
}  # fmt: skip
_MAPS_KEPT = 512  # addresses whose encoded descriptors each tensor of a bound call keeps

# Missing in builds for a CPU only, where nothing is bound.
_current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", lambda: -1)
_current_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", lambda _: 0)
_capturing: Callable[[], bool] = getattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: False)
_empty_like = torch.empty_like

Counter = Callable[[int, int], Tensor]  # the dynamic scheduler's, of a device and a stream


def bind(kernel: Kernel, problem: Problem, plan: Plan, inputs: Inputs, device: int, sms: int, counter: Counter) -> Bound | None:
    """Binds a call; its device, of index ``device``, is current.

    None where a launch takes more from its tensors than addresses: a copy of one, in another layout or type.
    """
    q, k, v = inputs.q, inputs.k, inputs.v
    if 0 in (problem.batch, q.numel(), k.numel(), v.numel()) or not all(aligned(x) is x for x in (q, k, v)):
        return None
    out = q.new_empty(*q.shape[:-1], problem.head_dim_v)
    rows = q.shape[:-2]
    lse = q.new_empty(*rows[:-1], problem.heads, rows[-1], dtype=torch.float32)
    if has_data(problem.mask):  # a predicate may compute something else in the next call
        return None
    launch = prepare(kernel, problem, plan, inputs, out, lse, sms=sms, counter=lse)
    if launch.extras or launch.after:
        return None
    sources = _sources(launch, inputs)
    return None if sources is None else Bound(problem, plan, launch, sources, device, counter)


@dataclasses.dataclass(frozen=True)
class _Sources:
    """Pointers that are addresses of inputs, as (place among the pointers, number among the inputs), and constants kept for them."""

    direct: tuple[tuple[int, int], ...]
    constants: tuple[Tensor, ...]


def _sources(launch: LaunchDescription, inputs: Inputs) -> _Sources | None:
    direct, constants = [], []
    for place, x in enumerate(launch.pointers):
        if x is None or place in _PER_CALL:
            continue
        name = _GIVEN.get(POINTERS[place], "")
        given = getattr(inputs, name) if name else None
        if given is not None and given.data_ptr() == x.data_ptr():
            direct.append((place, _INPUTS.index(name)))
        elif given is None and name in _LENGTHS:
            constants.append(x)  # all of a tensor is used: this follows from its shape
        else:
            return None
    return _Sources(tuple(direct), tuple(constants))


def _template(x: Tensor) -> Tensor:
    """One element in the shape of ``x``, to make others like it."""
    return x.new_empty(1).expand(x.shape)


class _Maps(dict[int, bytes]):
    """Encoded descriptors of one tensor, of its head's and (where there is one) its tail's, by its address."""

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


class Bound:
    """Takes the tensors of ``Inputs`` in their order; returns O and LSE. For one device and one thread.

    None is returned where a call has to be prepared by itself: TMA cannot read its tensors where they lie, or a CUDA graph is captured.
    """

    def __init__(self, problem: Problem, plan: Plan, launch: LaunchDescription, sources: _Sources, device: int, counter: Counter) -> None:
        block = ArgumentBlock(launch.kernel, device)
        block.write(launch)
        self._groups, self._plan, self._packed = problem.heads // plan.pack_gqa, plan, plan.varlen
        self._words, self._launch, self._grid = block.words, block.launch, launch.grid * launch.kernel.ctas
        self._maps = tuple(_Maps(launch, i) for i in range(4))
        self._maps_at = block.maps
        self._like_out, self._like_lse = _template(launch.described[3]), _template(launch.pointers[_LSE])  # type: ignore[arg-type]
        self._direct, self._constants = sources.direct, sources.constants
        self._device, self._counter_of, self._counter, self._stream = device, counter, launch.pointers[_COUNTER], -1

    def __call__(self, tensors: tuple[Any, ...]) -> tuple[Tensor, Tensor] | None:
        q, k, v = tensors[0].data_ptr(), tensors[1].data_ptr(), tensors[2].data_ptr()
        if (q | k | v) & 15 or _capturing():
            return None
        device = self._device
        if _current_device() != device:
            with torch.cuda.device(device):
                return self(tensors)
        stream, words = _current_stream(device), self._words
        if stream != self._stream:
            self._stream, self._counter = stream, self._counter_of(device, stream)
            words[_COUNTER] = self._counter.data_ptr()
        out, lse = _empty_like(self._like_out), _empty_like(self._like_lse)
        maps_q, maps_k, maps_v, maps_out = self._maps
        maps = maps_q[q], maps_k[k], maps_v[v], maps_out[out.data_ptr()]
        self._maps_at[:] = b"".join(maps)
        words[_LSE] = lse.data_ptr()
        for place, number in self._direct:
            words[place] = tensors[number].data_ptr()
        kept = self._pack(tensors, out, lse, stream) if self._packed else None  # until the launch is in the stream
        self._launch(self._grid, stream)
        del kept
        return out, lse

    def _pack(self, tensors: tuple[Any, ...], out: Tensor, lse: Tensor, stream: int) -> tuple[Tensor, Tensor]:
        """Rows that no tile covers, and the order of the tiles."""
        out.zero_()
        lse.fill_(float("-inf"))
        order, starts, launch = helpers.packed_tiles(self._plan, tensors[_CU_Q], tensors[_CU_K], tensors[_USED_K], self._groups)
        run(launch, self._device, stream)
        self._words[_ORDER], self._words[_STARTS] = order.data_ptr(), starts.data_ptr()
        return order, starts
