"""Forward by tiles, in the order and with the roundings of the kernels (FlashAttention-4, algorithm 1), driven by a Plan.

Scores, maxima and LSE stay in natural units, where the kernels fold log2(e) into the scale: the largest finite logits (a bias of
``torch.finfo(dtype).min``, say) would leave float32 in log2 units, and LSE comes back from memory exactly as it was made.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from tandem_attn.reference.chunk import Chunk, Dense, chunks
from tandem_attn.reference.numerics import accumulator_dtype, exp_, finite_or_zero, next_max, round_to
from tandem_attn.spec.bands import BlockRange
from tandem_attn.spec.plan import Plan

Partial = tuple[Tensor, Tensor, Tensor]  # acc_O (chunk, group * M, Dv), row_max and row_sum (chunk, group, M)


def forward(dense: Dense, plan: Plan) -> tuple[Tensor, Tensor]:
    """O (B, Sq, H, Dv) in the call's dtype of O and LSE (B, H, Sq), natural log, in the accumulator dtype."""
    batch, seqlen_q, heads = dense.q.shape[:3]
    out = dense.q.new_empty(batch, seqlen_q, heads, dense.problem.head_dim_v, dtype=getattr(torch, dense.problem.out_dtype))
    lse = torch.empty(batch, heads, seqlen_q, dtype=accumulator_dtype(dense.q.dtype), device=dense.q.device)
    for chunk in chunks(dense, plan.tile_m, plan.tile_n):
        q, k, v = chunk.query_rows(dense.q), chunk.key_rows(dense.k), chunk.key_rows(dense.v)
        for m_start in range(0, seqlen_q, plan.tile_m):
            m = slice(m_start, min(m_start + plan.tile_m, seqlen_q))
            tile_out, tile_lse = _finalize(chunk, *_work_item(chunk, plan, q[:, :, m].flatten(1, 2), k, v, m))
            out[chunk.batch, m, chunk.heads] = chunk.heads_first(tile_out).transpose(1, 2).to(out.dtype)
            lse[chunk.batch, chunk.heads, m] = chunk.heads_first(tile_lse)
    return out, lse


def _work_item(chunk: Chunk, plan: Plan, q: Tensor, k: Tensor, v: Tensor, m: slice) -> Partial:
    """All keys for one query tile: one loop, or ``num_splits`` loops over parts of the keys and their combination."""
    dense = chunk.dense
    if dense.lens_k is None:
        visit = dense.problem.mask.n_block_range(m.start, m.stop, plan.tile_n, dense.seqlen_q, dense.seqlen_k)
    else:  # lengths are on the device: visit everything, mask every block
        visit = BlockRange(0, 0, 0, -(-dense.seqlen_k // plan.tile_n))
    if plan.num_splits == 1:
        return _loop(chunk, plan, q, k, v, m, visit, range(visit.start, visit.stop))
    share = -(-len(visit) // plan.num_splits)
    starts = [min(visit.start + i * share, visit.stop) for i in range(plan.num_splits + 1)]
    return _combine([_loop(chunk, plan, q, k, v, m, visit, range(a, b)) for a, b in itertools.pairwise(starts)])


def _loop(chunk: Chunk, plan: Plan, q: Tensor, k: Tensor, v: Tensor, m: slice, visit: BlockRange, blocks: range) -> Partial:
    """Online softmax over key blocks, the last block first as in the kernels: the mask lies there."""
    acc = q.new_zeros(q.shape[0], q.shape[1], v.shape[2])
    row_max = q.new_full((q.shape[0], chunk.group, m.stop - m.start), float("-inf"))
    row_sum = torch.zeros_like(row_max)
    operand = getattr(torch, plan.dtype)
    on_host = q.device.type == "cpu"  # elsewhere a decision by value would synchronise
    for n_block in reversed(blocks):
        n = slice(n_block * plan.tile_n, min((n_block + 1) * plan.tile_n, k.shape[1]))
        sees = None if visit.is_full(n_block) else chunk.sees(m, n)
        if on_host and sees is not None and not bool(sees.any()):
            continue
        s, _ = chunk.scores(q, k[:, n], m, n, sees)
        new_max = next_max(row_max, s.amax(-1).view_as(row_max), plan.rescale_threshold, plan.rescale_rows)
        safe_max = finite_or_zero(new_max)
        p = exp_(s.sub_(safe_max.flatten(1)[..., None]), plan.exp2)
        alpha = torch.exp(row_max - safe_max)
        row_sum = row_sum * alpha + p.sum(-1).view_as(row_sum)
        if not on_host or bool((alpha != 1).any()):
            acc.mul_(alpha.flatten(1)[..., None])
        acc.baddbmm_(round_to(p, operand, plan.p_exponent), v[:, n])
        row_max = new_max
    return acc, row_max, row_sum


def _combine(parts: Sequence[Partial]) -> Partial:
    """Partial results of a split work item as one: each part is normalised by itself, as the split kernels store it."""
    row_max = torch.stack([part[1] for part in parts]).amax(0)
    safe_max = finite_or_zero(row_max)
    acc, row_sum = torch.zeros_like(parts[0][0]), torch.zeros_like(row_max)
    for part_acc, part_max, part_sum in parts:
        out = part_acc / torch.where(part_sum == 0, 1, part_sum).flatten(1)[..., None]
        weight = part_sum * torch.exp(part_max - safe_max)
        acc += out * weight.flatten(1)[..., None]
        row_sum += weight
    return acc, row_max, row_sum


def _finalize(chunk: Chunk, acc: Tensor, row_max: Tensor, row_sum: Tensor) -> tuple[Tensor, Tensor]:
    """Normalised O (chunk, group, M, Dv) and LSE (chunk, group, M). A row without keys gives 0 and -inf, with a sink 0 and the sink."""
    if chunk.dense.sink is not None:
        sink = _sink_rows(chunk, row_max)
        new_max = torch.maximum(row_max, sink)
        safe_max = finite_or_zero(new_max)
        alpha = torch.exp(row_max - safe_max)
        acc = acc * alpha.flatten(1)[..., None]
        row_sum = row_sum * alpha + torch.exp(sink - safe_max)
        row_max = new_max
    out = acc.view(*row_sum.shape, -1) / torch.where(row_sum == 0, 1, row_sum)[..., None]
    return out, row_max + row_sum.log()


def _sink_rows(chunk: Chunk, like: Tensor) -> Tensor:
    """The sink logits, broadcast to (chunk, group, M)."""
    assert chunk.dense.sink is not None  # narrows the type; the caller checked
    sink = chunk.per_head(chunk.dense.sink).to(like.dtype)
    return sink.expand(*chunk.grid, 1, 1).reshape(-1, chunk.group, 1).expand_as(like)
