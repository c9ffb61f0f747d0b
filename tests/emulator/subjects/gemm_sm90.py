"""C = A B^T on Hopper: one TMA producer warp, two wgmma consumer warpgroups, a TMA store; persistent or one tile per CTA.

A is (M, K), B is (N, K), C is (M, N), all bf16 with a contiguous last dimension; sums in fp32.
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tests.emulator.subjects.ring import slot_and_phase, tile_offsets
from tests.emulator.subjects.subject import Subject, compile_kernel, random_tensor, unwritten

CONSUMERS = gl.constexpr(2)


@gluon.aggregate
class Gemm:
    """What every role is given. A stage of the ring holds one A tile per consumer and one B tile."""

    a_desc: tma.tensor_descriptor
    b_desc: tma.tensor_descriptor
    c_desc: tma.tensor_descriptor
    a_smem: gl.shared_memory_descriptor
    b_smem: gl.shared_memory_descriptor
    c_smem: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    N: gl.tensor
    K: gl.tensor
    tiles: gl.tensor
    STAGES: gl.constexpr


@gluon.jit
def load_role(g):
    rows: gl.constexpr = g.a_desc.block_shape[0]
    tile_n: gl.constexpr = g.b_desc.block_shape[0]
    tile_k: gl.constexpr = g.b_desc.block_shape[1]
    step = 0
    for tile in range(gl.program_id(0), g.tiles, gl.num_programs(0)):
        m, n = tile_offsets(tile, g.N, CONSUMERS * rows, tile_n)
        for k in range(0, g.K, tile_k):
            stage, phase = slot_and_phase(step, g.STAGES)
            mbarrier.wait(g.empty.index(stage), phase ^ 1)
            mbarrier.expect(g.full.index(stage), CONSUMERS * g.a_desc.nbytes_per_cta + g.b_desc.nbytes_per_cta)
            for consumer in gl.static_range(CONSUMERS):
                tma.async_load(g.a_desc, [m + consumer * rows, k], g.full.index(stage), g.a_smem.index(stage * CONSUMERS + consumer))
            tma.async_load(g.b_desc, [n, k], g.full.index(stage), g.b_smem.index(stage))
            step += 1


@gluon.jit
def mma_role(g, consumer: gl.constexpr):
    rows: gl.constexpr = g.a_desc.block_shape[0]
    tile_n: gl.constexpr = g.b_desc.block_shape[0]
    tile_k: gl.constexpr = g.b_desc.block_shape[1]
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, tile_n, 16])
    step = 0
    for tile in range(gl.program_id(0), g.tiles, gl.num_programs(0)):
        m, n = tile_offsets(tile, g.N, CONSUMERS * rows, tile_n)
        acc = gl.zeros([rows, tile_n], gl.float32, acc_layout)
        for _ in range(0, g.K, tile_k):
            stage, phase = slot_and_phase(step, g.STAGES)
            mbarrier.wait(g.full.index(stage), phase)
            tSsA = g.a_smem.index(stage * CONSUMERS + consumer)
            tSsB = g.b_smem.index(stage).permute((1, 0))
            acc = warpgroup_mma_wait(0, deps=(warpgroup_mma(tSsA, tSsB, acc, is_async=True), tSsA, tSsB))[0]
            mbarrier.arrive(g.empty.index(stage), count=1)
            step += 1
        tma.store_wait(0)  # sC is free again
        sC = g.c_smem.index(consumer)
        sC.store(acc.to(gl.bfloat16))
        fence_async_shared()
        tma.async_store(g.c_desc, [m + consumer * rows, n], sC)
    tma.store_wait(0)


@gluon.jit
def gemm_kernel(a_desc, b_desc, c_desc, N, K, tiles, STAGES: gl.constexpr, MMA_REGS: gl.constexpr, LOAD_REGS: gl.constexpr):
    a_block: gl.constexpr = a_desc.block_shape
    b_block: gl.constexpr = b_desc.block_shape
    c_block: gl.constexpr = c_desc.block_shape
    sA = gl.allocate_shared_memory(gl.bfloat16, [STAGES * CONSUMERS, a_block[0], a_block[1]], a_desc.layout)
    sB = gl.allocate_shared_memory(gl.bfloat16, [STAGES, b_block[0], b_block[1]], b_desc.layout)
    sC = gl.allocate_shared_memory(gl.bfloat16, [CONSUMERS, c_block[0], c_block[1]], c_desc.layout)
    full = mbarrier.allocate_mbarrier(batch=STAGES)
    empty = mbarrier.allocate_mbarrier(batch=STAGES)
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=CONSUMERS)
    g = Gemm(a_desc, b_desc, c_desc, sA, sB, sC, full, empty, N, K, tiles, STAGES)
    gl.warp_specialize([(mma_role, (g, 0)), (mma_role, (g, 1)), (load_role, (g,))], [4, 1], [MMA_REGS, LOAD_REGS])


def gemm_sm90(M: int, N: int, K: int, ctas: int | None = None, tile=(128, 128, 64), stages: int = 3, seed: int = 0) -> Subject:
    """ctas None: one CTA per tile; else that many persistent CTAs share the tiles. M, N and K need not be multiples of a tile."""
    tile_m, tile_n, tile_k = tile
    a, b = random_tensor((M, K), torch.bfloat16, seed), random_tensor((N, K), torch.bfloat16, seed + 1)
    c = unwritten((M, N), torch.bfloat16)
    rows = tile_m // CONSUMERS.value

    def descriptor(tensor, *block):
        return TensorDescriptor.from_tensor(tensor, list(block), gl.NVMMASharedLayout.get_default_for(list(block), gl.bfloat16))

    tiles = -(-M // tile_m) * -(-N // tile_n)
    args = (descriptor(a, rows, tile_k), descriptor(b, tile_n, tile_k), descriptor(c, rows, tile_n), N, K, tiles)
    constexprs = {"STAGES": stages, "MMA_REGS": 168, "LOAD_REGS": 24}
    kernel = compile_kernel(gemm_kernel, args, constexprs, arch=90, num_warps=4, maxnreg=168)
    expected = a.double() @ b.double().T
    tolerance = float(expected.abs().max()) * 2**-8  # half a bf16 ulp of the largest element, and fp32 sums far below it
    return Subject(f"gemm_sm90 {M}x{N}x{K} ctas={ctas}", kernel, args, (ctas or tiles, 1, 1), c, expected, tolerance)
