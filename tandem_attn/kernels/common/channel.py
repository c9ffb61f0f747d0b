"""Channels: rings of shared-memory slots between one producer and its consumers.

Nobody outside this file touches a slot's index or a barrier's phase. The producer acquires a slot, lets TMA fill it and moves on; TMA's
last byte makes the slot ready. A consumer waits for it, reads it and releases it.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.language.core import _aggregate as aggregate

from tandem_attn.kernels.common import ptx, ptx_cluster

WARPS = gl.constexpr(4)  # of a consumer: one warpgroup


@aggregate
class Buffers:
    """Shared memory for ``stages`` tiles, cut into one or two chunks of head_dim."""

    slots: gl.shared_memory_descriptor  # (stages, ...)
    tails: gl.shared_memory_descriptor  # (stages, ...): the second chunk; the same as slots where there is none


@gluon.jit
def make_buffers(dtype: gl.constexpr, stages: gl.constexpr, rows: gl.constexpr, chunks: gl.constexpr, split: gl.constexpr = ()):
    """``split``: how the CTAs of a cluster share a tile, see ``cluster_split``."""
    slots = gl.allocate_shared_memory(dtype, [stages, rows, chunks[0]], tma_layout(rows, chunks[0], dtype, split))
    if len(chunks) > 1:
        return Buffers(slots, gl.allocate_shared_memory(dtype, [stages, rows, chunks[1]], tma_layout(rows, chunks[1], dtype, split)))
    else:
        return Buffers(slots, slots)


@gluon.constexpr_function
def tma_layout(rows, columns, dtype, split=()):
    """Swizzled layout that TMA writes and MMA reads."""
    return gl.NVMMASharedLayout.get_default_for([rows, columns], dtype, cga_layout=[list(basis) for basis in split])


@gluon.constexpr_function
def cluster_split(plan, dim, rank=2):
    """Layout bases of a tile of which each CTA of a pair holds half along ``dim``; none without pairs."""
    return (tuple(int(i == dim) for i in range(rank)),) if plan.cta_group == 2 else ()


@gluon.constexpr_function
def in_each_cta(plan):
    """Layout bases of shared memory of which each CTA of a pair has its own."""
    return [[0]] if plan.cta_group == 2 else []


@aggregate
class Channel:
    """Slots with a ``ready`` and an ``empty`` barrier each."""

    buffers: Buffers
    ready: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    stages: gl.constexpr
    plain: gl.constexpr  # Gluon's own arrive: slower, but visible to Triton's sanitizers
    pair: gl.constexpr  # both CTAs of a pair fill a slot, and tell the first one
    lean: gl.constexpr  # the sender, one warp, arrives without Gluon, see ``ptx.announce``
    ctas: gl.constexpr  # of a cluster of programs
    shared: gl.constexpr  # a slot is released to the producers of all of them

    @gluon.jit
    def here(self, slot):
        """``slot``, or what ``ptx`` takes for this CTA's."""
        if self.ctas > 1:
            return ptx_cluster.in_own_cta(slot)
        else:
            return slot

    @gluon.jit
    def lane(self, i: gl.constexpr):
        """Slot ``i`` as a channel of its own."""
        lane = Buffers(self.buffers.slots.slice(i, 1), self.buffers.tails.slice(i, 1))
        return Channel(
            lane, self.ready.slice(i, 1), self.empty.slice(i, 1), gl.constexpr(1), self.plain, self.pair, self.lean, self.ctas, self.shared
        )

    @gluon.jit
    def sender(self):
        return Sender(self, gl.to_tensor(0), gl.to_tensor(1))

    @gluon.jit
    def receiver(self):
        return Receiver(self, gl.to_tensor(0), gl.to_tensor(0))


@gluon.jit
def make_channel(
    buffers, stages: gl.constexpr, consumers: gl.constexpr, plain: gl.constexpr, ctas: gl.constexpr = 1, shared: gl.constexpr = False
):
    """A channel over ``buffers``, each slot released by ``consumers`` warpgroups, of each CTA of a cluster if they share it. Shared
    ones have no plain form."""
    arrivals: gl.constexpr = consumers * WARPS * ctas if shared else consumers if plain else consumers * WARPS
    return channel_of(buffers, stages, arrivals, plain, ctas=ctas, shared=shared)


@gluon.jit
def channel_of(
    buffers, stages: gl.constexpr, arrivals: gl.constexpr, plain: gl.constexpr, pair: gl.constexpr = False, lean: gl.constexpr = False,
    ctas: gl.constexpr = 1, shared: gl.constexpr = False,
):  # fmt: skip
    """A channel over ``buffers``, each slot released by ``arrivals`` arrivals.

    With ``pair`` a slot is ready when both CTAs of a pair have loaded their part of it, which the first one's MMA warp waits for.
    """
    ready = mbarrier.allocate_mbarrier(batch=stages, two_ctas=pair)
    empty = mbarrier.allocate_mbarrier(batch=stages)
    for i in gl.static_range(stages):
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(empty.index(i), count=arrivals)
    return Channel(buffers, ready, empty, stages, plain, pair, lean, ctas, shared)


@gluon.jit
def step(index, phase, stages: gl.constexpr):
    """Index and phase of the next slot."""
    if stages == 1:
        return index, phase ^ 1
    last = index == stages - 1
    return gl.where(last, 0, index + 1), phase ^ last.to(gl.int32)


@aggregate
class Sender:
    """The producer's end."""

    channel: Channel
    index: gl.tensor
    phase: gl.tensor

    @gluon.jit
    def acquire(self, nbytes: gl.constexpr):
        """Waits until the slot is empty and announces ``nbytes`` of TMA, which may begin when every thread is here."""
        mbarrier.wait(self.channel.empty.index(self.index), self.phase)
        if self.channel.lean:
            ptx.announce(self.ready(), nbytes, self.channel.pair)
        else:
            mbarrier.expect(self.ready(), nbytes)
        gl.barrier()

    @gluon.jit
    def sent(self):
        """Says that the slot is written, by other means than TMA."""
        if self.channel.lean:
            ptx.arrive_warp(self.ready())
        else:
            mbarrier.arrive(self.ready(), count=1)

    @gluon.jit
    def wait_empty(self):
        mbarrier.wait(self.channel.empty.index(self.index), self.phase)

    @gluon.jit
    def drain(self):
        """Waits until every slot is empty: nobody, above all no other CTA, then arrives here any more."""
        out = self
        out.wait_empty()
        for _ in gl.static_range(self.channel.stages - 1):
            out = out.next()
            gl.barrier()
            out.wait_empty()

    @gluon.jit
    def slot(self):
        return self.channel.buffers.slots.index(self.index)

    @gluon.jit
    def tail(self):
        return self.channel.buffers.tails.index(self.index)

    @gluon.jit
    def ready(self):
        return self.channel.ready.index(self.index)

    @gluon.jit
    def next(self):
        index, phase = step(self.index, self.phase, self.channel.stages)
        return Sender(self.channel, index, phase)


@aggregate
class Receiver:
    """A consumer's end."""

    channel: Channel
    index: gl.tensor
    phase: gl.tensor

    @gluon.jit
    def wait(self):
        if self.channel.plain:
            mbarrier.wait(self.channel.ready.index(self.index), self.phase)
        else:
            ptx.wait_phase(self.channel.here(self.channel.ready.index(self.index)), self.phase)

    @gluon.jit
    def slot(self):
        return self.channel.buffers.slots.index(self.index)

    @gluon.jit
    def tail(self):
        return self.channel.buffers.tails.index(self.index)

    @gluon.jit
    def empty(self):
        """The barrier to arrive at when the slot has been read, for MMAs that do so by themselves."""
        return self.channel.empty.index(self.index)

    @gluon.jit
    def anew(self):
        """The same; addresses of its slot are computed behind this point and not kept from before."""
        return Receiver(self.channel, ptx.pinned(self.index), self.phase)

    @gluon.jit
    def release(self):
        """Gives the slot back; every warp calls it after its last read."""
        if self.channel.shared:
            ptx_cluster.arrive_warp_both(self.channel.here(self.channel.empty.index(self.index)))
        elif self.channel.plain:
            mbarrier.arrive(self.channel.empty.index(self.index), count=1)
        else:
            ptx.arrive_warp(self.channel.here(self.channel.empty.index(self.index)))

    @gluon.jit
    def release_after(self, value):
        """``release``, not before ``value`` is computed: see ``ptx.arrive_warp_after``."""
        if self.channel.shared:
            self.release()
        elif self.channel.plain:
            mbarrier.arrive(self.channel.empty.index(self.index), count=1)
        else:
            ptx.arrive_warp_after(self.channel.here(self.channel.empty.index(self.index)), value)

    @gluon.jit
    def next(self):
        index, phase = step(self.index, self.phase, self.channel.stages)
        return Receiver(self.channel, index, phase)


@aggregate
class KeyValue:
    """Both ends of the keys' and the values' rings on one side; ``shared`` says that they are one ring, in the order in
    which the architecture's producer loads them."""

    k: gl.base_value
    v: gl.base_value
    shared: gl.constexpr

    @gluon.jit
    def after_k(self, k):
        if self.shared:
            return KeyValue(k, k, self.shared)
        else:
            return KeyValue(k, self.v, self.shared)

    @gluon.jit
    def after_v(self, v):
        if self.shared:
            return KeyValue(v, v, self.shared)
        else:
            return KeyValue(self.k, v, self.shared)
