"""The protocol of every timing: functions interleaved in one process, on random data, outputs compared before, medians of rounds."""

from __future__ import annotations

import datetime
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

Run = Callable[[], Any]
ROUND_MS = 30.0  # of one function in one round: long enough to reach the power-limited clock


def milliseconds(functions: Mapping[str, Run], rounds: int = 5, round_ms: float = ROUND_MS) -> dict[str, list[float]]:
    """Milliseconds a call in each round. Every other round runs in reverse order, so that drifts of the clock cancel."""
    repeats = {name: max(2, round(round_ms / _once(run, 3))) for name, run in functions.items()}
    times: dict[str, list[float]] = {name: [] for name in functions}
    for i in range(rounds):
        for name in list(functions) if i % 2 == 0 else reversed(list(functions)):
            times[name].append(_once(functions[name], repeats[name]))
    return times


def _once(run: Run, repeats: int) -> float:
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    run()
    start.record()
    for _ in range(repeats):
        run()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop) / repeats


def sustained(run: Run, seconds: float = 0.5) -> dict[str, float]:
    """Milliseconds a call, mean SM clock (MHz) and mean power (W) while ``run`` repeats for ``seconds``."""
    import pynvml  # installed with the driver's tools

    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByIndex(torch.cuda.current_device())
    repeats = max(4, round(1000 * seconds / _once(run, 3)))
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(repeats):
        run()
    stop.record()
    clocks, watts = [], []
    while not stop.query():
        clocks.append(pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM))
        watts.append(pynvml.nvmlDeviceGetPowerUsage(handle) / 1000)
        time.sleep(0.01)
    late = slice(len(clocks) // 2, None)  # the first half is the way to the steady state
    return {"ms": start.elapsed_time(stop) / repeats, "mhz": statistics.mean(clocks[late]), "watts": statistics.mean(watts[late])}


def median(values: list[float]) -> float:
    return statistics.median(values)


def matmul_tflops(size: int = 8192) -> Run:
    """A bfloat16 product, timed beside the attention it is compared with; ``2 * size**3`` FLOP."""
    a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return lambda: a @ b


def gpu_state() -> dict[str, str]:
    """Clocks and power right now."""
    names = "name,clocks.sm,clocks.mem,power.draw,power.limit,temperature.gpu,driver_version"
    out = subprocess.run(
        ["nvidia-smi", f"--query-gpu={names}", "--format=csv,noheader"], capture_output=True, text=True, check=False
    ).stdout
    return dict(zip(names.split(","), (part.strip() for part in out.splitlines()[0].split(",")), strict=False)) if out else {}


def environment() -> dict[str, Any]:
    """What a result must carry: commit, versions, date, command."""
    return {
        "commit": os.environ.get("TANDEM_COMMIT") or _git_commit(),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "versions": {name: _version(name) for name in ("triton", "tokenspeed-fa3", "flash-attn-4", "nvidia-cutlass-dsl")},
        "gpu": gpu_state(),
    }


def _git_commit() -> str:
    here = Path(__file__).parent
    return subprocess.run(["git", "rev-parse", "HEAD"], cwd=here, capture_output=True, text=True, check=False).stdout.strip()


def _version(package: str) -> str:
    import importlib.metadata

    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
