"""The kernels as a backend: which forwards they cover, how they are planned, and the call."""

from __future__ import annotations

import functools
import importlib.metadata
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from tandem_attn.kernels import cuda, launch
from tandem_attn.kernels.compile import TRITON, Kernel, compiled
from tandem_attn.spec.errors import UnsupportedError
from tandem_attn.spec.inputs import Inputs
from tandem_attn.spec.masks import Document, Predicate
from tandem_attn.spec.plan import ELEMENT_BYTES, FORWARD, Launch, Plan, Schedule, ScheduleKind, mask_scalars
from tandem_attn.spec.planner import plan as make_plan
from tandem_attn.spec.problem import Problem

LOG2E = math.log2(math.e)
MAX_SCALARS = 4  # runtime window bounds that a kernel takes
_MAX_ROWS = 1 << 28  # coordinates and tile numbers are int32
_EXTRAS = {"cache": "a KV cache", "bias": "a bias"}


def missing(problem: Problem) -> str | None:
    """What the forward of the problem asks for that the kernels lack; None: they serve it."""
    if problem.device != "cuda":
        return "devices other than CUDA"
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        return "GPUs other than compute capability 9.0"
    if any(isinstance(leaf, (Document, Predicate)) for leaf in problem.mask.leaves()):  # before any cache: they hold tensors
        return f"the mask {problem.mask.code}"
    return _no_triton() or lacks(problem)


@functools.cache
def _no_triton() -> str | None:
    try:
        installed = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return f"triton {TRITON}.*, which is not installed"
    return None if installed.startswith(f"{TRITON}.") else f"triton {TRITON}.* (found {installed})"


@functools.lru_cache(maxsize=4096)
def lacks(problem: Problem) -> str | None:
    """``missing``, on a machine that has all it takes."""
    found = [words for name, words in _EXTRAS.items() if getattr(problem, name)]
    if problem.dtype not in ("float16", "bfloat16"):
        found.append(problem.dtype)
    for name in ("head_dim", "head_dim_v"):
        if getattr(problem, name) % 8:
            found.append(f"{name}={getattr(problem, name)} (multiples of 8)")
    if not problem.scale_value > 0:
        found.append(f"scale={problem.scale_value:g} (only positive scales)")
    if len(mask_scalars(problem.mask.code)) > MAX_SCALARS:
        found.append(f"the mask {problem.mask.code}")
    if max(problem.seqlen_q, problem.seqlen_k, problem.varlen * problem.total_q, problem.varlen * problem.total_k) > _MAX_ROWS:
        found.append(f"more than {_MAX_ROWS} rows")
    if not found:
        try:
            plan(problem)
        except UnsupportedError as error:
            found.append(error.missing)
    return ", ".join(found) or None


@functools.lru_cache(maxsize=4096)
def plan(problem: Problem, direction: str = FORWARD) -> Plan:  # noqa: ARG001
    """How the forward of a problem is computed; a backward that is not ours needs no plan, and gets this one too."""
    chosen = make_plan(problem, "H200", direction=FORWARD, num_splits=1, pack_gqa=1).plan
    if problem.varlen and chosen.schedule.launch is Launch.NONE:  # how many tiles there are is known on the device only
        return chosen.with_(schedule=Schedule(ScheduleKind.LPT, Launch.DYNAMIC))
    return chosen


def forward(problem: Problem, plan: Plan, inputs: Inputs) -> tuple[Tensor, Tensor]:
    """O, shaped as q with last size head_dim_v, and LSE (B, H, Sq) or (H, total_q), float32, natural log."""
    q, k, v = (_aligned(x) for x in (inputs.q, inputs.k, inputs.v))
    *rows, heads, _ = q.shape
    out = torch.empty(*rows, heads, v.shape[-1], dtype=q.dtype, device=q.device)
    lse = torch.empty(*rows[:-1], heads, rows[-1], dtype=torch.float32, device=q.device)
    no_keys = k.shape[-3] == 0
    if problem.varlen or no_keys:  # the kernel writes only rows of sequences that it visits
        out.zero_()
        lse.fill_(float("-inf"))
    if lse.numel() == 0 or problem.batch == 0:
        return out, lse
    if no_keys:
        return out, _sinks_alone(problem, inputs, lse)
    if q.device.index == torch.cuda.current_device():
        _launch(problem, plan, inputs, q, k, v, out, lse)
    else:
        with torch.cuda.device(q.device):
            _launch(problem, plan, inputs, q, k, v, out, lse)
    return out, lse


def _launch(problem: Problem, plan: Plan, inputs: Inputs, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> None:
    kernel = compiled(plan)
    device = q.device.index
    stream = torch.cuda.current_stream().cuda_stream
    rows, heads = q.shape[-3], q.shape[-2]
    blocks = -(-rows // plan.rows_per_cta)
    tiles = blocks * heads * problem.batch  # with packed sequences the device counts them
    grid = min(tiles, _sms(device)) if plan.schedule.launch is not Launch.NONE else tiles
    every = heads if problem.varlen else heads * problem.batch
    section = min(plan.schedule.section or (1 if plan.schedule.kind is ScheduleKind.NAIVE else every), every)
    window = mask_scalars(problem.mask.code)
    used_q, used_k = _used(problem, inputs, q, k)
    order, starts = _packed_tiles(plan, inputs, heads) if problem.varlen else (None, None)
    sink, slopes = inputs.sink, inputs.alibi_slopes
    extra = [None if sink is None else sink.float().contiguous(), None if slopes is None else _slopes(slopes, problem.batch)]
    pointers = [lse, _counter(device, stream), inputs.cu_seqlens_q, inputs.cu_seqlens_k, used_q, used_k, *extra, order, starts]
    launch.launcher(kernel, device)(
        grid,
        stream,
        _maps(plan, kernel, q, k, v, out),
        (
            *(0 if x is None else x.data_ptr() for x in pointers),
            *window, *(0,) * (MAX_SCALARS - len(window)),
            problem.scale_value * LOG2E, problem.softcap,
            rows, k.shape[-3], rows, k.shape[-3], problem.batch, heads, problem.heads_per_kv, blocks, section, tiles, rows,
        ),
    )  # fmt: skip


def _packed_tiles(plan: Plan, inputs: Inputs, heads: int) -> tuple[Tensor, Tensor]:
    """Packed sequences in the order they are worked on, longest keys first, and the number of tiles before each; on the device."""
    assert inputs.cu_seqlens_q is not None and inputs.cu_seqlens_k is not None  # narrows the type: the problem is packed
    blocks = (inputs.cu_seqlens_q.diff() + (plan.rows_per_cta - 1)) // plan.rows_per_cta
    order = torch.argsort(inputs.cu_seqlens_k.diff(), descending=True, stable=True)
    starts = torch.zeros_like(inputs.cu_seqlens_q)
    torch.cumsum(blocks[order] * heads, 0, dtype=torch.int32, out=starts[1:])
    return order.int(), starts


def _maps(plan: Plan, kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> list[bytes]:
    """Descriptors of q, k, v, o and their tails, in the kernel's order."""
    packed, ragged = plan.varlen, plan.varlen or plan.seqused
    tensors = ((q, ragged), (k, ragged), (v, ragged), (out, packed))
    half = len(tensors)
    found = [_map(plan.dtype, x.data_ptr(), x.shape, x.stride(), by_rows, *kernel.descriptors[i]) for i, (x, by_rows) in enumerate(tensors)]
    for i, (x, by_rows) in enumerate(tensors):  # a tail with the same box is not used
        same = kernel.descriptors[i] == kernel.descriptors[half + i]
        found.append(found[i] if same else _map(plan.dtype, x.data_ptr(), x.shape, x.stride(), by_rows, *kernel.descriptors[half + i]))
    return found


@functools.lru_cache(maxsize=8192)
def _map(
    dtype: str, address: int, shape: tuple[int, ...], strides: tuple[int, ...], ragged: bool, swizzle: int, box: tuple[int, ...]
) -> bytes:
    """A tensor's TMA descriptor, innermost dimension first, see ``kernels.common.copies``; encoded once for an address."""
    *batch, rows, heads, columns = shape
    *by_batch, by_row, by_head, _ = strides
    element = ELEMENT_BYTES[dtype]
    if ragged:
        sizes = (rows, heads, rows + 1, *batch)
        in_bytes = _bytes((by_row, by_head, by_row, *by_batch), sizes, element)
        in_bytes = (in_bytes[0], in_bytes[1], in_bytes[0], *in_bytes[3:])
        return cuda.tensor_map(dtype, address - rows * in_bytes[0], (columns, *sizes), in_bytes, box[::-1], swizzle)
    sizes = (rows, heads, *batch)
    return cuda.tensor_map(dtype, address, (columns, *sizes), _bytes((by_row, by_head, *by_batch), sizes, element), box[::-1], swizzle)


def _bytes(strides: Sequence[int], sizes: Sequence[int], element: int) -> tuple[int, ...]:
    """Strides in bytes; that of a dimension of size 1 is never used and may be anything, but TMA wants multiples of 16."""
    return tuple(stride * element if size > 1 else 16 for stride, size in zip(strides, sizes, strict=True))


def _aligned(x: Tensor) -> Tensor:
    """x as TMA can read it: unit last stride, everything else on 16 bytes; a copy where it is not so."""
    return x if x.data_ptr() % 16 == 0 and _strides_fit(x.shape, x.stride(), x.element_size()) else x.contiguous()


@functools.lru_cache(maxsize=8192)
def _strides_fit(shape: tuple[int, ...], strides: tuple[int, ...], element: int) -> bool:
    outer = zip(strides[:-1], shape[:-1], strict=True)
    return strides[-1] == 1 and all(stride * element % 16 == 0 for stride, size in outer if size > 1)


def _used(problem: Problem, inputs: Inputs, q: Tensor, k: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Both seqused tensors where there is one."""
    if not problem.seqused:
        return None, None
    full = lambda x: torch.full((problem.batch,), x.shape[-3], dtype=torch.int32, device=q.device)  # noqa: E731
    return (
        full(q) if inputs.seqused_q is None else inputs.seqused_q.contiguous(),
        full(k) if inputs.seqused_k is None else inputs.seqused_k.contiguous(),
    )


def _slopes(slopes: Tensor, batch: int) -> Tensor:
    return slopes.float().expand(batch, -1).contiguous()


def _sinks_alone(problem: Problem, inputs: Inputs, lse: Tensor) -> Tensor:
    """LSE of rows without keys."""
    if inputs.sink is None:
        return lse
    if not problem.varlen and inputs.seqused_q is None:
        return lse.copy_(inputs.sink.float()[:, None].expand_as(lse))
    in_use = _rows_in_use(problem, inputs, lse.shape[-1])
    return torch.where(in_use, inputs.sink.float()[:, None], lse)


def _rows_in_use(problem: Problem, inputs: Inputs, rows: int) -> Tensor:
    """Which rows a sequence uses: (B, 1, Sq), or (total_q,) of packed tensors."""
    at = torch.arange(rows, device=inputs.q.device)
    if inputs.cu_seqlens_q is None:
        assert inputs.seqused_q is not None  # narrows the type: the caller checked
        return at < inputs.seqused_q[:, None, None]
    lengths = inputs.cu_seqlens_q.diff()
    used = lengths if inputs.seqused_q is None else torch.minimum(lengths, inputs.seqused_q)
    which = torch.searchsorted(inputs.cu_seqlens_q[1:], at, right=True).clamp(max=problem.batch - 1)
    return (at < inputs.cu_seqlens_q[-1]) & (at - inputs.cu_seqlens_q[which] < used[which])


@functools.cache
def _sms(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.lru_cache(maxsize=256)
def _eager_counter(device: int, stream: int) -> Tensor:  # noqa: ARG001
    return torch.zeros(1, dtype=torch.int32, device=f"cuda:{device}")


def _counter(device: int, stream: int) -> Tensor:
    """The dynamic scheduler's counter: kernels of one stream run one after the other and each leaves 0 behind.

    A CUDA graph gets its own, which it clears itself: it may be replayed beside other work.
    """
    if torch.cuda.is_current_stream_capturing():
        return torch.zeros(1, dtype=torch.int32, device=f"cuda:{device}")
    return _eager_counter(device, stream)
