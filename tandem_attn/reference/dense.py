"""Attention written down directly: the truth (float64) that every backend is judged by, and the plain computation they must not fall
behind.

One sequence at a time, the whole score matrix in memory, gradients by autograd. Slow, and meant to be obviously right.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tandem_attn.reference.layout import Rows, host_groups, of_heads
from tandem_attn.spec.inputs import Inputs
from tandem_attn.spec.problem import Problem


def attention(
    problem: Problem, inputs: Inputs, dtype: torch.dtype = torch.float64, weights: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """O and LSE, every operation in ``dtype``; differentiable with respect to all floating-point inputs.

    Shapes as the API returns them. With ``dtype=torch.float64`` this is the truth; with the inputs' own dtype it is "the same
    computation done plainly in PyTorch", the yardstick of the contract's accuracy rule. ``weights``: an 8-bit dtype that
    the weights are rounded to, the largest of each row being 2^8 then.
    """
    out = torch.zeros(*inputs.q.shape[:-1], problem.head_dim_v, dtype=dtype, device=inputs.q.device)
    lse = torch.full((*inputs.q.shape[:-1], 1), float("-inf"), dtype=dtype, device=inputs.q.device)
    for group in host_groups(problem, inputs):
        for i, b in enumerate(group.members.tolist()):
            q, k, v = inputs.q[_one(group.q_rows, i)], inputs.k[_one(group.k_rows, i)], inputs.v[_one(group.k_rows, i)]
            numbers = (inputs.q_descale, inputs.k_descale, inputs.v_descale)
            q, k, v = (_meant(x.to(dtype), number, b) for x, number in zip((q, k, v), numbers, strict=True))
            sequence_out, sequence_lse = _sequence(problem, inputs, b, q, k, v, weights)
            rows = _one(group.q_rows, i)
            out = out.index_put(rows, sequence_out)
            lse = lse.index_put(rows, sequence_lse.unsqueeze(-1))
    return out, lse.squeeze(-1).transpose(-1, -2)


def _one(rows: Rows, i: int) -> tuple[Tensor, ...]:
    """The index of a group's i-th sequence: it yields (length, heads, D)."""
    if not rows:
        return (torch.tensor(i),)
    return tuple(torch.broadcast_to(part, rows[-1].shape)[i] for part in rows)


def _meant(x: Tensor, descale: Tensor | None, b: int) -> Tensor:
    """x (length, heads, D) of sequence b times its descales (B, Hkv)."""
    return x if descale is None else x * of_heads(descale[b].to(x.dtype), x.shape[1])[:, None]


def _sequence(
    problem: Problem, inputs: Inputs, b: int, q: Tensor, k: Tensor, v: Tensor, weights: torch.dtype | None
) -> tuple[Tensor, Tensor]:
    """One sequence: q (Sq, H, D), k (Sk, Hkv, D), v (Sk, Hkv, Dv) -> O (Sq, H, Dv), LSE (Sq, H)."""
    k, v = (x.repeat_interleave(problem.heads_per_kv, dim=1) for x in (k, v))
    s = torch.einsum("qhd,khd->hqk", q, k) * problem.scale_value
    if problem.softcap:
        s = problem.softcap * torch.tanh(s / problem.softcap)
    s = _biased(s, inputs, b)
    seen = _seen(problem, b, s)
    columns = [torch.where(seen, s, float("-inf"))]
    if inputs.sink is not None:
        columns.append(inputs.sink.to(s.dtype)[:, None, None].expand(-1, s.shape[1], 1))
    logits = torch.cat(columns, dim=-1)
    alive = (logits != float("-inf")).any(-1, keepdim=True)  # rows that see a key or a sink
    logits = torch.where(alive, logits, 0.0)  # softmax of an all -inf row would be NaN, and so its gradients
    p = torch.where(alive, torch.softmax(logits, dim=-1), 0.0)[..., : s.shape[-1]]
    lse = torch.where(alive.squeeze(-1), torch.logsumexp(logits, dim=-1), float("-inf"))
    if weights is not None:
        p = _rounded(p, weights)
    return torch.einsum("hqk,khd->qhd", p, v), lse.transpose(0, 1)


def _rounded(p: Tensor, dtype: torch.dtype) -> Tensor:
    """p (H, Sq, Sk) with the precision of an 8-bit dtype that holds each row's largest element as 2^8."""
    if not p.numel():
        return p
    top = p.amax(-1, keepdim=True)
    unit = torch.where(top > 0, top, 1.0) / 256
    return (p / unit).to(dtype).to(p.dtype) * unit


def _biased(s: Tensor, inputs: Inputs, b: int) -> Tensor:
    seqlen_q, seqlen_k = s.shape[1:]
    if inputs.bias is not None:
        bias = inputs.bias[b if inputs.bias.shape[0] > 1 else 0]
        s = s + bias[:, :seqlen_q, :seqlen_k].to(s.dtype)
    if inputs.alibi_slopes is not None:
        slopes = inputs.alibi_slopes[b] if inputs.alibi_slopes.ndim == 2 else inputs.alibi_slopes
        i, j = _positions(s)
        s = s - slopes.to(s.dtype)[:, None, None] * (i + (seqlen_k - seqlen_q) - j).abs()
    return s


def _positions(s: Tensor) -> tuple[Tensor, Tensor]:
    return torch.arange(s.shape[1], device=s.device)[:, None], torch.arange(s.shape[2], device=s.device)


def _seen(problem: Problem, b: int, s: Tensor) -> Tensor:
    """Which keys each query sees, (H, Sq, Sk)."""
    i, j = _positions(s)
    h = torch.arange(s.shape[0], device=s.device)[:, None, None]
    seen = problem.mask.allowed(torch.as_tensor(b, device=s.device), h, i, j, s.shape[1], s.shape[2])
    return torch.as_tensor(seen, device=s.device).expand(s.shape)
