"""C = A B^T on Blackwell: a TMA load warp, one warp issuing tcgen05.mma, an epilogue warpgroup; accumulators double-buffered in TMEM.

A is (M, K), B is (N, K), C is (M, N), all bf16 with a contiguous last dimension; sums in fp32. How a cluster shares the work:
    "one"        1 CTA, cta_group::1
    "pair"       2 CTAs, cta_group::2: each holds half the rows of A and C and half the rows of B
    "multicast"  2 CTAs, cta_group::1: each holds half the rows of A and C, and B reaches both by one TMA multicast
    "quad"       4 CTAs: two pairs, one per half of the columns; each half of A reaches both pairs by TMA multicast
"""

from dataclasses import dataclass

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import (
    TensorMemoryLayout,
    allocate_tensor_memory,
    fence_async_shared,
    mbarrier,
    tcgen05_commit,
    tcgen05_mma,
    tcgen05_mma_barrier_count,
    tensor_memory_descriptor,
    tma,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tests.emulator.subjects.ring import slot_and_phase, tile_offsets
from tests.emulator.subjects.subject import Subject, compile_kernel, random_tensor, unwritten

ACC_STAGES = gl.constexpr(2)


@dataclass(frozen=True)
class ClusterShape:
    """How the CTAs of a cluster split the rows of A, B and C: one basis vector per bit of the CTA rank (0 = both hold the same)."""

    ctas: int
    split_a: tuple[tuple[int, int], ...]
    split_b: tuple[tuple[int, int], ...]
    split_c: tuple[tuple[int, int], ...]
    two_ctas: bool
    tile: tuple[int, int, int]


CLUSTERS = {
    "one": ClusterShape(1, (), (), (), False, (128, 128, 64)),
    "pair": ClusterShape(2, ((1, 0),), ((1, 0),), ((1, 0),), True, (256, 128, 64)),
    "multicast": ClusterShape(2, ((1, 0),), ((0, 0),), ((1, 0),), False, (256, 128, 64)),
    "quad": ClusterShape(4, ((1, 0), (0, 0)), ((1, 0), (2, 0)), ((1, 0), (0, 1)), True, (256, 256, 64)),
}


@gluon.aggregate
class Gemm:
    """What every role is given."""

    a_desc: tma.tensor_descriptor
    b_desc: tma.tensor_descriptor
    c_desc: tma.tensor_descriptor
    a_smem: gl.shared_memory_descriptor
    b_smem: gl.shared_memory_descriptor
    c_smem: gl.shared_memory_descriptor
    acc_tmem: tensor_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    acc_full: gl.shared_memory_descriptor
    acc_empty: gl.shared_memory_descriptor
    N: gl.tensor
    K: gl.tensor
    tiles: gl.tensor
    STAGES: gl.constexpr


@gluon.jit
def load_role(g):
    tile_k: gl.constexpr = g.a_desc.block_shape[1]
    step = 0
    for tile in range(gl.program_id(0), g.tiles, gl.num_programs(0)):
        m, n = tile_offsets(tile, g.N, g.a_desc.block_shape[0], g.b_desc.block_shape[0])
        for k in range(0, g.K, tile_k):
            stage, phase = slot_and_phase(step, g.STAGES)
            mbarrier.wait(g.empty.index(stage), phase ^ 1)
            mbarrier.expect(g.full.index(stage), g.a_desc.nbytes_per_cta + g.b_desc.nbytes_per_cta)
            tma.async_load(g.a_desc, [m, k], g.full.index(stage), g.a_smem.index(stage), multicast=True)
            tma.async_load(g.b_desc, [n, k], g.full.index(stage), g.b_smem.index(stage), multicast=True)
            step += 1


@gluon.jit
def mma_role(g):
    tile_k: gl.constexpr = g.a_desc.block_shape[1]
    step = 0
    acc_step = 0
    for _ in range(gl.program_id(0), g.tiles, gl.num_programs(0)):
        acc_stage, acc_phase = slot_and_phase(acc_step, ACC_STAGES)
        mbarrier.wait(g.acc_empty.index(acc_stage), acc_phase ^ 1)
        for k in range(0, g.K, tile_k):
            stage, phase = slot_and_phase(step, g.STAGES)
            mbarrier.wait(g.full.index(stage), phase)
            sA = g.a_smem.index(stage)
            sB = g.b_smem.index(stage).permute((1, 0))
            done = [g.empty.index(stage)]
            tcgen05_mma(sA, sB, g.acc_tmem.index(acc_stage), use_acc=k != 0, multicast=True, mbarriers=done)
            step += 1
        tcgen05_commit(g.acc_full.index(acc_stage), descs=[g.a_smem.index(0), g.b_smem.index(0)])
        acc_step += 1  # noqa: SIM113 (enumerate is no Gluon)


@gluon.jit
def epilogue_role(g):
    acc_step = 0
    for tile in range(gl.program_id(0), g.tiles, gl.num_programs(0)):
        m, n = tile_offsets(tile, g.N, g.a_desc.block_shape[0], g.b_desc.block_shape[0])
        acc_stage, acc_phase = slot_and_phase(acc_step, ACC_STAGES)
        mbarrier.wait(g.acc_full.index(acc_stage), acc_phase)
        acc = g.acc_tmem.index(acc_stage).load()
        mbarrier.arrive(g.acc_empty.index(acc_stage), count=1)
        tma.store_wait(0)  # sC is free again
        g.c_smem.store(acc.to(gl.bfloat16))
        fence_async_shared()
        tma.async_store(g.c_desc, [m, n], g.c_smem)
        acc_step += 1  # noqa: SIM113
    tma.store_wait(0)


@gluon.jit
def gemm_kernel(a_desc, b_desc, c_desc, N, K, tiles, STAGES: gl.constexpr, acc_layout: gl.constexpr):
    a_block: gl.constexpr = a_desc.block_shape
    b_block: gl.constexpr = b_desc.block_shape
    c_block: gl.constexpr = c_desc.block_shape
    two_ctas: gl.constexpr = acc_layout.two_ctas
    sA = gl.allocate_shared_memory(gl.bfloat16, [STAGES, a_block[0], a_block[1]], a_desc.layout)
    sB = gl.allocate_shared_memory(gl.bfloat16, [STAGES, b_block[0], b_block[1]], b_desc.layout)
    sC = gl.allocate_shared_memory(gl.bfloat16, c_block, c_desc.layout)
    tAcc = allocate_tensor_memory(gl.float32, [ACC_STAGES, c_block[0], c_block[1]], acc_layout)
    # A CTA's stage is free when every MMA that reads what its loads multicast is complete, in whichever CTA that MMA runs.
    readers: gl.constexpr = tcgen05_mma_barrier_count([sA.index(0), sB.index(0)], True, two_ctas)

    full = mbarrier.allocate_mbarrier(batch=STAGES, two_ctas=two_ctas)
    empty = mbarrier.allocate_mbarrier(batch=STAGES)
    acc_full = mbarrier.allocate_mbarrier(batch=ACC_STAGES)
    acc_empty = mbarrier.allocate_mbarrier(batch=ACC_STAGES, two_ctas=two_ctas)
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=readers)
    for stage in gl.static_range(ACC_STAGES):
        mbarrier.init(acc_full.index(stage), count=readers)
        mbarrier.init(acc_empty.index(stage), count=1)
    g = Gemm(a_desc, b_desc, c_desc, sA, sB, sC, tAcc, full, empty, acc_full, acc_empty, N, K, tiles, STAGES)
    gl.warp_specialize([(epilogue_role, (g,)), (mma_role, (g,)), (load_role, (g,))], [1, 1], [24, 24])


def gemm_sm100(
    M: int, N: int, K: int, cluster: str = "one", programs: int | None = None, stages: int = 3, seed: int = 0, arch: int = 100
) -> Subject:
    """programs None: one cluster per tile; else that many persistent clusters share the tiles."""
    shape = CLUSTERS[cluster]
    tile_m, tile_n, tile_k = shape.tile
    a, b = random_tensor((M, K), torch.bfloat16, seed), random_tensor((N, K), torch.bfloat16, seed + 1)
    c = unwritten((M, N), torch.bfloat16)

    def descriptor(tensor, block, split):
        layout = gl.NVMMASharedLayout.get_default_for(list(block), gl.bfloat16, cga_layout=[list(basis) for basis in split])
        return TensorDescriptor.from_tensor(tensor, list(block), layout)

    tiles = -(-M // tile_m) * -(-N // tile_n)
    args = (
        descriptor(a, (tile_m, tile_k), shape.split_a),
        descriptor(b, (tile_n, tile_k), shape.split_b),
        descriptor(c, (tile_m, tile_n), shape.split_c),
        N,
        K,
        tiles,
    )
    acc_layout = TensorMemoryLayout((128, 128), col_stride=1, cga_layout=[list(x) for x in shape.split_c], two_ctas=shape.two_ctas)
    constexprs = {"STAGES": stages, "acc_layout": acc_layout}
    kernel = compile_kernel(gemm_kernel, args, constexprs, arch=arch, num_warps=4, num_ctas=shape.ctas, maxnreg=168)
    expected = a.double() @ b.double().T
    tolerance = float(expected.abs().max()) * 2**-8  # half a bf16 ulp of the largest element, and fp32 sums far below it
    return Subject(f"gemm_sm{arch} {cluster} {M}x{N}x{K}", kernel, args, (programs or tiles, 1, 1), c, expected, tolerance)
