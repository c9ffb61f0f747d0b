"""Defects that were found by attacking the library; each test is the smallest call that showed one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tandem_attn import attention


def rand(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_bias_of_the_smallest_finite_number_is_a_logit(dtype: torch.dtype) -> None:
    """A row masked with ``torch.finfo(dtype).min`` throughout, as eager masks do, is an ordinary softmax over equal logits."""
    q, k, v = rand(1, 3, 2, 8), rand(1, 5, 2, 8), rand(1, 5, 2, 8)
    lowest = torch.finfo(dtype).min
    out, lse = attention(q, k, v, bias=torch.full((1, 1, 3, 5), lowest, dtype=dtype), return_lse=True)
    torch.testing.assert_close(out, v.mean(1, keepdim=True).expand_as(out))
    assert bool((lse == lowest).all())


@pytest.mark.parametrize("backend", ["sdpa", "reference"])
@pytest.mark.parametrize("size", [1e8, 1e20, 1e35])
def test_gradients_of_huge_logits_are_those_of_a_hard_maximum(size: float, backend: str) -> None:
    """One key wins in every row: dV is a sum of rows of dO, whatever the rounding of LSE."""
    q, k, v = (x.requires_grad_() for x in (rand(1, 20, 2, 8) * size**0.5, rand(1, 30, 2, 8) * size**0.5, rand(1, 30, 2, 8)))
    grad_out = rand(1, 20, 2, 8)
    dq, dk, dv = torch.autograd.grad(attention(q, k, v, backend=backend), (q, k, v), grad_out)
    winner = torch.einsum("bihd,bjhd->bihj", q.double(), k.double()).argmax(-1)[..., None].expand(-1, -1, -1, 8)
    expected = torch.zeros_like(v, requires_grad=False).scatter_add_(1, winner, grad_out)
    torch.testing.assert_close(dv, expected, rtol=1e-5, atol=1e-5)
    assert bool(dq.isfinite().all()) and bool(dk.isfinite().all())


def test_logits_as_large_as_float32_holds() -> None:
    v = rand(1, 3, 1, 4)
    k = torch.tensor([-1.0, -0.5, 0.9]).view(1, 3, 1, 1).expand(1, 3, 1, 4) * 3e38
    out, lse = attention(torch.tensor([1.0, 0, 0, 0]).view(1, 1, 1, 4), k, v, scale=1.0, return_lse=True)
    torch.testing.assert_close(out[:, 0], v[:, 2])
    torch.testing.assert_close(lse, torch.full((1, 1, 1), 2.7e38))
    sink = torch.full((1,), 3e38)
    assert float(attention(v, v, v, sink=sink, return_lse=True)[1][0, 0, 0]) == pytest.approx(3e38)
