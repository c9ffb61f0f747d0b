"""NaN goes where it belongs and nowhere else; transforms that cannot see into the operators are refused instead of ignored."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

from tandem_attn import UnsupportedError, attention


def qkv() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, 6, 4, 8, generator=generator) for _ in range(3)]


@pytest.mark.parametrize("backend", ["sdpa", "reference"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_bad_query_makes_its_own_row_nan(backend: str, value: float) -> None:
    q, k, v = qkv()
    q[0, 1, 2, 3] = value
    out, lse = attention(q, k, v, causal=True, return_lse=True, backend=backend)
    assert out.isnan().any(-1).nonzero().tolist() == [[0, 1, 2]]
    assert lse.isnan().nonzero().tolist() == [[0, 2, 1]]


@pytest.mark.parametrize("backend", ["sdpa", "reference"])
def test_a_nan_key_reaches_the_rows_that_see_it(backend: str) -> None:
    q, k, v = qkv()
    k[0, 4, 2, 3] = float("nan")
    out = attention(q, k, v, causal=True, backend=backend)
    assert out.isnan().any(-1).nonzero().tolist() == [[0, 4, 2], [0, 5, 2]]


@pytest.mark.parametrize("backend", ["sdpa", "reference"])
def test_a_nan_query_makes_the_gradients_it_reaches_nan(backend: str) -> None:
    q, k, v = qkv()
    q[1, 5, 0, 0] = float("nan")
    leaves = [x.requires_grad_() for x in (q, k, v)]
    dq, dk, dv = torch.autograd.grad(attention(*leaves, causal=True, backend=backend).sum(), leaves)
    assert dq.isnan().any(-1).nonzero().tolist() == [[1, 5, 0]]
    for grad in (dk, dv):
        assert {(b, h) for b, _, h in grad.isnan().any(-1).nonzero().tolist()} == {(1, 0)}


def test_forward_mode_is_refused_because_it_would_lose_the_tangent() -> None:
    q, k, v = qkv()
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(q, torch.ones_like(q))
        with pytest.raises(UnsupportedError, match="forward-mode automatic differentiation"):
            attention(dual, k, v)
        assert attention(q, k, v).isfinite().all()  # no tangent, no objection


@pytest.mark.parametrize(
    "transform",
    [
        lambda q, k, v: torch.func.grad(lambda x: attention(x, k, v).sum())(q),
        lambda q, k, v: torch.func.jvp(lambda x: attention(x, k, v), (q,), (q,)),
        lambda q, k, v: torch.func.vmap(lambda x: attention(x, k, v))(torch.stack([q, q])),
    ],
    ids=["grad", "jvp", "vmap"],
)
def test_torch_func_is_refused(transform: object) -> None:
    with pytest.raises(UnsupportedError, match=r"torch\.func transforms"):
        transform(*qkv())  # type: ignore[operator]


def test_meta_tensors_give_shapes() -> None:
    q, k, v = (x.to("meta") for x in qkv())
    out, lse = attention(q, k, v, causal=True, return_lse=True)
    assert (out.shape, lse.shape, out.device.type) == ((2, 6, 4, 8), (2, 4, 6), "meta")
