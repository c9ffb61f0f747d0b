"""Time the CPU backends beside PyTorch's own attention: ``python benchmarks/cpu.py [--out FILE]``.

Every case is checked against the other backend before it is timed; rounds are interleaved, the figures are medians of wall time. The
results file carries commit, processor, threads, versions, date and command.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from tandem_attn import attention

ROUNDS = 15
# (batch, seqlen, heads, head_dim, dtype, causal)
CASES = (
    (1, 2048, 8, 64, torch.float32, True),
    (1, 2048, 8, 64, torch.float32, False),
    (1, 2048, 8, 64, torch.bfloat16, True),
    (4, 512, 8, 128, torch.float32, True),
    (1, 4096, 8, 128, torch.bfloat16, True),
)


def processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())


def calls(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> dict[str, Callable[[], Tensor]]:
    def torch_sdpa() -> Tensor:
        heads_first = (x.transpose(1, 2) for x in (q, k, v))
        return torch.nn.functional.scaled_dot_product_attention(*heads_first, is_causal=causal).transpose(1, 2)

    return {
        "reference": lambda: attention(q, k, v, causal=causal, backend="reference"),
        "auto": lambda: attention(q, k, v, causal=causal),
        "torch SDPA": torch_sdpa,
    }


def measure(case: tuple[int, int, int, int, torch.dtype, bool]) -> dict[str, object]:
    batch, seqlen, heads, head_dim, dtype, causal = case
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(batch, seqlen, heads, head_dim, generator=generator).to(dtype) for _ in range(3))
    forms = calls(q, k, v, causal)
    want = forms["torch SDPA"]()
    for form in forms.values():
        torch.testing.assert_close(form(), want, rtol=0, atol=4 * torch.finfo(dtype).eps * float(v.abs().max()))
    times: dict[str, list[float]] = {name: [] for name in forms}
    for _ in range(ROUNDS):
        for name, form in forms.items():
            start = time.perf_counter()
            form()
            times[name].append(time.perf_counter() - start)
    ms = {name: round(statistics.median(values) * 1e3, 2) for name, values in times.items()}
    return {
        "batch": batch,
        "seqlen": seqlen,
        "heads": heads,
        "head_dim": head_dim,
        "dtype": str(dtype).removeprefix("torch."),
        "mask": "causal" if causal else "full",
        "direction": "fwd",
        "ms": ms,
        "reference_over_sdpa": round(ms["reference"] / ms["torch SDPA"], 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="where to write the results as JSON")
    out = parser.parse_args().out
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    results = {
        "commit": commit,
        "processor": processor(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": " ".join(["python", *sys.argv]),
        "rounds": ROUNDS,
        "cells": [measure(case) for case in CASES],
    }
    if out:
        out.write_text(json.dumps(results, indent=2) + "\n")
    print(f"{results['processor']}, {results['threads']} threads, torch {results['torch']}")
    print(f"milliseconds, medians of {ROUNDS} interleaved rounds")
    for cell in results["cells"]:  # type: ignore[attr-defined]
        shape = f"({cell['batch']}, {cell['seqlen']}, {cell['heads']}, {cell['head_dim']}) {cell['dtype']} {cell['mask']}"
        timed = ", ".join(f"{name} {ms}" for name, ms in cell["ms"].items())
        print(f"{shape:38} {timed}; reference / SDPA {cell['reference_over_sdpa']}")


if __name__ == "__main__":
    main()
