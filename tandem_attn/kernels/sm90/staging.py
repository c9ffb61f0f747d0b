"""Where a consumer stages O for TMA: in shared memory of its own, or in a slot that the producer lends it at the end of a tile.

Lent slots belong to V's ring. Q's memory is then free when the last S is computed, and the next Q arrives under the last product and while
O is stored. Nothing is loaded into a lent slot; as any other it is announced when it is empty, and all consumers release it.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

from tandem_attn.kernels.common.channel import tma_layout
from tandem_attn.kernels.sm90.visits import skipped_slot


@gluon.constexpr_function
def is_lent(plan):
    return plan.o_in_ring and plan.num_splits == 1  # a part of the keys is written without TMA


@gluon.constexpr_function
def tiles_in_slot(plan):
    return plan.tile_n // plan.tile_m


@gluon.constexpr_function
def slots_lent(plan):
    return -(-plan.q_stages // tiles_in_slot(plan))


@gluon.jit
def lend(plan: gl.constexpr, out):
    """The producer's part: announces slots for the O tiles of all consumers; returns the channel end behind them."""
    slots: gl.constexpr = slots_lent(plan)
    for _ in gl.static_range(slots):
        out.wait_empty()
        out.sent()
        out = out.next()
    return out


@gluon.jit
def borrow(plan: gl.constexpr, kv_in, index: gl.constexpr):
    """The lent slot that holds this consumer's O tile, once it is empty, and the rings behind all lent ones."""
    slots: gl.constexpr = slots_lent(plan)
    end = kv_in.v
    mine = end
    for i in gl.static_range(slots):
        if i == index // tiles_in_slot(plan):
            end.wait()
            mine = end
            end = end.next()
        else:
            end = skipped_slot(end)
    return mine, kv_in.after_v(end)


@gluon.jit
def o_tile(plan: gl.constexpr, memory, columns: gl.constexpr, index: gl.constexpr):
    """A consumer's tile of O, or a chunk of it, in a lent slot."""
    layout: gl.constexpr = tma_layout(plan.tile_m, columns, memory.dtype)
    tiles = memory.reinterpret(memory.dtype, [tiles_in_slot(plan), plan.tile_m, columns], layout)
    return tiles.index(index % tiles_in_slot(plan))


@gluon.jit
def await_store():
    """Until every warp knows that O has been read from shared memory."""
    tma.store_wait(0)
    gl.barrier()
