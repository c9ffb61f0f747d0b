"""The kernels as a backend on a GPU: which forwards they cover, how they are planned, and the call."""

from __future__ import annotations

import functools
import importlib.metadata
from dataclasses import replace

import torch
from torch import Tensor

from tandem_attn.kernels import launch
from tandem_attn.kernels.bound import Bound
from tandem_attn.kernels.bound import bind as make_bound
from tandem_attn.kernels.compile import TRITON, compiled
from tandem_attn.kernels.forward import attend
from tandem_attn.kernels.prepare import prepare
from tandem_attn.spec.arch import get_arch
from tandem_attn.spec.errors import UnsupportedError
from tandem_attn.spec.inputs import Inputs
from tandem_attn.spec.mask_tree import Opaque, has_data, lower
from tandem_attn.spec.plan import FORWARD, Launch, Plan, Schedule, ScheduleKind
from tandem_attn.spec.planner import plan as make_plan
from tandem_attn.spec.predicates import UntraceableError
from tandem_attn.spec.problem import Problem

CHIP = "H200"  # that GPU launches are planned for
_HOPPER_ONLY = {"cache": "a KV cache", "bias": "a bias"}
_MAX_ROWS = 1 << 28  # coordinates and tile numbers are int32


def missing(problem: Problem) -> str | None:
    """What the forward of the problem asks for that the kernels lack; None: they serve it."""
    if problem.device != "cuda":
        return "devices other than CUDA"
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        return "GPUs other than compute capability 9.0"
    return uncovered(problem)


def uncovered(problem: Problem, chip: str = CHIP) -> str | None:
    """What a chip's kernels, or this machine's Triton, lack for the forward of a problem, wherever it is to run."""
    return _no_triton() or lacks(problem, chip)


def _is_hopper(chip: str) -> bool:
    return (get_arch(chip).capability or (0,))[0] == 9


@functools.cache
def _no_triton() -> str | None:
    try:
        installed = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return f"triton {TRITON}.*, which is not installed"
    return None if installed.startswith(f"{TRITON}.") else f"triton {TRITON}.* (found {installed})"


def lacks(problem: Problem, chip: str = CHIP) -> str | None:
    """``uncovered``, on a machine that has all it takes."""
    try:
        return _lacks(_without_data(problem), chip)
    except UntraceableError as error:
        return f"a mask with {error}"


def _without_data(problem: Problem) -> Problem:
    """The problem with its mask lowered: caches must hold no tensors, and calls with other data are equal then."""
    return replace(problem, mask=lower(problem.mask)[0]) if has_data(problem.mask) else problem


@functools.lru_cache(maxsize=4096)
def _lacks(problem: Problem, chip: str) -> str | None:
    found = [] if problem.dtype in ("float16", "bfloat16") else [problem.dtype]
    if not _is_hopper(chip):
        found += [words for name, words in _HOPPER_ONLY.items() if getattr(problem, name)]
        found += [f"the mask {problem.mask.code}"] if any(isinstance(leaf, Opaque) for leaf in problem.mask.leaves()) else []
        found += [] if problem.scale_value > 0 else [f"scale={problem.scale_value:g} (only positive scales)"]
    for name in ("head_dim", "head_dim_v"):
        if getattr(problem, name) % 8:
            found.append(f"{name}={getattr(problem, name)} (multiples of 8)")
    if max(problem.seqlen_q, problem.seqlen_k, problem.varlen * problem.total_q, problem.varlen * problem.total_k) > _MAX_ROWS:
        found.append(f"more than {_MAX_ROWS} rows")
    if not found:
        try:
            _plan(problem, chip)
        except UnsupportedError as error:
            found.append(error.missing)
    return ", ".join(found) or None


def plan(problem: Problem, direction: str = FORWARD, chip: str = CHIP) -> Plan:  # noqa: ARG001
    """How the forward of a problem is computed; a backward that is not ours needs no plan, and gets this one too."""
    return _plan(_without_data(problem), chip)


@functools.lru_cache(maxsize=4096)
def _plan(problem: Problem, chip: str) -> Plan:
    fixed = {} if _is_hopper(chip) else {"num_splits": 1, "pack_gqa": 1}
    chosen = make_plan(problem, chip, direction=FORWARD, **fixed).plan
    if problem.varlen and chosen.schedule.launch is Launch.NONE:  # how many tiles there are is known on the device only
        return chosen.with_(schedule=Schedule(ScheduleKind.LPT, Launch.DYNAMIC))
    return chosen


def forward(problem: Problem, plan: Plan, inputs: Inputs) -> tuple[Tensor, Tensor]:
    """O, shaped as q with last size head_dim_v, and LSE (B, H, Sq) or (H, total_q), float32, natural log."""
    return attend(problem, plan, inputs, _launch)


def bind(problem: Problem, plan: Plan, inputs: Inputs) -> Bound | None:
    """The forward for calls with other tensors of the same properties; None where each call has to be prepared by itself."""
    device = inputs.q.device.index
    with torch.cuda.device(device):
        return make_bound(compiled(plan), problem, plan, inputs, device, _sms(device), _eager_counter)


def _launch(problem: Problem, plan: Plan, inputs: Inputs, out: Tensor, lse: Tensor) -> None:
    device = out.device.index
    if device != torch.cuda.current_device():
        with torch.cuda.device(device):
            return _launch(problem, plan, inputs, out, lse)
    kernel = compiled(plan)
    stream = torch.cuda.current_stream().cuda_stream
    launch.run(prepare(kernel, problem, plan, inputs, out, lse, sms=_sms(device), counter=_counter(device, stream)), device, stream)
    return None


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
