"""Blackwell forward: two query tiles in ping-pong, S, P and O in tensor memory, one warp for all products and one for all loads.

The roles are one file each: ``load``, ``mma``, ``softmax``, ``correction``; ``pipeline`` is what they share. The account of the schedule is
docs/blackwell_forward.md.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tandem_attn.kernels.common.arguments import Args, worker_registers
from tandem_attn.kernels.sm100.correction import correction
from tandem_attn.kernels.sm100.handout import by_hardware
from tandem_attn.kernels.sm100.load import load
from tandem_attn.kernels.sm100.mma import mma
from tandem_attn.kernels.sm100.pipeline import make_pipeline
from tandem_attn.kernels.sm100.softmax import softmax

WARPS = gl.constexpr(4)  # of a warpgroup


@gluon.jit
def forward(
    q_desc, k_desc, v_desc, o_desc, q_tail, k_tail, v_tail, o_tail,
    lse, counter, cu_q, cu_k, used_q, used_k, sink, slopes, order, starts,
    scalar0, scalar1, scalar2, scalar3, scale_log2, softcap,
    seqlen_q, seqlen_k, pitch_q, pitch_k, pitch_v, batch, heads, heads_per_kv, blocks, section, num_tiles, lse_stride,
    bounds, mask_data, bias_data, pages, parts, descales,
    plan: gl.constexpr, plain: gl.constexpr,
):  # fmt: skip
    """The kernel: the pipeline and the table of roles."""
    scalars = (scalar0, scalar1, scalar2, scalar3) + bounds
    args = Args(
        q_desc, k_desc, v_desc, o_desc, q_tail, k_tail, v_tail, o_tail,
        lse, counter, cu_q, cu_k, used_q, used_k, sink, slopes, order, starts,
        scalars, scale_log2, softcap, seqlen_q, seqlen_k, pitch_q, pitch_k, pitch_v, batch, heads, heads_per_kv, blocks, section, num_tiles,
        lse_stride, mask_data, bias_data, pages, parts, descales,
    )  # fmt: skip
    pipe = make_pipeline(plan, q_desc.dtype, o_desc.dtype, plain)
    if by_hardware(plan) and plan.cta_group == 1:
        gl.barrier()
    registers: gl.constexpr = worker_registers(plan)
    gl.warp_specialize([
        (correction, (plan, args, pipe)),
        (softmax, (plan, args, pipe, 0)),
        (softmax, (plan, args, pipe, 1)),
        (mma, (plan, args, pipe)),
        (load, (plan, args, pipe)),
    ], [WARPS, WARPS, 1, 1], registers)  # fmt: skip
