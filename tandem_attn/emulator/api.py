"""The public call of the emulator."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tandem_attn.emulator import ops  # noqa: F401 - fills the table of instructions
from tandem_attn.emulator.codegen import native
from tandem_attn.emulator.codegen.segments import HOT, LlvmSegments, NumpySegments
from tandem_attn.emulator.errors import LaunchError
from tandem_attn.emulator.events import Observer
from tandem_attn.emulator.judge.checks import RACES, chosen
from tandem_attn.emulator.judge.fences import unfenced
from tandem_attn.emulator.judge.races import RaceTracker
from tandem_attn.emulator.judge.registers import over_budget, pressure
from tandem_attn.emulator.launch.launch import Launch, over_capacity
from tandem_attn.emulator.launch.prepare import prepare
from tandem_attn.emulator.machine.async_ops import SCHEDULES
from tandem_attn.emulator.machine.machine import Machine
from tandem_attn.emulator.progress import Bar
from tandem_attn.emulator.report import Report, Result, Statistics
from tandem_attn.emulator.trace import Trace


def run(
    kernel: Any,
    args: Sequence[Any] | Mapping[str, Any],
    grid: Sequence[int] | int,
    *,
    checks: str | Iterable[str] = "default",
    schedule: str = "at-issue",
    seed: int = 0,
    backend: str = "auto",
    block: Sequence[int] | int | None = None,
    cluster: Sequence[int] | int | None = None,
    shared: int | None = None,
    entry: str | None = None,
    resident_ctas: int | None = None,
    observers: Sequence[Observer] = (),
    trace: bool = False,
    progress: bool = False,
    sass: str | None = None,
) -> Result:
    """Execute a kernel on the CPU and judge it.

    kernel: a compiled Triton or Gluon kernel (what `triton.compile` returns), or PTX text.
    args: one value per kernel argument, constexprs left out; a mapping goes by argument name (Triton kernels only). Tensors are torch
        CPU tensors or numpy arrays and are changed in place; a tensor descriptor is any object with `base`, `shape`, `strides` and
        `block_shape` (Triton's and Gluon's own, or `launch.TensorDescriptor`); scalars are int, float or bool.
    grid: CTAs in x, y, z as one gives it to a Triton launch (programs; a program of num_ctas CTAs counts once).
    checks: "default" (all state checks), "all" (with the race tracker), "none", or names out of `judge.checks.CHECKS`.
    schedule: "at-issue" (asynchronous operations take effect at once), "latest" (when nothing else can run) or "random" (warp order and
        delays drawn from `seed`).
    backend: "numpy"; "llvm" (everything that can be is compiled to machine code first); "auto" (what is executed often is, where llvmlite
        is installed).
    block, cluster, shared: threads per CTA, CTAs per cluster, dynamic shared memory in bytes; needed for bare PTX, known from a Triton
        kernel. `.reqntid` and `.reqnctapercluster` give the defaults.
    resident_ctas: how many CTAs fit on the chip at once (default: SMs of the kernel's architecture times what fits on one).
    observers: receive every event (`events.py`).
    trace: record what every warp executed and waited for (`Result.trace`, see `trace.py`), for a performance model.
    sass: the kernel's disassembly (`cuobjdump -sass`, Triton's `kernel.asm["sass"]`): the registers that it uses behind each setmaxnreg
        are compared with its count. Without it "register-pressure" is what PTX can tell.
    progress: show instructions per second and the time left on the terminal when a run takes longer than 2 s.

    Raises ParseError, UnsupportedInstruction or LaunchError for what cannot be run. What runs and is wrong is in `Result.reports`.
    """
    if schedule not in SCHEDULES:
        raise LaunchError(f"schedule {schedule!r} is not one of {', '.join(SCHEDULES)}")
    began = time.perf_counter()
    wanted = chosen(checks)
    launch, resident = prepare(kernel, args, grid, block=block, cluster=cluster, shared=shared, entry=entry)
    parse_s = time.perf_counter() - began
    too_much = over_capacity(launch)
    if too_much is not None:
        return Result([Report("shared-capacity", too_much)], Statistics(parse_s=parse_s), finished=False)
    segments = make_segments(backend, launch)
    made_before = segments.codegen_s
    bar = Bar(len(launch.clusters)) if progress else None
    record = Trace(launch.program) if trace else None
    observers = [*observers, record] if record is not None else observers
    if wanted & RACES:
        observers = [*observers, RaceTracker(launch.grid, wanted, launch.profile_scratch)]
    machine = Machine(
        launch, segments, schedule=schedule, seed=seed, resident_ctas=resident_ctas or resident, observers=observers,
        wanted=wanted, tick=bar.tick if bar else None,
        trace=record,
    )  # fmt: skip
    machine.run()
    if bar is not None:
        bar.close()
    statistics = machine.statistics
    statistics.parse_s, statistics.codegen_s, statistics.backend = parse_s, segments.codegen_s - made_before, segments.name
    statistics.run_s -= statistics.codegen_s
    program = launch.program
    if program.findings is None:
        program.findings = unfenced(program)
    static = [*program.findings, *(over_budget(sass) if sass is not None else ())]
    if "register-pressure" in wanted:
        static += pressure(program)
    reports = [r for r in (*machine.reports, *static) if r.kind in wanted]
    return Result(reports, statistics, machine.finished, record)


def make_segments(backend: str, launch: Launch) -> NumpySegments:
    """The executable form for a backend name."""
    if backend not in ("auto", "numpy", "llvm"):
        raise LaunchError(f"backend {backend!r} is not one of auto, numpy, llvm")
    if backend == "llvm" and not native.available():
        raise LaunchError("backend 'llvm' needs llvmlite: pip install tandem-attn[emulator]")
    if backend == "auto" and not native.available():
        backend = "numpy"
    engines = launch.program.engines
    if backend not in engines:
        program, links = launch.program, launch.links
        hot = 1 if backend == "llvm" else HOT
        engines[backend] = NumpySegments(program, links) if backend == "numpy" else LlvmSegments(program, links, hot)
    found: NumpySegments = engines[backend]
    return found
