"""Backward by tiles: per key block a loop over query blocks and five products (S, dP, dV, dK, dQ), driven by a Plan.

The gradient of LSE needs no product of its own: dS = P * (dP - (rowsum(dO * O) - dLSE)).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tandem_attn.reference.chunk import Chunk, Dense, chunks
from tandem_attn.reference.numerics import accumulator_dtype, exp_, round_to
from tandem_attn.spec.bands import BlockRange
from tandem_attn.spec.inputs import Gradients
from tandem_attn.spec.plan import Plan


def backward(dense: Dense, plan: Plan, out: Tensor, lse: Tensor, grad_out: Tensor, grad_lse: Tensor | None) -> Gradients:
    """Gradients of a group: out and grad_out (B, Sq, H, Dv), lse and grad_lse (B, H, Sq)."""
    grads = _allocate(dense)
    for chunk in chunks(dense, plan.tile_m, plan.tile_n):
        state = _preprocess(chunk, out, lse, grad_out, grad_lse)
        for n_start in range(0, dense.seqlen_k, plan.tile_n):
            _key_block(chunk, plan, state, slice(n_start, min(n_start + plan.tile_n, dense.seqlen_k)), grads)
        _postprocess(chunk, state, grads)
    return grads


def _allocate(dense: Dense) -> Gradients:
    acc = accumulator_dtype(dense.q.dtype)

    def extra(x: Tensor | None) -> Tensor | None:
        return None if x is None else torch.zeros_like(x, dtype=acc, memory_format=torch.contiguous_format)

    q, k, v = (torch.zeros(x.shape, dtype=x.dtype, device=x.device) for x in (dense.q, dense.k, dense.v))
    return Gradients(q=q, k=k, v=v, sink=extra(dense.sink), alibi_slopes=extra(dense.alibi_slopes), bias=extra(dense.bias))


@dataclass(frozen=True)
class _State:
    """Operands of a chunk in the accumulator dtype, and dQ's float32 accumulator."""

    q: Tensor  # (chunk, group, Sq, D)
    k: Tensor  # (chunk, Sk, D)
    v: Tensor
    grad_out: Tensor  # (chunk, group, Sq, Dv)
    lse: Tensor  # (chunk, group, Sq), +inf where no key was seen
    delta: Tensor  # (chunk, group, Sq): rowsum(dO * O) - dLSE
    grad_q: Tensor  # (chunk, group, Sq, D)


def _preprocess(chunk: Chunk, out: Tensor, lse: Tensor, grad_out: Tensor, grad_lse: Tensor | None) -> _State:
    q, d_out = chunk.query_rows(chunk.dense.q), chunk.query_rows(grad_out)

    def rows(x: Tensor) -> Tensor:
        return x[chunk.batch, chunk.heads].reshape(*q.shape[:3])

    delta = (d_out * chunk.query_rows(out)).sum(-1)
    if grad_lse is not None:
        delta -= rows(grad_lse)
    safe_lse = torch.where(torch.isneginf(rows(lse)), float("inf"), rows(lse))  # then P = e^-inf = 0
    # A row without keys has LSE = -inf whatever q is: the gradient that arrives there (dLSE) leads nowhere.
    return _State(q, chunk.key_rows(chunk.dense.k), chunk.key_rows(chunk.dense.v), d_out, safe_lse, delta, torch.zeros_like(q))


def _key_block(chunk: Chunk, plan: Plan, state: _State, n: slice, grads: Gradients) -> None:
    dense = chunk.dense
    if dense.lens_q is None:
        visit = dense.problem.mask.m_block_range(n.start, n.stop, plan.tile_m, dense.seqlen_q, dense.seqlen_k)
    else:
        visit = BlockRange(0, 0, 0, -(-dense.seqlen_q // plan.tile_m))
    k, v = state.k[:, n], state.v[:, n]
    grad_k, grad_v = torch.zeros_like(k), torch.zeros_like(v)
    for m_block in range(visit.start, visit.stop):
        m = slice(m_block * plan.tile_m, min((m_block + 1) * plan.tile_m, dense.seqlen_q))
        sees = None if visit.is_full(m_block) else chunk.sees(m, n)
        if sees is not None and k.device.type == "cpu" and not bool(sees.any()):
            continue
        _tile(chunk, plan, state, m, n, sees, grad_k, grad_v, grads)
    _store(chunk, grads.k, n, grad_k * dense.problem.scale_value)
    _store(chunk, grads.v, n, grad_v)


def _tile(
    chunk: Chunk, plan: Plan, state: _State, m: slice, n: slice, sees: Tensor | None, grad_k: Tensor, grad_v: Tensor, grads: Gradients
) -> None:
    q, d_out = state.q[:, :, m].flatten(1, 2), state.grad_out[:, :, m].flatten(1, 2)
    k, v = state.k[:, n], state.v[:, n]
    dtype = chunk.dense.q.dtype
    s, capped = chunk.scores(q, k, m, n, sees)
    s.sub_(state.lse[:, :, m].flatten(1)[..., None]).clamp_(max=0)  # P <= 1, also where one rounding of a huge logit exceeds any exponent
    p = exp_(s, plan.exp2)
    grad_v.baddbmm_(round_to(p, dtype).transpose(1, 2), d_out)
    grad_p = torch.bmm(d_out, v.transpose(1, 2))
    grad_s = grad_p.sub_(state.delta[:, :, m].flatten(1)[..., None]).mul_(p)
    _extra_gradients(chunk, grad_s, m, n, grads)
    if capped is not None:
        grad_s.mul_(1 - capped.square())
    grad_s = round_to(grad_s, dtype)
    grad_k.baddbmm_(grad_s.transpose(1, 2), q)
    state.grad_q[:, :, m] += torch.bmm(grad_s, k).unflatten(1, (chunk.group, -1))


def _extra_gradients(chunk: Chunk, grad_s: Tensor, m: slice, n: slice, grads: Gradients) -> None:
    shown = grad_s.view(*chunk.grid, m.stop - m.start, n.stop - n.start)
    if grads.bias is not None:
        target = chunk.bias_tile(grads.bias, m, n)
        target += shown.sum_to_size(target.shape)
    if grads.alibi_slopes is not None:
        target = chunk.per_head(grads.alibi_slopes)
        target -= (shown * chunk.distance(m, n)).sum_to_size(target.shape)


def _store(chunk: Chunk, into: Tensor, n: slice, value: Tensor) -> None:
    rows = value.view(chunk.grid[0], chunk.grid[1], *value.shape[1:])
    into[chunk.batch, n, chunk.kv_heads] = rows.transpose(1, 2).to(into.dtype)


def _postprocess(chunk: Chunk, state: _State, grads: Gradients) -> None:
    rows = chunk.heads_first(state.grad_q * chunk.dense.problem.scale_value)
    grads.q[chunk.batch, :, chunk.heads] = rows.transpose(1, 2).to(grads.q.dtype)
    if grads.sink is not None:
        assert chunk.dense.sink is not None  # both or neither
        sink = chunk.per_head(chunk.dense.sink).to(state.lse.dtype)
        lse = state.lse.view(*chunk.grid, -1)
        weight = torch.exp(sink[..., 0] - lse)  # the sink's probability; its own dP is 0
        grads.sink[chunk.heads] -= (weight * state.delta.view_as(lse)).sum((0, 3)).flatten()
