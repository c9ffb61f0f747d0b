"""Attention of one sequence and of a whole call, written a second time: nothing here comes from ``tandem_attn``.

In float64 it is the truth, in a case's own dtype the plain computation whose error sets the bound. 8-bit inputs stand for themselves times
their descales.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from tests.support.cases import Call, Case


def results(call: Call, dtype: torch.dtype, weights: torch.dtype | None = None) -> dict[str, Tensor]:
    """``out``, ``lse`` and the gradients ``dq``, ``dk``, ... of a call, every operation in ``dtype``.

    ``weights``: an 8-bit dtype that each row's weights are rounded to for the product with V, times what makes the largest of them 2^8.
    """
    leaves = {name: x.detach().to(dtype, copy=True).requires_grad_(call.case.needs_backward) for name, x in call.leaves.items()}
    keys, values = (leaves["k"], leaves["v"]) if call.cache_after is None else (x.to(dtype) for x in call.cache_after)
    q = leaves["q"]
    out = torch.zeros(*q.shape[:-1], values.shape[-1], dtype=dtype)
    lse = torch.full(q.shape[:-1], float("-inf"), dtype=dtype)
    for b, at_q, at_k in call.sequences:
        operands = _meant(call, b, q[at_q], keys[at_k], values[at_k])
        out[at_q], lse[at_q] = _sequence(call, b, *operands, leaves, weights)[:2]
    lse = lse.transpose(-1, -2)
    found = {"out": out.detach(), "lse": lse.detach()}
    if call.case.needs_backward:
        found |= _gradients(call, dtype, leaves, out, lse)
    return found


def _gradients(call: Call, dtype: torch.dtype, leaves: dict[str, Tensor], out: Tensor, lse: Tensor) -> dict[str, Tensor]:
    arriving = [(out, call.grad_out), (lse, call.grad_lse)]
    # NaN may stand in the gradient of rows that are not in use: those rows of ``out`` are constants here, but NaN * 0 is NaN.
    pairs = [(x, g.to(dtype).nan_to_num(0.0)) for x, g in arriving if g is not None and x.requires_grad]
    if not pairs:
        return {f"d{name}": torch.zeros_like(x) for name, x in leaves.items()}
    grads = torch.autograd.grad(
        [x for x, _ in pairs], list(leaves.values()), [g for _, g in pairs], allow_unused=True, materialize_grads=True
    )
    return {f"d{name}": grad for name, grad in zip(leaves, grads, strict=True)}


def magnitudes(call: Call) -> dict[str, Tensor]:
    """Size of each gradient's sums before anything cancels: the gradients with every summand's absolute value. For O, the largest of V.

    A backward pass that knows P only through LSE (float32 by contract) has a relative error of 1 + |LSE| roundings in each summand, also
    where the sum is zero (the gradient of a bias that is constant along the keys, say).
    """
    leaves = {name: x.detach().double().abs().requires_grad_() for name, x in call.leaves.items()}
    exact = {name: x.detach().double() for name, x in call.leaves.items()}
    total = torch.zeros((), dtype=torch.float64)
    largest = torch.zeros((), dtype=torch.float64)
    for b, at_q, at_k in call.sequences:
        q, k, v = _meant(call, b, exact["q"][at_q], exact["k"][at_k], exact["v"][at_k])
        out, lse, p = _sequence(call, b, q, k, v, exact)
        largest = max(largest, v.abs().amax()) if v.numel() else largest
        total = total + _summands(call, b, (at_q, at_k), leaves, (out, lse, p))
    found = {"out": largest.expand(*call.leaves["q"].shape[:-1], call.case.width_v)}
    if not total.requires_grad:
        return found | {f"d{name}": torch.zeros_like(x) for name, x in leaves.items()}
    grads = torch.autograd.grad(total, list(leaves.values()), allow_unused=True, materialize_grads=True)
    return found | {f"d{name}": grad for name, grad in zip(leaves, grads, strict=True)}


def _summands(call: Call, b: int, at: tuple[Any, Any], leaves: dict[str, Tensor], found: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """A number whose gradients are the sums of absolute values of one sequence."""
    case, (out, lse, p) = call.case, found
    q, k, v = _meant(call, b, leaves["q"][at[0]], leaves["k"][at[1]], leaves["v"][at[1]])
    of_head = torch.arange(case.heads) // (case.heads // case.heads_kv)
    k, v = k[:, of_head], v[:, of_head]
    d_out = torch.zeros_like(out) if call.grad_out is None else call.grad_out[at[0]].double().abs()
    d_lse = torch.zeros_like(lse) if call.grad_lse is None else call.grad_lse.transpose(-1, -2)[at[0]].double().abs()
    noise = (1 + lse.nan_to_num(0.0, 0.0, 0.0).abs()).T[..., None]
    delta = ((d_out * out.abs()).sum(-1) + d_lse).T[..., None]
    weighted = p[..., : k.shape[0]] * noise
    d_s = weighted * (torch.einsum("qhd,khd->hqk", d_out, v.detach()) + delta)
    scale = abs(case.head_dim**-0.5 if case.scale is None else case.scale)
    s = torch.einsum("qhd,khd->hqk", q, k) * scale + _bias(case, b, leaves, s_like=d_s) + _alibi(case, b, leaves, s_like=d_s)
    total = (d_s * s).sum() + (weighted * torch.einsum("qhd,khd->hqk", d_out, v)).sum()
    if "sink" in leaves:
        total = total + (p[..., -1:] * noise * delta * leaves["sink"][:, None, None]).sum()
    return total


def _bias(case: Case, b: int, leaves: dict[str, Tensor], s_like: Tensor) -> Tensor:
    if "bias" not in leaves:
        return s_like.new_zeros(())
    heads, seqlen_q, seqlen_k = s_like.shape
    longest = (max(a, n) for a, n in zip(leaves["bias"].shape[2:], (seqlen_q, seqlen_k), strict=True))
    return leaves["bias"].expand(case.batch, heads, *longest)[b, :, :seqlen_q, :seqlen_k]


def _alibi(case: Case, b: int, leaves: dict[str, Tensor], s_like: Tensor) -> Tensor:
    if "alibi_slopes" not in leaves:
        return s_like.new_zeros(())
    heads, seqlen_q, seqlen_k = s_like.shape
    i, j = torch.arange(seqlen_q)[:, None], torch.arange(seqlen_k)[None, :]
    slopes = leaves["alibi_slopes"].expand(case.batch, heads)[b]
    return slopes[:, None, None] * (i + seqlen_k - seqlen_q - j).abs().to(s_like.dtype)


def _meant(call: Call, b: int, *operands: Tensor) -> list[Tensor]:
    """q, k and v (S, heads, D) of sequence b, each head times the descale of its KV head."""
    return [_times(call, b, x, call.arguments.get(f"{name}_descale")) for name, x in zip("qkv", operands, strict=True)]


def _times(call: Call, b: int, x: Tensor, descale: Tensor | None) -> Tensor:
    if descale is None:
        return x
    of_kv_heads = descale.expand(call.case.batch, call.case.heads_kv)[b].to(x.dtype)
    return x * of_kv_heads.repeat_interleave(x.shape[1] // call.case.heads_kv)[:, None]


def _sequence(
    call: Call, b: int, q: Tensor, k: Tensor, v: Tensor, leaves: dict[str, Tensor], weights: torch.dtype | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """q (Sq, H, D), k (Sk, Hkv, D), v (Sk, Hkv, Dv) -> O (Sq, H, Dv), LSE (Sq, H), P (H, Sq, Sk or with a sink Sk + 1)."""
    case, heads, (seqlen_q, seqlen_k) = call.case, q.shape[1], (q.shape[0], k.shape[0])
    of_head = torch.arange(heads) // (heads // k.shape[1])
    k, v = k[:, of_head], v[:, of_head]
    i, j = torch.arange(seqlen_q)[:, None], torch.arange(seqlen_k)[None, :]
    s = (q.transpose(0, 1) @ k.permute(1, 2, 0)) * (case.head_dim**-0.5 if case.scale is None else case.scale)
    if case.softcap:
        s = torch.tanh(s / case.softcap) * case.softcap
    s = s + _bias(case, b, leaves, s_like=s) - _alibi(case, b, leaves, s_like=s)
    seen = torch.stack([call.sees(b, h, i, j, seqlen_q, seqlen_k).expand(seqlen_q, seqlen_k) for h in range(heads)])
    logits = s.masked_fill(~seen, float("-inf"))
    if "sink" in leaves:
        logits = torch.cat([logits, leaves["sink"][:, None, None].expand(heads, seqlen_q, 1)], -1)
    alive = torch.isfinite(logits.detach()).any(-1, keepdim=True) if logits.shape[-1] else torch.zeros(heads, seqlen_q, 1, dtype=torch.bool)
    safe = logits.masked_fill(~alive, 0.0)
    p = torch.softmax(safe, -1).masked_fill(~alive, 0.0)
    lse = _logsumexp(safe).masked_fill(~alive[..., 0], float("-inf"))
    of_keys = p[..., :seqlen_k]
    if weights is not None and seqlen_k:
        unit = of_keys.amax(-1, keepdim=True).clamp_min(torch.finfo(p.dtype).tiny) / 2.0**8
        of_keys = (of_keys / unit).to(weights).to(p.dtype) * unit
    return (of_keys @ v.transpose(0, 1)).transpose(0, 1), lse.transpose(0, 1), p


def _logsumexp(x: Tensor) -> Any:
    return torch.logsumexp(x, -1) if x.shape[-1] else x.sum(-1)
