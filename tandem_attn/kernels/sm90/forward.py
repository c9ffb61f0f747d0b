"""Hopper forward: one producer warp loads by TMA, two or three consumer warpgroups of 64 query rows each compute.

Per key block a consumer issues S = Q K^T of this block and O += P V of the block before, and works on the softmax of S while the products
of the other consumers (and its own P V) run on the tensor cores. Named barriers let the consumers issue in turns (ping-pong).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma
from triton.language.core import _aggregate as aggregate

from tandem_attn.kernels.common import bias, masks, mma, packing, paging, predicates, ptx, softmax
from tandem_attn.kernels.common.arguments import (
    Args,
    exp2_of,
    has_bias,
    is_natural,
    unit,
    work_at,
    worker_registers,
)
from tandem_attn.kernels.common.channel import KeyValue, channel_of, make_buffers
from tandem_attn.kernels.common.scheduler import coords_of, following_tile, receive_tile, send_tile, tile_channel_of, tile_count
from tandem_attn.kernels.sm90 import output
from tandem_attn.kernels.sm90.layouts import o_layout, p_layout, s_layout

TURN_THREADS = gl.constexpr(256)  # the consumer that waits and the one before it


@aggregate
class State:
    """What a consumer keeps between key blocks."""

    acc: gl.tensor
    acc_tail: gl.tensor  # 0 where head_dim_v is one chunk
    row_max: gl.tensor  # log2 units
    row_sum: gl.tensor
    p: gl.tensor  # of the last block, an operand of the next product


@gluon.jit
def producer(plan: gl.constexpr, args, q, kv_out, tiles):
    """Hands out tiles and loads them: Q, then K and V blocks from the last to the first, V one block behind K."""
    consumers: gl.constexpr = plan.consumers
    k_chunks: gl.constexpr = plan.head_dim_chunks
    v_chunks: gl.constexpr = plan.head_dim_v_chunks
    num_tiles = tile_count(plan, args)
    q_out = q.sender()
    tile = gl.program_id(0)
    at = coords_of(plan, args, tile, num_tiles)
    tiles_out = send_tile(tiles.sender(), at)
    while at.valid != 0:
        tile = following_tile(plan, args, tile, num_tiles)
        following = coords_of(plan, args, tile, num_tiles)
        tiles_out = send_tile(tiles_out, following)
        work = work_at(plan, args, at)
        seq = work.seq
        head_kv = packing.head_kv(plan, args, work.head)
        for i in gl.static_range(consumers):
            q_out = packing.load_queries(plan, args, seq, work.head, work.row + i * plan.consumer_rows, q_out)
        key = (work.visit.stop - 1) * plan.tile_n
        kv_out = kv_out.after_k(paging.load_keys(plan, args, args.k, args.k_tail, k_chunks, seq.batch, seq.k, head_kv, key, kv_out.k))
        for _ in range(work.visit.start, work.visit.stop - 1):
            before = key - plan.tile_n
            kv_out = kv_out.after_k(
                paging.load_keys(plan, args, args.k, args.k_tail, k_chunks, seq.batch, seq.k, head_kv, before, kv_out.k)
            )
            kv_out = kv_out.after_v(paging.load_keys(plan, args, args.v, args.v_tail, v_chunks, seq.batch, seq.v, head_kv, key, kv_out.v))
            key = before
        kv_out = kv_out.after_v(paging.load_keys(plan, args, args.v, args.v_tail, v_chunks, seq.batch, seq.v, head_kv, key, kv_out.v))
        at = following


@gluon.jit
def consumer(plan: gl.constexpr, args, q, kv_in, o, tiles, index: gl.constexpr):
    """Computes the query rows of its warpgroups, tile after tile."""
    q_in = q.lane(index).receiver()
    o_out = o.lane(index).sender()
    _open_turns(plan, index)
    at, tiles_in = receive_tile(tiles.receiver())
    while at.valid != 0:
        work = work_at(plan, args, at)
        row = work.row + index * plan.consumer_rows
        state, kv_in = _attend(plan, args, work, row, q_in, kv_in, index)
        if plan.num_splits > 1:
            output.finish_part(plan, args, work, row, state)
            if plan.o_over_q:
                q_in.release()
        else:
            output.finish(plan, args, work, row, state, o_out, index)
            o_out = o_out.next()
        q_in = q_in.next()
        at, tiles_in = receive_tile(tiles_in)
    _close_turns(plan, index)


@gluon.jit
def _attend(plan: gl.constexpr, args, work, row, q_in, kv_in, index: gl.constexpr):
    """Softmax-weighted values of all key blocks, from the last block to the first; not yet normalised."""
    tree: gl.constexpr = masks.parse(plan.mask)
    visit = work.visit
    q_in.wait()
    q_a = q_in.slot()
    q_b = q_in.tail()
    if plan.q_registers:
        operand: gl.constexpr = gl.DotOperandLayout(0, s_layout(plan), 2)
        q_a = q_a.load(operand)
        if len(plan.head_dim_chunks) > 1:
            q_b = q_b.load(operand)
        fence_async_shared()
        q_in.release()
    state, kv_in = _first_block(plan, args, work, row, q_a, q_b, kv_in, visit.stop - 1, index)
    n_block = visit.stop - 2
    for _ in range(gl.maximum(visit.full_stop, visit.start), visit.stop - 1):
        state, kv_in = _block(plan, args, work, row, q_a, q_b, kv_in, state, n_block, True, index)
        n_block -= 1
    if masks.has_full_blocks(tree):
        for _ in range(visit.full_start, visit.full_stop):
            state, kv_in = _block(plan, args, work, row, q_a, q_b, kv_in, state, n_block, False, index)
            n_block -= 1
        if masks.bounded_left(tree):
            for _ in range(visit.start, gl.minimum(visit.full_start, visit.full_stop)):
                state, kv_in = _block(plan, args, work, row, q_a, q_b, kv_in, state, n_block, True, index)
                n_block -= 1
    if not plan.q_registers and not plan.o_over_q:
        q_in.release()
    v = kv_in.v
    v.wait()
    o_mma, tail_mma = _values_mma(plan, state, v)
    acc, acc_tail = _values_wait(plan, o_mma, tail_mma)
    v.release()
    return State(acc, acc_tail, state.row_max, state.row_sum, state.p), kv_in.after_v(v.next())


@gluon.jit
def _first_block(plan: gl.constexpr, args, work, row, q_a, q_b, kv_in, n_block, index: gl.constexpr):
    """The last key block: there is no P V to overlap with yet."""
    k = kv_in.k
    k.wait()
    _take_turn(plan, index)
    s_mma = _scores_mma(plan, q_a, q_b, k)
    _pass_turn(plan, index)
    s = mma.wait(0, deps=(s_mma,))
    k.release()
    s = _logits(plan, args, work, s, row, n_block, True)
    row_max = _tile_max(plan, args, s)
    p = _weights(plan, args, s, softmax.finite_or_zero(row_max))
    acc = gl.full([plan.consumer_rows, plan.head_dim_v_chunks[0]], 0.0, gl.float32, o_layout(plan, plan.head_dim_v_chunks[0]))
    acc_tail = gl.to_tensor(0)
    if len(plan.head_dim_v_chunks) > 1:
        acc_tail = gl.full([plan.consumer_rows, plan.head_dim_v_chunks[1]], 0.0, gl.float32, o_layout(plan, plan.head_dim_v_chunks[1]))
    return State(acc, acc_tail, row_max, softmax.partial_sum(p), _operand(plan, args, p)), kv_in.after_k(k.next())


@gluon.jit
def _block(plan: gl.constexpr, args, work, row, q_a, q_b, kv_in, state, n_block, masked: gl.constexpr, index: gl.constexpr):
    """S of one key block, O += P V of the block before it, and the softmax of S under both."""
    k = kv_in.k
    kv_in = kv_in.after_k(k.next())
    v = kv_in.v
    kv_in = kv_in.after_v(v.next())
    k.wait()
    _take_turn(plan, index)
    s_mma = _scores_mma(plan, q_a, q_b, k)
    if plan.early_turn:
        _pass_turn(plan, index)
    v.wait()
    o_mma, tail_mma = _values_mma(plan, state, v)
    if not plan.early_turn:
        _pass_turn(plan, index)
    s = mma.wait(len(plan.head_dim_v_chunks), deps=(s_mma,))
    s = _logits(plan, args, work, s, row, n_block, masked)
    row_max = gl.maximum(state.row_max, _tile_max(plan, args, s))
    if plan.rescale_rows:
        row_max = softmax.grown_max(state.row_max, row_max, plan.rescale_threshold * unit(plan) / softmax.LOG2_E)
    safe_max = row_max
    if masked or is_natural(plan):  # a bias may hold -inf
        safe_max = softmax.finite_or_zero(row_max)
    alpha = exp2_of(is_natural(plan), state.row_max - safe_max)
    p = _weights(plan, args, s, safe_max)
    row_sum = state.row_sum * gl.convert_layout(alpha, gl.SliceLayout(1, state.row_sum.type.layout))[:, None] + softmax.partial_sum(p)
    if plan.intra_overlap:
        k.release_after(row_sum)
    else:
        k.release()
    acc, acc_tail = _values_wait(plan, o_mma, tail_mma)
    v.release()
    if plan.intra_overlap and plan.q_registers:
        operand = softmax.rounded_over(state.p, p, acc)
    else:
        operand = _operand(plan, args, p)
    acc, acc_tail = _rescale(plan, acc, acc_tail, alpha)
    return State(acc, acc_tail, row_max, row_sum, operand), kv_in


@gluon.jit
def _scores_mma(plan: gl.constexpr, q_a, q_b, k):
    zero = gl.full([plan.consumer_rows, plan.tile_n], 0.0, gl.float32, s_layout(plan))
    s = warpgroup_mma(q_a, k.slot().permute((1, 0)), zero, use_acc=False, is_async=True)
    if len(plan.head_dim_chunks) > 1:
        s = warpgroup_mma(q_b, k.tail().permute((1, 0)), s, is_async=True)
    return s


@gluon.jit
def _values_mma(plan: gl.constexpr, state, v):
    acc = warpgroup_mma(state.p, v.slot(), state.acc, is_async=True)
    if len(plan.head_dim_v_chunks) > 1:
        return acc, warpgroup_mma(state.p, v.tail(), state.acc_tail, is_async=True)
    else:
        return acc, state.acc_tail


@gluon.jit
def _values_wait(plan: gl.constexpr, acc, acc_tail):
    if len(plan.head_dim_v_chunks) > 1:
        return mma.wait(0, deps=(acc, acc_tail))
    else:
        return mma.wait(0, deps=(acc,)), acc_tail


@gluon.jit
def _logits(plan: gl.constexpr, args, work, s, row, n_block, masked: gl.constexpr):
    """Masked scores; with soft cap or ALiBi in log2 units, else still to be multiplied by scale_log2."""
    layout: gl.constexpr = s_layout(plan)
    rows = row + gl.arange(0, plan.consumer_rows, layout=gl.SliceLayout(1, layout))
    queries = packing.queries(plan, rows)
    heads = packing.heads(plan, work.head, rows)
    if plan.softcap:
        s = softmax.tanh(s * (args.scale_log2 * softmax.LN_2 / args.softcap)) * (args.softcap * unit(plan))
    elif has_bias(plan):
        s = s * (args.scale_log2 * softmax.LN_2 if is_natural(plan) else args.scale_log2)
    if is_natural(plan):
        s = bias.add(s, args.bias_data, plan.bias, work.seq.batch, heads, queries, n_block * plan.tile_n)
    if plan.alibi:
        slope = packing.as_column(plan, gl.load(args.slopes + work.seq.batch * args.heads + heads)) * unit(plan)
        columns = n_block * plan.tile_n + gl.arange(0, plan.tile_n, layout=gl.SliceLayout(0, layout))
        distance = gl.abs(queries[:, None] + (work.seq.k.used - work.seq.q.used) - columns[None, :])
        s = s - slope * distance.to(gl.float32)
    if masked:
        site = predicates.Site(work.seq.batch, packing.as_column(plan, heads), args.mask_data)
        s = masks.hide(s, masks.parse(plan.mask), args.scalars, work.seq, queries, n_block * plan.tile_n, site)
    return s


@gluon.jit
def _tile_max(plan: gl.constexpr, args, s):
    """Row maxima of one block."""
    row_max = gl.max(s, axis=1)
    return row_max if has_bias(plan) else row_max * args.scale_log2


@gluon.jit
def _weights(plan: gl.constexpr, args, s, row_max):
    if is_natural(plan):
        x = (s - row_max[:, None]) * softmax.LOG2_E
    elif has_bias(plan):
        x = s - row_max[:, None]
    else:
        x = s * args.scale_log2 - row_max[:, None]
    return softmax.exp2(x, plan.exp2)


@gluon.jit
def _operand(plan: gl.constexpr, args, p):
    return gl.convert_layout(p.to(args.v.dtype), p_layout(plan))


@gluon.jit
def _rescale(plan: gl.constexpr, acc, acc_tail, alpha):
    alpha = gl.convert_layout(alpha, gl.SliceLayout(1, acc.type.layout))
    if plan.rescale_rows:
        acc = softmax.scaled_rows(acc, alpha)
    else:
        acc = acc * alpha[:, None]
    if len(plan.head_dim_v_chunks) > 1:
        acc_tail = acc_tail * gl.convert_layout(alpha, gl.SliceLayout(1, acc_tail.type.layout))[:, None]
    return acc, acc_tail


@gluon.constexpr_function
def takes_turns(plan):
    return plan.ping_pong and plan.q_stages > 1


@gluon.jit
def _open_turns(plan: gl.constexpr, index: gl.constexpr):
    """The last warpgroup lets the first one begin."""
    if takes_turns(plan):
        ptx.named_arrive_if(ptx.place(plan.consumer_warps, index) == plan.q_stages - 1, gl.to_tensor(0), TURN_THREADS)


@gluon.jit
def _take_turn(plan: gl.constexpr, index: gl.constexpr):
    if takes_turns(plan):
        ptx.named_sync(ptx.place(plan.consumer_warps, index), TURN_THREADS)


@gluon.jit
def _pass_turn(plan: gl.constexpr, index: gl.constexpr):
    if takes_turns(plan):
        behind = ptx.place(plan.consumer_warps, index) + 1
        ptx.named_arrive(gl.where(behind == plan.q_stages, 0, behind), TURN_THREADS)


@gluon.jit
def _close_turns(plan: gl.constexpr, index: gl.constexpr):
    """The first warpgroup takes the turn that the last one left over."""
    if takes_turns(plan):
        ptx.named_sync_if(ptx.place(plan.consumer_warps, index) == 0, gl.to_tensor(0), TURN_THREADS)


@gluon.jit
def forward(
    q_desc, k_desc, v_desc, o_desc, q_tail, k_tail, v_tail, o_tail,
    lse, counter, cu_q, cu_k, used_q, used_k, sink, slopes, order, starts,
    scalar0, scalar1, scalar2, scalar3, scale_log2, softcap,
    seqlen_q, seqlen_k, pitch_q, pitch_k, pitch_v, batch, heads, heads_per_kv, blocks, section, num_tiles, lse_stride,
    bounds, mask_data, bias_data, pages, parts, descales,
    plan: gl.constexpr, plain: gl.constexpr,
):  # fmt: skip
    """The kernel: on-chip memory, channels and the table of roles."""
    scalars = (scalar0, scalar1, scalar2, scalar3) + bounds
    args = Args(
        q_desc, k_desc, v_desc, o_desc, q_tail, k_tail, v_tail, o_tail,
        lse, counter, cu_q, cu_k, used_q, used_k, sink, slopes, order, starts,
        scalars, scale_log2, softcap, seqlen_q, seqlen_k, pitch_q, pitch_k, pitch_v, batch, heads, heads_per_kv, blocks, section, num_tiles,
        lse_stride, mask_data, bias_data, pages, parts, descales,
    )  # fmt: skip
    dtype: gl.constexpr = q_desc.dtype
    consumers: gl.constexpr = plan.consumers
    # How many arrivals release a slot: one a warp, or with Gluon's own one a warp partition; where O lies over Q, one of the storer.
    readers: gl.constexpr = consumers if plain else consumers * plan.consumer_warps
    q_readers: gl.constexpr = 1 if plain or plan.o_over_q and plan.num_splits == 1 else plan.consumer_warps
    q = channel_of(make_buffers(dtype, consumers, plan.consumer_rows, plan.head_dim_chunks), consumers, q_readers, plain)
    o = output.make_channel(plan, dtype, q, plain)
    if plan.shared_kv_ring:
        k = channel_of(make_buffers(dtype, plan.kv_stages, plan.tile_n, plan.head_dim_chunks), plan.kv_stages, readers, plain)
        v = k
    else:
        k = channel_of(make_buffers(dtype, plan.k_stages, plan.tile_n, plan.head_dim_chunks), plan.k_stages, readers, plain)
        v = channel_of(make_buffers(dtype, plan.v_stages, plan.tile_n, plan.head_dim_v_chunks), plan.v_stages, readers, plain)
    tiles = tile_channel_of(readers + 1, plain)
    kv_out = KeyValue(k.sender(), v.sender(), plan.shared_kv_ring)
    kv_in = KeyValue(k.receiver(), v.receiver(), plan.shared_kv_ring)
    registers: gl.constexpr = worker_registers(plan)
    if consumers == 1:
        gl.warp_specialize([
            (consumer, (plan, args, q, kv_in, o, tiles, 0)),
            (producer, (plan, args, q, kv_out, tiles)),
            (output.storer, (plan, args, o, tiles)),
        ], [1, 1], registers)  # fmt: skip
    elif consumers == 2:
        gl.warp_specialize([
            (consumer, (plan, args, q, kv_in, o, tiles, 0)),
            (consumer, (plan, args, q, kv_in, o, tiles, 1)),
            (producer, (plan, args, q, kv_out, tiles)),
            (output.storer, (plan, args, o, tiles)),
        ], [4, 1, 1], registers)  # fmt: skip
    else:
        gl.warp_specialize([
            (consumer, (plan, args, q, kv_in, o, tiles, 0)),
            (consumer, (plan, args, q, kv_in, o, tiles, 1)),
            (consumer, (plan, args, q, kv_in, o, tiles, 2)),
            (producer, (plan, args, q, kv_out, tiles)),
            (output.storer, (plan, args, o, tiles)),
        ], [4, 4, 1, 1], registers)  # fmt: skip
