"""Which key blocks a consumer computes, how, and which it lets pass."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.core import _aggregate as aggregate

from tandem_attn.kernels.common import masks, packing, redo
from tandem_attn.kernels.sm90 import turns


@gluon.constexpr_function
def skips_blocks(plan):
    """Whether the last blocks that a tile visits may lie beyond what its first rows see, and these rows then skip them."""
    tree = masks.parse(plan.mask)
    ends_early = tree.kind == "window" and tree.left == "None" and tree.right != "None"
    return ends_early and plan.num_splits == 1 and plan.queries_per_tile * plan.pack_rows > plan.tile_n


@gluon.jit
def own_blocks(plan: gl.constexpr, args, work, row):
    """The key blocks of one consumer's rows: those of the tile, or fewer."""
    if skips_blocks(plan):
        queries: gl.constexpr = plan.tile_m // plan.pack_rows
        first = packing.queries(plan, row)
        return masks.visit(masks.parse(plan.mask), args.scalars, work.seq, first, queries, plan.tile_n, ())
    else:
        return work.visit


@aggregate
class Loops:
    """Where the three loops over a consumer's blocks end or begin, from the last block to the first: masked blocks down to ``masked_from``,
    whole ones from ``whole_start`` to ``whole_stop``, and below ``left_stop`` those that a window's left side cuts."""

    masked_from: gl.tensor
    whole_start: gl.tensor
    whole_stop: gl.tensor
    left_stop: gl.tensor


@gluon.jit
def loops(plan: gl.constexpr, args, at, work, row, visit):
    """With fixed maxima whole blocks keep those that rows have by then: so every row needs one. A tile that is computed again has all its
    blocks in the masked loop, which renews maxima."""
    tree: gl.constexpr = masks.parse(plan.mask)
    stop = visit.full_stop
    if plan.fixed_max:
        if tree.kind == "window" and tree.right != "None":  # may the first row see nothing behind?
            _, hi = masks.edges(tree, args.scalars, work.seq.q.used, work.seq.k.used)
            seen = packing.queries(plan, row) + hi + 1
            stop = gl.where(seen <= stop * plan.tile_n, gl.maximum(stop - 1, visit.full_start), stop)
        once = at.valid == redo.TILE
        return Loops(
            gl.where(once, gl.maximum(stop, visit.start), visit.start),
            visit.full_start,
            gl.where(once, stop, visit.full_start),
            gl.where(once, gl.minimum(visit.full_start, stop), visit.start),
        )
    else:
        return Loops(gl.maximum(stop, visit.start), visit.full_start, stop, gl.minimum(visit.full_start, stop))


@gluon.jit
def skip_before(plan: gl.constexpr, kv_in, skipped, index: gl.constexpr):
    """Lets the last blocks pass, all of them but V of the first that is not skipped."""
    for i in range(skipped):
        turns.take(plan, index)
        turns.pass_on(plan, index)
        kv_in = kv_in.after_k(skipped_slot(kv_in.k))
        if i > 0:
            kv_in = kv_in.after_v(skipped_slot(kv_in.v))
    return kv_in


@gluon.jit
def skipped_slot(end):
    end.wait()
    end.release()
    return end.next()
