"""8-bit P in the tiled reference: rounded with its exponent, and what the planner's choice of it is worth."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from tandem_attn import attention
from tandem_attn.reference import dense, tiled
from tandem_attn.reference.samples import sample
from tandem_attn.spec.plan import FORWARD
from tandem_attn.spec.planner import plan
from tandem_attn.spec.problem import FLOAT8, Problem


@pytest.mark.parametrize("name", FLOAT8)
def test_p_is_rounded_before_its_product(name: str) -> None:
    """Two keys with P = (1, p): V = (-round(p), 1) gives exactly 0 with P rounded, and p - round(p) otherwise."""
    dtype, logit = getattr(torch, name), -0.40625
    p = math.exp(logit)
    rounded = float(torch.tensor(p).to(dtype))
    assert abs(p - rounded) > 1e-3
    q, k = torch.zeros(1, 1, 1, 16), torch.zeros(1, 2, 1, 16)
    q[..., 0], k[0, 1, 0, 0] = 1.0, logit
    v = torch.tensor([-rounded, 1.0]).view(1, 2, 1, 1)
    out = attention(q.to(dtype), k.to(dtype), v.to(dtype), scale=1.0, backend="reference")
    assert float(out) == 0.0, f"got {float(out):.3g}: P was not rounded (p - round(p) = {p - rounded:.3g})"


@pytest.mark.parametrize(("name", "logit"), [("float8_e4m3fn", -9.0), ("float8_e5m2", -14.0)])
def test_small_weights_count(name: str, logit: float) -> None:
    """A weight far below the smallest subnormal number of P's type; P times 2^8 still has all its mantissa."""
    dtype = getattr(torch, name)
    p = math.exp(logit)
    assert float(torch.tensor(p).to(dtype)) == 0.0
    q, k = torch.zeros(1, 1, 1, 16), torch.zeros(1, 2, 1, 16)
    q[..., 0], k[0, 1, 0, 0] = 1.0, logit
    v = torch.tensor([0.0, 1.0]).view(1, 2, 1, 1)
    out = attention(q.to(dtype), k.to(dtype), v.to(dtype), scale=1.0, backend="reference")
    assert abs(float(out) - p) <= p * torch.finfo(dtype).eps / 2


@pytest.mark.parametrize("name", FLOAT8)
def test_the_planned_exponent_and_threshold_pay(name: str) -> None:
    """Peaked rows: the error is less than half of that with the 16-bit types' threshold."""
    problem = Problem(batch=1, seqlen_q=128, seqlen_k=2048, heads=2, heads_kv=1, head_dim=64, dtype=name, scale=0.5, descale=True)
    inputs = sample(problem, 0).inputs
    truth, _ = dense.attention(problem, inputs)

    def error(**changes: object) -> float:
        out, _ = tiled.forward(problem, plan(problem, "CPU", direction=FORWARD, **changes).plan, inputs)
        return float((out.double() - truth).norm() / truth.norm())

    assert error() < 0.5 * error(p_exponent=0, rescale_threshold=8.0)
    assert error() < 0.6 * torch.finfo(getattr(torch, name)).eps / 2


def test_descales_of_unlike_sequences_stay_theirs() -> None:
    """Sequences of one length are computed together: each keeps its own."""
    problem = Problem(batch=3, seqlen_q=40, seqlen_k=60, heads=4, heads_kv=2, head_dim=16, dtype="float8_e4m3fn", descale=True)
    inputs = sample(problem, 1).inputs
    chosen = plan(problem, "CPU", direction=FORWARD).plan
    out, lse = tiled.forward(problem, chosen, inputs)
    for b in range(3):
        one = {name: getattr(inputs, name)[b : b + 1] for name in ("q", "k", "v", "q_descale", "k_descale", "v_descale")}
        alone, alone_lse = tiled.forward(replace(problem, batch=1, total_q=0, total_k=0), chosen, replace(inputs, **one))
        assert torch.equal(out[b], alone[0]) and torch.equal(lse[b], alone_lse[0])
