"""What a first call waits for: a kernel compiled by a fresh process with an empty cache, then loaded by another. Needs no GPU.

python -m benchmarks.cold_compile [OUT.json]

Seconds from the moment at which PyTorch and Tandem are imported, Triton's import included: CPU time, of the process and of its children
(ptxas), and wall time. The least of three processes each, since other work on a machine only adds.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tandem_attn.bench.machine import environment
from tandem_attn.kernels import backend
from tandem_attn.kernels import compile as kernels
from tandem_attn.spec.masks import Causal, Full
from tandem_attn.spec.plan import FORWARD
from tandem_attn.spec.problem import Problem

ROUNDS = 3
HEAD_DIMS = ((64, 64), (128, 128), (192, 128), (256, 256))
MASKS = {"full": Full(), "causal": Causal()}
CHIPS = ("H200", "B200")
HIDDEN, TOKENS, SEQLEN = 2048, 32768, 8192


def problem(head_dim: int, head_dim_v: int, mask: str) -> Problem:
    heads = HIDDEN // 128 if head_dim == 192 else HIDDEN // head_dim
    return Problem(
        batch=TOKENS // SEQLEN, seqlen_q=SEQLEN, seqlen_k=SEQLEN, heads=heads, heads_kv=heads, head_dim=head_dim, head_dim_v=head_dim_v,
        mask=MASKS[mask], device="cuda", return_lse=False,
    )  # fmt: skip


def once(chip: str, head_dim: int, head_dim_v: int, mask: str) -> dict[str, float]:
    """Of this process, which has compiled and loaded nothing yet."""
    plan = backend.plan(problem(head_dim, head_dim_v, mask), FORWARD, chip)
    before, start = used(), time.perf_counter()
    kernels.compiled(plan)
    after, wall = used(), time.perf_counter() - start
    own, children = (new - old for new, old in zip(after, before, strict=True))
    return {"cpu": own + children, "ptxas": children, "wall": wall}


def used() -> tuple[float, float]:
    """CPU seconds of this process and of its children that have ended."""
    both = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    own, children = (each.ru_utime + each.ru_stime for each in both)
    return own, children


def best(chip: str, head_dim: int, head_dim_v: int, mask: str) -> dict[str, dict[str, float]]:
    found: dict[str, list[dict[str, float]]] = {"compile": [], "load": []}
    for _ in range(ROUNDS):
        with tempfile.TemporaryDirectory() as empty:
            for kind, results in found.items():  # the second process finds what the first stored
                command = [sys.executable, "-m", "benchmarks.cold_compile", "--once", chip, str(head_dim), str(head_dim_v), mask]
                done = subprocess.run(command, env=os.environ | {"TANDEM_CACHE_DIR": empty}, capture_output=True, text=True, check=True)
                assert len(list(Path(empty).glob("*.kernel"))) == 1, kind
                results.append(json.loads(done.stdout.splitlines()[-1]))
    return {kind: {name: round(min(each[name] for each in results), 3) for name in results[0]} for kind, results in found.items()}


def main() -> None:
    rows = []
    print(f"{'chip':6} {'head_dim':10} {'mask':7} {'compile: cpu':>13} {'of it ptxas':>12} {'wall':>6} {'load: cpu':>10} {'wall':>6}   s")
    for chip in CHIPS:
        for head_dim, head_dim_v in HEAD_DIMS:
            for mask in MASKS:
                found = best(chip, head_dim, head_dim_v, mask)
                new, old = found["compile"], found["load"]
                print(
                    f"{chip:6} {f'{head_dim}, {head_dim_v}':10} {mask:7} {new['cpu']:13.2f} {new['ptxas']:12.2f} {new['wall']:6.2f} "
                    f"{old['cpu']:10.3f} {old['wall']:6.3f}",
                    flush=True,
                )
                rows.append({"chip": chip, "head_dim": head_dim, "head_dim_v": head_dim_v, "mask": mask, **found})
    if len(sys.argv) > 1:
        result = {"environment": environment([]), "rounds": ROUNDS, "cells": rows}
        Path(sys.argv[1]).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--once"]:
        chip, head_dim, head_dim_v, mask = sys.argv[2:]
        print(json.dumps(once(chip, int(head_dim), int(head_dim_v), mask)))
    else:
        main()
