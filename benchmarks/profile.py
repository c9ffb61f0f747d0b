"""One launch each of a variant and of FlashAttention-3, for a profiler: python -m benchmarks.profile CASE VARIANT..."""

from __future__ import annotations

import os
import sys

import torch

from benchmarks.cases import by_tokens
from benchmarks.peers import PEERS
from benchmarks.protocol import sustained
from benchmarks.sweep import problem_of, variant
from tandem_attn.kernels import backend
from tandem_attn.spec.inputs import Inputs


def main() -> None:
    head_dim, seqlen, mask = sys.argv[1].split(",")
    case = by_tokens(int(head_dim), int(seqlen), mask)
    q, k, v = case.tensors()
    functions = {"fa3": PEERS["fa3"](case, q, k, v)}
    for name in sys.argv[2:]:
        functions[name] = lambda name=name: backend.forward(problem_of(case), variant(case, name), Inputs(q=q, k=k, v=v))
    for run in functions.values():
        run()
    torch.cuda.synchronize()
    if os.environ.get("SUSTAINED"):
        for name, run in functions.items():
            seen = sustained(run)
            print(f"{case} {name} {case.flops / seen['ms'] * 1e-9:.0f} TFLOP/s {seen['mhz']:.0f} MHz {seen['watts']:.0f} W", flush=True)
        return
    torch.cuda.cudart().cudaProfilerStart()
    for run in functions.values():
        run()
        torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStop()


if __name__ == "__main__":
    main()
