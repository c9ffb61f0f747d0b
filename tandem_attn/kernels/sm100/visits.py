"""Which key blocks each of two query tiles visits, among those that are loaded for both, and which of them a softmax role takes."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.core import _aggregate as aggregate

from tandem_attn.kernels.common import masks, packing, ptx
from tandem_attn.kernels.sm100 import memory
from tandem_attn.kernels.sm100.memory import by_turns


@aggregate
class Visit:
    """Key blocks ``[start, stop)``, at least one; those in ``[full_start, full_stop)`` need no element mask. Alike in all lanes."""

    start: gl.tensor
    full_start: gl.tensor
    full_stop: gl.tensor
    stop: gl.tensor

    @gluon.jit
    def holds(self, n_block):
        return (n_block >= self.start) & (n_block < self.stop)

    @gluon.jit
    def masks(self, n_block):
        """1 for a block that needs the element mask, else 0."""
        return ((n_block >= self.full_stop) | (n_block < self.full_start)).to(gl.int32)


@gluon.constexpr_function
def apart(plan):
    """Whether the two query tiles may visit different blocks."""
    return not by_turns(plan) and _bounded(masks.parse(plan.mask))


@gluon.constexpr_function
def stride(plan):
    """Key blocks from one of a softmax role's to its next: those of one query tile go to two roles in turns."""
    return 2 if by_turns(plan) else 1


@gluon.constexpr_function
def turn(plan, index):
    """How many key blocks of its query tile come before the first that softmax role ``index`` takes."""
    return index if by_turns(plan) else 0


@gluon.constexpr_function
def _bounded(tree):
    return tree.kind != "full" and not masks.reads_data(tree)


@gluon.jit
def visit_of_all(work):
    """What is loaded."""
    return _uniform(work.visit.start, work.visit.full_start, work.visit.full_stop, work.visit.stop)


@gluon.jit
def visit_of(plan: gl.constexpr, args, work, index: gl.constexpr):
    """What query tile ``index`` visits."""
    if not apart(plan):
        return visit_of_all(work)
    else:
        row = packing.queries(plan, work.row + index * memory.rows(plan))
        last = gl.minimum(row + packing.queries(plan, memory.rows(plan)), work.seq.q.used)
        band = masks.bounds(masks.parse(plan.mask), args.scalars, work.seq.q.used, work.seq.k.used)
        own = masks.block_range(band, row, last, plan.tile_n, work.seq.k.used)
        start = gl.minimum(gl.maximum(own.start, work.visit.start), work.visit.stop - 1)  # a tile without keys may lie outside
        stop = gl.minimum(gl.maximum(own.stop, start + 1), work.visit.stop)
        full_stop = gl.minimum(own.full_stop, stop - 1)
        return _uniform(start, gl.minimum(gl.maximum(own.full_start, start), full_stop), full_stop, stop)


@gluon.jit
def _uniform(start, full_start, full_stop, stop):
    return Visit(ptx.uniform(start), ptx.uniform(full_start), ptx.uniform(full_stop), ptx.uniform(stop))
