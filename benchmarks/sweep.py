"""Variants of the Hopper forward against each other and the peers: what the planner's choices rest on.

python -m benchmarks.sweep OUT.json GROUP...
"""

from __future__ import annotations

import functools
import json
import os
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tandem_attn.bench.cases import Case, by_tokens, tensors
from tandem_attn.bench.machine import Telemetry, environment
from tandem_attn.bench.peers import PEERS
from tandem_attn.bench.presets import varlen
from tandem_attn.bench.protocol import MATMUL, matmul, milliseconds
from tandem_attn.kernels import backend
from tandem_attn.kernels.precompile import precompile
from tandem_attn.spec.exp2 import Exp2Split
from tandem_attn.spec.inputs import Inputs
from tandem_attn.spec.plan import Launch, Plan, Schedule, ScheduleKind
from tandem_attn.spec.planner import plan
from tandem_attn.spec.problem import Problem

BASE = {"ping_pong": True, "intra_overlap": True, "q_registers": False}
VARIANTS: dict[str, dict[str, Any]] = {
    "planned": {},  # as the planner has it, not from BASE on
    "smem": {},
    "smem_seq": {"intra_overlap": False},
    "smem_tau": {"rescale_rows": 16},
    "reg": {"q_registers": True},
    "reg_seq": {"q_registers": True, "intra_overlap": False},
    "reg_seq_tau": {"q_registers": True, "intra_overlap": False, "rescale_rows": 16},
    "no_turns": {"ping_pong": False},
    "turns": {"ping_pong": True},
    "early": {"early_turn": True},
    "smem_seq_tau": {"intra_overlap": False, "rescale_rows": 16},
    "kv4": {"kv_stages": 4},
    "dynamic": {"schedule": Schedule(ScheduleKind.LPT, Launch.DYNAMIC, 0)},
    "static": {"schedule": Schedule(ScheduleKind.LPT, Launch.STATIC, 0)},
    "naive_static": {"schedule": Schedule(ScheduleKind.NAIVE, Launch.STATIC, 0)},
    "naive_dynamic": {"schedule": Schedule(ScheduleKind.NAIVE, Launch.DYNAMIC, 0)},
    **{f"lpt{n}": {"schedule": Schedule(ScheduleKind.LPT, Launch.DYNAMIC, n)} for n in (1, 2, 3, 4, 6, 8, 12, 16, 32, 64, 128)},
    **{f"nd{n}": {"schedule": Schedule(ScheduleKind.NAIVE, Launch.DYNAMIC, n)} for n in (1, 2, 4, 8, 16)},
    "none": {"schedule": Schedule(ScheduleKind.NAIVE, Launch.NONE, 0)},
    "fma12": {"exp2": Exp2Split(3, 4, 32)},
    "fma6": {"exp2": Exp2Split(3, 2, 32)},
    "fma25": {"exp2": Exp2Split(3, 4, 16)},
    "fma50": {"exp2": Exp2Split(3, 8, 16)},
    "two": {"q_stages": 2},
    "three": {"q_stages": 3},
    "n64": {"tile_n": 64},
    "always": {"rescale_rows": 0},
    "seq": {"intra_overlap": False},
    "tau": {"rescale_rows": 16},
    "late": {"early_turn": False},
    "q_smem": {"q_registers": False},
    "overlap": {"intra_overlap": True},
    "multicast": {"kv_multicast": 2},
    "alone": {"kv_multicast": 1},
    "in_ring": {"o_in_ring": True},
    "own_o": {"o_in_ring": False},
    "fixed": {"fixed_max": True},
    "running": {"fixed_max": False},
}
WIDE = {"heads": 16, "head_dim_v": 128}
GROUPS: dict[str, tuple[list[Case], list[str]]] = {
    "d128": (
        [by_tokens(128, s, mask) for s in (1024, 4096, 16384) for mask in ("full", "causal")],
        ["smem", "smem_seq", "smem_tau", "reg", "reg_seq", "reg_seq_tau", "smem+no_turns", "smem_tau+fma12"],
    ),
    "d128_full": (
        [by_tokens(128, s, "full") for s in (1024, 4096, 16384)],
        [f"reg_seq{x}" for x in ("", "+nd1", "+nd2", "+nd4", "+naive_static", "+none")] + ["reg_seq_tau+nd1", "reg+nd1", "smem_seq+nd1"],
    ),
    "d128_causal": (
        [by_tokens(128, s, "causal") for s in (1024, 4096, 16384)],
        [f"reg_seq_tau{x}" for x in ("", "+nd1", "+nd4", "+lpt1", "+lpt2", "+lpt4", "+lpt8", "+lpt16")] + ["smem_seq+lpt4"],
    ),
    "d128_turns": (
        [by_tokens(128, s, mask) for s in (4096, 16384) for mask in ("full", "causal")],
        ["reg_seq_tau+lpt4", "reg_seq_tau+early+lpt4", "smem_seq_tau+early+lpt4", "smem_tau+early+lpt4", "reg_seq_tau+kv4+lpt4"],
    ),
    "d64": (
        [by_tokens(64, s, mask) for s in (1024, 8192) for mask in ("full", "causal")],
        ["smem_seq", "smem_seq_tau", "smem_seq_tau+early", "smem_seq_tau+fma12", "smem_seq_tau+fma25", "two+reg_seq_tau",
         "two+reg_seq_tau+early",
         "smem_seq_tau+no_turns"],
    ),
    "d256": (
        [by_tokens(256, 8192, mask) for mask in ("full", "causal")],
        ["smem_seq", "smem_seq_tau", "smem_seq+early", "smem_seq_tau+no_turns"],
    ),
    "d192_128": (
        [by_tokens(192, 8192, mask, heads=16, head_dim_v=128) for mask in ("full", "causal")],
        ["smem_seq", "smem_seq_tau", "smem_seq+early", "smem_seq_tau+no_turns"],
    ),
    "d64_shapes": (
        [by_tokens(64, s, mask) for s in (1024, 2048, 8192) for mask in ("full", "causal")],
        ["seq+tau+late+three", "seq+late+three", "tau+late+three", "seq+tau+late+three+fma12", "seq+tau+late+three+fma25",
         "reg_seq_tau+two+no_turns", "reg_seq_tau+two+late", "reg_seq_tau+two+no_turns+fma12"],
    ),
    "d128_kv": (
        [by_tokens(128, s, mask) for s in (1024, 4096, 16384) for mask in ("full", "causal")],
        ["reg_seq_tau+early", "reg_seq_tau+late", "reg_seq_tau+no_turns", "smem_seq_tau+early"],
    ),
    "sections": (
        [
            by_tokens(d, s, "causal", **(WIDE if d == 192 else {}))
            for d, s in ((128, 16384), (192, 8192), (192, 16384), (64, 8192), (256, 16384))
        ],
        ["planned", "planned+lpt4", "planned+lpt8", "planned+lpt16", "planned+dynamic"],
    ),
    "turns": (
        [by_tokens(128, s, mask) for s, mask in ((4096, "full"), (32768, "full"), (4096, "causal"), (16384, "causal"))],
        ["planned", "planned+late", "planned+no_turns", "planned+q_smem", "planned+q_smem+late", "planned+q_smem+overlap+late"],
    ),
    "turns_wide": (
        [
            by_tokens(d, s, mask, **(WIDE if d == 192 else {}))
            for d in (192, 256)
            for s, mask in ((2048, "full"), (8192, "full"), (8192, "causal"))
        ],
        ["planned", "planned+late", "planned+no_turns", "planned+seq+late"],
    ),
    "d64_fma": (
        [by_tokens(64, s, mask) for s, mask in ((8192, "full"), (32768, "full"), (16384, "causal"))],
        ["planned", "planned+fma6", "planned+fma12"],
    ),
    "full_orders": (
        [
            by_tokens(d, s, "full", **(WIDE if d == 192 else {}))
            for d, lengths in ((64, (512, 1024, 4096, 16384)), (128, (512, 1024, 4096, 16384)), (192, (1024, 8192)), (256, (1024, 8192)))
            for s in lengths
        ],
        ["planned", "planned+nd1"],
    ),
    "causal_orders": (
        [
            by_tokens(d, s, "causal", **(WIDE if d == 192 else {}))
            for d, lengths in ((64, (4096, 16384)), (128, (4096, 16384)), (192, (4096, 16384)), (256, (2048, 16384)))
            for s in lengths
        ],
        ["planned", "planned+lpt2", "planned+lpt4", "planned+lpt16"],
    ),
    "short_causal_orders": (
        [
            by_tokens(d, s, "causal", **(WIDE if d == 192 else {}))
            for d, lengths in ((64, (512, 1024, 2048, 4096)), (128, (512, 1024, 2048)), (192, (512, 2048)), (256, (512, 2048)))
            for s in lengths
        ],
        ["planned+lpt16", "planned+lpt32", "planned+lpt64", "planned+lpt128", "planned+dynamic"],
    ),
    "multicast": (
        [
            *(by_tokens(64, s, mask) for s, mask in ((4096, "causal"), (32768, "causal"), (16384, "full"), (32768, "full"))),
            *(by_tokens(128, s, "causal") for s in (2048, 4096, 8192, 32768)),
            *(by_tokens(128, s, "full") for s in (8192, 16384, 32768)),
            *(by_tokens(192, s, mask, **WIDE) for s in (4096, 16384) for mask in ("causal", "full")),
            *(by_tokens(256, s, mask) for s in (4096, 16384) for mask in ("causal", "full")),
        ],
        ["planned+alone", "planned+multicast"],
    ),
    "fixed_128": (
        [by_tokens(128, s, "full") for s in (1024, 4096, 16384)],
        ["planned+fixed", "planned+fixed+reg+early", "planned+fixed+reg+late", "planned+fixed+reg+early+multicast"],
    ),
    "fixed_128_causal": (
        [by_tokens(128, s, "causal") for s in (1024, 4096, 16384)],
        ["planned+running", "planned+fixed", "planned+fixed+alone", "planned+fixed+q_smem+late+multicast"],
    ),
    "fixed_64": (
        [by_tokens(64, s, mask) for mask in ("full", "causal") for s in (4096, 16384)],
        ["planned+fixed", "planned+fixed+multicast"],
    ),
    "fixed_64_short": (
        [by_tokens(64, s, mask) for s, mask in ((512, "full"), (1024, "full"), (1024, "causal"), (2048, "causal"))],
        ["planned+running", "planned+fixed", "planned+fixed+three+q_smem+late+turns"],
    ),
    "fixed_wide": (
        [
            *(by_tokens(192, s, mask, **WIDE) for s, mask in ((2048, "causal"), (16384, "full"))),
            *(by_tokens(256, s, mask) for s, mask in ((512, "full"), (2048, "causal"), (16384, "causal"), (16384, "full"))),
        ],
        ["planned+running", "planned+fixed", "planned+fixed+early"],
    ),
    "forms_256": (
        [by_tokens(256, s, mask) for s in (1024, 2048, 4096, 8192, 16384) for mask in ("full", "causal")],
        ["planned", "planned+alone", "planned+fixed", "planned+running"],
    ),
    "own_o_192": (
        [by_tokens(192, s, mask, **WIDE) for s in (512, 2048, 8192, 32768) for mask in ("full", "causal")],
        ["planned", "planned+own_o"],
    ),
    "in_ring_128": (
        [*(by_tokens(128, s, "causal") for s in (1024, 2048, 16384)), by_tokens(128, 1024, "full"), by_tokens(64, 2048, "causal")],
        ["planned", "planned+in_ring", "planned+static"],
    ),
    "causal_128": (
        [by_tokens(128, s, "causal") for s in (2048, 4096, 8192, 16384)],
        ["planned", "planned+lpt4", "planned+lpt8", "planned+lpt16", "planned+lpt32"],
    ),
    "causal_128_2k": (
        [by_tokens(128, 2048, "causal")],
        ["planned+running", "planned+fixed", "planned+fixed+multicast", "planned+running+multicast", "planned+fixed+q_smem+late"],
    ),
    "causal_grouped": (
        [by_tokens(128, 8192, "causal", heads=n, heads_kv=m) for n, m in ((32, 4), (16, 1))],
        ["planned", "planned+alone", "planned+lpt4", "planned+lpt8", "planned+lpt16", "planned+lpt32"],
    ),
    "packed": (
        [replace(varlen()[0], head_dim=d, head_dim_v=d, mask=mask) for d, mask in ((128, "causal"), (128, "full"), (64, "causal"))],
        ["planned+running", "planned+fixed"],
    ),
    "fixed_from": (
        [
            *(by_tokens(64, s, mask) for s, mask in ((512, "full"), (1024, "full"), (512, "causal"), (1024, "causal"))),
            *(by_tokens(128, s, mask) for s, mask in ((512, "full"), (1024, "causal"), (2048, "causal"))),
            *(by_tokens(192, 512, mask, **WIDE) for mask in ("full", "causal")),
            *(by_tokens(256, s, "full") for s in (512, 1024)),
            *(by_tokens(256, s, "causal") for s in (1024, 4096, 16384)),
        ],
        ["planned+running", "planned+fixed"],
    ),
    "d64_causal_512": (
        [by_tokens(64, 512, "causal")],
        [f"planned{x}" for x in ("", "+static", "+naive_dynamic", "+lpt64", "+lpt128", "+n64", "+q_smem", "+always", "+turns", "+in_ring")],
    ),
    "order": (
        [by_tokens(d, s, "full", **(WIDE if d == 192 else {})) for d, s in ((128, 16384), (128, 32768), (192, 8192), (64, 8192))],
        ["planned", "planned+nd1", "planned+nd4", "planned+nd16", "planned+none", "planned+late"],
    ),
}  # fmt: skip


def _out(problem: Problem, plan: Plan, inputs: Inputs) -> Tensor:
    return backend.forward(problem, plan, inputs)[0]


def variant(case: Case, name: str) -> Plan:
    changes = {} if name.startswith("planned") else dict(BASE)
    for part in name.split("+"):
        changes |= VARIANTS[part]
    return plan(case.problem("cuda"), "H200", direction="forward", num_splits=1, pack_gqa=1, **changes).plan


def run_group(name: str, telemetry: Telemetry, peers: tuple[str, ...] = ("cudnn", "fa3", "fa4")) -> list[dict[str, Any]]:
    cells = []
    cases, variants = GROUPS[name]
    for case in cases:
        t = tensors(case, "cuda")
        inputs, problem = Inputs(q=t.q, k=t.k, v=t.v, cu_seqlens_q=t.cu_seqlens, cu_seqlens_k=t.cu_seqlens), case.problem("cuda")
        functions: dict[str, Any] = {}
        for peer in peers:
            try:
                functions[peer] = PEERS[peer].make(case, t)
                functions[peer]()
            except Exception as error:
                functions.pop(peer, None)
                print(f"{case}: {peer} is missing: {str(error)[:90]}", flush=True)
        first = next(iter(functions.values()), None) or functools.partial(_out, problem, variant(case, variants[0]), inputs)
        truth = first().float()  # without a peer only whether variants agree
        for key in variants:
            try:
                chosen = variant(case, key)
                run = functools.partial(_out, problem, chosen, inputs)
                off = ((run().float() - truth).norm() / truth.norm()).item()
            except Exception as failure:
                print(f"{case}: {key} failed: {str(failure)[:120]}", flush=True)
                continue
            if not off < 6e-3:
                print(f"{case}: {key} is WRONG by {off:.2e}", flush=True)
                continue
            functions[key] = run
        functions["matmul"] = matmul()
        began = time.monotonic()
        times = milliseconds(functions, rounds=int(os.environ.get("ROUNDS", "3")))
        rates = {n: (2 * MATMUL**3 if n == "matmul" else case.flops) / statistics.median(ms) * 1e-9 for n, ms in times.items()}
        print(case, " ".join(f"{n} {r:.0f}" for n, r in rates.items()), flush=True)
        cells.append({"case": case.__dict__, "tflops": rates, "gpu": telemetry.since(began)})
    return cells


def plans(groups: list[str]) -> list[Plan]:
    return [variant(case, name) for group in groups for case in GROUPS[group][0] for name in GROUPS[group][1]]


def main() -> None:
    torch.manual_seed(0)
    started = time.time()
    for done in precompile(plans(sys.argv[2:]), os.cpu_count() or 1):
        if done.error:
            print(f"{done.plan.digest} does not compile: {done.error[:300]}", flush=True)
    print(f"compiled in {time.time() - started:.0f} s", flush=True)
    with Telemetry() as telemetry:
        groups = {name: run_group(name, telemetry) for name in sys.argv[2:]}
    out = {"environment": environment([PEERS[name].package for name in ("cudnn", "fa3", "fa4")]), "groups": groups}
    Path(sys.argv[1]).write_text(json.dumps(out, indent=1))


if __name__ == "__main__":
    main()
