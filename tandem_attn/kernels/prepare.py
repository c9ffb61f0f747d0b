"""From a problem and its tensors to a launch description: everything that a launch needs, whoever carries it out.

The CUDA launcher (``launch``) and the emulator (``emulated``) read the same description. Nothing here touches a device beyond PyTorch
operations on the tensors' own one, and nothing waits for it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from tandem_attn.kernels.compile import Kernel
from tandem_attn.spec.inputs import Inputs
from tandem_attn.spec.plan import ELEMENT_BYTES, Launch, Plan, ScheduleKind, mask_scalars
from tandem_attn.spec.problem import Problem

LOG2E = math.log2(math.e)
MAX_SCALARS = 4  # runtime window bounds that a kernel takes

# The arguments of every forward kernel, in order.
DESCRIPTORS = ("q_desc", "k_desc", "v_desc", "o_desc", "q_tail", "k_tail", "v_tail", "o_tail")
POINTERS = ("lse", "counter", "cu_q", "cu_k", "used_q", "used_k", "sink", "slopes", "order", "starts")
NUMBERS = (
    "scalar0", "scalar1", "scalar2", "scalar3", "scale_log2", "softcap",
    "seqlen_q", "seqlen_k", "limit_q", "limit_k", "batch", "heads", "heads_per_kv", "blocks", "section", "num_tiles", "lse_stride",
)  # fmt: skip


@dataclass(frozen=True, eq=False)  # equal by identity: a description stands for its place in the cache that made it
class TensorMap:
    """What a TMA descriptor says; all tuples run from the innermost dimension out.

    Attributes:
        dtype: element type, by torch's name.
        address: of the element at coordinates 0, a multiple of 16; it need not lie in the tensor (see ``kernels.common.copies``).
        sizes: elements of each dimension.
        strides: bytes from one element to the next, of every dimension but the innermost.
        box: elements of each dimension that one copy moves.
        swizzle: CUtensorMapSwizzle (CUDA Driver API): 0 none, 1, 2, 3 for 32, 64, 128 bytes.
    """

    dtype: str
    address: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int


class LaunchDescription(NamedTuple):
    """A kernel and its arguments, in the kernel's order: descriptors, pointers, numbers.

    Attributes:
        kernel: what to run.
        grid: clusters (CTAs where a cluster is one), along x.
        maps: a description for each of the kernel's TMA descriptors.
        described: the tensor behind each of them, in the same order.
        pointers: a tensor each, or None for a null pointer.
        numbers: int32 and float32 arguments.
    """

    kernel: Kernel
    grid: int
    maps: tuple[TensorMap, ...]
    described: tuple[Tensor, ...]
    pointers: tuple[Tensor | None, ...]
    numbers: tuple[int | float, ...]


def prepare(
    kernel: Kernel, problem: Problem, plan: Plan, inputs: Inputs, out: Tensor, lse: Tensor, *, sms: int, counter: Tensor
) -> LaunchDescription:
    """Describes one forward launch.

    Args:
        kernel: ``plan``, compiled.
        problem, plan: what is asked, and how it is computed.
        inputs: tensors of the call; q, k and v as TMA can read them (``aligned``), and none of them empty.
        out: O, written by the kernel: q's shape with last size head_dim_v, contiguous.
        lse: (B, H, Sq) or (H, total_q), float32, contiguous.
        sms: clusters that a persistent kernel is launched with at most.
        counter: int32 zero, the dynamic scheduler's; the kernel leaves it zero.
    """
    q, k, v = inputs.q, inputs.k, inputs.v
    rows, heads = q.shape[-3], q.shape[-2]
    tile_rows = plan.rows_per_cta * plan.cta_group
    blocks = -(-rows // tile_rows)
    tiles = blocks * heads * problem.batch
    if problem.varlen:  # the device counts them; at most one tile of a sequence and head is not full
        tiles = (rows // tile_rows + problem.batch) * heads
    grid = min(tiles, sms) if plan.schedule.launch in (Launch.STATIC, Launch.DYNAMIC) else tiles
    every = heads if problem.varlen else heads * problem.batch
    section = min(plan.schedule.section or (1 if plan.schedule.kind is ScheduleKind.NAIVE else every), every)
    window = mask_scalars(problem.mask.code)
    used_q, used_k = _used(problem, inputs)
    cu_q, cu_k = _contiguous(inputs.cu_seqlens_q), _contiguous(inputs.cu_seqlens_k)
    order, starts = packed_tiles(plan, cu_q, cu_k, heads) if problem.varlen else (None, None)
    sink, slopes = inputs.sink, inputs.alibi_slopes
    return LaunchDescription(
        kernel,
        grid,
        _maps(plan, kernel, q, k, v, out),
        (q, k, v, out, q, k, v, out),
        (
            lse, counter, cu_q, cu_k, used_q, used_k,
            None if sink is None else sink.float().contiguous(), None if slopes is None else _slopes(slopes, problem.batch), order, starts,
        ),
        (
            *window, *(0,) * (MAX_SCALARS - len(window)), problem.scale_value * LOG2E, problem.softcap,
            rows, k.shape[-3], rows, k.shape[-3], problem.batch, heads, problem.heads_per_kv, blocks, section, tiles, rows,
        ),
    )  # fmt: skip


def packed_tiles(plan: Plan, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None, heads: int) -> tuple[Tensor, Tensor]:
    """Packed sequences in the order they are worked on, longest keys first, and the number of tiles before each; on the device."""
    assert cu_seqlens_q is not None and cu_seqlens_k is not None  # narrows the type: the problem is packed
    tile_rows = plan.rows_per_cta * plan.cta_group
    blocks = (cu_seqlens_q.diff() + (tile_rows - 1)) // tile_rows
    order = torch.argsort(cu_seqlens_k.diff(), descending=True, stable=True)
    starts = torch.zeros_like(cu_seqlens_q)
    torch.cumsum(blocks[order] * heads, 0, dtype=torch.int32, out=starts[1:])
    return order.int(), starts


def _used(problem: Problem, inputs: Inputs) -> tuple[Tensor | None, Tensor | None]:
    """Both seqused tensors where there is one."""
    if not problem.seqused:
        return None, None
    full = lambda x: torch.full((problem.batch,), x.shape[-3], dtype=torch.int32, device=x.device)  # noqa: E731
    return (
        full(inputs.q) if inputs.seqused_q is None else inputs.seqused_q.contiguous(),
        full(inputs.k) if inputs.seqused_k is None else inputs.seqused_k.contiguous(),
    )


def _contiguous(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()


def _slopes(slopes: Tensor, batch: int) -> Tensor:
    return slopes.float().expand(batch, -1).contiguous()


def _maps(plan: Plan, kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> tuple[TensorMap, ...]:
    """Descriptors of q, k, v, o and their tails, in the kernel's order; a tail that is not used repeats its tensor's."""
    dtype, packed, ragged = plan.dtype, plan.varlen, plan.varlen or plan.seqused
    tensors = ((q, ragged), (k, ragged), (v, ragged), (out, packed))
    boxes = kernel.descriptors
    found = [_map(dtype, x.data_ptr(), x.shape, x.stride(), by_rows, *boxes[i]) for i, (x, by_rows) in enumerate(tensors)]
    tails = found
    if kernel.has_tails:
        tails = [_map(dtype, x.data_ptr(), x.shape, x.stride(), by_rows, *boxes[4 + i]) for i, (x, by_rows) in enumerate(tensors)]
    return (*found, *tails)


@functools.lru_cache(maxsize=8192)
def _map(
    dtype: str, address: int, shape: tuple[int, ...], strides: tuple[int, ...], ragged: bool, swizzle: int, box: tuple[int, ...]
) -> TensorMap:
    """A tensor's TMA descriptor, see ``kernels.common.copies``; one object for an address, so that it is encoded once."""
    *batch, rows, heads, columns = shape
    *by_batch, by_row, by_head, _ = strides
    element = ELEMENT_BYTES[dtype]
    if ragged:
        sizes = (rows, heads, rows + 1, *batch)
        in_bytes = _bytes((by_row, by_head, by_row, *by_batch), sizes, element)
        in_bytes = (in_bytes[0], in_bytes[1], in_bytes[0], *in_bytes[3:])
        return TensorMap(dtype, address - rows * in_bytes[0], (columns, *sizes), in_bytes, box[::-1], swizzle)
    sizes = (rows, heads, *batch)
    return TensorMap(dtype, address, (columns, *sizes), _bytes((by_row, by_head, *by_batch), sizes, element), box[::-1], swizzle)


def _bytes(strides: Sequence[int], sizes: Sequence[int], element: int) -> tuple[int, ...]:
    """Strides in bytes; that of a dimension of size 1 is never used and may be anything, but TMA wants multiples of 16."""
    return tuple(stride * element if size > 1 else 16 for stride, size in zip(strides, sizes, strict=True))


def aligned(x: Tensor) -> Tensor:
    """x as TMA can read it: unit last stride, everything else on 16 bytes; a copy where it is not so."""
    return x if x.data_ptr() % 16 == 0 and _strides_fit(x.shape, x.stride(), x.element_size()) else _copy(x)


def _copy(x: Tensor) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format)  # contiguous() would return a tensor that is only misplaced


@functools.lru_cache(maxsize=8192)
def _strides_fit(shape: tuple[int, ...], strides: tuple[int, ...], element: int) -> bool:
    outer = zip(strides[:-1], shape[:-1], strict=True)
    return strides[-1] == 1 and all(stride * element % 16 == 0 for stride, size in outer if size > 1)
