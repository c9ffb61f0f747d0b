"""K and V for the CTAs of a cluster: each loads a part of every tile, which TMA brings to all of them (multicast).

The CTAs are programs of their own, which work on neighbouring rows of one head and so visit the same key blocks in the same order. A slot
is filled when it is empty in all of them, since consumers release it in all of them, see ``Receiver.release``.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.language.core import _aggregate as aggregate

from tandem_attn.kernels.common import ptx, ptx_cluster
from tandem_attn.kernels.common.copies import coordinates
from tandem_attn.kernels.common.scheduler import following_tile, is_dynamic
from tandem_attn.kernels.common.signal import make_signal

TENSORS = gl.constexpr(("q", "k", "v", "o"))  # as the kernel's parameters have them


@aggregate
class Mail:
    """Where the producer of the first CTA puts a number for those of all CTAs, its own too."""

    slot: gl.base_value  # shared memory; with the signals 0 where nothing is to be told
    came: gl.base_value  # signal: the number is there
    taken: gl.base_value  # signal, of the first CTA: all have read the last number
    passed: gl.base_value  # signal: what the first CTA did before, see ``pass_on``; 0 with running maxima
    rank: gl.base_value  # of this CTA


@gluon.jit
def join(plan: gl.constexpr):
    """This CTA's rank in its cluster, whose CTAs are now all ready; every warp calls it."""
    if plan.kv_multicast > 1:
        ptx_cluster.cluster_barrier()
        return ptx.cta_rank()
    else:
        return gl.to_tensor(0)


@gluon.jit
def make_mail(plan: gl.constexpr):
    nothing = gl.to_tensor(0)
    if plan.kv_multicast > 1 and (is_dynamic(plan) or plan.fixed_max):
        slot = gl.allocate_shared_memory(gl.int32, [1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
        passed = nothing
        if plan.fixed_max:
            passed = make_signal(1, 1, False)
        return Mail(slot, make_signal(1, 1, False), make_signal(1, plan.kv_multicast, False), passed, nothing)
    else:
        return Mail(nothing, nothing, nothing, nothing, nothing)


@gluon.jit
def await_number(mail):
    """Says that the last number has been read; the first CTA goes on when all have said so."""
    mbarrier.expect(mail.came.barrier(), 4)
    ptx_cluster.arrive_warp_first(ptx_cluster.in_own_cta(mail.taken.barrier()))
    if mail.rank == 0:
        ptx.wait_phase(ptx_cluster.in_own_cta(mail.taken.barrier()), mail.taken.phase)


@gluon.jit
def read_number(mail):
    """The number, and the mail behind it."""
    ptx.wait_phase(ptx_cluster.in_own_cta(mail.came.barrier()), mail.came.phase)
    number = ptx.load_word(ptx_cluster.in_own_cta(mail.slot))
    return number, Mail(mail.slot, mail.came.next(), mail.taken.next(), mail.passed, mail.rank)


@gluon.jit
def tell(number, mail):
    """The first CTA's ``number``, in all CTAs, and the mail behind it."""
    await_number(mail)
    ptx_cluster.tell_pair(number, mail.slot, mail.came.barrier())
    return read_number(mail)


@gluon.jit
def pass_on(mail):
    """What the first CTA's producer read and wrote comes before what the other's does from here on; a number tells of itself only."""
    if mail.rank == 0:
        ptx_cluster.publish_warp(1, ptx_cluster.in_own_cta(mail.passed.barrier()))
    else:
        ptx_cluster.wait_phase_of_cluster(ptx_cluster.in_own_cta(mail.passed.barrier()), mail.passed.phase)
    return Mail(mail.slot, mail.came, mail.taken, mail.passed.next(), mail.rank)


@gluon.jit
def next_tile(plan: gl.constexpr, args, tile, num_tiles, mail):
    """The number of the cluster's next tile, and the mail behind it."""
    if plan.kv_multicast > 1 and is_dynamic(plan):
        await_number(mail)
        ptx_cluster.take_for_pair(args.counter, num_tiles, gl.num_programs(0) // plan.kv_multicast, mail.slot, mail.came.barrier())
        return read_number(mail)
    else:
        return following_tile(plan, args, tile, num_tiles), mail


@gluon.constexpr_function
def parameter(plan, tensor, tail):
    """Number of the PTX parameter that is a descriptor: after each come its shape and strides."""
    from tandem_attn.kernels.compile import box_shape

    order = [(name, end) for end in (False, True) for name in TENSORS.value]
    before = order[: order.index((tensor, tail))]
    return sum(1 + 2 * len(box_shape(name, end, plan)) for name, end in before)


@gluon.constexpr_function
def panel_columns(plan, columns):
    """Columns of one copy: a swizzled tile lies in shared memory in panels of 128 bytes a row, one behind the other."""
    return min(columns, 128 // plan.element_bytes)


@gluon.constexpr_function
def panels_before(plan, tensor, tail):
    """Panels of K, then V, that come before those of a chunk: each CTA loads every other one."""
    counts = [sum(columns // panel_columns(plan, columns) for columns in plan.head_dim_chunks)] if tensor == "v" else []
    chunks = plan.head_dim_v_chunks if tensor == "v" else plan.head_dim_chunks
    return sum(counts) + (chunks[0] // panel_columns(plan, chunks[0]) if tail else 0)


@gluon.constexpr_function
def tile_bytes(plan, chunks):
    return plan.tile_n * sum(chunks) * plan.element_bytes


@gluon.jit
def load_keys(plan: gl.constexpr, tensor: gl.constexpr, chunks: gl.constexpr, batch, rows, head, key, rank, out):
    """A sequence's keys or values from ``key`` on into the next slot of channel end ``out`` of every CTA of the cluster."""
    out.acquire(tile_bytes(plan, chunks))
    _load_chunk(
        plan, tensor, False, chunks[0], 0, batch, rows, head, key, rank, out.channel.here(out.ready()), out.channel.here(out.slot())
    )
    if len(chunks) > 1:
        _load_chunk(
            plan,
            tensor,
            True,
            chunks[1],
            chunks[0],
            batch,
            rows,
            head,
            key,
            rank,
            out.channel.here(out.ready()),
            out.channel.here(out.tail()),
        )
    return out.next()


@gluon.jit
def _load_chunk(
    plan: gl.constexpr, tensor: gl.constexpr, tail: gl.constexpr, columns: gl.constexpr, first: gl.constexpr,
    batch, rows, head, key, rank, barrier, slot,
):  # fmt: skip
    width: gl.constexpr = panel_columns(plan, columns)
    number: gl.constexpr = panels_before(plan, tensor, tail)
    for i in gl.static_range(columns // width):
        coords = coordinates(plan, batch, rows, head, key, first + i * width)
        mine = rank == (number + i) % plan.kv_multicast
        to = slot + i * (plan.tile_n * width * plan.element_bytes)
        ptx_cluster.load_for_cluster(parameter(plan, tensor, tail), coords, to, barrier, mine.to(gl.int32), plan.kv_multicast)
