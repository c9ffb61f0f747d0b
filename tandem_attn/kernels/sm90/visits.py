"""Which key blocks a consumer computes, how, and which it lets pass."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

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


@gluon.jit
def full_stop(plan: gl.constexpr, args, at, work, row, visit):
    """Blocks from ``visit.full_start`` to this one are computed without element masks and, with fixed maxima, with those that rows have by
    then: so every row needs one, and a tile that is computed again has no such block."""
    tree: gl.constexpr = masks.parse(plan.mask)
    stop = gl.maximum(visit.full_stop, visit.start)
    if plan.fixed_max:
        if tree.kind == "window" and tree.right != "None":  # may the first row see nothing behind?
            _, hi = masks.edges(tree, args.scalars, work.seq.q.used, work.seq.k.used)
            seen = packing.queries(plan, row) + hi + 1
            stop = gl.where(seen <= stop * plan.tile_n, gl.maximum(stop - 1, visit.full_start), stop)
        stop = gl.where(at.valid == redo.TILE, stop, visit.start)
    return stop


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
