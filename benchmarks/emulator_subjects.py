"""What ``benchmarks.emulator`` runs: compiled kernels with CPU tensors and their fp64 truth."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tandem_attn.kernels.compile import compiled
from tandem_attn.kernels.emulated import CHIPS, arguments
from tandem_attn.kernels.prepare import prepare
from tandem_attn.spec.arch import get_arch
from tandem_attn.spec.inputs import Inputs
from tandem_attn.spec.masks import Causal, Full
from tandem_attn.spec.planner import plan
from tandem_attn.spec.problem import Problem

ERROR = 2.0**-7  # of the largest element: bf16 outputs, and P's roundings


@dataclass(frozen=True)
class Subject:
    """A kernel with its arguments. `check` returns the largest error of the outputs and raises when it is too large."""

    kernel: Any
    args: list[Any]
    grid: int | tuple[int, ...]
    check: Callable[[], float]
    options: dict[str, Any] = field(default_factory=dict)


def forward(arch: str, seqlen: int, heads: int, head_dim: int = 128, causal: bool = False) -> Subject:
    """The package's forward for an architecture: bf16, one batch, (1, S, H, D), as many clusters as the chip has room for."""
    mask = Causal() if causal else Full()
    sizes = {"seqlen_q": seqlen, "seqlen_k": seqlen, "heads": heads, "heads_kv": heads, "head_dim": head_dim}
    problem = Problem(batch=1, mask=mask, device="cpu", return_lse=True, **sizes)
    made = plan(problem, CHIPS[arch], direction="forward", num_splits=1, pack_gqa=1).plan
    kernel = compiled(made)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, seqlen, heads, head_dim, generator=generator).to(torch.bfloat16) for _ in range(3))
    out = torch.full_like(q, math.nan)
    lse = torch.full((1, heads, seqlen), math.nan)
    counter = torch.zeros(1, dtype=torch.int32)
    sms = get_arch(CHIPS[arch]).sms // kernel.ctas
    launch = prepare(kernel, problem, made, Inputs(q=q, k=k, v=v), out, lse, sms=sms, counter=counter)

    def check() -> float:
        counter.zero_()
        return attention_error(q, k, v, out, lse, causal)

    options = {"block": kernel.threads, "cluster": kernel.ctas, "shared": kernel.shared_bytes}
    return Subject(kernel.ptx, arguments(launch), launch.grid * kernel.ctas, check, options)


def attention_error(q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool) -> float:
    """The largest error of O against fp64. Raises AssertionError when O or LSE is off by more than its rounding."""
    q, k, v = (x.double().transpose(1, 2) for x in (q, k, v))
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -math.inf)
    truth = torch.softmax(scores, -1) @ v
    error = (out.double().transpose(1, 2) - truth).abs()
    largest = float(error.nan_to_num(math.inf).max())
    bound = ERROR * float(truth.abs().max())
    assert largest <= bound, f"O is off by {largest:.3e}, allowed {bound:.3e}"
    of_lse = float((lse.double() - scores.logsumexp(-1)).abs().nan_to_num(math.inf).max())
    assert of_lse <= 1e-4, f"LSE is off by {of_lse:.3e}"
    out.fill_(math.nan)
    lse.fill_(math.nan)
    return largest


def gemm(arch: str, size: int) -> Subject:
    """The test suite's GEMM of an architecture, square."""
    if arch == "sm_90a":
        from tests.emulator.subjects.gemm_sm90 import gemm_sm90 as make
    else:
        from tests.emulator.subjects.gemm_sm100 import gemm_sm100 as make
    subject = make(size, size, size)

    def check() -> float:
        subject.check()
        error = float((subject.out.double() - subject.expected).abs().max())
        subject.out.fill_(math.nan)
        return error

    return Subject(subject.kernel, list(subject.args), subject.grid, check)
