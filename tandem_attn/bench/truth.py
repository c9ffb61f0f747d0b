"""What an output is checked against before it is timed: float64, a block of rows at a time, for as many heads as a budget allows."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tandem_attn.bench.cases import BACKWARD, DECODE, Case, Tensors
from tandem_attn.reference import dense
from tandem_attn.spec.inputs import Inputs
from tandem_attn.spec.masks import Causal, Full
from tandem_attn.spec.problem import Problem

# Largest relative Frobenius distance from the truth. Rounding P and O to the dtype gives a third to a half of it; a wrong element of a
# row, a mask off by one or a block left out give far more.
TOLERANCE = {"float16": 8e-4, "bfloat16": 6e-3, "float32": 1e-5}
BACKWARD_TOLERANCE = 2.0  # times that: dS is rounded too
_BUDGET = {"cuda": 2**32, "cpu": 2**24}  # scores that are computed in float64
_PLACES = 64  # sequences and heads: each costs host time
_BLOCK = {"cuda": 2**25, "cpu": 2**21}  # scores in memory at once


@dataclass(frozen=True)
class Expected:
    """Truth for one sequence and one query head: its index into an output, and the values there."""

    output: str  # "out", "dq", "dk" or "dv"
    index: tuple[int | slice, ...]
    values: Tensor


def expected(case: Case, t: Tensors, device: str) -> list[Expected]:
    """Truth for the sequences and heads that the budget allows, spread evenly; at least one of each output."""
    places = [(rows, h) for rows in _sequences(case, t) for h in range(case.heads_kv)]
    group = case.heads // case.heads_kv
    cost = case.scores * case.heads_kv * group / len(places) * (2 if case.direction == BACKWARD else 1)
    count = max(1, min(len(places), _PLACES, int(_BUDGET[device] / cost)))
    step = (len(places) - 1) / max(1, count - 1)
    found: list[Expected] = []
    for rows, h in (places[round(i * step)] for i in range(count)):
        found += _backward(case, t, rows, h, device) if case.direction == BACKWARD else _forward(case, t, rows, h, device)
    return found


def error(outputs: dict[str, Tensor], truth: Sequence[Expected]) -> float:
    """The largest relative Frobenius error of an output, over all that is known of it; NaN where the output has NaN."""
    worst = 0.0
    for name in dict.fromkeys(x.output for x in truth):
        known = [x for x in truth if x.output == name]
        off = sum(float((outputs[name][x.index].double() - x.values).square().sum()) for x in known)
        size = sum(float(x.values.square().sum()) for x in known)
        here = (off / size) ** 0.5
        if not here <= worst:
            worst = here
    return worst


def tolerance(case: Case) -> float:
    return TOLERANCE[case.dtype] * (BACKWARD_TOLERANCE if case.direction == BACKWARD else 1)


def _sequences(case: Case, t: Tensors) -> list[tuple[int | slice, ...]]:
    """Index of each sequence's rows in q; k has the same, but in decoding."""
    if t.cu_seqlens is None:
        return [(b,) for b in range(case.batch)]
    ends = t.cu_seqlens.tolist()
    return [(slice(a, b),) for a, b in itertools.pairwise(ends)]


def _forward(case: Case, t: Tensors, rows: tuple[int | slice, ...], h: int, device: str) -> Iterator[Expected]:
    group = case.heads // case.heads_kv
    k, v = t.k[rows][:, h].double(), t.v[rows][:, h].double()
    for head in range(h * group, (h + 1) * group):
        q = t.q[rows][:, head].double()
        blocks = [_block(case, q, k, v, start, stop) for start, stop in _steps(len(q), len(k), device)]
        yield Expected("out", _at(rows, head), torch.cat(blocks))


def _backward(case: Case, t: Tensors, rows: tuple[int | slice, ...], h: int, device: str) -> Iterator[Expected]:
    assert t.grad_out is not None  # narrows the type: a backward has it
    group = case.heads // case.heads_kv
    k, v = (x[rows][:, h].detach().double().requires_grad_() for x in (t.k, t.v))
    dk, dv = torch.zeros_like(k), torch.zeros_like(v)
    for head in range(h * group, (h + 1) * group):
        q, grad = t.q[rows][:, head].detach().double().requires_grad_(), t.grad_out[rows][:, head].double()
        dq = torch.zeros_like(q)
        for start, stop in _steps(len(q), len(k), device):
            grads = torch.autograd.grad(_block(case, q, k, v, start, stop), (q, k, v), grad[start:stop])
            for total, part in zip((dq, dk, dv), grads, strict=True):
                total.add_(part)
        yield Expected("dq", _at(rows, head), dq)
    yield Expected("dk", _at(rows, h), dk)
    yield Expected("dv", _at(rows, h), dv)


def _at(rows: tuple[int | slice, ...], head: int) -> tuple[int | slice, ...]:
    return (*rows, slice(None), head) if isinstance(rows[0], int) else (*rows, head)


def _steps(queries: int, keys: int, device: str) -> list[tuple[int, int]]:
    step = max(1, _BLOCK[device] // max(1, keys))
    return [(start, min(start + step, queries)) for start in range(0, queries, step)]


def _block(case: Case, q: Tensor, k: Tensor, v: Tensor, start: int, stop: int) -> Tensor:
    """O of the query rows [start, stop): a causal block sees the keys up to its last row, to which its mask then aligns."""
    causal = case.causal and case.kind != DECODE
    keys = stop if causal else len(k)
    problem = Problem(
        batch=1, seqlen_q=stop - start, seqlen_k=keys, heads=1, heads_kv=1, head_dim=case.head_dim, head_dim_v=case.head_dim_v,
        dtype="float64", mask=Causal() if causal else Full(),
    )  # fmt: skip
    inputs = Inputs(q=q[None, start:stop, None], k=k[None, :keys, None], v=v[None, :keys, None])
    return dense.attention(problem, inputs)[0][0, :, 0]
