"""The kernels as a backend on a GPU: which forwards they cover, how they are planned, and the call."""

from __future__ import annotations

import functools
import importlib.metadata
import os
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
from tandem_attn.spec.mask_tree import has_data, lower
from tandem_attn.spec.plan import FORWARD, Launch, Plan, Schedule, ScheduleKind
from tandem_attn.spec.planner import plan as make_plan
from tandem_attn.spec.planner_rules import gpu_dtypes, row_step
from tandem_attn.spec.predicates import UntraceableError
from tandem_attn.spec.problem import Problem

CHIP = "H200"  # planned for where there is no GPU
CHIPS = {(9, 0): CHIP, (10, 0): "B200", (10, 3): "B300"}  # by compute capability: what launches are planned for
PROVEN = (CHIP,)  # chips that the kernels have been run on
UNPROVEN = "TANDEM_UNPROVEN"  # environment variable that lets them run on the others
_MAX_ROWS = 1 << 28  # coordinates and tile numbers are int32


def missing(problem: Problem) -> str | None:
    """What the forward of the problem asks for that the kernels lack; None: they serve it."""
    if problem.device != "cuda":
        return "devices other than CUDA"
    if not torch.cuda.is_available() or _chip_of(torch.cuda.current_device()) is None:
        return "GPUs other than compute capability 9.0, 10.0 and 10.3"
    if chip_here() not in PROVEN and not os.environ.get(UNPROVEN):
        return f"a run on {chip_here()}, which nobody has made yet (docs/blackwell_forward.md; {UNPROVEN}=1 in the environment allows it)"
    return uncovered(problem, chip_here())


def chip_here() -> str:
    """The chip that a launch on the current device is planned for."""
    found = _chip_of(torch.cuda.current_device()) if torch.cuda.is_available() else None
    return found or CHIP


@functools.cache
def _chip_of(device: int) -> str | None:
    return CHIPS.get(torch.cuda.get_device_capability(device))


def uncovered(problem: Problem, chip: str = CHIP) -> str | None:
    """What a chip's kernels, or this machine's Triton, lack for the forward of a problem, wherever it is to run."""
    return _no_triton() or lacks(problem, chip)


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
    takes = gpu_dtypes(get_arch(chip))
    found = [] if problem.dtype in takes else [f"dtype {problem.dtype} (the kernels for {chip} take {', '.join(takes)})"]
    for name in ("head_dim", "head_dim_v"):
        if getattr(problem, name) % row_step(problem):
            found.append(f"{name}={getattr(problem, name)} (multiples of {row_step(problem)})")
    if max(problem.seqlen_q, problem.seqlen_k, problem.varlen * problem.total_q, problem.varlen * problem.total_k) > _MAX_ROWS:
        found.append(f"more than {_MAX_ROWS} rows")
    if not found:
        try:
            _plan(problem, chip)
        except UnsupportedError as error:
            found.append(error.missing)
    return ", ".join(found) or None


def plan(problem: Problem, direction: str = FORWARD, chip: str = "") -> Plan:  # noqa: ARG001
    """How the forward of a problem is computed, by default on the current device; a backward, which is not ours, gets this plan too."""
    return _plan(_without_data(problem), chip or chip_here())


@functools.lru_cache(maxsize=4096)
def _plan(problem: Problem, chip: str) -> Plan:
    chosen = make_plan(problem, chip, direction=FORWARD).plan
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
        return make_bound(compiled(plan), problem, plan, inputs, device, _sms(device) // plan.ctas, _eager_counter)


def _launch(problem: Problem, plan: Plan, inputs: Inputs, out: Tensor, lse: Tensor) -> None:
    device = out.device.index
    if device != torch.cuda.current_device():
        with torch.cuda.device(device):
            return _launch(problem, plan, inputs, out, lse)
    kernel = compiled(plan)
    stream = torch.cuda.current_stream().cuda_stream
    clusters = _sms(device) // plan.ctas
    launch.run(prepare(kernel, problem, plan, inputs, out, lse, sms=clusters, counter=_counter(device, stream)), device, stream)
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
