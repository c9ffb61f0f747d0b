"""K and V for the CTAs of a cluster: each loads a part of the rows of every tile, which TMA brings to all of them (multicast).

The CTAs are programs of their own, which work on neighbouring rows of one head and so visit the same key blocks in the same order. A slot is
filled when it is empty in all of them: each tells the other, see ``Sender.acquire_in_cluster``.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.language.core import _aggregate as aggregate

from tandem_attn.kernels.common import ptx
from tandem_attn.kernels.common.copies import coordinates
from tandem_attn.kernels.common.scheduler import following_tile, is_dynamic
from tandem_attn.kernels.common.signal import make_signal

TENSORS = gl.constexpr(("q", "k", "v", "o"))  # as the kernel's parameters have them


@gluon.constexpr_function
def hands_out(plan):
    return plan.kv_multicast > 1 and is_dynamic(plan)


@aggregate
class HandOut:
    """Where the first CTA puts the number of the next tile, in each CTA."""

    number: gl.base_value
    came: gl.base_value


@gluon.jit
def make_handout(plan: gl.constexpr):
    if hands_out(plan):
        number = gl.allocate_shared_memory(gl.int32, [1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
        return HandOut(number, make_signal(1, 1, True))
    else:
        return HandOut(gl.to_tensor(0), gl.to_tensor(0))


@gluon.jit
def next_tile(plan: gl.constexpr, args, tile, num_tiles, handout, window):
    """The number of the cluster's next tile, and the hand-out behind it.

    The first CTA writes a number only when it has been told, tile by tile, that slots are empty in the other, which has read the last one.
    """
    if hands_out(plan):
        mbarrier.expect(handout.came.barrier(), 4)
        clusters = gl.num_programs(0) // plan.kv_multicast
        ptx.take_for_pair(args.counter, num_tiles, clusters, handout.number, handout.came.barrier())
        handout.came.wait()
        return ptx.load_word(ptx.in_window(handout.number, window)), HandOut(handout.number, handout.came.next())
    else:
        return following_tile(plan, args, tile, num_tiles), handout


@gluon.constexpr_function
def parameter(plan, tensor, tail):
    """Number of the PTX parameter that is a descriptor: after each come its shape and strides."""
    from tandem_attn.kernels.compile import box_shape

    order = [(name, end) for end in (False, True) for name in TENSORS.value]
    before = order[: order.index((tensor, tail))]
    return sum(1 + 2 * len(box_shape(name, end, plan)) for name, end in before)


@gluon.constexpr_function
def tile_bytes(plan, chunks):
    return plan.tile_n * sum(chunks) * plan.element_bytes


@gluon.jit
def load_keys(plan: gl.constexpr, args, tensor: gl.constexpr, chunks: gl.constexpr, batch, rows, head, key, rank, out):
    """A sequence's keys or values from ``key`` on into the next slot of channel end ``out`` of every CTA of the cluster."""
    whole: gl.constexpr = plan.do_stages == 1
    part: gl.constexpr = plan.tile_n // plan.kv_multicast
    out.acquire_in_cluster(tile_bytes(plan, chunks))
    mine = gl.to_tensor(1)
    if whole:
        mine = (rank == (0 if tensor == "k" else 1)).to(gl.int32)
        rank = gl.to_tensor(0)
    row = key + rank * part
    _load_chunk(plan, tensor, False, chunks[0], coordinates(plan, batch, rows, head, row, 0), rank * part, out.channel.at(out.ready()), out.channel.at(out.slot()), mine)
    if len(chunks) > 1:
        coords = coordinates(plan, batch, rows, head, row, chunks[0])
        _load_chunk(plan, tensor, True, chunks[1], coords, rank * part, out.channel.at(out.ready()), out.channel.at(out.tail()), mine)
    return out.next()


@gluon.jit
def _load_chunk(plan: gl.constexpr, tensor: gl.constexpr, tail: gl.constexpr, columns: gl.constexpr, coords, row, barrier, slot, mine):
    row_bytes: gl.constexpr = min(128, columns * plan.element_bytes)
    ptx.load_for_cluster(
        parameter(plan, tensor, tail), coords, columns, plan.tile_n * row_bytes, row * row_bytes, barrier, slot, plan.kv_multicast, mine
    )
