"""The public call of the emulator."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tandem_attn.emulator.events import Observer
from tandem_attn.emulator.report import Result


def run(
    kernel: Any,
    args: Sequence[Any] | Mapping[str, Any],
    grid: Sequence[int],
    *,
    checks: str | Iterable[str] = "default",
    schedule: str = "at-issue",
    seed: int = 0,
    backend: str = "auto",
    block: Sequence[int] | None = None,
    cluster: Sequence[int] | None = None,
    shared: int | None = None,
    entry: str | None = None,
    resident_ctas: int | None = None,
    observers: Sequence[Observer] = (),
    trace: bool = False,
    progress: bool = False,
) -> Result:
    """Execute a kernel on the CPU and judge it.

    kernel: a compiled Triton or Gluon kernel (what `triton.compile` returns), or PTX text.
    args: one value per kernel argument, constexprs left out; a mapping goes by argument name (Triton kernels only). Tensors are torch
        CPU tensors or numpy arrays and are changed in place; a tensor descriptor is any object with `base`, `shape`, `strides` and
        `block_shape` (Triton's and Gluon's own, or `launch.TensorDescriptor`); scalars are int, float or bool.
    grid: CTAs in x, y, z as one gives it to a Triton launch (programs; a program of num_ctas CTAs counts once).
    checks: "default" (all state checks), "all" (with the race tracker), "none", or names out of `judge.CHECKS`.
    schedule: "at-issue" (asynchronous operations take effect at once), "latest" (when nothing else can run) or "random" (warp order and
        delays drawn from `seed`).
    backend: "numpy", "llvm" or "auto" (llvm where llvmlite is installed).
    block, cluster, shared: threads per CTA, CTAs per cluster, dynamic shared memory in bytes; needed for bare PTX, known from a Triton
        kernel. `.reqntid` and `.reqnctapercluster` give the defaults.
    resident_ctas: how many CTAs fit on the chip at once (default: 132 for sm_90a, 148 for sm_100a, times what fits on one SM).
    observers: receive every event (`events.py`).

    Raises ParseError, UnsupportedInstruction or LaunchError for what cannot be run. What runs and is wrong is in `Result.reports`.
    """
    raise NotImplementedError
