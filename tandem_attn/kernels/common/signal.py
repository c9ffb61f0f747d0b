"""Signals: events of a pipeline that repeat, where the payload lies in tensor memory or is known to both sides.

Like a channel, a signal keeps barriers and phases to itself. Its name says what has happened once it is waited for.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.language.core import _aggregate as aggregate

from tandem_attn.kernels.common import ptx
from tandem_attn.kernels.common.channel import step


@aggregate
class Signal:
    """A ring of barriers, and the place and phase that its holder arrives at or waits for next."""

    barriers: gl.shared_memory_descriptor
    index: gl.tensor
    phase: gl.tensor
    stages: gl.constexpr
    pair: gl.constexpr  # both CTAs of a pair arrive at the first one's barrier, which only its MMA warp waits for
    plain: gl.constexpr  # Gluon's own wait and arrive: one arrival a role and a barrier of its warps, visible to Triton's sanitizers

    @gluon.jit
    def barrier(self):
        return self.barriers.index(self.index)

    @gluon.jit
    def wait(self):
        if self.plain:
            mbarrier.wait(self.barrier(), self.phase)
        else:
            ptx.wait_phase(self.barrier(), self.phase)

    @gluon.jit
    def arrive(self):
        """Every warp of the role calls it after what the signal stands for."""
        if self.plain:
            mbarrier.arrive(self.barrier(), count=1)
        else:
            ptx.arrive_warp(self.barrier())

    @gluon.jit
    def arrive_tmem(self):
        """``arrive`` after this warp's loads from and stores to tensor memory."""
        if self.plain:
            ptx.tmem_done()
            mbarrier.arrive(self.barrier(), count=1)
        elif self.pair:
            ptx.arrive_warp_tmem_pair(self.barrier())
        else:
            ptx.arrive_warp_tmem(self.barrier())

    @gluon.jit
    def next(self):
        index, phase = step(self.index, self.phase, self.stages)
        return Signal(self.barriers, index, phase, self.stages, self.pair, self.plain)

    @gluon.jit
    def next_if(self, waited):
        """``next`` if ``waited``, of a single signal."""
        return Signal(self.barriers, self.index, self.phase ^ waited.to(gl.int32), self.stages, self.pair, self.plain)

    @gluon.jit
    def given(self):
        """The same signal for a holder whose first wait passes at once."""
        return Signal(self.barriers, self.index, self.phase ^ 1, self.stages, self.pair, self.plain)

    @gluon.jit
    def alone(self):
        """The same signal for a role of one warp, which has no other warps to wait for."""
        return Signal(self.barriers, self.index, self.phase, self.stages, self.pair, gl.constexpr(True))


@gluon.jit
def make_signal(stages: gl.constexpr, arrivals: gl.constexpr, plain: gl.constexpr, pair: gl.constexpr = False):
    """A ring of ``stages`` signals, each given by ``arrivals`` arrivals; with ``pair``, of each CTA."""
    barriers = mbarrier.allocate_mbarrier(batch=stages, two_ctas=pair)
    for i in gl.static_range(stages):
        mbarrier.init(barriers.index(i), count=arrivals)
    return Signal(barriers, gl.to_tensor(0), gl.to_tensor(0), stages, pair, plain)
