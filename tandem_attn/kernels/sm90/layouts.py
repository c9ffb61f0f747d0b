"""Register layouts of the Hopper forward: what wgmma gives and takes (PTX ISA, wgmma register fragments)."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.constexpr_function
def s_layout(plan):
    """Of S and P as float32: 16 rows a warp."""
    return gl.NVMMADistributedLayout([3, 0], [plan.consumer_warps, 1], [16, plan.tile_n, 16])


@gluon.constexpr_function
def o_layout(plan, columns):
    return gl.NVMMADistributedLayout([3, 0], [plan.consumer_warps, 1], [16, columns, 16])


@gluon.constexpr_function
def p_layout(plan):
    """Of P as operand A of O += P V."""
    return gl.DotOperandLayout(0, o_layout(plan, plan.head_dim_v_chunks[0]), 2)
