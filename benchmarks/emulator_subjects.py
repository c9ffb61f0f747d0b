"""What ``benchmarks.emulator`` runs: compiled kernels with CPU tensors and their fp64 truth."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tandem_attn.emulator.launch.tensormap import TensorDescriptor
from tandem_attn.kernels.compile import Kernel, compiled
from tandem_attn.spec.masks import Causal, Full
from tandem_attn.spec.planner import plan as make_plan
from tandem_attn.spec.problem import Problem

ERROR = 2.0**-8  # bf16 outputs and probabilities, of values near 1


@dataclass(frozen=True)
class Subject:
    """A kernel with its arguments. `check` returns the largest error of the outputs and raises when it is too large."""

    kernel: Any
    args: list[Any]
    grid: tuple[int, ...]
    check: Callable[[], float]
    options: dict[str, Any] = field(default_factory=dict)


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)


def hopper_forward(seqlen: int, heads: int, head_dim: int = 128, causal: bool = False, ctas: int = 132) -> Subject:
    """The package's Hopper forward: bf16, one batch, (1, S, H, D)."""
    problem = Problem(
        batch=1, seqlen_q=seqlen, seqlen_k=seqlen, heads=heads, heads_kv=heads, head_dim=head_dim, mask=Causal() if causal else Full(),
        return_lse=True, device="cuda",
    )  # fmt: skip
    chosen = make_plan(problem, "H200", num_splits=1, pack_gqa=1).plan
    kernel = compiled(chosen)
    q, k, v = (random(1, seqlen, heads, head_dim, seed=i) for i in range(3))
    out = torch.full_like(q, float("nan"))
    lse = torch.full((1, heads, seqlen), float("nan"))
    counter = torch.zeros(2, dtype=torch.int32)
    blocks = -(-seqlen // chosen.rows_per_cta)
    tiles = blocks * heads
    args: list[Any] = []
    for tensor, (swizzle, box) in zip((q, k, v, out) * 2, kernel.descriptors, strict=True):
        args += descriptor(tensor, swizzle, box)
    args += [lse, counter, *[0] * 8, *[0] * 4, problem.scale_value * math.log2(math.e), 0.0]
    args += [seqlen, seqlen, seqlen, seqlen, 1, heads, 1, blocks, heads, tiles, seqlen, 0, 0]

    def check() -> float:
        counter.zero_()
        return attention_error(q, k, v, out, lse, causal)

    return Subject(kernel.ptx, args, (min(tiles, ctas),), check, launch_of(kernel))


def launch_of(kernel: Kernel) -> dict[str, Any]:
    return {"block": kernel.threads, "shared": kernel.shared_bytes}


def descriptor(x: Tensor, swizzle: int, box: tuple[int, ...]) -> list[Any]:
    """(batch, heads, rows, columns) of a (B, S, H, D) tensor, then shape and strides, which the kernel does not read."""
    moved = x.transpose(1, 2)
    span = {0: 0, 1: 32, 2: 64, 3: 128}[swizzle]
    described = TensorDescriptor(moved, moved.shape, moved.stride(), box, swizzle=span)
    return [described, *moved.shape, *moved.stride()]


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
    assert of_lse <= 1e-5, f"LSE is off by {of_lse:.3e}"
    out.fill_(float("nan"))
    lse.fill_(float("nan"))
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
        subject.out.fill_(float("nan"))
        return error

    return Subject(subject.kernel, list(subject.args), subject.grid, check)
