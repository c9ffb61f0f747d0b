"""From a problem and its tensors to a launch description. Nothing here touches a device beyond PyTorch operations on the tensors' own one,
and nothing waits for it.
"""

from __future__ import annotations

import functools
import math

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
_ALIGN = 16  # bytes, of addresses and strides that TMA takes
_END, _WRAP = 1 << 30, 1 << 34  # see kernels.common.copies: _END * _WRAP is 2^64

# The arguments of every forward kernel, in order.
DESCRIPTORS = ("q_desc", "k_desc", "v_desc", "o_desc", "q_tail", "k_tail", "v_tail", "o_tail")
POINTERS = ("lse", "counter", "cu_q", "cu_k", "used_q", "used_k", "sink", "slopes", "order", "starts")
NUMBERS = (
    "scalar0", "scalar1", "scalar2", "scalar3", "scale_log2", "softcap",
    "seqlen_q", "seqlen_k", "pitch_q", "pitch_k", "pitch_v",
    "batch", "heads", "heads_per_kv", "blocks", "section", "num_tiles", "lse_stride",
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
            rows, keys, *(pitch(x.shape, x.stride()) for x in (q, k, v)),
            problem.batch, heads, problem.heads_per_kv, blocks, section, tiles, rows,
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
    pack, tensors = plan.pack_gqa, (q, k, v, out)
    how = ((q_is_ragged(plan), pack), (kv_is_ragged(plan), 1), (kv_is_ragged(plan), 1), (plan.varlen, pack))
    dtypes = (plan.dtype, plan.dtype, plan.dtype, plan.out_dtype)
    boxes = kernel.descriptors
    make = lambda i, box: _map(dtypes[i], tensors[i].data_ptr(), tensors[i].shape, tensors[i].stride(), *how[i], *box)  # noqa: E731
    found = [make(i, boxes[i]) for i in range(len(tensors))]
    tails = [make(i, boxes[len(tensors) + i]) for i in range(len(tensors))] if kernel.has_tails else found
    return (*found, *tails)


def q_is_ragged(plan: Plan) -> bool:
    """Whether q's descriptor has two row dimensions, see ``kernels.common.copies``. Packed heads are read whatever their rows hold."""
    return (plan.varlen or plan.seqused) and plan.pack_gqa == 1


def kv_is_ragged(plan: Plan) -> bool:
    return plan.varlen or plan.seqused or plan.page_size > 0


@functools.lru_cache(maxsize=8192)
def _map(
    dtype: str, address: int, shape: tuple[int, ...], strides: tuple[int, ...], ragged: bool, pack: int, swizzle: int, box: tuple[int, ...]
) -> TensorMap:
    """A tensor's TMA descriptor, see ``kernels.common.copies`` and ``packing``; one object for an address, so that it is encoded once."""
    element = ELEMENT_BYTES[dtype]
    if ragged and pack == 1:
        dims = _ragged_dims(shape, strides, element)
    else:
        *batch, rows, heads, _ = shape
        *by_batch, by_row, by_head, _ = (stride * element for stride in strides)
        dims = [(rows, by_row), (heads, by_head)] if pack == 1 else [(pack, by_head), (rows, by_row), (heads // pack, by_head * pack)]
        dims += zip(batch, by_batch, strict=True)
        if ragged:  # o of packed sequences, which is contiguous; see packing
            dims.append((rows + 1, by_row))
            address -= rows * by_row
        else:  # the stride of a dimension of size 1 is never used and may be anything, but TMA wants multiples of 16
            dims = [(size, stride if size > 1 else _ALIGN) for size, stride in dims]
    return TensorMap(dtype, address, (shape[-1], *(size for size, _ in dims)), tuple(stride for _, stride in dims), box[::-1], swizzle)


def _ragged_dims(shape: tuple[int, ...], strides: tuple[int, ...], element: int) -> list[tuple[int, int]]:
    """Sizes and strides in bytes from rows out: rows up to a sequence's end, heads, rows of the tensor, and what takes END rows back."""
    *batch, rows, heads, _ = shape
    by_head = strides[-2] * element if heads > 1 else _ALIGN
    by_row = _row_stride(shape, strides) * element
    last = (math.prod(batch) - 1) * pitch(shape, strides) + rows
    return [(_END, by_row), (heads, by_head), (last + 1, by_row), (_END + 1, _WRAP - by_row)]


def _row_stride(shape: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """Elements from row to row; where each sequence has one row, from sequence to sequence, and of a single row nothing depends on it."""
    *batch, rows, _, _ = shape
    if rows > 1:
        return strides[-3]
    return strides[0] if batch and batch[0] > 1 else _ALIGN


def pitch(shape: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """Rows from one sequence, or page, to the next in a tensor (batch, rows, heads, head_dim); 0 without a batch."""
    by_row = _row_stride(shape, strides)
    return strides[0] // by_row if len(shape) > 3 and shape[0] > 1 and by_row else 0


def aligned(x: Tensor, *, ragged: bool = False) -> Tensor:
    """x as TMA can read it: unit last stride, everything else on 16 bytes; for a ``ragged`` descriptor sequences also lie whole rows apart.
    A copy where it is not so."""
    return x if x.data_ptr() % _ALIGN == 0 and _strides_fit(x.shape, x.stride(), x.element_size(), ragged) else _copy(x)


def _copy(x: Tensor) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format)  # contiguous() would return a tensor that is only misplaced


@functools.lru_cache(maxsize=8192)
def _strides_fit(shape: tuple[int, ...], strides: tuple[int, ...], element: int, ragged: bool) -> bool:
    outer = zip(strides[:-1], shape[:-1], strict=True)
    fit = strides[-1] == 1 and all(stride * element % _ALIGN == 0 for stride, size in outer if size > 1)
    return fit and (not ragged or _sequences_fit(shape, strides, element))


def _sequences_fit(shape: tuple[int, ...], strides: tuple[int, ...], element: int) -> bool:
    """Whether rows of all sequences can be counted in one dimension of TMA (coordinates are int32)."""
    by_row = _row_stride(shape, strides)
    if by_row * element >= _WRAP:
        return False
    if len(shape) < 4 or shape[0] == 1:
        return True
    return (strides[0] % by_row == 0 if by_row else strides[0] == 0) and (shape[0] - 1) * pitch(shape, strides) + shape[1] < _END
