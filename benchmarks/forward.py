"""The forward table of an H200: Tandem as planned, and as its planner might have chosen, against every peer.

python -m benchmarks.forward OUT.json [HEAD_DIM...]
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.cases import Case, by_tokens
from benchmarks.peers import PEERS
from benchmarks.protocol import Run, environment, gpu_state, matmul_tflops, median, milliseconds
from benchmarks.sweep import problem_of
from tandem_attn.kernels import backend
from tandem_attn.kernels.compile import precompile
from tandem_attn.spec.inputs import Inputs
from tandem_attn.spec.plan import Plan
from tandem_attn.spec.planner import plan as make_plan

SEQLENS = (512, 1024, 2048, 4096, 8192, 16384, 32768)
PEER_NAMES = ("cudnn", "fa3", "fa4")
LARGEST_ERROR = 6e-3  # relative Frobenius distance between two right outputs in bfloat16
ALTERNATIVES: dict[int, dict[str, dict[str, Any]]] = {  # by head_dim
    64: {"two": {"q_stages": 2, "q_registers": True}, "early": {"early_turn": True}},
    128: {"late": {"early_turn": False}},
    192: {"always": {"rescale_rows": 0}},
    256: {"always": {"rescale_rows": 0}, "alone": {"ping_pong": False}},
}


def cases(head_dims: list[int]) -> list[Case]:
    found = []
    for d in head_dims:
        extra = {"head_dim_v": 128, "heads": 16} if d == 192 else {}
        found += [by_tokens(d, s, mask, **extra) for s in SEQLENS for mask in ("full", "causal")]
    if 128 in head_dims:
        found += [by_tokens(128, 8192, mask, heads=h, heads_kv=kv) for h, kv in ((32, 4), (16, 1)) for mask in ("full", "causal")]
    return found


def plans(case: Case) -> dict[str, Plan]:
    problem = problem_of(case)
    chosen = {"tandem": backend.plan(problem)}
    for name, changes in ALTERNATIVES[case.head_dim].items():
        chosen[name] = make_plan(problem, "H200", direction="forward", num_splits=1, pack_gqa=1, **changes).plan
    return chosen


def cell(case: Case) -> dict[str, Any]:
    """Rates of one case; a peer that fails, or whose output differs, is reported with its reason."""
    q, k, v = case.tensors()
    inputs, problem = Inputs(q=q, k=k, v=v), problem_of(case)
    candidates: dict[str, Run] = {}
    failed: dict[str, str] = {}
    for peer in PEER_NAMES:
        try:
            candidates[peer] = PEERS[peer](case, q, k, v)
            candidates[peer]()
        except Exception as error:
            failed[peer] = f"{type(error).__name__}: {error}"[:200]
            candidates.pop(peer, None)
    for name, chosen in plans(case).items():
        candidates[name] = lambda chosen=chosen: backend.forward(problem, chosen, inputs)[0]
    truth = candidates["tandem"]().float()
    for name, run in list(candidates.items()):
        if not (error := _distance(run(), truth)) < LARGEST_ERROR:
            failed[name] = f"output differs from tandem's by {error:.1e}"
            del candidates[name]
    del truth
    candidates["matmul"] = matmul_tflops()
    times = milliseconds(candidates, rounds=4, round_ms=20)
    rates = {name: (2 * 8192**3 if name == "matmul" else case.flops) / median(t) * 1e-9 for name, t in times.items()}
    peers = [rates[name] for name in PEER_NAMES if name in rates]
    return {
        **case.__dict__, "head_dim_v": case.head_dim_v or case.head_dim, "heads_kv": case.heads_kv or case.heads, "direction": "fwd",
        "tflops": rates, "ratio": rates["tandem"] / max(peers) if peers else math.nan, "failed": failed, "gpu": gpu_state(),
    }  # fmt: skip


def _distance(a: Tensor, b: Tensor) -> float:
    return ((a.float() - b).norm() / b.norm()).item()


def main() -> None:
    torch.manual_seed(0)
    todo = cases([int(d) for d in sys.argv[2:]] or sorted(ALTERNATIVES))
    precompile([plan for case in todo for plan in plans(case).values()], os.cpu_count() or 1)
    result: dict[str, Any] = {"environment": environment(), "cells": []}
    started = time.time()
    for case in todo:
        result["cells"].append(cell(case))
        seen = result["cells"][-1]
        rates = " ".join(f"{name} {rate:.0f}" for name, rate in seen["tflops"].items())
        print(f"{case}: {rates} ratio {seen['ratio']:.3f} {seen['failed'] or ''}", flush=True)
        Path(sys.argv[1]).write_text(json.dumps(result, indent=1))  # after every cell: a machine may be taken back
    logs = [math.log(c["ratio"]) for c in result["cells"] if c["ratio"] > 0]
    print(f"geometric mean of {len(logs)} ratios {math.exp(sum(logs) / len(logs)):.3f}, {time.time() - started:.0f} s")


if __name__ == "__main__":
    main()
