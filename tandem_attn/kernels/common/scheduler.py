"""Tile order and hand-out on the device: what ``spec.schedule`` defines.

Every role walks the same tiles. With the static launch it computes them; with the dynamic one the producer takes them from an atomic
counter and passes them on through a channel.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.language.core import _aggregate as aggregate

from tandem_attn.kernels.common.channel import Buffers, make_channel

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
    """Coordinates of one tile, see ``spec.schedule.Tile``."""

    m_block: gl.tensor
    head: gl.tensor
    batch: gl.tensor


@gluon.jit
def dense_coords(tile, blocks, heads, batch, section, descending: gl.constexpr):
    """``spec.schedule.DenseSchedule.coords``: section by section of heads, in a section block by block, each for all its heads."""
    pairs = heads * batch
    which = tile // (section * blocks)
    within = tile - which * section * blocks
    first = which * section
    size = gl.minimum(section, pairs - first)
    rank = within // size
    pair = first + within - rank * size
    b = pair // heads
    m_block = rank
    if descending:
        m_block = blocks - 1 - rank
    return Coords(m_block, pair - b * heads, b)


@gluon.jit
def make_tile_channel(consumers: gl.constexpr, plain: gl.constexpr):
    """Carries tile numbers from the producer to every consumer."""
    slots = gl.allocate_shared_memory(gl.int32, [AHEAD, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    return make_channel(Buffers(slots, slots), AHEAD, consumers, plain)


@gluon.jit
def take_tile(counter, num_tiles):
    """The next tile of the grid, from the atomic counter; the last taker of a launch leaves 0 for the next launch."""
    taken = gl.atomic_add(counter, 1, sem="relaxed")
    if taken == num_tiles - 1:
        gl.store(counter, 0)
    return taken + gl.num_programs(0)


@gluon.jit
def send_tile(out, tile):
    """Passes a tile number to the consumers."""
    out.wait_empty()
    out.slot().store(gl.full([1], 0, gl.int32, _one(1)) + tile)
    mbarrier.arrive(out.ready(), count=1)
    return out.next()


@gluon.jit
def receive_tile(tiles_in):
    """The next tile number; every warp of a consumer gets it."""
    tiles_in.wait()
    tile = gl.max(tiles_in.slot().load(_one(4)), axis=0)
    tiles_in.release()
    return tile, tiles_in.next()


@gluon.constexpr_function
def _one(warps):
    return gl.BlockedLayout([1], [32], [warps], [0])

