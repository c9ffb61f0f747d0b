"""Backends: what runs a Problem, which one ``auto`` takes, and what each lacks.

``auto`` goes down ``ORDER`` and takes the first that covers the problem; on a GPU it says once, through ``warnings``, when that is not
``tandem``. A named backend never falls back. ``emulator:ARCH``, the same kernels executed and judged on a CPU, runs by name only.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from tandem_attn.kernels import backend as kernels
from tandem_attn.kernels import emulated
from tandem_attn.reference import sdpa, tiled
from tandem_attn.spec.errors import UnsupportedError
from tandem_attn.spec.inputs import Gradients, Inputs
from tandem_attn.spec.plan import BACKWARD, FORWARD, Plan
from tandem_attn.spec.planner import plan as make_plan
from tandem_attn.spec.problem import FLOAT8, Problem

AUTO = "auto"
Bound = Callable[[tuple[Tensor | None, ...]], tuple[Tensor, Tensor] | None]


@dataclass(frozen=True)
class Backend:
    """Anything that takes (Problem, Plan, tensors).

    ``missing`` names what a problem asks for that the backend lacks, or is None. ``plan`` decides how, for a direction of ``spec.plan``.
    ``bind`` (optional) prepares repeated forwards: from one call it makes a ``Bound``, which takes the tensors of another, with the same
    properties and in the order of ``Inputs``, and returns O and LSE (anything, where ``problem.return_lse`` is off), or None where
    ``forward`` has to do it (an address that is not aligned, say). It must not keep tensors.
    """

    name: str
    summary: str
    missing: Callable[[Problem], str | None]
    plan: Callable[[Problem, str], Plan]
    forward: Callable[[Problem, Plan, Inputs], tuple[Tensor, Tensor]]
    backward: Callable[[Problem, Plan, Inputs, Tensor, Tensor, Tensor, Tensor | None], Gradients]
    bind: Callable[[Problem, Plan, Inputs], Bound | None] | None = None


@dataclass(frozen=True)
class Support:
    """Answer of ``supports``; true where the call would run.

    Attributes:
        ok: whether the problem is covered.
        backend: the one that would run, or the one that was asked.
        reason: what is missing; empty where ``ok``.
    """

    ok: bool
    backend: str
    reason: str

    def __bool__(self) -> bool:
        return self.ok


def _host_plan(problem: Problem, direction: str) -> Plan:
    return make_plan(problem, "CPU", direction=direction).plan


def _nothing_missing(problem: Problem) -> str | None:  # noqa: ARG001
    return None


def _tandem_backward(
    problem: Problem, plan: Plan, inputs: Inputs, out: Tensor, lse: Tensor, grad_out: Tensor, grad_lse: Tensor | None
) -> Gradients:
    """Fed with the O and LSE of our forward: PyTorch's flash kernel where it covers the problem, the tiled reference elsewhere."""
    borrowed = tiled if sdpa.missing(problem) else sdpa
    return borrowed.backward(problem, _host_plan(problem, BACKWARD) if borrowed is tiled else plan, inputs, out, lse, grad_out, grad_lse)


def _emulated(arch: str) -> Backend:
    def plan(problem: Problem, direction: str) -> Plan:
        return emulated.plan(problem, arch) if direction == FORWARD else _host_plan(problem, direction)

    summary = f"Tandem's own {arch} forward, executed and judged on the CPU (backward by reference)"
    return Backend(emulated.PREFIX + arch, summary, partial(emulated.missing, arch=arch), plan, emulated.forward, tiled.backward)


BACKENDS = {
    backend.name: backend
    for backend in (
        Backend(
            "tandem",
            "Tandem's own Hopper forward (backward by PyTorch)",
            kernels.missing,
            kernels.plan,
            kernels.forward,
            _tandem_backward,
            kernels.bind,
        ),
        Backend("sdpa", "PyTorch's scaled_dot_product_attention kernels", sdpa.missing, _host_plan, sdpa.forward, sdpa.backward),
        Backend("reference", "tiled attention in PyTorch operations", _nothing_missing, _host_plan, tiled.forward, tiled.backward),
        *map(_emulated, emulated.CHIPS),
    )
}
ORDER = ("tandem", "sdpa", "reference")  # what auto tries
NAMES = (AUTO, *BACKENDS)


def choose(problem: Problem, name: str) -> Backend:
    """The backend that runs the problem.

    Raises:
        ValueError: unknown name.
        UnsupportedError: the named backend, or with ``auto`` every backend, lacks something.
    """
    support = supports(problem, name)
    if not support.ok:
        raise UnsupportedError(backend=name, missing=support.reason, nearest=_nearest(problem))
    if name == AUTO and problem.device == "cuda" and support.backend != ORDER[0]:
        _tell_once(support.backend, _missing(problem, ORDER[0]) or "")
    return BACKENDS[support.backend]


def supports(problem: Problem, backend: str = AUTO) -> Support:
    """Whether ``backend`` covers the problem: what a call would do, without raising for it.

    Args:
        problem: see ``tandem_attn.Problem``.
        backend: a name of ``tandem_attn.backends()``.

    Returns:
        A ``Support``, for example ``supports(Problem(batch=1, seqlen_q=64, seqlen_k=64, heads=8, heads_kv=8, head_dim=128,
        softcap=30.0), "sdpa")`` is false with the reason "softcap".

    Raises:
        TypeError, ValueError: wrong arguments of this function.
    """
    if not isinstance(problem, Problem):
        raise TypeError(f"problem must be a tandem_attn.Problem, got {type(problem).__name__}")
    check_name(backend)
    reason = ""
    for name in ORDER if backend == AUTO else (backend,):
        reason = _missing(problem, name) or ""
        if not reason:
            return Support(True, name, "")
    return Support(False, backend, reason)


def _missing(problem: Problem, name: str) -> str | None:
    """What the problem asks for that a backend lacks; no backend has gradients of 8-bit inputs."""
    if problem.backward and problem.dtype in FLOAT8:
        return f"gradients of {problem.dtype}"
    return BACKENDS[name].missing(problem)


def check_name(backend: object) -> None:
    if not isinstance(backend, str):
        raise TypeError(f"backend must be a str, got {type(backend).__name__}")
    if backend not in NAMES:
        raise ValueError(f"backend must be one of {', '.join(NAMES)}, got {backend!r}")


def backends() -> dict[str, str]:
    """Names that ``backend=`` takes, each with a line of what it is."""
    return {AUTO: f"the first of {', '.join(ORDER)} that covers the call"} | {name: b.summary for name, b in BACKENDS.items()}


def _nearest(problem: Problem) -> str:
    able = [name for name in ORDER if _missing(problem, name) is None]
    return f"backend={able[0]!r}" if able else "none"


_told: set[str] = set()


def _tell_once(taken: str, lacking: str) -> None:
    """Warns that ``auto`` fell back; once for each backend that it falls back to."""
    if taken in _told:
        return
    _told.add(taken)
    warnings.warn(
        f"backend='auto' takes {taken!r} ({BACKENDS[taken].summary}): Tandem's own kernels lack {lacking}; "
        f"later calls that take {taken!r} say nothing",
        stacklevel=2,
    )
