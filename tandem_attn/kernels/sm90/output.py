"""The way of O: consumers normalise it into shared memory, and the storer, a warp of its own, has TMA store it.

No consumer then waits for a store, nor for the other consumers: those that are a partition together would be brought into step by its
barrier, against their turns.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from tandem_attn.kernels.common import packing, ptx, splits
from tandem_attn.kernels.common.arguments import is_natural, natural_lse, unit, with_sink
from tandem_attn.kernels.common.channel import Channel, Receiver, channel_of, make_buffers
from tandem_attn.kernels.common.copies import sequence
from tandem_attn.kernels.common.scheduler import receive_tile
from tandem_attn.kernels.sm90.layouts import s_layout

WARPGROUP = gl.constexpr(128)  # threads
OWN_BARRIER = gl.constexpr(4)  # number of the first warpgroup's hardware barrier, behind those of the turns


@gluon.jit
def make_channel(plan: gl.constexpr, dtype: gl.constexpr, q, plain: gl.constexpr):
    """From the consumers to the storer; over Q's slots where the plan says so, which the storer then gives back to the producer."""
    consumers: gl.constexpr = plan.consumers
    sends: gl.constexpr = 1 if plain else plan.consumer_warps
    if plan.o_over_q:
        ready = mbarrier.allocate_mbarrier(batch=plan.consumers)
        for i in gl.static_range(consumers):
            mbarrier.init(ready.index(i), count=sends)
        return Channel(q.buffers, ready, q.empty, plan.consumers, plain)
    else:
        buffers = make_buffers(dtype, plan.consumers, plan.consumer_rows, plan.head_dim_v_chunks)
        return channel_of(buffers, plan.consumers, 1, plain, sends=sends)


@gluon.jit
def storer(plan: gl.constexpr, args, o, tiles):
    """Stores tiles of O as the consumers finish them, and gives their memory back."""
    consumers: gl.constexpr = plan.consumers
    at, tiles_in = receive_tile(tiles.receiver())
    phase = gl.to_tensor(0)
    while at.valid != 0:
        if plan.num_splits == 1:
            seq = sequence(plan, args, at.batch)
            row = at.m_block * plan.rows_per_cta
            for i in gl.static_range(consumers):
                o_in = Receiver(o, gl.to_tensor(i), phase)
                o_in.wait()
                packing.store_outputs(plan, args, seq, at.head, row + i * plan.consumer_rows, o_in.slot(), o_in.tail())
            tma.store_wait(0)
            for i in gl.static_range(consumers):
                Receiver(o, gl.to_tensor(i), phase).release()
            phase ^= 1
        at, tiles_in = receive_tile(tiles_in)


@gluon.jit
def finish(plan: gl.constexpr, args, work, row, state, o_out, index: gl.constexpr):
    """Normalises once, exactly, and writes O and LSE. A row without keys gives 0 and -inf, with a sink 0 and the sink."""
    layout: gl.constexpr = gl.SliceLayout(1, s_layout(plan))
    in_tile = gl.arange(0, plan.consumer_rows, layout=layout)
    rows = row + in_tile
    queries = packing.queries(plan, rows)
    heads = packing.heads(plan, work.head, rows)
    row_sum = gl.convert_layout(gl.sum(state.row_sum, axis=1), layout)
    row_max = state.row_max
    if plan.sink:
        row_max, row_sum, share = with_sink(gl.load(args.sink + heads) * unit(plan), row_max, row_sum, is_natural(plan))
    else:
        share = gl.full([plan.consumer_rows], 1.0, gl.float32, layout)
    used = queries < work.seq.q.used  # row_sum is 0 for a row without keys, and NaN where an input was
    lse = gl.where(used & (row_sum != 0), natural_lse(plan, row_max, row_sum), float("-inf"))
    inverse = gl.where(used & (row_sum != 0), share / row_sum, 0.0)
    if plan.o_over_q:
        ptx.named_sync(OWN_BARRIER + ptx.place(plan.consumer_warps, index), WARPGROUP)  # the warpgroup has read its rows of Q
    else:
        o_out.wait_free()
    _put(plan, args, o_out, o_out.slot(), _normalised(plan, state.acc, inverse, used), in_tile)
    if len(plan.head_dim_v_chunks) > 1:
        _put(plan, args, o_out, o_out.tail(), _normalised(plan, state.acc_tail, inverse, used), in_tile)
    fence_async_shared()
    o_out.send()
    if plan.varlen:
        first = args.lse + heads.to(gl.int64) * args.lse_stride + work.seq.q.start
        gl.store(first + queries, lse, mask=packing.holds_query(plan, rows, used))
    else:
        first = args.lse + (work.seq.batch.to(gl.int64) * args.heads + heads) * args.lse_stride
        gl.store(first + queries, lse, mask=packing.holds_query(plan, rows, queries < args.seqlen_q))


@gluon.jit
def _put(plan: gl.constexpr, args, o_out, slot, acc, in_tile):
    if o_out.channel.plain:
        slot.store(acc.to(args.o.dtype))
    else:
        ptx.put_tile(slot, acc, gl.convert_layout(in_tile, gl.SliceLayout(1, acc.type.layout)), args.o.dtype)


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
    rows = row + gl.arange(0, plan.consumer_rows, layout=layout)
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
