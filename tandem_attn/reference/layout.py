"""Layouts: padded, packed and paged calls as groups of equally long sequences.

The tiled core knows one form only: a dense batch (B, S, heads, D). On a CPU the lengths are read and sequences of equal lengths form
one group, so no padding is computed and nothing beyond a length is touched. On other devices lengths are never read (no host
synchronisation): one group is padded to the upper bound, and rows beyond a length are replaced by zeros before any arithmetic, since
they may hold NaN.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from tandem_attn.spec.inputs import Inputs
from tandem_attn.spec.problem import Problem

Rows = tuple[Tensor, ...]  # an index that turns a tensor of the call into (members, length, heads, D); empty: the tensor is that already


@dataclass(frozen=True, kw_only=True)
class Group:
    """Sequences computed together.

    ``members`` are their batch indices; ``len_q`` and ``len_k`` their common lengths, or upper bounds where ``lens_q``, ``lens_k`` (int
    tensors, one a member) hold the true ones.
    """

    members: Tensor
    len_q: int
    len_k: int
    q_rows: Rows
    k_rows: Rows
    lens_q: Tensor | None = None
    lens_k: Tensor | None = None


def groups(problem: Problem, inputs: Inputs) -> Iterator[Group]:
    """Groups that cover every sequence of the call once."""
    if _uniform(inputs):
        members = torch.arange(problem.batch, device=inputs.q.device)
        yield Group(members=members, len_q=problem.seqlen_q, len_k=problem.seqlen_k, q_rows=(), k_rows=())
    elif inputs.q.device.type == "cpu":
        yield from _equal_lengths(problem, inputs)
    else:
        yield _upper_bound(problem, inputs)


def host_groups(problem: Problem, inputs: Inputs) -> Iterator[Group]:
    """Groups of equally long sequences on any device; reads the lengths, so it waits for the device."""
    yield from groups(problem, inputs) if _uniform(inputs) else _equal_lengths(problem, inputs)


def _uniform(inputs: Inputs) -> bool:
    return inputs.cu_seqlens_q is None and inputs.seqused_q is None and inputs.seqused_k is None and inputs.page_table is None


def _starts_and_lengths(problem: Problem, inputs: Inputs) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(q_start, q_length, k_start, k_length) of every sequence as int64 tensors; starts are rows of packed tensors, else 0."""
    device = inputs.q.device
    zeros = torch.zeros(problem.batch, dtype=torch.int64, device=device)

    def side(cu: Tensor | None, used: Tensor | None, padded: int) -> tuple[Tensor, Tensor]:
        start = zeros if cu is None else cu[:-1].long()
        length = zeros + padded if cu is None else cu[1:].long() - start
        return start, length if used is None else torch.minimum(length, used.long())

    q_start, q_length = side(inputs.cu_seqlens_q, inputs.seqused_q, problem.seqlen_q)
    k_start, k_length = side(inputs.cu_seqlens_k, inputs.seqused_k, problem.seqlen_k)
    if inputs.page_table is not None:
        k_start = zeros if inputs.leftpad is None else inputs.leftpad.long()
        k_length = (k_length - k_start).clamp(min=0)
    return q_start, q_length, k_start, k_length


def _rows(start: Tensor, length: int, packed: bool, members: Tensor, limit: int) -> Rows:
    at = start[:, None] + torch.arange(length, device=start.device)
    at = at.clamp(max=max(limit - 1, 0))
    return (at,) if packed else (members[:, None], at)


def _paged_rows(start: Tensor, length: int, members: Tensor, inputs: Inputs) -> Rows:
    assert inputs.page_table is not None  # narrows the type; the caller checked
    page_size, pages = inputs.k.shape[1], inputs.k.shape[0]
    at = start[:, None] + torch.arange(length, device=start.device)
    column = (at // page_size).clamp(max=inputs.page_table.shape[1] - 1)
    page = inputs.page_table.long()[members[:, None], column].clamp(0, max(pages - 1, 0))
    return (page, at % page_size)


def _k_rows(problem: Problem, inputs: Inputs, start: Tensor, length: int, members: Tensor) -> Rows:
    if inputs.page_table is not None:
        return _paged_rows(start, length, members, inputs)
    limit = problem.total_k if problem.varlen else problem.seqlen_k
    return _rows(start, length, problem.varlen, members, limit)


def _q_rows(problem: Problem, start: Tensor, length: int, members: Tensor) -> Rows:
    return _rows(start, length, problem.varlen, members, problem.total_q if problem.varlen else problem.seqlen_q)


def _equal_lengths(problem: Problem, inputs: Inputs) -> Iterator[Group]:
    q_start, q_length, k_start, k_length = _starts_and_lengths(problem, inputs)
    by_length: dict[tuple[int, int], list[int]] = defaultdict(list)
    for b, pair in enumerate(zip(q_length.tolist(), k_length.tolist(), strict=True)):
        by_length[pair].append(b)
    for (len_q, len_k), batch in by_length.items():
        if len_q == 0:  # its keys get no gradient and nobody reads its output
            continue
        members = torch.tensor(batch, device=inputs.q.device)
        q_rows = _q_rows(problem, q_start[members], len_q, members)
        k_rows = _k_rows(problem, inputs, k_start[members], len_k, members)
        yield Group(members=members, len_q=len_q, len_k=len_k, q_rows=q_rows, k_rows=k_rows)


def _upper_bound(problem: Problem, inputs: Inputs) -> Group:
    q_start, q_length, k_start, k_length = _starts_and_lengths(problem, inputs)
    members = torch.arange(problem.batch, device=inputs.q.device)
    len_q, len_k = _bound(problem.seqlen_q, inputs.bias, 2), _bound(problem.seqlen_k, inputs.bias, 3)
    return Group(
        members=members,
        len_q=len_q,
        len_k=len_k,
        q_rows=_q_rows(problem, q_start, len_q, members),
        k_rows=_k_rows(problem, inputs, k_start, len_k, members),
        lens_q=q_length,
        lens_k=k_length,
    )


def _bound(longest: int, bias: Tensor | None, dim: int) -> int:
    """A bias is as long as the longest sequence, so it bounds the lengths too."""
    return longest if bias is None or bias.shape[dim] == 1 else min(longest, bias.shape[dim])


def gather(x: Tensor, rows: Rows, lens: Tensor | None) -> Tensor:
    """(members, length, heads, D) of a call's tensor; rows beyond ``lens`` become zero."""
    taken = x[rows] if rows else x
    if lens is None:
        return taken
    valid = torch.arange(taken.shape[1], device=x.device) < lens[:, None]
    return torch.where(valid[:, :, None, None], taken, torch.zeros((), dtype=x.dtype, device=x.device))


def descaled(x: Tensor, descale: Tensor | None, members: Tensor) -> Tensor:
    """What 8-bit x (members, length, heads, D) stands for, in float32; ``descale`` is (B, Hkv). Wider tensors as they are."""
    if x.dtype.itemsize > 1:
        return x
    wide = x.to(torch.float32)
    return wide if descale is None else wide * of_heads(descale[members], x.shape[2])[:, None, :, None]


def of_heads(descale: Tensor, heads: int) -> Tensor:
    """(..., Hkv) for ``heads`` heads, query heads that share a KV head being neighbours."""
    return descale.repeat_interleave(heads // descale.shape[-1], dim=-1)


def blank(problem: Problem, like: Tensor, width: int, fill: float, dtype: torch.dtype) -> Tensor:
    """A tensor to scatter into, shaped as ``like`` with last size ``width``; packed ones have one spare row, see ``scatter``."""
    rows = (like.shape[0] + 1,) if problem.varlen else like.shape[:2]
    return torch.full((*rows, like.shape[-2], width), fill, dtype=dtype, device=like.device)


def scatter(x: Tensor, rows: Rows, lens: Tensor | None, value: Tensor) -> None:
    """Writes ``value`` (members, length, heads, D) where ``gather`` read it; rows beyond ``lens`` are left alone."""
    if lens is None:
        x[rows or ...] = value
        return
    valid = torch.arange(value.shape[1], device=x.device) < lens[:, None]
    if len(rows) == 2:  # padded: what lies beyond a length belongs to the same sequence
        x[rows] = torch.where(valid[:, :, None, None], value, x[rows])
    else:  # packed: it belongs to the next sequence, so it goes to the spare last row
        x[(torch.where(valid, rows[0], x.shape[0] - 1),)] = value
