"""What the compat tests compare with: attention written from the other library's documentation, in float64, with explicit masks."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor


def naive(
    q: Tensor, k: Tensor, v: Tensor, seen: Tensor, *, bias: Tensor | float = 0.0, scale: float | None = None, softcap: float = 0.0
) -> tuple[Tensor, Tensor]:
    """q (B, Sq, H, D), k and v (B, Sk, Hkv, D), seen broadcasts to (B, H, Sq, Sk) -> O (B, Sq, H, Dv), LSE (B, H, Sq)."""
    k, v = (x.repeat_interleave(q.shape[2] // k.shape[2], dim=2) for x in (k, v))
    s = torch.einsum("bqhd,bkhd->bhqk", q, k) * (scale if scale is not None else 1 / math.sqrt(q.shape[-1]))
    s = softcap * torch.tanh(s / softcap) if softcap else s
    s = torch.where(seen, s + bias, float("-inf"))
    alive = seen.expand_as(s).any(-1, keepdim=True)
    p = torch.where(alive, torch.softmax(torch.where(alive, s, 0.0), -1), 0.0)
    return torch.einsum("bhqk,bkhd->bqhd", p, v), torch.logsumexp(s, -1)


def window_matrix(seqlen_q: int, seqlen_k: int, window: tuple[int, int] = (-1, -1), causal: bool = False) -> Tensor:
    """FlashAttention-2's mask as documented: keys i + Sk - Sq - left to i + Sk - Sq + right; -1 is infinite; causal sets right to 0."""
    distance = torch.arange(seqlen_k)[None] - (torch.arange(seqlen_q)[:, None] + seqlen_k - seqlen_q)
    left, right = window[0], 0 if causal else window[1]
    seen = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool)
    if left >= 0:
        seen &= distance >= -left
    if right >= 0:
        seen &= distance <= right
    return seen


def alibi(slopes: Tensor, seqlen_q: int, seqlen_k: int) -> Tensor:
    """(H,) or (B, H) slopes -> bias (B or 1, H, Sq, Sk)."""
    distance = torch.arange(seqlen_k)[None] - (torch.arange(seqlen_q)[:, None] + seqlen_k - seqlen_q)
    return -slopes.double().reshape(-1, slopes.shape[-1], 1, 1) * distance.abs()


def close(name: str, actual: Tensor, truth: Tensor, tolerance: float = 1e-10) -> None:
    """Same shape, same infinities, no NaN, and no element further away than ``tolerance``; names the worst element."""
    assert actual.shape == truth.shape, f"{name}: shape {tuple(actual.shape)}, expected {tuple(truth.shape)}"
    if actual.numel() == 0:
        return
    a, b = actual.detach().double(), truth.detach().double()
    assert not a.isnan().any(), f"{name}: NaN"
    assert torch.equal(a.isinf(), b.isinf()), (
        f"{name}: infinities at {a.isinf().nonzero()[:3].tolist()}, expected {b.isinf().nonzero()[:3].tolist()}"
    )
    error = torch.where(a.isinf(), 0.0, (a - b).abs())
    worst = torch.unravel_index(error.argmax(), error.shape)
    assert error[worst] <= tolerance, (
        f"{name}: {a[worst]:g} instead of {b[worst]:g} at {tuple(int(x) for x in worst)}, tolerance {tolerance:g}"
    )


def grads_close(outputs: Tensor, expected: Tensor, inputs: list[Tensor], truth_inputs: list[Tensor], tolerance: float = 1e-10) -> None:
    """Gradients of the same random projection of both outputs."""
    generator = torch.Generator().manual_seed(7)
    direction = torch.randn(expected.shape, generator=generator, dtype=torch.float64)
    actual = torch.autograd.grad(outputs, inputs, direction.to(outputs.dtype))
    truth = torch.autograd.grad(expected, truth_inputs, direction.to(expected.dtype))
    for i, (a, b) in enumerate(zip(actual, truth, strict=True)):
        close(f"gradient {i}", a, b, tolerance)


@pytest.fixture
def truth() -> SimpleNamespace:
    torch.manual_seed(0)
    return SimpleNamespace(naive=naive, window_matrix=window_matrix, alibi=alibi, close=close, grads_close=grads_close)
