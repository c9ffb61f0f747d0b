"""Tiles that are computed again: where rows keep the maximum of their first blocks, later logits may overflow.

``Plan.fixed_max``: a row's weights are 2^(logit - m) with the maximum m of the blocks that a mask touches, or of the first one. Weights of
later blocks may be larger than 1; float32 sums and bfloat16 weights hold them up to 2^127, so nothing is lost but where logits grow by
about that. Then a sum is beyond ``LARGEST_SUM``, or O is: the consumer links its rows into a list, and when the CTA (or cluster) has no
other tile left, the producer loads those of the list again, which the consumers compute with running maxima.

The list needs no memory of its own: its head lies in shared memory of the (first) CTA, and each link in the LSE of the first row, which
is written again. A node is a tile and a consumer, counted through the cluster (of packed sequences: where that LSE lies); one whose rows
were right does not write again.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.core import _aggregate as aggregate

from tandem_attn.kernels.common import multicast, ptx, ptx_cluster
from tandem_attn.kernels.common.arguments import lse_offset
from tandem_attn.kernels.common.scheduler import Coords, last_not_beyond
from tandem_attn.kernels.common.signal import make_signal

# ``Coords.valid`` of what the producer sends:
TILE = gl.constexpr(1)
REPORT = gl.constexpr(2)  # no tile: all have been handed out, and consumers say when they are done with them
AGAIN = gl.constexpr(3)  # and the consumer of the node, counted through the cluster

NOTHING = gl.constexpr(-1)  # the end of the list
LARGEST_SUM = gl.constexpr(2.0**100)  # of a row's weights; the reciprocal of one beyond 2^126 would be subnormal
WARPS = gl.constexpr(4)


@aggregate
class Redo:
    head: gl.base_value  # shared memory: the last node linked; with ``done`` 0 where the plan has running maxima
    done: gl.base_value  # signal: every consumer has linked what it must


@gluon.jit
def make_redo(plan: gl.constexpr):
    nothing = gl.to_tensor(0)
    if plan.fixed_max:
        head = gl.allocate_shared_memory(gl.int32, [1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
        head.store(gl.full([1], NOTHING, gl.int32, gl.BlockedLayout([1], [32], [4], [0])))
        return Redo(head, make_signal(1, plan.q_stages * WARPS * plan.kv_multicast, False))
    else:
        return Redo(nothing, nothing)


@gluon.jit
def own(plan: gl.constexpr, rank, index: gl.constexpr):
    """The number of a consumer, counted through the cluster."""
    return rank * plan.q_stages + index


@gluon.jit
def writes(at, consumer):
    """Whether a consumer's rows of a tile are to be written."""
    return (at.valid == TILE) | (at.valid == AGAIN + consumer)


@gluon.jit
def link(plan: gl.constexpr, args, redo, at, consumer):
    """Puts a consumer's rows of a tile into the list; every warp of the consumer calls it, behind a barrier that follows the tile's LSE."""
    if plan.varlen:
        node = _offset(plan, args, at, consumer).to(gl.int32)
    else:
        tile = (at.batch * args.heads + at.head) * args.blocks + at.m_block
        node = tile * (plan.q_stages * plan.kv_multicast) + consumer
    ptx_cluster.push(plan.kv_multicast, _here(plan, redo.head), node, args.lse + _offset(plan, args, at, consumer))


@gluon.jit
def report(plan: gl.constexpr, redo):
    """Says that this warp has linked what it must; O of the same rows may be stored again."""
    ptx.stores_done()
    if plan.kv_multicast == 1:
        ptx.arrive_warp(redo.done.barrier())
    else:
        ptx_cluster.publish_warp(0, ptx_cluster.in_own_cta(redo.done.barrier()))


@gluon.jit
def _here(plan: gl.constexpr, slot):
    if plan.kv_multicast == 1:
        return slot
    else:
        return ptx_cluster.in_own_cta(slot)


@gluon.jit
def nothing():
    """What ends the consumers."""
    zero = gl.to_tensor(0)
    return Coords(zero, zero, zero, zero)


@gluon.jit
def first(plan: gl.constexpr, redo, mail):
    """The first node, once all consumers have reported, and the mail behind it."""
    if plan.kv_multicast == 1:
        redo.done.wait()
        return ptx.load_word(redo.head), mail
    else:
        node = gl.to_tensor(NOTHING)
        if mail.rank == 0:
            ptx_cluster.wait_phase_of_cluster(_here(plan, redo.done.barrier()), 0)
            node = ptx.load_word(_here(plan, redo.head))
        return multicast.tell(node, mail)


@gluon.jit
def tile_of(plan: gl.constexpr, args, node):
    """What to send for a node."""
    if plan.varlen:
        head = node // args.lse_stride
        row = node - head * args.lse_stride
        batch = last_not_beyond(args.cu_q, args.batch, row)
        row -= gl.load(args.cu_q + batch)
        m_block = row // (plan.rows_per_cta * plan.ctas)
        return Coords(AGAIN + (row - m_block * (plan.rows_per_cta * plan.ctas)) // plan.tile_m, m_block, head, batch)
    else:
        return _dense_tile_of(plan, args, node)


@gluon.jit
def _dense_tile_of(plan: gl.constexpr, args, node):
    tile = node // (plan.q_stages * plan.kv_multicast)
    consumer = node - tile * (plan.q_stages * plan.kv_multicast)
    pair = tile // args.blocks
    batch = pair // args.heads
    return Coords(AGAIN + consumer, tile - pair * args.blocks, pair - batch * args.heads, batch)


@gluon.jit
def following(plan: gl.constexpr, args, at, mail):
    """The node behind that of ``at``, before its tile is computed again, and the mail behind it."""
    if plan.kv_multicast == 1:
        return ptx_cluster.load_global(args.lse + _offset(plan, args, at, at.valid - AGAIN)), mail
    else:
        node = gl.to_tensor(NOTHING)
        if mail.rank == 0:
            node = ptx_cluster.load_global(args.lse + _offset(plan, args, at, at.valid - AGAIN))
        return multicast.tell(node, multicast.pass_on(mail))  # the link is written over when the tile is computed


@gluon.jit
def _offset(plan: gl.constexpr, args, at, consumer):
    """Where the LSE of the first row of a consumer's rows lies."""
    row = at.m_block * (plan.rows_per_cta * plan.ctas) + consumer * plan.tile_m
    if plan.varlen:
        row += gl.load(args.cu_q + at.batch)
    return lse_offset(plan, args, at.batch, at.head) + row
