"""How long a clock set by power takes to follow a change of the load: what ``tandem bench --settle-ms`` rests on. On a GPU.

python -m benchmarks.settle OUT.json
"""

from __future__ import annotations

import functools
import itertools
import json
import statistics
import sys
import time
from pathlib import Path

import torch

from tandem_attn.bench.cases import by_tokens, tensors
from tandem_attn.bench.machine import environment
from tandem_attn.bench.protocol import Run, matmul
from tandem_attn.kernels import backend
from tandem_attn.spec.inputs import Inputs

BEFORE_S = 0.5
CALLS = 300
BIN_MS = 20
CHANGES = (("light", "heavy"), ("product", "heavy"), ("heavy", "product"))


def attention(head_dim: int, seqlen: int) -> Run:
    case = by_tokens(head_dim, seqlen, "full")
    t, problem = tensors(case, "cuda"), case.problem("cuda")
    return functools.partial(backend.forward, problem, backend.plan(problem), Inputs(q=t.q, k=t.k, v=t.v))


def after(before: Run, run: Run) -> list[float]:
    """Microseconds a call of ``run``, in bins of 20 ms, from the moment on at which ``before`` ends."""
    run()
    torch.cuda.synchronize()
    began = time.perf_counter()
    while time.perf_counter() - began < BEFORE_S:
        for _ in range(20):
            before()
        torch.cuda.synchronize()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(CALLS + 1)]
    events[0].record()
    for event in events[1:]:
        run()
        event.record()
    torch.cuda.synchronize()
    at = [events[0].elapsed_time(event) for event in events]
    bins: dict[int, list[float]] = {}
    for start, stop in itertools.pairwise(at):
        bins.setdefault(int(start // BIN_MS), []).append((stop - start) * 1e3)
    return [round(statistics.mean(found), 1) for _, found in sorted(bins.items())]


def main() -> None:
    torch.manual_seed(0)
    runs = {"light": attention(64, 512), "heavy": attention(128, 4096), "product": matmul()}
    found = [{"before": a, "run": b, "bin_ms": BIN_MS, "us": after(runs[a], runs[b])} for a, b in CHANGES]
    for each in found:
        print(*each.values())
    Path(sys.argv[1]).write_text(json.dumps({"environment": environment([]), "changes": found}, indent=1))


if __name__ == "__main__":
    main()
