"""Hopper forward: one producer warp loads by TMA, two or three consumer warpgroups of 64 query rows each compute.

Per key block a consumer issues S = Q K^T of this block and O += P V of the block before, and works on the softmax of S while the products
of the other consumers (and its own P V) run on the tensor cores. Named barriers let the consumers issue in turns (ping-pong).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma, warpgroup_mma, warpgroup_mma_wait
from triton.language.core import _aggregate as aggregate

from tandem_attn.kernels.common import bias, masks, multicast, packing, paging, predicates, ptx, redo, softmax, splits
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
from tandem_attn.kernels.common.scheduler import Coords, coords_of, make_tile_channel, receive_tile, send_tile, tile_count

WARPS = gl.constexpr(4)  # of a consumer
VERDICT = gl.constexpr(3)  # hardware barriers of the consumers behind those of the turns
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
def producer(plan: gl.constexpr, args, q, kv_out, o, tiles, mail, again):  # noqa: ARG001
    """Hands out tiles and loads them; at the end those that must be computed again."""
    num_tiles = tile_count(plan, args)
    q_out = q.sender()
    rank = _join(plan)
    mail = multicast.Mail(mail.slot, mail.came, mail.taken, mail.passed, rank)
    tile = gl.program_id(0) // plan.kv_multicast
    at = coords_of(plan, args, tile, num_tiles)
    tiles_out = send_tile(tiles.sender(), _told(plan, at))
    while at.valid != 0:
        tile, mail = multicast.next_tile(plan, args, tile, num_tiles, mail)
        following = coords_of(plan, args, tile, num_tiles)
        tiles_out = send_tile(tiles_out, _told(plan, following))
        q_out, kv_out = _load(plan, args, work_at(plan, args, at), rank, q_out, kv_out)
        at = following
    if plan.fixed_max:
        node, mail = redo.first(plan, again, mail)
        while node >= 0:
            at = redo.tile_of(plan, args, node)
            node, mail = redo.following(plan, args, at, mail)
            tiles_out = send_tile(tiles_out, at)
            q_out, kv_out = _load(plan, args, work_at(plan, args, at), rank, q_out, kv_out)
        send_tile(tiles_out, redo.nothing())
    if plan.kv_multicast > 1:  # consumers of the other CTA still say that slots are empty
        kv_out.k.drain()
        if not plan.shared_kv_ring:
            kv_out.v.drain()


@gluon.jit
def _told(plan: gl.constexpr, at):
    """What consumers are told instead of a tile that does not exist."""
    if plan.fixed_max:
        return Coords(gl.where(at.valid == 0, redo.REPORT, at.valid), at.m_block, at.head, at.batch)
    else:
        return at


@gluon.jit
def _load(plan: gl.constexpr, args, work, rank, q_out, kv_out):
    """A tile's Q, then K and V blocks from the last to the first, V one block behind K."""
    seq = work.seq
    head_kv = packing.head_kv(plan, args, work.head)
    row = work.row + rank * plan.rows_per_cta
    consumers: gl.constexpr = plan.q_stages
    for i in gl.static_range(consumers):
        q_out = packing.load_queries(plan, args, seq, work.head, row + i * plan.tile_m, q_out)
    key = (work.visit.stop - 1) * plan.tile_n
    kv_out = kv_out.after_k(_load_k(plan, args, seq, head_kv, key, rank, kv_out.k))
    for _ in range(work.visit.start, work.visit.stop - 1):
        before = key - plan.tile_n
        kv_out = kv_out.after_k(_load_k(plan, args, seq, head_kv, before, rank, kv_out.k))
        kv_out = kv_out.after_v(_load_v(plan, args, seq, head_kv, key, rank, kv_out.v))
        key = before
    return q_out, kv_out.after_v(_load_v(plan, args, seq, head_kv, key, rank, kv_out.v))


@gluon.jit
def _join(plan: gl.constexpr):
    """This CTA's rank in its cluster, whose CTAs are now all ready; every warp calls it."""
    if plan.kv_multicast > 1:
        ptx.cluster_barrier()
        return ptx.cta_rank()
    else:
        return gl.to_tensor(0)


@gluon.jit
def spare(plan: gl.constexpr):
    """Warps without work, which a barrier of the cluster would wait for."""
    _join(plan)


@gluon.jit
def _load_k(plan: gl.constexpr, args, seq, head, key, rank, out):
    chunks: gl.constexpr = plan.head_dim_chunks
    if plan.kv_multicast > 1:
        return multicast.load_keys(plan, "k", chunks, seq.batch, seq.k, head, key, rank, out)
    else:
        return paging.load_keys(plan, args, args.k, args.k_tail, chunks, seq.batch, seq.k, head, key, out)


@gluon.jit
def _load_v(plan: gl.constexpr, args, seq, head, key, rank, out):
    chunks: gl.constexpr = plan.head_dim_v_chunks
    if plan.kv_multicast > 1:
        return multicast.load_keys(plan, "v", chunks, seq.batch, seq.v, head, key, rank, out)
    else:
        return paging.load_keys(plan, args, args.v, args.v_tail, chunks, seq.batch, seq.v, head, key, out)


@gluon.jit
def consumer(plan: gl.constexpr, args, q, kv_in, o, tiles, again, index: gl.constexpr):
    """Computes the query rows of one warpgroup, tile after tile."""
    rank = _join(plan)
    q_in = q.lane(index).receiver()
    o_slot = o.slots.index(index)
    o_tail = o.tails.index(index)
    _open_turns(plan, index)
    at, tiles_in = receive_tile(tiles.receiver())
    while at.valid != 0:
        work = work_at(plan, args, at)
        row = work.row + rank * plan.rows_per_cta + index * plan.tile_m
        state, kv_in = _attend(plan, args, at, work, row, q_in, kv_in, index)
        if plan.num_splits > 1:
            _finish_part(plan, args, work, row, state)
        elif plan.fixed_max:
            if redo.writes(at, redo.own(plan, rank, index)):
                _finish(plan, args, at, rank, work, row, state, o_slot, o_tail, again, index)
        else:
            _finish(plan, args, at, rank, work, row, state, o_slot, o_tail, again, index)
        if plan.o_over_q:
            tma.store_wait(0)
            gl.barrier()
            q_in.release()
        q_in = q_in.next()
        at, tiles_in = receive_tile(tiles_in)
        if plan.fixed_max:
            if at.valid == redo.REPORT:
                redo.report(plan, again)
                at, tiles_in = receive_tile(tiles_in)
    _close_turns(plan, index)
    tma.store_wait(0)


@gluon.jit
def _attend(plan: gl.constexpr, args, at, work, row, q_in, kv_in, index: gl.constexpr):
    """Softmax-weighted values of all key blocks, from the last block to the first; not yet normalised."""
    tree: gl.constexpr = masks.parse(plan.mask)
    visit = _own_blocks(plan, args, work, row)
    skipped = work.visit.stop - visit.stop
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
    if skips_blocks(plan):
        kv_in = _skip_before(plan, kv_in, skipped, index)
    state, kv_in = _first_block(plan, args, work, row, q_a, q_b, kv_in, visit.stop - 1, index)
    if skips_blocks(plan):
        if skipped > 0:
            kv_in = kv_in.after_v(_skipped(kv_in.v))
    n_block = visit.stop - 2
    full_stop = _full_stop(plan, args, at, work, row, visit)
    for _ in range(full_stop, visit.stop - 1):
        state, kv_in = _block(plan, args, work, row, q_a, q_b, kv_in, state, n_block, True, index)
        n_block -= 1
    if masks.has_full_blocks(tree):
        for _ in range(visit.full_start, full_stop):
            state, kv_in = _block(plan, args, work, row, q_a, q_b, kv_in, state, n_block, False, index)
            n_block -= 1
        if masks.bounded_left(tree):
            for _ in range(visit.start, gl.minimum(visit.full_start, full_stop)):
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
def _full_stop(plan: gl.constexpr, args, at, work, row, visit):
    """Blocks from ``visit.full_start`` to this one are computed without element masks and, with fixed maxima, with those that rows have by
    then: so every row needs one, and a tile that is computed again has no such block."""
    tree: gl.constexpr = masks.parse(plan.mask)
    full_stop = gl.maximum(visit.full_stop, visit.start)
    if plan.fixed_max:
        if tree.kind == "window" and tree.right != "None":  # may the first row see nothing behind?
            _, hi = masks.edges(tree, args.scalars, work.seq.q.used, work.seq.k.used)
            seen = packing.queries(plan, row) + hi + 1
            full_stop = gl.where(seen <= full_stop * plan.tile_n, gl.maximum(full_stop - 1, visit.full_start), full_stop)
        full_stop = gl.where(at.valid == redo.TILE, full_stop, visit.start)
    return full_stop


@gluon.constexpr_function
def skips_blocks(plan):
    """Whether the last blocks that a tile visits may lie beyond what its first rows see, and these rows then skip them."""
    tree = masks.parse(plan.mask)
    ends_early = tree.kind == "window" and tree.left == "None" and tree.right != "None"
    return ends_early and plan.num_splits == 1 and plan.queries_per_tile * plan.pack_rows > plan.tile_n


@gluon.jit
def _own_blocks(plan: gl.constexpr, args, work, row):
    """The key blocks of one consumer's rows: those of the tile, or fewer."""
    if skips_blocks(plan):
        queries: gl.constexpr = plan.tile_m // plan.pack_rows
        first = packing.queries(plan, row)
        return masks.visit(masks.parse(plan.mask), args.scalars, work.seq, first, queries, plan.tile_n, ())
    else:
        return work.visit


@gluon.jit
def _skip_before(plan: gl.constexpr, kv_in, skipped, index: gl.constexpr):
    """Lets the last blocks pass, all of them but V of the first that is not skipped."""
    for i in range(skipped):
        _take_turn(plan, index)
        _pass_turn(plan, index)
        kv_in = kv_in.after_k(_skipped(kv_in.k))
        if i > 0:
            kv_in = kv_in.after_v(_skipped(kv_in.v))
    return kv_in


@gluon.jit
def _skipped(end):
    end.wait()
    end.release()
    return end.next()


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
    if plan.fixed_max and not masked:
        return _fixed_block(plan, args, state, s, o_mma, tail_mma, k, v), kv_in
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
def _fixed_block(plan: gl.constexpr, args, state, s, o_mma, tail_mma, k, v):
    """``_block`` behind S with the maxima that rows have: no maximum, no correction."""
    k.release()
    acc, acc_tail = _values_wait(plan, o_mma, tail_mma)
    v.release()
    row_max = state.row_max
    if plan.q_registers:
        row_max = softmax.behind(row_max, acc)
    p = _weights(plan, args, s, row_max)
    row_sum = state.row_sum + softmax.partial_sum(p)
    return State(acc, acc_tail, row_max, row_sum, _operand(plan, args, p))


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
def _finish(plan: gl.constexpr, args, at, rank, work, row, state, o_slot, o_tail, again, index: gl.constexpr):
    """Normalises once, exactly, and writes O and LSE. A row without keys gives 0 and -inf, with a sink 0 and the sink."""
    layout: gl.constexpr = gl.SliceLayout(1, s_layout(plan))
    rows = row + gl.arange(0, plan.tile_m, layout=layout)
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
    if plan.varlen:
        first = args.lse + heads.to(gl.int64) * args.lse_stride + work.seq.q.start
        gl.store(first + queries, lse, mask=packing.holds_query(plan, rows, used))
    else:
        first = args.lse + (work.seq.batch.to(gl.int64) * args.heads + heads) * args.lse_stride
        gl.store(first + queries, lse, mask=packing.holds_query(plan, rows, queries < args.seqlen_q))
    if plan.fixed_max:
        if at.valid == redo.TILE:
            visit = _own_blocks(plan, args, work, row)
            fixed = _full_stop(plan, args, at, work, row, visit) > visit.full_start
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
    ctas: gl.constexpr = plan.kv_multicast
    q = make_channel(make_buffers(dtype, consumers, plan.tile_m, plan.head_dim_chunks), consumers, 1, plain, ctas)
    if plan.o_over_q:
        o = q.buffers
    else:
        o = make_buffers(dtype, consumers, plan.tile_m, plan.head_dim_v_chunks)
    if plan.shared_kv_ring:
        k = make_channel(
            make_buffers(dtype, plan.kv_stages, plan.tile_n, plan.head_dim_chunks), plan.kv_stages, consumers, plain, ctas, ctas > 1
        )
        v = k
    else:
        k = make_channel(
            make_buffers(dtype, plan.k_stages, plan.tile_n, plan.head_dim_chunks), plan.k_stages, consumers, plain, ctas, ctas > 1
        )
        v = make_channel(
            make_buffers(dtype, plan.v_stages, plan.tile_n, plan.head_dim_v_chunks), plan.v_stages, consumers, plain, ctas, ctas > 1
        )
    tiles = make_tile_channel(consumers, plain, ctas)
    mail = multicast.make_mail(plan)
    again = redo.make_redo(plan)
    kv_out = KeyValue(k.sender(), v.sender(), plan.shared_kv_ring)
    kv_in = KeyValue(k.receiver(), v.receiver(), plan.shared_kv_ring)
    registers: gl.constexpr = worker_registers(plan)
    if consumers == 1:
        gl.warp_specialize([
            (consumer, (plan, args, q, kv_in, o, tiles, again, 0)),
            (producer, (plan, args, q, kv_out, o, tiles, mail, again)),
        ], [1], registers)  # fmt: skip
    elif consumers == 2 and ctas > 1:
        gl.warp_specialize([
            (consumer, (plan, args, q, kv_in, o, tiles, again, 0)),
            (consumer, (plan, args, q, kv_in, o, tiles, again, 1)),
            (spare, (plan,)),
            (producer, (plan, args, q, kv_out, o, tiles, mail, again)),
            (spare, (plan,)),
        ], [WARPS, 2, 1, 1], [registers[0], registers[1], registers[1], registers[1]])  # fmt: skip
    elif consumers == 2:
        gl.warp_specialize([
            (consumer, (plan, args, q, kv_in, o, tiles, again, 0)),
            (consumer, (plan, args, q, kv_in, o, tiles, again, 1)),
            (producer, (plan, args, q, kv_out, o, tiles, mail, again)),
        ], [WARPS, 1], registers)  # fmt: skip
    elif ctas > 1:
        gl.warp_specialize([
            (consumer, (plan, args, q, kv_in, o, tiles, again, 0)),
            (consumer, (plan, args, q, kv_in, o, tiles, again, 1)),
            (consumer, (plan, args, q, kv_in, o, tiles, again, 2)),
            (spare, (plan,)),
            (producer, (plan, args, q, kv_out, o, tiles, mail, again)),
            (spare, (plan,)),
        ], [WARPS, WARPS, 2, 1, 1], [registers[0], registers[1], registers[2], registers[2], registers[2]])  # fmt: skip
    else:
        gl.warp_specialize([
            (consumer, (plan, args, q, kv_in, o, tiles, again, 0)),
            (consumer, (plan, args, q, kv_in, o, tiles, again, 1)),
            (consumer, (plan, args, q, kv_in, o, tiles, again, 2)),
            (producer, (plan, args, q, kv_out, o, tiles, mail, again)),
        ], [WARPS, WARPS, 1], registers)  # fmt: skip
