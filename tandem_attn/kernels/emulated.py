"""The kernels as backends without a GPU: compiled for an architecture, executed and judged by the emulator, on CPU tensors."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tandem_attn.kernels import backend
from tandem_attn.kernels.compile import Kernel, compiled
from tandem_attn.kernels.description import LaunchDescription
from tandem_attn.kernels.forward import attend
from tandem_attn.kernels.prepare import prepare
from tandem_attn.spec.inputs import Inputs
from tandem_attn.spec.plan import FORWARD, Plan
from tandem_attn.spec.problem import Problem

if TYPE_CHECKING:
    from tandem_attn.emulator import Result

CHIPS = {"sm_90a": "H200", "sm_100a": "B200", "sm_103a": "B300"}  # architectures that have kernels, and the chip these are planned for
PREFIX = "emulator:"  # of the backends' names; an architecture follows
_SWIZZLE_BYTES = (0, 32, 64, 128)  # by CUtensorMapSwizzle


@dataclass(frozen=True)
class Settings:
    """How a kernel is run.

    Attributes:
        checks, schedule, seed, engine (``backend`` there), trace, progress: see ``emulator.run``.
        clusters: that a persistent kernel is launched with at most. Few, so that small problems give each of them several tiles.
        plain: run the form of the kernel whose synchronisation is all Gluon's own.
        consan: run that form as Triton's concurrency sanitizer instruments it.
    """

    checks: str | Iterable[str] = "all"
    schedule: str = "at-issue"
    seed: int = 0
    engine: str = "auto"
    clusters: int = 3
    plain: bool = False
    consan: bool = False
    trace: bool = False
    progress: bool = False


_DEFAULT = Settings()
_settings: ContextVar[Settings] = ContextVar("settings", default=_DEFAULT)


@contextlib.contextmanager
def settings(**changes: Any) -> Iterator[None]:
    """Changes how the backends run kernels, inside the ``with`` block and this thread."""
    token = _settings.set(replace(_settings.get(), **changes))
    try:
        yield
    finally:
        _settings.reset(token)


def missing(problem: Problem, arch: str) -> str | None:
    """What the forward of the problem asks for that an architecture's kernels, or this machine, lack; None: it runs here."""
    if problem.device != "cpu":
        return "devices other than the CPU"
    if importlib.util.find_spec("numpy") is None:
        return "numpy, which is not installed"
    return backend.uncovered(problem, CHIPS[arch])


def plan(problem: Problem, arch: str) -> Plan:
    """How the forward of a problem is computed on an architecture."""
    return backend.plan(problem, FORWARD, CHIPS[arch])


def forward(problem: Problem, plan: Plan, inputs: Inputs) -> tuple[Tensor, Tensor]:
    """O and LSE as ``backend.forward`` gives them.

    Raises:
        JudgementError: of the emulator, when the run leaves a report. The message holds every report, ``result`` the whole result.
    """
    out, lse, result = judged(problem, plan, inputs)
    if result is not None:
        result.raise_for_reports()
    return out, lse


def judged(problem: Problem, plan: Plan, inputs: Inputs) -> tuple[Tensor, Tensor, Result | None]:
    """O and LSE, whatever the judgement, and the emulator's result; None where the problem needs no kernel."""
    results: list[Result] = []
    out, lse = attend(problem, plan, inputs, lambda *call: results.append(_run(*call)))
    return out, lse, results[0] if results else None


def _run(problem: Problem, plan: Plan, inputs: Inputs, out: Tensor, lse: Tensor) -> Result:
    chosen = _settings.get()
    kernel = compiled(plan, plain=chosen.plain or chosen.consan, consan=chosen.consan)
    counter = torch.zeros(1, dtype=torch.int32)
    launch = prepare(kernel, problem, plan, inputs, out, lse, sms=chosen.clusters, counter=counter)
    return execute(launch, chosen)


def execute(launch: LaunchDescription, chosen: Settings, **options: Any) -> Result:
    """Runs a launch in the emulator, with those before and after it; ``options`` are others of ``emulator.run``, for the launch itself.

    The tensors are changed in place. The result is the launch's own, or that of the first one beside it that is not ok.
    """
    for each in launch.before:
        first = execute(each, chosen)
        if not first.ok:
            return first
    own = _execute_one(launch, chosen, **options)
    if not own.ok:
        return own
    return next((result for result in (execute(each, chosen) for each in launch.after) if not result.ok), own)


def _execute_one(launch: LaunchDescription, chosen: Settings, **options: Any) -> Result:
    from tandem_attn import emulator

    kernel = launch.kernel
    return emulator.run(
        kernel.ptx, arguments(launch), launch.grid * kernel.ctas, block=kernel.threads, cluster=kernel.ctas, shared=kernel.shared_bytes,
        checks=chosen.checks, schedule=chosen.schedule, seed=chosen.seed, backend=chosen.engine,
        trace=chosen.trace, progress=chosen.progress, **options,
    )  # fmt: skip


def arguments(launch: LaunchDescription) -> list[Any]:
    """Values of the PTX parameters. After each descriptor come its shape and strides, which our kernels do not read; scratch comes last."""
    from tandem_attn.emulator.launch.tensormap import TensorDescriptor

    values: list[Any] = []
    for tensor, x in zip(launch.described, launch.maps, strict=True):
        element = tensor.element_size()
        strides = [*(stride // element for stride in reversed(x.strides)), 1]
        swizzle = _SWIZZLE_BYTES[x.swizzle]
        offset = x.address - tensor.data_ptr()
        values += [TensorDescriptor(tensor, x.sizes[::-1], strides, x.box[::-1], swizzle=swizzle, offset=offset), *[0] * (2 * len(x.sizes))]
    return [*values, *launch.pointers, *launch.numbers, *launch.extras, *_scratch(launch.kernel, launch.grid)]


def _scratch(kernel: Kernel, grid: int) -> list[Tensor | None]:
    sizes = (size * kernel.ctas * grid for size in kernel.scratch_bytes)
    return [torch.zeros(size, dtype=torch.uint8) if size else None for size in sizes]
