"""The end of a tile: O and LSE, or a part of them, and whether the tile must be computed again."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from tandem_attn.kernels.common import packing, ptx, redo, splits
from tandem_attn.kernels.common.arguments import is_natural, lse_offset, natural_lse, unit, with_sink
from tandem_attn.kernels.sm90.block import rows_from, s_layout
from tandem_attn.kernels.sm90.visits import loops, own_blocks

WARPS = gl.constexpr(4)  # of a consumer
VERDICT = gl.constexpr(3)  # hardware barriers of the consumers behind those of the turns


@gluon.jit
def finish(plan: gl.constexpr, args, at, rank, work, row, state, o_slot, o_tail, again, index: gl.constexpr):
    """Normalises once, exactly, and writes O and LSE. A row without keys gives 0 and -inf, with a sink 0 and the sink."""
    layout: gl.constexpr = gl.SliceLayout(1, s_layout(plan))
    rows = rows_from(plan, row)
    queries = packing.queries(plan, rows)
    heads = packing.heads(plan, work.head, rows)
    row_sum = gl.convert_layout(gl.sum(state.row_sum, axis=1), layout)
    row_max = state.row_max
    overflowed = row_sum > redo.LARGEST_SUM
    if plan.sink:
        row_max, row_sum, share = with_sink(gl.load(args.sink + heads) * unit(plan), row_max, row_sum, is_natural(plan))
    else:
        share = gl.full([plan.tile_m], 1.0, gl.float32, layout)
    used = queries < work.seq.q.used  # row_sum is 0 for a row without keys, and NaN where an input was
    lse = gl.where(used & (row_sum != 0), natural_lse(plan, row_max, row_sum), float("-inf"))
    inverse = gl.where(used & (row_sum != 0), share / row_sum, 0.0)
    acc = _normalised(plan, state.acc, inverse, used)
    tma.store_wait(0)
    gl.barrier()
    o_slot.store(acc.to(args.o.dtype))
    if len(plan.head_dim_v_chunks) > 1:
        acc_tail = _normalised(plan, state.acc_tail, inverse, used)
        o_tail.store(acc_tail.to(args.o.dtype))
    fence_async_shared()
    gl.barrier()
    packing.store_outputs(plan, args, work.seq, work.head, row, o_slot, o_tail)
    first = args.lse + lse_offset(plan, args, work.seq.batch, heads)
    if plan.varlen:
        gl.store(first + work.seq.q.start + queries, lse, mask=packing.holds_query(plan, rows, used))
    else:
        gl.store(first + queries, lse, mask=packing.holds_query(plan, rows, queries < args.seqlen_q))
    if plan.fixed_max:
        if at.valid == redo.TILE:
            visit = own_blocks(plan, args, work, row)
            ends = loops(plan, args, at, work, row, visit)
            fixed = ends.whole_stop > ends.whole_start
            wrong = used & (_overflowed(plan, state.acc) | overflowed | ((state.row_max == float("-inf")) & fixed))
            if len(plan.head_dim_v_chunks) > 1:
                wrong = wrong | (used & _overflowed(plan, state.acc_tail))
            if ptx.any_row(VERDICT + index, wrong.to(gl.int32), WARPS * 32) > 0:  # the LSE is written now
                redo.link(plan, args, again, at, redo.own(plan, rank, index))


@gluon.jit
def _overflowed(plan: gl.constexpr, acc):
    """Rows with an element that is infinite or no number."""
    none = gl.convert_layout(gl.sum(acc * 0.0, axis=1), gl.SliceLayout(1, s_layout(plan)))
    return ~(none == 0.0)


@gluon.jit
def _normalised(plan: gl.constexpr, acc, inverse, used):
    rows: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
    acc = acc * gl.convert_layout(inverse, rows)[:, None]
    if plan.seqused and plan.pack_gqa > 1:  # rows that are not in use may be NaN, see packing
        acc = gl.where(gl.convert_layout(used, rows)[:, None], acc, 0.0)
    return acc


@gluon.jit
def finish_part(plan: gl.constexpr, args, work, row, state):
    """Writes what a part of the keys gives, see ``splits``; sinks join with the parts."""
    layout: gl.constexpr = gl.SliceLayout(1, s_layout(plan))
    rows = rows_from(plan, row)
    queries = packing.queries(plan, rows)
    heads = packing.heads(plan, work.head, rows)
    used = queries < work.seq.q.used
    exists = packing.holds_query(plan, rows, used if plan.varlen else queries < args.seqlen_q)
    first = work.seq.q.start if plan.varlen else work.seq.batch * args.seqlen_q
    row_sum = gl.convert_layout(gl.sum(state.row_sum, axis=1), layout)
    inverse = gl.where(used & (row_sum != 0), 1.0 / row_sum, 0.0)
    at = (work.split.to(gl.int64) * args.parts[3] + first + queries) * args.heads + heads
    splits.store_statistics(args.parts, at, gl.where(used, state.row_max, splits.UNUSED), gl.where(used, row_sum, 0.0), exists)
    splits.store_columns(args.parts, at, state.acc, inverse, 0, plan.head_dim_v, exists)
    if len(plan.head_dim_v_chunks) > 1:
        splits.store_columns(args.parts, at, state.acc_tail, inverse, plan.head_dim_v_chunks[0], plan.head_dim_v, exists)
