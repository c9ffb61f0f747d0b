"""Time the emulator's backends on the kernels of this package: ``python -m benchmarks.emulator [--case NAME ...] [--out FILE]``.

Every run is checked against fp64 before its time counts. Figures are CPU seconds (``time.process_time``, the best of several runs), which a
shared machine disturbs least, and warp-instructions per such second; generation of code is done before. Memory is the peak of the process,
of which every row has its own. The results file carries commit, processor, load, versions, date and command.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # one core: before NumPy is loaded

import numpy as np
import torch

from benchmarks.emulator_subjects import Subject, forward, gemm
from tandem_attn.emulator import run

ROUNDS = 5
TOOLS = ("numpy", "llvmlite", "torch", "triton")


@dataclass(frozen=True)
class Case:
    """A subject, and the options of the run that is timed."""

    make: Callable[[], Subject]
    backends: tuple[str, ...] = ("numpy", "auto")
    options: tuple[tuple[str, Any], ...] = ()
    rounds: int = ROUNDS


CASES = {
    "sm_90a 1024": Case(lambda: forward("sm_90a", 1024, heads=2)),
    "sm_90a 1024 causal": Case(lambda: forward("sm_90a", 1024, heads=2, causal=True)),
    "sm_100a 1024": Case(lambda: forward("sm_100a", 1024, heads=2)),
    "sm_100a 1024 causal": Case(lambda: forward("sm_100a", 1024, heads=2, causal=True)),
    "sm_90a 4096": Case(lambda: forward("sm_90a", 4096, heads=1), backends=("auto",)),
    "sm_100a 4096": Case(lambda: forward("sm_100a", 4096, heads=1), backends=("auto",)),
    "sm_90a 4096 all checks": Case(lambda: forward("sm_90a", 4096, heads=1), backends=("auto",), options=(("checks", "all"),), rounds=1),
    "sm_100a 4096 all checks": Case(lambda: forward("sm_100a", 4096, heads=1), backends=("auto",), options=(("checks", "all"),), rounds=1),
    "gemm sm_90a 512": Case(lambda: gemm("sm_90a", 512)),
    "gemm sm_100a 512": Case(lambda: gemm("sm_100a", 512)),
}


def measure(name: str, backend: str, rounds: int) -> dict[str, Any]:
    """The best of several runs, behind one that makes the code."""
    torch.set_num_threads(1)
    case = CASES[name]
    subject = case.make()
    options: dict[str, Any] = {"backend": backend, **subject.options, **dict(case.options)}
    best, instructions, error = float("inf"), 0, 0.0
    for n in range(min(rounds, case.rounds) + 1):
        began = time.process_time()
        result = run(subject.kernel, subject.args, subject.grid, **options)
        spent = time.process_time() - began
        result.raise_for_reports()
        error = subject.check()
        instructions = result.statistics.instructions
        best = min(best, spent) if n else best
    return {
        "case": name, "backend": backend, "instructions": instructions, "cpu_s": round(best, 4),
        "rate": round(instructions / best), "error": error, "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
    }  # fmt: skip


def processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", action="append", choices=list(CASES), help="only these")
    parser.add_argument("--backend", action="append", choices=("numpy", "llvm", "auto"), help="only these")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows = []
    for name in options.case or CASES:
        for backend in CASES[name].backends:
            if options.backend and backend not in options.backend:
                continue
            with get_context("spawn").Pool(1) as pool:  # a process for each, so that its peak of memory is its own
                row = pool.apply(measure, (name, backend, options.rounds))
            rows.append(row)
            print(
                f"{name:24} {backend:6} {row['instructions']:8} warp-instructions {row['cpu_s']:7.3f} s CPU "
                f"{row['rate'] / 1e6:6.3f} M/s  {row['peak_mib']} MiB peak, error {row['error']:.1e}", flush=True,
            )  # fmt: skip
    if options.out:
        commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
        record = {
            "commit": commit, "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "processor": processor(), "load": os.getloadavg(), "python": platform.python_version(),
            "versions": {tool: importlib.metadata.version(tool) for tool in TOOLS}, "threads": 1,
            "command": " ".join(["python -m benchmarks.emulator", *sys.argv[1:]]), "rows": rows,
        }  # fmt: skip
        options.out.write_text(json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    np.seterr(all="warn")
    sys.exit(main())
