"""The kernels as a backend: which problems they cover, how they are planned, and the forward call."""

from __future__ import annotations

import functools
import importlib.util
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from tandem_attn.kernels import launch
from tandem_attn.kernels.compile import Kernel, compiled
from tandem_attn.reference import sdpa
from tandem_attn.spec.errors import UnsupportedError
from tandem_attn.spec.inputs import Gradients, Inputs
from tandem_attn.spec.masks import Document, Predicate
from tandem_attn.spec.plan import Launch, Plan, ScheduleKind, mask_scalars
from tandem_attn.spec.planner import plan as make_plan
from tandem_attn.spec.problem import Problem

LOG2E = math.log2(math.e)
MAX_SCALARS = 4  # runtime window bounds that a kernel takes
_MAX_ROWS = 1 << 28  # coordinates and tile numbers are int32
_EXTRAS = {"cache": "a KV cache", "bias": "a bias", "varlen": "packed variable length"}


def missing(problem: Problem) -> str | None:
    """What the problem asks for that the kernels lack; None: they serve it."""
    if problem.device != "cuda":
        return "devices other than CUDA"
    if torch.cuda.get_device_capability() != (9, 0):
        return "GPUs other than compute capability 9.0"
    if importlib.util.find_spec("triton") is None:
        return "triton, which is not installed"
    return lacks(problem)


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
    if any(isinstance(leaf, (Document, Predicate)) for leaf in problem.mask.leaves()) or len(mask_scalars(problem.mask.code)) > MAX_SCALARS:
        found.append(f"the mask {problem.mask.code}")
    if max(problem.seqlen_q, problem.seqlen_k) > _MAX_ROWS:
        found.append(f"sequences beyond {_MAX_ROWS}")
    if problem.backward and (lacking := sdpa.missing(problem)) is not None:
        found.append(f"a backward of its own (PyTorch's is used, which lacks {lacking})")
    if not found:
        try:
            plan(problem)
        except UnsupportedError as error:
            found.append(error.missing)
    return ", ".join(found) or None


@functools.lru_cache(maxsize=4096)
def plan(problem: Problem) -> Plan:
    """How the forward of a problem is computed."""
    return make_plan(problem, "H200", direction="forward", num_splits=1, pack_gqa=1).plan


def forward(problem: Problem, plan: Plan, inputs: Inputs) -> tuple[Tensor, Tensor]:
    """O, shaped as q with last size head_dim_v, and LSE (B, H, Sq), float32, natural log."""
    q, k, v = (_aligned(x) for x in (inputs.q, inputs.k, inputs.v))
    batch, seqlen_q, heads = q.shape[:3]
    out = torch.empty(batch, seqlen_q, heads, v.shape[-1], dtype=q.dtype, device=q.device)
    lse = torch.empty(batch, heads, seqlen_q, dtype=torch.float32, device=q.device)
    if lse.numel() == 0:
        return out, lse
    if k.shape[1] == 0:
        return out.zero_(), _sinks_alone(lse, inputs.sink)
    if q.device.index == torch.cuda.current_device():
        _launch(problem, plan, inputs, q, k, v, out, lse)
    else:
        with torch.cuda.device(q.device):
            _launch(problem, plan, inputs, q, k, v, out, lse)
    return out, lse


def backward(
    problem: Problem, plan: Plan, inputs: Inputs, out: Tensor, lse: Tensor, grad_out: Tensor, grad_lse: Tensor | None
) -> Gradients:
    """Gradients by PyTorch's kernels, from our O and LSE: ``missing`` refuses what those lack."""
    return sdpa.backward(problem, plan, inputs, out, lse, grad_out, grad_lse)


def _launch(problem: Problem, plan: Plan, inputs: Inputs, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> None:
    kernel = compiled(plan)
    device = q.device.index
    stream = torch.cuda.current_stream().cuda_stream
    batch, seqlen_q, heads = q.shape[:3]
    blocks = -(-seqlen_q // plan.rows_per_cta)
    tiles = blocks * heads * batch
    persistent = plan.schedule.launch is not Launch.NONE
    grid = min(tiles, _sms(device)) if persistent else tiles
    section = plan.schedule.section or (1 if plan.schedule.kind is ScheduleKind.NAIVE else heads * batch)
    window = mask_scalars(problem.mask.code)
    used_q, used_k = _used(problem, inputs, q, k)
    sink, slopes = inputs.sink, inputs.alibi_slopes
    extra = [None if sink is None else sink.float().contiguous(), None if slopes is None else _slopes(slopes, batch)]
    pointers = [lse, _counter(device, stream), None, None, used_q, used_k, *extra]
    launch.launcher(kernel, device)(
        grid,
        stream,
        _maps(plan, kernel, q, k, v, out),
        (
            *(0 if x is None else x.data_ptr() for x in pointers),
            *window, *(0,) * (MAX_SCALARS - len(window)),
            problem.scale_value * LOG2E, problem.softcap,
            seqlen_q, k.shape[1], seqlen_q, k.shape[1], batch, heads, problem.heads_per_kv, blocks, section, tiles, seqlen_q,
        ),
    )  # fmt: skip


def _maps(plan: Plan, kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> list[bytes]:
    tensors = (q, k, v, out) * 2
    return [
        launch.encode(plan.dtype, *_described(x, plan.seqused and x is not out), tuple(reversed(box)), swizzle)
        for x, (swizzle, box) in zip(tensors, kernel.descriptors, strict=True)
    ]


def _described(x: Tensor, ragged: bool) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    """Address, shape and strides (bytes) of a padded tensor's descriptor, innermost dimension first, see ``kernels.common.copies``."""
    batch, rows, heads, columns = x.shape
    by_batch, by_row, by_head, _ = x.stride()
    size = x.element_size()
    if not ragged:
        return x.data_ptr(), (columns, rows, heads, batch), _bytes((by_row, by_head, by_batch), (rows, heads, batch), size)
    shape = (columns, rows, heads, rows + 1, batch)
    strides = _bytes((by_row, by_head, by_row, by_batch), (rows, heads, rows + 1, batch), size)
    return x.data_ptr() - rows * strides[0], shape, strides


def _bytes(strides: Sequence[int], sizes: Sequence[int], element: int) -> tuple[int, ...]:
    """Strides in bytes; that of a dimension of size 1 is never used and may be anything, but TMA wants multiples of 16."""
    return tuple(stride * element if size > 1 else 16 for stride, size in zip(strides, sizes, strict=True))


def _aligned(x: Tensor) -> Tensor:
    """x as TMA can read it: unit last stride, everything else on 16 bytes; a copy where it is not so."""
    step = 16 // x.element_size()
    fits = x.stride(-1) == 1 and x.data_ptr() % 16 == 0
    fits = fits and all(stride % step == 0 for stride, size in zip(x.stride()[:-1], x.shape[:-1], strict=True) if size > 1)
    return x if fits else x.contiguous()


def _used(problem: Problem, inputs: Inputs, q: Tensor, k: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Both seqused tensors where there is one."""
    if not problem.seqused:
        return None, None
    full = lambda x: torch.full((q.shape[0],), x.shape[1], dtype=torch.int32, device=q.device)  # noqa: E731
    return (
        full(q) if inputs.seqused_q is None else inputs.seqused_q.contiguous(),
        full(k) if inputs.seqused_k is None else inputs.seqused_k.contiguous(),
    )


def _slopes(slopes: Tensor, batch: int) -> Tensor:
    return slopes.float().expand(batch, -1).contiguous()


def _sinks_alone(lse: Tensor, sink: Tensor | None) -> Tensor:
    """LSE of rows without keys."""
    return lse.fill_(float("-inf")) if sink is None else lse.copy_(sink.float()[None, :, None].expand_as(lse))


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
