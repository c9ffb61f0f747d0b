"""A consumer, one warpgroup: computes 64 query rows, tile after tile."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from tandem_attn.kernels.common import masks, multicast, redo
from tandem_attn.kernels.common.arguments import work_at
from tandem_attn.kernels.common.scheduler import receive_tile
from tandem_attn.kernels.sm90 import turns
from tandem_attn.kernels.sm90.block import State, block, first_block, rows_from, s_layout, values_mma, values_wait
from tandem_attn.kernels.sm90.finish import finish, finish_part
from tandem_attn.kernels.sm90.staging import await_store, borrow, is_lent, o_tile
from tandem_attn.kernels.sm90.visits import loops, own_blocks, skip_before, skipped_slot, skips_blocks


@gluon.jit
def consumer(plan: gl.constexpr, args, q, kv_in, o, tiles, again, index: gl.constexpr):
    """Computes the query rows of one warpgroup, tile after tile."""
    rank = multicast.join(plan)
    q_in = q.lane(index).receiver()
    if not is_lent(plan):
        o_slot = o.slots.index(index)
        o_tail = o.tails.index(index)
    turns.open_turns(plan, index)
    at, tiles_in = _next_tile(plan, again, tiles.receiver())
    while at.valid != 0:
        work = work_at(plan, args, at)
        row = work.row + rank * plan.rows_per_cta + index * plan.tile_m
        state, kv_in = _attend(plan, args, at, work, row, q_in, kv_in, index)
        if is_lent(plan):
            lent, kv_in = borrow(plan, kv_in, index)
            o_slot = o_tile(plan, lent.slot(), plan.head_dim_v_chunks[0], index)
            o_tail = o_slot
            if len(plan.head_dim_v_chunks) > 1:
                o_tail = o_tile(plan, lent.tail(), plan.head_dim_v_chunks[1], index)
        if plan.num_splits > 1:
            finish_part(plan, args, work, row, state)
        elif plan.fixed_max:
            if redo.writes(at, redo.own(plan, rank, index)):
                finish(plan, args, at, rank, work, row, state, o_slot, o_tail, again, index)
        else:
            finish(plan, args, at, rank, work, row, state, o_slot, o_tail, again, index)
        if is_lent(plan):
            await_store()
            lent.release()
        q_in = q_in.next()
        at, tiles_in = _next_tile(plan, again, tiles_in)
    turns.close_turns(plan, index)
    tma.store_wait(0)


@gluon.jit
def _next_tile(plan: gl.constexpr, again, tiles_in):
    """The next tile's coordinates. A CTA may get none: then the first word is that it reports."""
    at, tiles_in = receive_tile(tiles_in)
    if plan.fixed_max:
        if at.valid == redo.REPORT:
            redo.report(plan, again)
            at, tiles_in = receive_tile(tiles_in)
    return at, tiles_in


@gluon.jit
def _attend(plan: gl.constexpr, args, at, work, row, q_in, kv_in, index: gl.constexpr):
    """Softmax-weighted values of all key blocks, from the last block to the first; not yet normalised."""
    tree: gl.constexpr = masks.parse(plan.mask)
    visit = own_blocks(plan, args, work, row)
    skipped = work.visit.stop - visit.stop
    rows = rows_from(plan, row)
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
        kv_in = skip_before(plan, kv_in, skipped, index)
    state, kv_in = first_block(plan, args, work, rows, q_a, q_b, kv_in, visit.stop - 1, index)
    if skips_blocks(plan):
        if skipped > 0:
            kv_in = kv_in.after_v(skipped_slot(kv_in.v))
    n_block = visit.stop - 2
    ends = loops(plan, args, at, work, row, visit)
    for _ in range(ends.masked_from, visit.stop - 1):
        state, kv_in = block(plan, args, work, rows, q_a, q_b, kv_in, state, n_block, True, index)
        n_block -= 1
    if masks.has_full_blocks(tree):
        for _ in range(ends.whole_start, ends.whole_stop):
            state, kv_in = block(plan, args, work, rows, q_a, q_b, kv_in, state, n_block, False, index)
            n_block -= 1
        if masks.bounded_left(tree):
            for _ in range(visit.start, ends.left_stop):
                state, kv_in = block(plan, args, work, rows, q_a, q_b, kv_in, state, n_block, True, index)
                n_block -= 1
    if not plan.q_registers:
        q_in.release()
    v = kv_in.v
    v.wait()
    o_mma, tail_mma = values_mma(plan, state, v)
    acc, acc_tail = values_wait(plan, o_mma, tail_mma)
    v.release()
    return State(acc, acc_tail, state.row_max, state.row_sum, state.p), kv_in.after_v(v.next())
