"""The forward around a kernel, on any device: tensors as the kernel wants them, its outputs, and what needs no kernel."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from tandem_attn.kernels.prepare import aligned, kv_is_ragged, q_is_ragged
from tandem_attn.spec.inputs import Inputs
from tandem_attn.spec.plan import Plan
from tandem_attn.spec.problem import Problem

Execute = Callable[[Problem, Plan, Inputs, Tensor, Tensor], None]  # runs the kernel, which fills O and LSE


def attend(problem: Problem, plan: Plan, inputs: Inputs, execute: Execute) -> tuple[Tensor, Tensor]:
    """O, shaped as q with last size head_dim_v, and LSE (B, H, Sq) or (H, total_q), float32, natural log."""
    inputs = _readable(plan, _one_page_each(plan, inputs))
    q, k, v = inputs.q, inputs.k, inputs.v
    *rows, heads, _ = q.shape
    out = torch.empty(*rows, heads, v.shape[-1], dtype=getattr(torch, problem.out_dtype), device=q.device)
    lse = torch.empty(*rows[:-1], heads, rows[-1], dtype=torch.float32, device=q.device)
    no_keys = k.shape[-3] == 0 or (inputs.page_table is not None and 0 in (k.shape[0], inputs.page_table.shape[1]))
    if problem.varlen or no_keys:  # the kernel writes only rows of sequences that it visits
        out.zero_()
        lse.fill_(float("-inf"))
    if lse.numel() == 0 or problem.batch == 0:  # packed rows may lie behind no sequence at all
        return out, lse
    if no_keys:
        return out, _sinks_alone(problem, inputs, lse)
    execute(problem, plan, inputs, out, lse)
    return out, lse


def _one_page_each(plan: Plan, inputs: Inputs) -> Inputs:
    """Pages that no copy of the plan fits into are gathered: then each sequence has one page."""
    table, page_size = inputs.page_table, inputs.k.shape[-3]
    if table is None or not table.numel() or not inputs.k.numel():
        return inputs
    if table.shape[1] == 1 or (page_size % plan.page_rows == 0 and not plan.leftpad):
        return inputs
    pages = table.long().clamp(0, inputs.k.shape[0] - 1)
    k, v = (x[pages].flatten(1, 2) for x in (inputs.k, inputs.v))
    own = torch.arange(table.shape[0], dtype=torch.int32, device=table.device)[:, None]
    return replace(inputs, k=k, v=v, page_table=own)


def _readable(plan: Plan, inputs: Inputs) -> Inputs:
    q = aligned(inputs.q, ragged=q_is_ragged(plan))
    k, v = (aligned(x, ragged=kv_is_ragged(plan)) for x in (inputs.k, inputs.v))
    if q is inputs.q and k is inputs.k and v is inputs.v:
        return inputs
    return replace(inputs, q=q, k=k, v=v)


def _sinks_alone(problem: Problem, inputs: Inputs, lse: Tensor) -> Tensor:
    """LSE of rows without keys."""
    if inputs.sink is None:
        return lse
    if not problem.varlen and inputs.seqused_q is None:
        return lse.copy_(inputs.sink.float()[:, None].expand_as(lse))
    in_use = _rows_in_use(problem, inputs, lse.shape[-1])
    return torch.where(in_use, inputs.sink.float()[:, None], lse)


def _rows_in_use(problem: Problem, inputs: Inputs, rows: int) -> Tensor:
    """Which rows a sequence uses: (B, 1, Sq), or (total_q,) of packed tensors."""
    at = torch.arange(rows, device=inputs.q.device)
    if inputs.cu_seqlens_q is None:
        assert inputs.seqused_q is not None  # narrows the type: the caller checked
        return at < inputs.seqused_q[:, None, None]
    lengths = inputs.cu_seqlens_q.diff()
    used = lengths if inputs.seqused_q is None else torch.minimum(lengths, inputs.seqused_q)
    which = torch.searchsorted(inputs.cu_seqlens_q[1:], at, right=True).clamp(max=problem.batch - 1)
    return (at < inputs.cu_seqlens_q[-1]) & (at - inputs.cu_seqlens_q[which] < used[which])
