"""A softmax role: one warpgroup, one row of its query tile a thread, no shuffles."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.core import _aggregate as aggregate

from tandem_attn.kernels.common import masks, ptx, row_masks
from tandem_attn.kernels.common import softmax as online
from tandem_attn.kernels.common.channel import cluster_split
from tandem_attn.kernels.common.scheduler import receive_tile
from tandem_attn.kernels.sm90.forward import _with_sink, work_at
from tandem_attn.kernels.sm100 import memory
from tandem_attn.kernels.sm100.pipeline import Tile, next_parts
from tandem_attn.kernels.sm100.weights import write_p


@aggregate
class State:
    """What a row keeps between key blocks."""

    row_max: gl.tensor  # log2 units
    sums: gl.tuple  # two partial row sums


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


@gluon.jit
def softmax(plan: gl.constexpr, args, pipe, index: gl.constexpr):
    """P of every block of query tile ``index``, the statistics by which correction scales O, and LSE."""
    tile = pipe.query_tiles[index]
    tile = Tile(tile.s_ready, tile.p_ready, tile.stats, tile.stats_ready, tile.stats_free.given(), tile.o_ready)
    rows: gl.constexpr = row_type(plan, gl.int32)
    lane_row = ptx.pinned(gl.arange(0, memory.rows(plan), rows.layout))
    s_address = ptx.tmem_lanes(memory.scores(plan, pipe.tmem, index, 0), lane_row)
    p_address = ptx.tmem_lanes(memory.weights(plan, pipe.tmem, index, 0, args.v.dtype), lane_row)
    at, tiles_in = receive_tile(pipe.tiles.receiver())
    while ptx.uniform(at.valid) != 0:
        work = work_at(plan, args, at)
        row = ptx.pinned(work.row + index * memory.rows(plan) + lane_row)
        start = ptx.uniform(work.visit.start)
        n_block = ptx.uniform(work.visit.stop)
        zero = (lane_row * 0).to(gl.float32)
        state = State(zero + float("-inf"), (zero, zero))
        for _ in range(start, ptx.uniform(work.visit.stop)):
            n_block -= 1
            state, tile = _block(plan, args, work, row, lane_row, state, tile, n_block, (s_address, p_address))
        tile = _finish(plan, args, work, row, lane_row, state, tile)
        at, tiles_in = receive_tile(tiles_in)


@gluon.jit
def _block(plan: gl.constexpr, args, work, row, lane_row, state, tile, n_block, places):
    """Maxima, statistics and P of one key block; ``places`` are the addresses of S and P."""
    s_address, p_address = places
    if plan.q_stages == 1:  # two S tiles take turns
        s_address += tile.s_ready.index * plan.tile_n
        p_address += tile.s_ready.index * plan.tile_n
    tile.s_ready.wait()
    ptx.tmem_after()
    s = ptx.load_row(s_address, tile_type(plan, plan.tile_n))
    s, scale = _logits(plan, args, work, s, row, n_block)
    row_max = gl.maximum(state.row_max, gl.max(s, axis=1) * scale)
    row_max = _kept_max(plan, state.row_max, row_max)
    safe_max = online.finite_or_zero(row_max)
    alpha = gl.exp2(state.row_max - safe_max)
    tile = _send(tile, alpha, lane_row)
    sums = (state.sums[0] * alpha, state.sums[1] * alpha)
    sums = write_p(plan, s, scale, safe_max, sums, p_address, args.batch, tile.p_ready)
    tile = Tile(tile.s_ready.next(), next_parts(tile.p_ready), tile.stats, tile.stats_ready, tile.stats_free, tile.o_ready)
    return State(row_max, sums), tile


@gluon.jit
def _logits(plan: gl.constexpr, args, work, s, row, n_block):
    """Masked scores, and what to multiply them with for log2 units."""
    n_start = n_block * plan.tile_n
    scale = args.scale_log2
    if plan.softcap:
        s = online.tanh(s * (scale * online.LN_2 / args.softcap)) * (args.softcap * online.LOG2_E)
        scale = gl.to_tensor(1.0)
    if plan.alibi:
        slope = gl.load(args.slopes + work.seq.batch * args.heads + work.head) * online.LOG2_E
        distance = (row + (work.seq.k.used - work.seq.q.used) - n_start).to(gl.float32)
        s = row_masks.add_alibi(s, scale, slope, distance)
        scale = gl.to_tensor(1.0)
    masked = (n_block >= work.visit.full_stop) | (n_block < work.visit.full_start)
    s = row_masks.hide(s, masks.parse(plan.mask), args.scalars, work.seq, row, n_start, ptx.uniform(masked.to(gl.int32)))
    return s, scale


@gluon.jit
def _kept_max(plan: gl.constexpr, old, new):
    """The stabilisers: the new maxima, or the old ones while no row of those that decide together grew by more than tau."""
    if plan.rescale_rows == 0:
        return new
    elif plan.rescale_rows == 1:
        return gl.where(new > old + plan.rescale_threshold, new, old)
    elif plan.rescale_rows == 32:
        return online.grown_max(old, new, plan.rescale_threshold)
    else:
        grew = gl.reduce_or((new > old + plan.rescale_threshold).to(gl.int32), 0) != 0
        return gl.where(grew, new, old)


@gluon.jit
def _send(tile, x, lane_row):
    """Passes a number a row to correction."""
    tile.stats_free.wait()
    ptx.put_row(tile.stats, x, lane_row)
    tile.stats_ready.arrive()
    return Tile(tile.s_ready, tile.p_ready, tile.stats, tile.stats_ready.next(), tile.stats_free.next(), tile.o_ready)


@gluon.jit
def _finish(plan: gl.constexpr, args, work, row, lane_row, state, tile):
    """Sends the factors that normalise O and writes LSE. A row without keys gets 0 and -inf, with a sink 0 and the sink."""
    row_sum = state.sums[0] + state.sums[1]
    row_max = state.row_max
    if plan.sink:
        row_max, row_sum, share = _with_sink(gl.load(args.sink + work.head) * online.LOG2_E, row_max, row_sum)
    else:
        share = row_sum * 0.0 + 1.0
    used = row < work.seq.q.used  # row_sum is 0 for a row without keys, and NaN where an input was
    lse = gl.where(used & (row_sum != 0), (row_max + gl.log2(row_sum)) * online.LN_2, float("-inf"))
    tile = _send(tile, gl.where(used & (row_sum != 0), share / row_sum, 0.0), lane_row)
    if plan.varlen:
        first = args.lse + work.head.to(gl.int64) * args.lse_stride + work.seq.q.start
        gl.store(first + row, lse, mask=used)
    else:
        first = args.lse + (work.seq.batch.to(gl.int64) * args.heads + work.head) * args.lse_stride
        gl.store(first + row, lse, mask=row < args.seqlen_q)
    return tile
