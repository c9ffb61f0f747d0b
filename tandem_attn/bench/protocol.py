"""The protocol of every timing: functions interleaved in one process, on random data, outputs checked before, medians of rounds."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

Run = Callable[[], Any]
ROUNDS = 3
ROUND_MS = 100.0  # of one function in one round
SETTLE_MS = 120.0  # before them: on an H200 a clock set by power follows a change of the load after 40 to 100 ms (h200_settle_2026-11-30)
MATMUL = 8192  # rows and columns of the product that attention's rate is compared with


def milliseconds(
    functions: Mapping[str, Run], rounds: int = ROUNDS, round_ms: float = ROUND_MS, device: str = "cuda", settle_ms: float = SETTLE_MS
) -> dict[str, list[float]]:
    """Milliseconds a call in each round, in an order drawn anew each time.

    A GPU's clock follows the power of the last tenth of a second: whoever runs after a function of low power would profit by up to 8 %. So
    there each function runs untimed for ``settle_ms`` first, and is timed at the clock that its own power allows.
    """
    on_gpu = device == "cuda"
    once, fewest = (_on_gpu, 2) if on_gpu else (_on_cpu, 1)
    repeats = {name: max(fewest, round(round_ms / once(run, fewest))) for name, run in functions.items()}
    times: dict[str, list[float]] = {name: [] for name in functions}
    order = random.Random()
    for _ in range(rounds):
        for name in order.sample(list(functions), len(functions)):
            for _ in range(round(repeats[name] * settle_ms / round_ms) if on_gpu else 0):
                functions[name]()
            times[name].append(once(functions[name], repeats[name]))
    return times


def _on_gpu(run: Run, repeats: int) -> float:
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    run()
    start.record()
    for _ in range(repeats):
        run()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop) / repeats


def _on_cpu(run: Run, repeats: int) -> float:
    start = time.perf_counter()
    for _ in range(repeats):
        run()
    return (time.perf_counter() - start) * 1e3 / repeats


def host_microseconds(run: Run, calls: int = 200, rounds: int = 7) -> float:
    """Host time of a call: median over rounds of calls that are issued without waiting; the device is idle when a round starts."""
    found = []
    for _ in range(rounds):
        run()
        torch.cuda.synchronize() if torch.cuda.is_available() else None
        start = time.perf_counter()
        for _ in range(calls):
            run()
        found.append((time.perf_counter() - start) * 1e6 / calls)
    return statistics.median(found)


def matmul() -> Run:
    """A bfloat16 product, timed beside the attention it is compared with; ``2 * MATMUL**3`` FLOP."""
    a, b = (torch.randn(MATMUL, MATMUL, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return lambda: a @ b
