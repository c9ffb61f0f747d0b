"""Hopper forward: one producer warp loads by TMA, two or three consumer warpgroups of 64 query rows each compute.

Per key block a consumer issues S = Q K^T of this block and O += P V of the block before, and works on the softmax of S while the products
of the other consumers (and its own P V) run on the tensor cores. Named barriers let the consumers issue in turns (ping-pong).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tandem_attn.kernels.common import multicast, redo
from tandem_attn.kernels.common.arguments import Args, worker_registers
from tandem_attn.kernels.common.channel import KeyValue, make_buffers, make_channel
from tandem_attn.kernels.common.scheduler import make_tile_channel
from tandem_attn.kernels.sm90.consumer import consumer
from tandem_attn.kernels.sm90.load import producer, spare

WARPS = gl.constexpr(4)  # of a consumer


@gluon.jit
def forward(
    q_desc, k_desc, v_desc, o_desc, q_tail, k_tail, v_tail, o_tail,
    lse, counter, cu_q, cu_k, used_q, used_k, sink, slopes, order, starts,
    scalar0, scalar1, scalar2, scalar3, scale_log2, softcap,
    seqlen_q, seqlen_k, pitch_q, pitch_k, pitch_v, batch, heads, heads_per_kv, blocks, section, num_tiles, lse_stride,
    bounds, mask_data, bias_data, pages, parts, descales,
    plan: gl.constexpr, plain: gl.constexpr,
):  # fmt: skip
    """The kernel: on-chip memory, channels and the table of roles."""
    scalars = (scalar0, scalar1, scalar2, scalar3) + bounds
    args = Args(
        q_desc, k_desc, v_desc, o_desc, q_tail, k_tail, v_tail, o_tail,
        lse, counter, cu_q, cu_k, used_q, used_k, sink, slopes, order, starts,
        scalars, scale_log2, softcap, seqlen_q, seqlen_k, pitch_q, pitch_k, pitch_v, batch, heads, heads_per_kv, blocks, section, num_tiles,
        lse_stride, mask_data, bias_data, pages, parts, descales,
    )  # fmt: skip
    dtype: gl.constexpr = q_desc.dtype
    consumers: gl.constexpr = plan.q_stages
    ctas: gl.constexpr = plan.kv_multicast
    q = make_channel(make_buffers(dtype, consumers, plan.tile_m, plan.head_dim_chunks), consumers, 1, plain, ctas)
    if plan.o_in_ring:
        o = q.buffers  # not used: see ``staging``
    else:
        o = make_buffers(dtype, consumers, plan.tile_m, plan.head_dim_v_chunks)
    if plan.shared_kv_ring:
        k = make_channel(
            make_buffers(dtype, plan.kv_stages, plan.tile_n, plan.head_dim_chunks), plan.kv_stages, consumers, plain, ctas, ctas > 1
        )
        v = k
    else:
        k = make_channel(
            make_buffers(dtype, plan.k_stages, plan.tile_n, plan.head_dim_chunks), plan.k_stages, consumers, plain, ctas, ctas > 1
        )
        v = make_channel(
            make_buffers(dtype, plan.v_stages, plan.tile_n, plan.head_dim_v_chunks), plan.v_stages, consumers, plain, ctas, ctas > 1
        )
    tiles = make_tile_channel(consumers, plain, ctas)
    mail = multicast.make_mail(plan)
    again = redo.make_redo(plan)
    kv_out = KeyValue(k.sender(), v.sender(), plan.shared_kv_ring)
    kv_in = KeyValue(k.receiver(), v.receiver(), plan.shared_kv_ring)
    registers: gl.constexpr = worker_registers(plan)
    if consumers == 1:
        gl.warp_specialize([
            (consumer, (plan, args, q, kv_in, o, tiles, again, 0)),
            (producer, (plan, args, q, kv_out, o, tiles, mail, again)),
        ], [1], registers)  # fmt: skip
    elif consumers == 2 and ctas > 1:
        gl.warp_specialize([
            (consumer, (plan, args, q, kv_in, o, tiles, again, 0)),
            (consumer, (plan, args, q, kv_in, o, tiles, again, 1)),
            (spare, (plan,)),
            (producer, (plan, args, q, kv_out, o, tiles, mail, again)),
            (spare, (plan,)),
        ], [WARPS, 2, 1, 1], [registers[0], registers[1], registers[1], registers[1]])  # fmt: skip
    elif consumers == 2:
        gl.warp_specialize([
            (consumer, (plan, args, q, kv_in, o, tiles, again, 0)),
            (consumer, (plan, args, q, kv_in, o, tiles, again, 1)),
            (producer, (plan, args, q, kv_out, o, tiles, mail, again)),
        ], [WARPS, 1], registers)  # fmt: skip
    elif ctas > 1:
        gl.warp_specialize([
            (consumer, (plan, args, q, kv_in, o, tiles, again, 0)),
            (consumer, (plan, args, q, kv_in, o, tiles, again, 1)),
            (consumer, (plan, args, q, kv_in, o, tiles, again, 2)),
            (spare, (plan,)),
            (producer, (plan, args, q, kv_out, o, tiles, mail, again)),
            (spare, (plan,)),
        ], [WARPS, WARPS, 2, 1, 1], [registers[0], registers[1], registers[2], registers[2], registers[2]])  # fmt: skip
    else:
        gl.warp_specialize([
            (consumer, (plan, args, q, kv_in, o, tiles, again, 0)),
            (consumer, (plan, args, q, kv_in, o, tiles, again, 1)),
            (consumer, (plan, args, q, kv_in, o, tiles, again, 2)),
            (producer, (plan, args, q, kv_out, o, tiles, mail, again)),
        ], [WARPS, WARPS, 1], registers)  # fmt: skip
