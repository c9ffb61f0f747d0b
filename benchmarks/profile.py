"""One launch each of a variant and of FlashAttention-3, for a profiler: python -m benchmarks.profile CASE VARIANT..."""

from __future__ import annotations

import functools
import os
import sys
import time

import torch

from benchmarks.sweep import variant
from tandem_attn.bench.cases import Case, by_tokens, tensors
from tandem_attn.bench.machine import Telemetry
from tandem_attn.bench.peers import PEERS
from tandem_attn.bench.protocol import Run, milliseconds
from tandem_attn.kernels import backend
from tandem_attn.spec.inputs import Inputs


def _sustained(case: Case, functions: dict[str, Run]) -> None:
    """Rate, clock and power of each while it repeats for a second; the first half second is the way to the steady state."""
    with Telemetry() as telemetry:
        for name, run in functions.items():
            milliseconds({name: run}, rounds=1, round_ms=500)
            began = time.monotonic()
            (ms,) = milliseconds({name: run}, rounds=1, round_ms=500)[name]
            print(f"{case} {name} {case.flops / ms * 1e-9:.0f} TFLOP/s {telemetry.since(began)}", flush=True)


def main() -> None:
    head_dim, seqlen, mask = sys.argv[1].split(",")
    case = by_tokens(int(head_dim), int(seqlen), mask)
    t = tensors(case, "cuda")
    inputs, problem = Inputs(q=t.q, k=t.k, v=t.v), case.problem("cuda")
    functions: dict[str, Run] = {"fa3": PEERS["fa3"].make(case, t)}
    for name in sys.argv[2:]:
        functions[name] = functools.partial(backend.forward, problem, variant(case, name), inputs)
    for run in functions.values():
        run()
    torch.cuda.synchronize()
    if os.environ.get("SUSTAINED"):
        _sustained(case, functions)
        return
    torch.cuda.cudart().cudaProfilerStart()
    for run in functions.values():
        run()
        torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStop()


if __name__ == "__main__":
    main()
