"""What the GEMM subjects share: the ring of stages guarded by full and empty mbarriers, and the order of the tiles."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def slot_and_phase(step, STAGES: gl.constexpr):
    """Stage of the ring that step number `step` uses, and the parity of its `step // STAGES`-th use.

    A reader waits for `full` with this parity, a writer for `empty` with the opposite one, so that the first use of a stage does
    not wait (a fresh mbarrier counts as having completed the phase of parity 1).
    """
    return step % STAGES, (step // STAGES) & 1


@gluon.jit
def tile_offsets(tile, N, tile_m: gl.constexpr, tile_n: gl.constexpr):
    """First row and column of C in tile number `tile`, counted along N first."""
    tiles_n = gl.cdiv(N, tile_n)
    return (tile // tiles_n) * tile_m, (tile % tiles_n) * tile_n
