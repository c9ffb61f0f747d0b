"""Hopper forward: one producer warp loads by TMA, two or three consumer warpgroups of 64 query rows each compute.

Per key block a consumer issues S = Q K^T of this block and O += P V of the block before, and works on the softmax of S while the products
of the other consumers (and its own P V) run on the tensor cores. Named barriers let the consumers issue in turns (ping-pong).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma, warpgroup_mma, warpgroup_mma_wait
from triton.language.core import _aggregate as aggregate

from tandem_attn.kernels.common import bias, masks, packing, paging, predicates, ptx, softmax, splits
from tandem_attn.kernels.common.arguments import (
    Args,
    exp2_of,
    has_bias,
    is_natural,
    natural_lse,
    unit,
    with_sink,
    work_at,
    worker_registers,
)
from tandem_attn.kernels.common.channel import KeyValue, make_buffers, make_channel
from tandem_attn.kernels.common.scheduler import coords_of, following_tile, make_tile_channel, receive_tile, send_tile, tile_count

WARPS = gl.constexpr(4)  # of a consumer
TURN_THREADS = gl.constexpr(256)  # the consumer that waits and the one before it


@aggregate
class State:
    """What a consumer keeps between key blocks."""

    acc: gl.tensor
    acc_tail: gl.tensor  # 0 where head_dim_v is one chunk
    row_max: gl.tensor  # log2 units
    row_sum: gl.tensor
    p: gl.tensor  # of the last block, an operand of the next product


@gluon.constexpr_function
def s_layout(plan):
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, plan.tile_n, 16])


@gluon.constexpr_function
def o_layout(columns):
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])


@gluon.constexpr_function
def p_layout(plan):
    return gl.DotOperandLayout(0, o_layout(plan.head_dim_v_chunks[0]), 2)


@gluon.jit
def producer(plan: gl.constexpr, args, q, kv_out, o, tiles):  # noqa: ARG001
    """Hands out tiles and loads them: Q, then K and V blocks from the last to the first, V one block behind K."""
    consumers: gl.constexpr = plan.q_stages
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
            q_out = packing.load_queries(plan, args, seq, work.head, work.row + i * plan.tile_m, q_out)
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
    """Computes the query rows of one warpgroup, tile after tile."""
    q_in = q.lane(index).receiver()
    o_slot = o.slots.index(index)
    o_tail = o.tails.index(index)
    _open_turns(plan, index)
    at, tiles_in = receive_tile(tiles.receiver())
    while at.valid != 0:
        work = work_at(plan, args, at)
        row = work.row + index * plan.tile_m
        state, kv_in = _attend(plan, args, work, row, q_in, kv_in, index)
        if plan.num_splits > 1:
            _finish_part(plan, args, work, row, state)
        else:
            _finish(plan, args, work, row, state, o_slot, o_tail)
        if plan.o_over_q:
            tma.store_wait(0)
            q_in.release()
        q_in = q_in.next()
        at, tiles_in = receive_tile(tiles_in)
    _close_turns(plan, index)
    tma.store_wait(0)


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
    s = warpgroup_mma_wait(0, deps=(s_mma,))
    k.release()
    s = _logits(plan, args, work, s, row, n_block, True)
    row_max = _tile_max(plan, args, s)
    p = _weights(plan, args, s, softmax.finite_or_zero(row_max))
    acc = gl.full([plan.tile_m, plan.head_dim_v_chunks[0]], 0.0, gl.float32, o_layout(plan.head_dim_v_chunks[0]))
    acc_tail = gl.to_tensor(0)
    if len(plan.head_dim_v_chunks) > 1:
        acc_tail = gl.full([plan.tile_m, plan.head_dim_v_chunks[1]], 0.0, gl.float32, o_layout(plan.head_dim_v_chunks[1]))
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
    s = warpgroup_mma_wait(len(plan.head_dim_v_chunks), deps=(s_mma,))
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
    zero = gl.full([plan.tile_m, plan.tile_n], 0.0, gl.float32, s_layout(plan))
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
        return warpgroup_mma_wait(0, deps=(acc, acc_tail))
    else:
        return warpgroup_mma_wait(0, deps=(acc,)), acc_tail


@gluon.jit
def _logits(plan: gl.constexpr, args, work, s, row, n_block, masked: gl.constexpr):
    """Masked scores; with soft cap or ALiBi in log2 units, else still to be multiplied by scale_log2."""
    layout: gl.constexpr = s_layout(plan)
    rows = row + gl.arange(0, plan.tile_m, layout=gl.SliceLayout(1, layout))
    queries = packing.queries(plan, rows)
    heads = packing.heads(plan, work.head, rows)
    if plan.softcap:
        s = softmax.tanh(s * (args.scale_log2 * softmax.LN_2 / args.softcap)) * (args.softcap * unit(plan))
    elif has_bias(plan):
        s = s * (args.scale_log2 * softmax.LN_2 if is_natural(plan) else args.scale_log2)
    if is_natural(plan):
        s = bias.add(s, args.bias_data, plan.bias, work.seq.batch, heads, queries, n_block * plan.tile_n)
    if plan.alibi:
        slope = gl.load(args.slopes + work.seq.batch * args.heads + heads) * unit(plan)
        distance = queries + (work.seq.k.used - work.seq.q.used) - n_block * plan.tile_n
        s = masks.add_alibi(s, slope, distance.to(gl.float32))
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


@gluon.jit
def _finish(plan: gl.constexpr, args, work, row, state, o_slot, o_tail):
    """Normalises once, exactly, and writes O and LSE. A row without keys gives 0 and -inf, with a sink 0 and the sink."""
    layout: gl.constexpr = gl.SliceLayout(1, s_layout(plan))
    rows = row + gl.arange(0, plan.tile_m, layout=layout)
    queries = packing.queries(plan, rows)
    heads = packing.heads(plan, work.head, rows)
    row_sum = gl.convert_layout(gl.sum(state.row_sum, axis=1), layout)
    row_max = state.row_max
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
    if plan.varlen:
        first = args.lse + heads.to(gl.int64) * args.lse_stride + work.seq.q.start
        gl.store(first + queries, lse, mask=packing.holds_query(plan, rows, used))
    else:
        first = args.lse + (work.seq.batch.to(gl.int64) * args.heads + heads) * args.lse_stride
        gl.store(first + queries, lse, mask=packing.holds_query(plan, rows, queries < args.seqlen_q))


@gluon.jit
def _normalised(plan: gl.constexpr, acc, inverse, used):
    rows: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
    acc = acc * gl.convert_layout(inverse, rows)[:, None]
    if plan.seqused and plan.pack_gqa > 1:  # rows that are not in use may be NaN, see packing
        acc = gl.where(gl.convert_layout(used, rows)[:, None], acc, 0.0)
    return acc


@gluon.jit
def _finish_part(plan: gl.constexpr, args, work, row, state):
    """Writes what a part of the keys gives, see ``splits``; sinks join with the parts."""
    layout: gl.constexpr = gl.SliceLayout(1, s_layout(plan))
    rows = row + gl.arange(0, plan.tile_m, layout=layout)
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


@gluon.constexpr_function
def takes_turns(plan):
    return plan.ping_pong and plan.q_stages > 1


@gluon.jit
def _open_turns(plan: gl.constexpr, index: gl.constexpr):
    """The last consumer lets the first one begin."""
    if takes_turns(plan):
        if index == plan.q_stages - 1:
            ptx.named_arrive(0, TURN_THREADS)


@gluon.jit
def _take_turn(plan: gl.constexpr, index: gl.constexpr):
    if takes_turns(plan):
        ptx.named_sync(index, TURN_THREADS)


@gluon.jit
def _pass_turn(plan: gl.constexpr, index: gl.constexpr):
    if takes_turns(plan):
        ptx.named_arrive((index + 1) % plan.q_stages, TURN_THREADS)


@gluon.jit
def _close_turns(plan: gl.constexpr, index: gl.constexpr):
    """The first consumer takes the turn that the last one left over."""
    if takes_turns(plan):
        if index == 0:
            ptx.named_sync(0, TURN_THREADS)


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
    consumers: gl.constexpr = plan.q_stages
    q = make_channel(make_buffers(dtype, consumers, plan.tile_m, plan.head_dim_chunks), consumers, 1, plain)
    if plan.o_over_q:
        o = q.buffers
    else:
        o = make_buffers(dtype, consumers, plan.tile_m, plan.head_dim_v_chunks)
    if plan.shared_kv_ring:
        k = make_channel(make_buffers(dtype, plan.kv_stages, plan.tile_n, plan.head_dim_chunks), plan.kv_stages, consumers, plain)
        v = k
    else:
        k = make_channel(make_buffers(dtype, plan.k_stages, plan.tile_n, plan.head_dim_chunks), plan.k_stages, consumers, plain)
        v = make_channel(make_buffers(dtype, plan.v_stages, plan.tile_n, plan.head_dim_v_chunks), plan.v_stages, consumers, plain)
    tiles = make_tile_channel(consumers, plain)
    kv_out = KeyValue(k.sender(), v.sender(), plan.shared_kv_ring)
    kv_in = KeyValue(k.receiver(), v.receiver(), plan.shared_kv_ring)
    registers: gl.constexpr = worker_registers(plan)
    if consumers == 1:
        gl.warp_specialize([
            (consumer, (plan, args, q, kv_in, o, tiles, 0)),
            (producer, (plan, args, q, kv_out, o, tiles)),
        ], [1], registers)  # fmt: skip
    elif consumers == 2:
        gl.warp_specialize([
            (consumer, (plan, args, q, kv_in, o, tiles, 0)),
            (consumer, (plan, args, q, kv_in, o, tiles, 1)),
            (producer, (plan, args, q, kv_out, o, tiles)),
        ], [WARPS, 1], registers)  # fmt: skip
    else:
        gl.warp_specialize([
            (consumer, (plan, args, q, kv_in, o, tiles, 0)),
            (consumer, (plan, args, q, kv_in, o, tiles, 1)),
            (consumer, (plan, args, q, kv_in, o, tiles, 2)),
            (producer, (plan, args, q, kv_out, o, tiles)),
        ], [WARPS, WARPS, 1], registers)  # fmt: skip
