"""From cases to results: every implementation is checked against the truth, then all are timed side by side."""

from __future__ import annotations

import gc
import json
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tandem_attn.bench import ours, peers, protocol, truth
from tandem_attn.bench.cases import BACKWARD, DECODE, Case, Tensors, tensors
from tandem_attn.bench.machine import Telemetry, environment
from tandem_attn.kernels.precompile import precompile

MATMUL = "matmul"
_PATIENCE_S = 20.0  # a peer that failed for so long (compiling, say) is not tried again


@dataclass
class Settings:
    """How to measure.

    Attributes:
        device: "cuda" or "cpu".
        backend: what ``tandem`` stands for, a name of ``tandem_attn.backends()``.
        peers: names of ``peers.PEERS``.
        rounds, round_ms, settle_ms: see ``protocol.milliseconds``.
        seed: of the random tensors.
    """

    device: str
    backend: str
    peers: tuple[str, ...]
    rounds: int = protocol.ROUNDS
    round_ms: float = protocol.ROUND_MS
    settle_ms: float = protocol.SETTLE_MS
    seed: int = 0


@dataclass
class Results:
    """Everything one run found, as it is stored; ``missing`` names the peers that could not run at all, with the reason."""

    settings: dict[str, Any]
    environment: dict[str, Any]
    missing: dict[str, str]
    cells: list[dict[str, Any]] = field(default_factory=list)

    def write(self, path: Path) -> None:
        partial = path.with_suffix(path.suffix + ".part")
        partial.write_text(json.dumps(self.__dict__, indent=1) + "\n")
        partial.replace(path)


def start(settings: Settings) -> Results:
    """Looks for the peers and describes the machine."""
    missing = {name: reason for name in settings.peers if (reason := peers.missing(name, settings.device))}
    found = environment([peers.PEERS[name].package for name in settings.peers])
    return Results(dict(settings.__dict__), found, missing)


def measure(cases: list[Case], settings: Settings, results: Results) -> Iterator[dict[str, Any]]:
    """Measures case after case; each cell is added to ``results`` and then yielded."""
    torch.manual_seed(settings.seed)
    if settings.device == "cuda" and settings.backend == "tandem":
        for _ in precompile(ours.plans(cases), min(16, os.cpu_count() or 1)):
            pass  # side by side; a kernel that does not compile fails in its cell
    spent: dict[str, float] = {}
    with Telemetry() as telemetry:
        for case in cases:
            found = _cell(case, settings, results, spent, telemetry)
            results.cells.append(found)
            yield found
            gc.collect()


def _cell(case: Case, settings: Settings, results: Results, spent: dict[str, float], telemetry: Telemetry) -> dict[str, Any]:
    t = tensors(case, settings.device, settings.seed)
    known = truth.expected(case, t, settings.device)
    candidates: dict[str, protocol.Run] = {}
    failed: dict[str, str] = {}
    errors: dict[str, float] = {}
    for name, make in _makers(case, t, settings).items():
        if name in results.missing:
            continue
        began = time.monotonic()
        try:
            run = _direction(case, t, make())
            errors[name] = truth.error(_outputs(case, run()), known)
        except Exception as error:  # whatever a peer raises is its reason
            failed[name] = f"{type(error).__name__}: {' '.join(str(error).split())}"[:200]
            spent[name] = spent.get(name, 0.0) + time.monotonic() - began
            if spent[name] > _PATIENCE_S and name in peers.PEERS:
                results.missing[name] = f"not tried again after failing for {spent[name]:.0f} s: {failed[name]}"
            continue
        if not errors[name] < truth.tolerance(case):
            failed[name] = f"wrong: relative error {errors[name]:.1e} against float64, at most {truth.tolerance(case):.1e} is right"
            continue
        candidates[name] = run
    known.clear()
    if settings.device == "cuda" and case.kind != DECODE:
        candidates[MATMUL] = protocol.matmul()
    began = time.monotonic()
    times = protocol.milliseconds(candidates, settings.rounds, settings.round_ms, settings.device, settings.settle_ms)
    return _as_cell(case, times, errors, failed, telemetry.since(began))


def _makers(case: Case, t: Tensors, settings: Settings) -> dict[str, Callable[[], Callable[[], Tensor]]]:
    """Ours, its variants and the peers, each still to be made."""
    found: dict[str, Callable[[], Callable[[], Tensor]]] = {ours.NAME: lambda: ours.run(case, t, settings.backend)}
    if settings.device == "cuda" and case.direction != BACKWARD:
        found |= {f"{ours.NAME}, {name}": lambda name=name: ours.variant(case, t, name) for name in case.variants}  # type: ignore[misc]
    return found | {name: lambda name=name: peers.PEERS[name].make(case, t) for name in settings.peers}


def _direction(case: Case, t: Tensors, forward: Callable[[], Tensor]) -> protocol.Run:
    """What is timed: the forward, or the backward of one forward."""
    if case.direction != BACKWARD:
        return forward
    out = forward()
    return lambda: torch.autograd.grad(out, t.qkv, t.grad_out, retain_graph=True)


def _outputs(case: Case, result: Any) -> dict[str, Tensor]:
    if case.direction != BACKWARD:
        return {"out": result}
    return dict(zip(("dq", "dk", "dv"), result, strict=True))


def _as_cell(
    case: Case, times: dict[str, list[float]], errors: dict[str, float], failed: dict[str, str], telemetry: dict[str, float]
) -> dict[str, Any]:
    ms = {name: statistics.median(values) for name, values in times.items()}
    rates = {name: (2.0 * protocol.MATMUL**3 if name == MATMUL else case.flops) / each * 1e-9 for name, each in ms.items()}
    return {
        **case.as_dict(),
        "tflops": {name: float(f"{rate:.5g}") for name, rate in rates.items()},
        "ratio": ratio(rates),
        **({"of_matmul": round(rates[ours.NAME] / rates[MATMUL], 4)} if {ours.NAME, MATMUL} <= set(rates) else {}),
        "fastest_peer": fastest_peer(rates),
        "ms": {name: float(f"{each:.5g}") for name, each in ms.items()},
        **({"kv_gb_per_s": {name: round(case.kv_bytes / each * 1e-6, 1) for name, each in ms.items()}} if case.kind == DECODE else {}),
        "error": {name: float(f"{each:.3g}") if math.isfinite(each) else str(each) for name, each in errors.items()},
        "failed": failed,
        "gpu": telemetry,
    }


def fastest_peer(rates: dict[str, float]) -> str | None:
    """Name of the fastest peer that ran."""
    ran = {name: rate for name, rate in rates.items() if name in peers.PEERS}
    return max(ran, key=lambda name: ran[name]) if ran else None


def ratio(rates: dict[str, float]) -> float | None:
    """Ours over the fastest peer; None where one of them did not run."""
    peer = fastest_peer(rates)
    return None if peer is None or ours.NAME not in rates else float(f"{rates[ours.NAME] / rates[peer]:.4g}")
