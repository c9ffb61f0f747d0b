"""From a problem and its tensors to a launch description. Nothing here touches a device beyond PyTorch operations on the tensors' own one,
and nothing waits for it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from tandem_attn.kernels import helpers
from tandem_attn.kernels.compile import Kernel
from tandem_attn.kernels.description import Extra, LaunchDescription, TensorMap
from tandem_attn.kernels.extras import SCALARS
from tandem_attn.kernels.mask_data import mask_data
from tandem_attn.spec.inputs import Inputs
from tandem_attn.spec.plan import ELEMENT_BYTES, Launch, Plan, ScheduleKind, mask_scalars
from tandem_attn.spec.problem import Problem

LOG2E = math.log2(math.e)
_ENDLESS = 1 << 30

# The arguments of every forward kernel, in order.
DESCRIPTORS = ("q_desc", "k_desc", "v_desc", "o_desc", "q_tail", "k_tail", "v_tail", "o_tail")
POINTERS = ("lse", "counter", "cu_q", "cu_k", "used_q", "used_k", "sink", "slopes", "order", "starts")
NUMBERS = (
    "scalar0", "scalar1", "scalar2", "scalar3", "scale_log2", "softcap",
    "seqlen_q", "seqlen_k", "limit_q", "limit_k", "batch", "heads", "heads_per_kv", "blocks", "section", "num_tiles", "lse_stride",
)  # fmt: skip


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
    groups = heads // plan.pack_gqa
    blocks = -(-rows // plan.queries_per_tile)
    tiles = blocks * groups * problem.batch
    if problem.varlen:  # the device counts them; at most one tile of a sequence and head is not full
        tiles = (rows // plan.queries_per_tile + problem.batch) * groups
    tiles *= plan.num_splits
    grid = min(tiles, sms) if plan.schedule.launch in (Launch.STATIC, Launch.DYNAMIC) else tiles
    every = groups if problem.varlen else groups * problem.batch
    section = min(plan.schedule.section or (1 if plan.schedule.kind is ScheduleKind.NAIVE else every), every)
    window = mask_scalars(problem.mask.code)
    keys = k.shape[-3] if inputs.page_table is None else inputs.page_table.shape[1] * k.shape[-3]
    used_q, used_k = _used(plan, inputs, keys)
    cu_q, cu_k = _contiguous(inputs.cu_seqlens_q), _contiguous(inputs.cu_seqlens_k)
    order = starts = None
    before: list[LaunchDescription] = []
    if cu_q is not None and cu_k is not None:
        order, starts, first = helpers.packed_tiles(plan, cu_q, cu_k, used_k, groups)
        before.append(first)
    lengths = (cu_q, cu_k, used_q, used_k)
    data, ranges = mask_data(plan, problem, lengths, rows, keys, q.device)
    sink = None if inputs.sink is None else inputs.sink.float().contiguous()
    slopes = None if inputs.alibi_slopes is None else _slopes(inputs.alibi_slopes, problem.batch)
    parts, after = helpers.parts(plan, out, lse, sink, rows)
    return LaunchDescription(
        kernel,
        grid,
        _maps(plan, kernel, q, k, v, out),
        (q, k, v, out, q, k, v, out),
        (lse, counter, *lengths, sink, slopes, order, starts),
        (
            *window[:SCALARS], *(0,) * (SCALARS - len(window)), problem.scale_value * LOG2E, problem.softcap,
            rows, keys, rows, k.shape[-3], problem.batch, heads, problem.heads_per_kv, blocks, section, tiles, rows,
        ),
        (*window[SCALARS:], *data, *_bias(plan, inputs), *_pages(inputs), *parts, *_descales(plan, problem, inputs)),
        (*before, *ranges),
        after,
    )  # fmt: skip


def _bias(plan: Plan, inputs: Inputs) -> tuple[Extra, ...]:
    """The bias with a stride of 0 for each size of 1; of such a row or column there is no end."""
    if inputs.bias is None:
        return ()
    bias = inputs.bias.to(getattr(torch, plan.bias))
    strides = (0 if size == 1 else stride for size, stride in zip(bias.shape, bias.stride(), strict=True))
    return (bias, *(_ENDLESS if size == 1 else size for size in bias.shape[2:]), *strides)


def _descales(plan: Plan, problem: Problem, inputs: Inputs) -> tuple[Extra, ...]:
    """Those of q, k and v where they lie, a 1 for one that is not given, and their strides."""
    if not plan.descale:
        return ()
    given = (inputs.q_descale, inputs.k_descale, inputs.v_descale)
    shape = (problem.batch, problem.heads_kv)
    found = [torch.full((1, 1), 1.0, device=inputs.q.device).expand(shape) if x is None else x for x in given]
    return (*found, *(stride for x in found for stride in x.stride()))


def _pages(inputs: Inputs) -> tuple[Extra, ...]:
    if inputs.page_table is None:
        return ()
    table = inputs.page_table.int()
    table = table if table.stride(1) == 1 or table.shape[1] == 1 else table.contiguous()
    leftpad = () if inputs.leftpad is None else (inputs.leftpad.int().contiguous(),)
    return (table, table.stride(0), table.shape[1], inputs.k.shape[-3], *leftpad)


def _used(plan: Plan, inputs: Inputs, keys: int) -> tuple[Tensor | None, Tensor | None]:
    """Both seqused tensors where there is one."""
    if not plan.seqused:
        return None, None
    return (
        _lengths(inputs.seqused_q, inputs, inputs.q.shape[-3]) if plan.uses_part_of_q else None,
        _lengths(inputs.seqused_k, inputs, keys),
    )


def _lengths(given: Tensor | None, inputs: Inputs, rows: int) -> Tensor:
    if given is not None:
        return given.contiguous()
    other = inputs.seqused_q if inputs.seqused_k is None else inputs.seqused_k
    assert other is not None  # narrows the type: one of them is given
    return torch.full(other.shape, rows, dtype=torch.int32, device=other.device)


def _contiguous(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()


def _slopes(slopes: Tensor, batch: int) -> Tensor:
    return slopes.float().expand(batch, -1).contiguous()


def _maps(plan: Plan, kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> tuple[TensorMap, ...]:
    """Descriptors of q, k, v, o and their tails, in the kernel's order; a tail that is not used repeats its tensor's."""
    ragged = plan.varlen or plan.seqused
    pack = plan.pack_gqa
    ragged_kv = ragged or plan.page_size > 0
    tensors = (
        (q, plan.dtype, ragged and pack == 1, pack), (k, plan.dtype, ragged_kv, 1), (v, plan.dtype, ragged_kv, 1),
        (out, plan.out_dtype, plan.varlen, pack),
    )  # fmt: skip
    boxes = kernel.descriptors
    found = [_map(x.data_ptr(), x.shape, x.stride(), *how, *boxes[i]) for i, (x, *how) in enumerate(tensors)]
    tails = found
    if kernel.has_tails:
        tails = [_map(x.data_ptr(), x.shape, x.stride(), *how, *boxes[4 + i]) for i, (x, *how) in enumerate(tensors)]
    return (*found, *tails)


@functools.lru_cache(maxsize=8192)
def _map(
    address: int, shape: tuple[int, ...], strides: tuple[int, ...], dtype: str, ragged: bool, pack: int, swizzle: int, box: tuple[int, ...]
) -> TensorMap:
    """A tensor's TMA descriptor, see ``kernels.common.copies`` and ``packing``; one object for an address, so that it is encoded once."""
    *batch, rows, heads, columns = shape
    *by_batch, by_row, by_head, _ = strides
    element = ELEMENT_BYTES[dtype]
    dims = [(rows, by_row), (heads, by_head)] if pack == 1 else [(pack, by_head), (rows, by_row), (heads // pack, by_head * pack)]
    if ragged:
        dims.append((rows + 1, by_row))
        address -= rows * by_row * element if rows > 1 else 16
    dims += zip(batch, by_batch, strict=True)
    sizes = tuple(size for size, _ in dims)
    in_bytes = _bytes([stride for _, stride in dims], sizes, element)
    if ragged:  # both row dimensions move alike, also where one of them has a single element
        in_rows, in_end = (1, 3) if pack > 1 else (0, 2)
        in_bytes = tuple(in_bytes[in_rows] if i == in_end else each for i, each in enumerate(in_bytes))
    return TensorMap(dtype, address, (columns, *sizes), in_bytes, box[::-1], swizzle)


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
