"""How the load role gets its next tile: by its own count, from a counter in memory, or from the hardware (cluster launch control).

Asked for before the loads of a tile and taken behind them, so that the answer's latency is hidden. The load roles of a CTA pair need the
same answer: the hardware gives it to both, and of a counter the first CTA takes a number for both.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import clc, fence_async_shared, mbarrier
from triton.language.core import _aggregate as aggregate

from tandem_attn.kernels.common import ptx, ptx_cluster
from tandem_attn.kernels.common.channel import in_each_cta
from tandem_attn.kernels.common.scheduler import following_tile, is_dynamic
from tandem_attn.kernels.common.signal import make_signal


@gluon.constexpr_function
def by_hardware(plan):
    return plan.schedule.launch.value == "clc"


@gluon.constexpr_function
def by_first_cta(plan):
    return is_dynamic(plan) and plan.cta_group == 2


@aggregate
class HandOut:
    answer: gl.base_value  # shared memory of 16 bytes; with the signals 0 where the role finds the next tile by itself
    came: gl.base_value  # signal: the answer is there
    taken: gl.base_value  # signal, with a pair: both CTAs have read the last answer and await the next
    plain: gl.constexpr  # Gluon's own arrivals, see ``ptx.announce``

    @gluon.jit
    def await_answer(self, nbytes: gl.constexpr):
        """Says how much comes, and waits until the other CTA of a pair awaits it too."""
        if self.plain:
            mbarrier.expect(self.came.barrier(), nbytes)
        else:
            ptx.announce(self.came.barrier(), nbytes, False)
        if gl.num_ctas() == 2:
            if self.plain:
                self.taken.arrive()
            else:
                ptx.arrive_warp_pair(self.taken.barrier())
            self.taken.wait()

    @gluon.jit
    def next(self):
        return HandOut(self.answer, self.came.next(), self.taken.next(), self.plain)


@gluon.jit
def make_handout(plan: gl.constexpr, plain: gl.constexpr):
    if by_hardware(plan) or by_first_cta(plan):
        answer = gl.allocate_shared_memory(gl.int64, [2], gl.SwizzledSharedLayout(1, 1, 1, [0], in_each_cta(plan)))
        return HandOut(answer, make_signal(1, 1, True), make_signal(1, 1, True, plan.cta_group == 2), plain)
    else:
        return HandOut(gl.to_tensor(0), gl.to_tensor(0), gl.to_tensor(0), plain)


@gluon.jit
def ask(plan: gl.constexpr, args, handout, tile, num_tiles):
    """Asks for the tile behind ``tile``; what it returns goes to ``take``."""
    if by_hardware(plan):
        handout.await_answer(16)
        if plan.cta_group == 2:
            fence_async_shared(cluster=True)  # the answer goes to both CTAs
        else:
            gl.barrier()
        clc.try_cancel(handout.answer, handout.came.barrier())
        return num_tiles
    elif by_first_cta(plan):
        handout.await_answer(4)
        ptx_cluster.take_for_pair(args.counter, num_tiles, gl.num_programs(0), handout.answer, handout.came.barrier())
        return num_tiles
    else:
        return following_tile(plan, args, tile, num_tiles)


@gluon.jit
def take(plan: gl.constexpr, handout, asked):
    """The tile asked for, and the hand-out behind it; a tile that does not exist if there is none left."""
    if by_hardware(plan):
        handout.came.wait()
        answer = clc.load_result(handout.answer)
        tile = gl.where(answer.is_canceled(), answer.program_id(0), asked)
        fence_async_shared()  # the next answer is written through the asynchronous proxy
        return tile, handout.next()
    elif by_first_cta(plan):
        handout.came.wait()
        return ptx.load_word(handout.answer), handout.next()
    else:
        return asked, handout
