"""A softmax role: one warpgroup, one row of its query tile a thread, no shuffles.

With two query tiles each has a role. The key blocks of one query tile go to both roles in turns: each receives the other's row maxima, so
that the maxima of one block are taken beside the exponentials of the other.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.core import _aggregate as aggregate

from tandem_attn.kernels.common import bias, descale, masks, packing, predicates, ptx, row_masks, splits
from tandem_attn.kernels.common import softmax as online
from tandem_attn.kernels.common.arguments import exp2_of, has_bias, is_natural, lse_offset, natural_lse, unit, with_sink, work_at
from tandem_attn.kernels.common.channel import cluster_split
from tandem_attn.kernels.common.scheduler import receive_tile
from tandem_attn.kernels.sm100 import memory, twins
from tandem_attn.kernels.sm100.memory import by_turns
from tandem_attn.kernels.sm100.visits import stride, turn, visit_of
from tandem_attn.kernels.sm100.weights import write_p


@aggregate
class State:
    """What a row keeps between key blocks."""

    row_max: gl.tensor  # log2 units, of all blocks so far
    sums: gl.tuple  # two partial row sums of this role's blocks
    sums_max: gl.tensor  # what the sums are relative to: row_max as of this role's last block


@gluon.constexpr_function
def row_type(plan, dtype):
    """A number a row, one row a thread."""
    return gl.distributed_type(dtype, [memory.rows(plan)], gl.SliceLayout(1, row_layout(plan, plan.tile_n)))


@gluon.constexpr_function
def tile_type(plan, columns):
    """float32 (rows, columns): thread t of the role holds row t of its CTA, as tcgen05.ld .32x32b gives it."""
    return gl.distributed_type(gl.float32, [memory.rows(plan), columns], row_layout(plan, columns))


@gluon.constexpr_function
def row_layout(plan, columns):
    return gl.BlockedLayout([1, columns], [32, 1], [4, 1], [1, 0], [list(basis) for basis in cluster_split(plan, 0)])


@aggregate
class Place:
    """Rows of the work item, each one's query and query head (one for all unless heads are packed), and the scale of their scores."""

    rows: gl.tensor
    queries: gl.tensor
    heads: gl.tensor
    scale_log2: gl.tensor


@gluon.jit
def place_of(plan: gl.constexpr, args, work, rows):
    scale = descale.scale_of_scores(plan, args, work)
    return Place(rows, packing.queries(plan, rows), packing.heads(plan, work.head, rows), scale)


@gluon.jit
def softmax(plan: gl.constexpr, args, pipe, index: gl.constexpr):
    """P of every block in S tile ``index``, the statistics by which correction scales O, and LSE."""
    tile = pipe.s_tiles[index].for_softmax()
    other = pipe.s_tiles[1 - index]
    lane_row = ptx.lane_row(memory.rows(plan), row_type(plan, gl.int32).layout)
    warp_row = ptx.warp_row(lane_row)
    s_address = ptx.tmem_lanes(memory.scores(plan, pipe.tmem, index), warp_row)
    p_address = ptx.tmem_lanes(memory.weights(plan, pipe.tmem, index, args.v.dtype), warp_row)
    at, tiles_in = receive_tile(pipe.tiles.receiver())
    while ptx.uniform(at.valid) != 0:
        work = work_at(plan, args, at)
        place = place_of(plan, args, work, ptx.pinned(work.row + memory.query_tile(plan, index) * memory.rows(plan) + lane_row))
        visit = visit_of(plan, args, work, index)
        n_block = visit.stop + (stride(plan) - 1 - turn(plan, index))
        zero = (lane_row * 0).to(gl.float32)
        state = State(zero + float("-inf"), (zero, zero), zero + float("-inf"))
        if turn(plan, index) == 1:
            state, other = _received_max(state, other, lane_row)
        for _ in range(visit.start, visit.stop - turn(plan, index), stride(plan)):
            n_block -= stride(plan)
            masked = visit.masks(n_block)
            state, tile = _block(plan, args, pipe.tmem, work, place, lane_row, state, tile, n_block, masked, (s_address, p_address), index)
            if by_turns(plan):
                if n_block > visit.start:
                    state, other = _received_max(state, other, lane_row)
        if by_turns(plan):
            state, tile, other = _added_up(plan, lane_row, state, tile, other, index)
        if turn(plan, index) == 0:
            if plan.num_splits > 1:
                tile = _finish_part(plan, args, work, place, lane_row, state, tile)
            else:
                tile = _finish(plan, args, work, place, lane_row, state, tile)
        at, tiles_in = receive_tile(tiles_in)


@gluon.jit
def _received_max(state, other, lane_row):
    """The state with the maxima of the block behind, which the other role has taken."""
    other, row_max = other.receive(lane_row)
    return State(row_max, state.sums, state.sums_max), other


@gluon.jit
def _added_up(plan: gl.constexpr, lane_row, state, tile, other, index: gl.constexpr):
    """The state of role 0 with both roles' sums, which are then relative to the last maxima; role 1 sends its own.

    Correction receives what role 1 sends too, and role 1 the factor by which role 0 has O normalised: each message has two receivers.
    """
    scale = exp2_of(is_natural(plan), state.sums_max - online.finite_or_zero(state.row_max))
    own = (state.sums[0] + state.sums[1]) * scale
    if index == 1:
        tile = tile.send(own, lane_row)
    other, theirs = other.receive(lane_row)
    return State(state.row_max, (own, theirs), state.row_max), tile, other


@gluon.jit
def _block(plan: gl.constexpr, args, tmem, work, place, lane_row, state, tile, n_block, masked, places, index: gl.constexpr):
    """Maxima, statistics and P of one key block; ``places`` are the addresses of S and P."""
    s_address, p_address = places
    tile.s_ready.wait()
    ptx.tmem_after()
    if tile.s_ready.plain:
        s = twins.load(memory.scores(plan, tmem, index), row_layout(plan, plan.tile_n))
    else:
        s = ptx.load_row(s_address, tile_type(plan, plan.tile_n))
    s, scale = _logits(plan, args, work, s, place, n_block, masked)
    row_max = gl.maximum(state.row_max, gl.max(s, axis=1) * scale)
    row_max = _kept_max(plan, state.row_max, row_max)
    safe_max = online.finite_or_zero(row_max)
    if by_turns(plan):
        tile = tile.send(row_max, lane_row)
        alpha = exp2_of(is_natural(plan), state.sums_max - safe_max)
    else:
        alpha = exp2_of(is_natural(plan), state.row_max - safe_max)
        tile = tile.send(alpha, lane_row)
    sums = (state.sums[0] * alpha, state.sums[1] * alpha)
    if is_natural(plan):  # the difference first: biases may be as large as float32 goes
        s = s - safe_max[:, None]
        safe_max = safe_max * 0.0
        scale = gl.to_tensor(online.LOG2_E.value)
    if plan.p_exponent:
        safe_max -= plan.p_exponent
    if tile.s_ready.plain:
        sums = twins.write_p(plan, s, scale, safe_max, sums, memory.weights(plan, tmem, index, args.v.dtype), tile.p_ready)
    else:
        sums = write_p(plan, s, scale, safe_max, sums, p_address, args.batch, tile.p_ready)
    return State(row_max, sums, row_max), tile.after_scores().after_values()


@gluon.jit
def _logits(plan: gl.constexpr, args, work, s, place, n_block, masked):
    """Masked scores, and what to multiply them with for the units of maxima."""
    n_start = n_block * plan.tile_n
    scale = place.scale_log2
    if plan.softcap:
        s = online.tanh(s * (scale * online.LN_2 / args.softcap)) * (args.softcap * unit(plan))
        scale = gl.to_tensor(1.0)
    elif has_bias(plan):
        s = s * (scale * online.LN_2 if is_natural(plan) else scale)
        scale = gl.to_tensor(1.0)
    if is_natural(plan):
        s = bias.add_to_row(s, args.bias_data, plan.bias, work.seq.batch, place.heads, place.queries, n_start)
    if plan.alibi:
        slope = gl.load(args.slopes + work.seq.batch * args.heads + place.heads) * unit(plan)
        distance = (place.queries + (work.seq.k.used - work.seq.q.used) - n_start).to(gl.float32)
        s = row_masks.add_alibi(s, scale, slope, distance)
    site = predicates.Site(work.seq.batch, packing.as_column(plan, place.heads), args.mask_data)
    s = row_masks.hide(s, masks.parse(plan.mask), args.scalars, work.seq, place.queries, n_start, masked, site)
    return s, scale


@gluon.jit
def _kept_max(plan: gl.constexpr, old, new):
    """The stabilisers: the new maxima, or the old ones while no row of those that decide together grew by more than tau."""
    tau: gl.constexpr = _threshold(plan)
    if plan.rescale_rows == 0:
        return new
    elif plan.rescale_rows == 1:
        return gl.where(new > old + tau, new, old)
    elif plan.rescale_rows == 32:
        return online.grown_max(old, new, tau)
    else:
        grew = gl.reduce_or((new > old + tau).to(gl.int32), 0) != 0
        return gl.where(grew, new, old)


@gluon.constexpr_function
def _threshold(plan):
    """tau in the units of maxima."""
    return plan.rescale_threshold * (online.LN_2.value if is_natural(plan) else 1.0)


@gluon.jit
def _finish(plan: gl.constexpr, args, work, place, lane_row, state, tile):
    """Sends the factors that normalise O and writes LSE. A row without keys gets 0 and -inf, with a sink 0 and the sink."""
    row_sum = _row_sum(plan, state)
    row_max = state.row_max
    if plan.sink:
        row_max, row_sum, share = with_sink(gl.load(args.sink + place.heads) * unit(plan), row_max, row_sum, is_natural(plan))
    else:
        share = row_sum * 0.0 + 1.0
    queries, heads = place.queries, place.heads
    used = queries < work.seq.q.used  # row_sum is 0 for a row without keys, and NaN where an input was
    lse = gl.where(used & (row_sum != 0), natural_lse(plan, row_max, row_sum), float("-inf"))
    tile = tile.send(gl.where(used & (row_sum != 0), _factor(plan, args, work, share / row_sum), 0.0), lane_row)
    first = args.lse + lse_offset(plan, args, work.seq.batch, heads)
    if plan.varlen:
        gl.store(first + work.seq.q.start + queries, lse, mask=packing.holds_query(plan, place.rows, used))
    else:
        gl.store(first + queries, lse, mask=packing.holds_query(plan, place.rows, queries < args.seqlen_q))
    return tile


@gluon.jit
def _row_sum(plan: gl.constexpr, state):
    """Of the weights as they are, without the factor that P carries; a power of two, so nothing is rounded."""
    row_sum = state.sums[0] + state.sums[1]
    return row_sum * 2.0**-plan.p_exponent if plan.p_exponent else row_sum


@gluon.jit
def _factor(plan: gl.constexpr, args, work, share):
    """What normalises O, with what O stands for."""
    return share * descale.scale_of_output(plan, args, work) if plan.p_exponent or plan.descale else share


@gluon.jit
def _finish_part(plan: gl.constexpr, args, work, place, lane_row, state, tile):
    """Sends the factors that normalise a part of the keys and writes its statistics, see ``splits``; sinks join with the parts."""
    row_sum = _row_sum(plan, state)
    used = place.queries < work.seq.q.used
    tile = tile.send(gl.where(used & (row_sum != 0), _factor(plan, args, work, 1.0 / row_sum), 0.0), lane_row)
    at, exists = part_rows(plan, args, work, place)
    splits.store_statistics(args.parts, at, gl.where(used, state.row_max, splits.UNUSED), gl.where(used, row_sum, 0.0), exists)
    return tile


@gluon.jit
def part_rows(plan: gl.constexpr, args, work, place):
    """Numbers of the rows in the parts, and which of them exist."""
    exists = place.queries < (work.seq.q.used if plan.varlen else args.seqlen_q)
    first = work.seq.q.start if plan.varlen else work.seq.batch * args.seqlen_q
    at = (work.split.to(gl.int64) * args.parts[3] + first + place.queries) * args.heads + place.heads
    return at, packing.holds_query(plan, place.rows, exists)
