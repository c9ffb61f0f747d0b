"""The path that other devices take, executed on a CPU: lengths are never read, one padded group, zeros beyond the lengths."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
import torch

from tandem_attn.reference import dense, layout, tiled
from tandem_attn.spec.inputs import Inputs
from tandem_attn.spec.masks import Causal, Mask, Predicate, Window
from tandem_attn.spec.plan import FORWARD
from tandem_attn.spec.planner import plan
from tandem_attn.spec.problem import Problem

NAN = float("nan")


@pytest.fixture
def upper_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    def one_group(problem: Problem, inputs: Inputs) -> Iterator[layout.Group]:
        yield layout._upper_bound(problem, inputs)

    monkeypatch.setattr(layout, "_equal_lengths", one_group)


def packed(q_lengths: list[int], k_lengths: list[int], spare: int, mask: Mask) -> tuple[Problem, Inputs]:
    """Packed sequences with ``spare`` rows of NaN behind the last one."""
    generator = torch.Generator().manual_seed(0)

    def rows(lengths: list[int], heads: int, width: int) -> torch.Tensor:
        x = torch.randn(sum(lengths) + spare, heads, width, generator=generator)
        x[sum(lengths) :] = NAN
        return x

    def offsets(lengths: list[int]) -> torch.Tensor:
        return torch.tensor([0, *lengths]).cumsum(0).int()

    inputs = Inputs(
        q=rows(q_lengths, 4, 16),
        k=rows(k_lengths, 2, 16),
        v=rows(k_lengths, 2, 8),
        sink=torch.randn(4, generator=generator),
        cu_seqlens_q=offsets(q_lengths),
        cu_seqlens_k=offsets(k_lengths),
    )
    problem = Problem(
        batch=len(q_lengths),
        seqlen_q=max(q_lengths) + 3,
        seqlen_k=max(k_lengths) + 5,
        heads=4,
        heads_kv=2,
        head_dim=16,
        head_dim_v=8,
        dtype="float32",
        mask=mask,
        sink=True,
        varlen=True,
        total_q=inputs.q.shape[0],
        total_k=inputs.k.shape[0],
    )
    return problem, inputs


def padded(seqused_q: list[int], seqused_k: list[int], mask: Mask) -> tuple[Problem, Inputs]:
    """A padded batch with NaN beyond the used lengths."""
    generator = torch.Generator().manual_seed(1)
    batch, seqlen_q, seqlen_k = len(seqused_q), max(seqused_q) + 2, max(seqused_k) + 7
    q, k, v = (torch.randn(batch, s, h, 16, generator=generator) for s, h in ((seqlen_q, 4), (seqlen_k, 2), (seqlen_k, 2)))
    for b in range(batch):
        q[b, seqused_q[b] :] = k[b, seqused_k[b] :] = v[b, seqused_k[b] :] = NAN
    inputs = Inputs(q=q, k=k, v=v, seqused_q=torch.tensor(seqused_q).int(), seqused_k=torch.tensor(seqused_k).int())
    problem = Problem(
        batch=batch, seqlen_q=seqlen_q, seqlen_k=seqlen_k, heads=4, heads_kv=2, head_dim=16, dtype="float32", mask=mask, seqused=True
    )
    return problem, inputs


MASKS = [Causal(), Window(9, 3), Causal() & Predicate(lambda b, h, q_idx, kv_idx: (q_idx + kv_idx + b) % 3 != 0)]
CALLS = [
    lambda mask: packed([130, 0, 7, 1, 40], [150, 9, 0, 1, 3], 0, mask),
    lambda mask: packed([5, 60], [160, 2], 6, mask),
    lambda mask: padded([3, 140, 0], [0, 150, 9], mask),
]


@pytest.mark.parametrize("mask", MASKS, ids=lambda mask: mask.code.split(":")[0])
@pytest.mark.parametrize("make", CALLS, ids=["packed", "packed, spare rows", "padded"])
def test_unread_lengths_give_the_numbers_of_read_ones(make: object, mask: Mask, request: pytest.FixtureRequest) -> None:
    problem, inputs = make(mask)  # type: ignore[operator]
    chosen = plan(problem, "CPU", direction=FORWARD).plan
    out, lse = tiled.forward(problem, chosen, inputs)
    generator = torch.Generator().manual_seed(2)
    grad_out, grad_lse = (torch.randn(x.shape, generator=generator) for x in (out, lse))
    grads = tiled.backward(problem, chosen, inputs, out, lse, grad_out, grad_lse)
    request.getfixturevalue("upper_bound")
    unread_out, unread_lse = tiled.forward(problem, chosen, inputs)
    unread = tiled.backward(problem, chosen, inputs, out, lse, grad_out, grad_lse)
    torch.testing.assert_close(unread_out, out, rtol=0, atol=2e-6)
    torch.testing.assert_close(unread_lse, lse, rtol=0, atol=4e-6)
    for field in dataclasses.fields(grads):
        want, got = getattr(grads, field.name), getattr(unread, field.name)
        if want is not None:
            assert bool(want.isfinite().all()), field.name
            torch.testing.assert_close(got, want, rtol=0, atol=4e-5, msg=lambda m, name=field.name: f"{name}: {m}")


def test_the_dense_truth_reads_lengths_on_every_device(upper_bound_everywhere: None) -> None:
    """On a GPU ``groups`` reads no length; the truth must not be computed from such a group."""
    problem, inputs = packed([30, 0, 7], [50, 9, 3], 0, Window(9, 3))
    want = [dense.attention(problem, inputs)[i] for i in range(2)]
    got = tiled.forward(problem, plan(problem, "CPU", direction=FORWARD).plan, inputs)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=0, atol=4e-6)


@pytest.fixture
def upper_bound_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    def one_group(problem: Problem, inputs: Inputs) -> Iterator[layout.Group]:
        yield layout._upper_bound(problem, inputs)

    monkeypatch.setattr(layout, "groups", one_group)
    monkeypatch.setattr(tiled, "groups", one_group)
