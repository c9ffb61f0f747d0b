"""Tile order and hand-out on the device: what ``spec.schedule`` defines.

The producer decides. It walks the tiles of its CTA (one; every grid-th; or those an atomic counter hands out), works out their coordinates
and sends them to the consumers through a channel, one tile ahead.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.core import _aggregate as aggregate

from tandem_attn.kernels.common import ptx
from tandem_attn.kernels.common.channel import WARPS, Buffers, channel_of
from tandem_attn.kernels.common.packing import head_groups

AHEAD = gl.constexpr(2)  # tiles the producer may be ahead of the slowest consumer


@gluon.constexpr_function
def is_dynamic(plan):
    return plan.schedule.launch.value == "dynamic"


@gluon.constexpr_function
def is_persistent(plan):
    return plan.schedule.launch.value != "none"


@gluon.constexpr_function
def is_naive(plan):
    return plan.schedule.kind.value == "naive"


@aggregate
class Coords:
    """Coordinates of one tile, see ``spec.schedule.Tile``; ``valid`` is 0 behind the last one."""

    valid: gl.tensor
    m_block: gl.tensor
    head: gl.tensor
    batch: gl.tensor


@gluon.jit
def tile_count(plan: gl.constexpr, args):
    if plan.varlen and plan.num_splits > 1:
        return gl.load(args.starts + args.batch) * args.parts[2]
    elif plan.varlen:
        return gl.load(args.starts + args.batch)
    else:
        return args.num_tiles


@gluon.jit
def coords_of(plan: gl.constexpr, args, tile, num_tiles):
    """Where tile number ``tile`` lies. With split keys ``valid`` is 1 + the split: the parts of a tile follow one another."""
    valid = (tile < num_tiles).to(gl.int32)
    if plan.num_splits > 1:
        valid = valid * (1 + tile % args.parts[2])
        tile = tile // args.parts[2]
    heads = head_groups(plan, args)
    if plan.varlen:
        rank = last_not_beyond(args.starts, args.batch, tile)
        batch = gl.load(args.order + rank)
        blocks = gl.cdiv(gl.load(args.cu_q + batch + 1) - gl.load(args.cu_q + batch), plan.queries_per_tile)
        within = _dense_coords(tile - gl.load(args.starts + rank), gl.maximum(blocks, 1), heads, 1, args.section, not is_naive(plan))
        return Coords(valid, within.m_block, within.head, batch)
    else:
        at = _dense_coords(tile, args.blocks, heads, args.batch, args.section, not is_naive(plan))
        return Coords(valid, at.m_block, at.head, at.batch)


@gluon.jit
def last_not_beyond(starts, count, place):
    """Which of ``count`` ranges, one behind the other, holds ``place``: the last whose start is not beyond it (empty ones hold nothing)."""
    low = gl.to_tensor(0)
    high = count
    while high - low > 1:
        middle = (low + high) // 2
        beyond = gl.load(starts + middle) > place
        low = gl.where(beyond, low, middle)
        high = gl.where(beyond, middle, high)
    return low


@gluon.jit
def _dense_coords(tile, blocks, heads, batch, section, descending: gl.constexpr):
    """``spec.schedule.DenseSchedule.coords``: section by section of heads, in a section block by block, each for all its heads."""
    pairs = heads * batch
    which = tile // (section * blocks)
    within = tile - which * section * blocks
    first = which * section
    size = gl.maximum(gl.minimum(section, pairs - first), 1)
    rank = within // size
    pair = first + within - rank * size
    b = pair // heads
    m_block = rank
    if descending:
        m_block = blocks - 1 - rank
    return Coords(gl.to_tensor(1), m_block, pair - b * heads, b)


@gluon.jit
def make_tile_channel(consumers: gl.constexpr, plain: gl.constexpr, ctas: gl.constexpr = 1):
    """Carries the coordinates of tiles from the producer to every consumer."""
    return tile_channel_of(consumers if plain else consumers * WARPS, plain, ctas=ctas)


@gluon.jit
def tile_channel_of(
    arrivals: gl.constexpr, plain: gl.constexpr, in_each_cta: gl.constexpr = (), lean: gl.constexpr = False,
    ctas: gl.constexpr = 1,
):  # fmt: skip
    """``make_tile_channel``, each slot released by ``arrivals`` arrivals.

    ``in_each_cta``: layout bases of shared memory of which each CTA of a pair has its own.
    """
    slots = gl.allocate_shared_memory(gl.int32, [AHEAD, 4], gl.SwizzledSharedLayout(1, 1, 1, [0], in_each_cta))
    return channel_of(Buffers(slots, slots), AHEAD, arrivals, plain, lean=lean, ctas=ctas)


@gluon.jit
def following_tile(plan: gl.constexpr, args, tile, num_tiles):
    """The number of this CTA's next tile.

    Every CTA that had a tile takes one number too many, so a launch takes ``num_tiles`` of them; the last taker leaves the counter at 0.
    """
    if is_dynamic(plan):
        taken = gl.atomic_add(args.counter, 1, sem="relaxed")
        if taken == num_tiles - 1:
            gl.store(args.counter, 0)
        return taken + gl.num_programs(0)
    elif is_persistent(plan):
        return tile + gl.num_programs(0) // plan.kv_multicast
    else:
        return num_tiles


@gluon.jit
def send_tile(out, at):
    """Passes a tile's coordinates to the consumers."""
    out.wait_empty()
    ptx.store_four(out.channel.here(out.slot()), at.valid, at.m_block, at.head, at.batch)
    out.sent()
    return out.next()


@gluon.jit
def receive_tile(tiles_in):
    """The next tile's coordinates."""
    tiles_in.wait()
    valid, m_block, head, batch = ptx.load_four(tiles_in.channel.here(tiles_in.slot()))
    tiles_in.release()
    return Coords(valid, m_block, head, batch), tiles_in.next()
