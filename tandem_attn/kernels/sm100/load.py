"""The load role, one warp: hands out tiles and loads them by TMA."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tandem_attn.kernels.common import packing, paging
from tandem_attn.kernels.common.arguments import work_at
from tandem_attn.kernels.common.scheduler import coords_of, send_tile, tile_count
from tandem_attn.kernels.sm100 import memory
from tandem_attn.kernels.sm100.handout import ask, take


@gluon.jit
def load(plan: gl.constexpr, args, pipe):
    """Q, then K and V blocks from the last to the first; the second Q behind the first K, as the first product needs no more."""
    k_chunks: gl.constexpr = plan.head_dim_chunks
    v_chunks: gl.constexpr = plan.head_dim_v_chunks
    num_tiles = tile_count(plan, args)
    q_out = pipe.q.sender()
    kv_out = pipe.kv_out
    handout = pipe.handout
    tile = gl.program_id(0)
    at = coords_of(plan, args, tile, num_tiles)
    tiles_out = send_tile(pipe.tiles.sender(), at)
    while at.valid != 0:
        asked = ask(plan, args, handout, tile, num_tiles)
        work = work_at(plan, args, at)
        seq = work.seq
        head_kv = packing.head_kv(plan, args, work.head)
        q_out = packing.load_queries(plan, args, seq, work.head, work.row, q_out)
        key = (work.visit.stop - 1) * plan.tile_n
        kv_out = kv_out.after_k(paging.load_keys(plan, args, args.k, args.k_tail, k_chunks, seq.batch, seq.k, head_kv, key, kv_out.k))
        if plan.q_stages == 2:
            q_out = packing.load_queries(plan, args, seq, work.head, work.row + memory.rows(plan), q_out)
        for _ in range(work.visit.start, work.visit.stop - 1):
            kv_out = kv_out.after_v(paging.load_keys(plan, args, args.v, args.v_tail, v_chunks, seq.batch, seq.v, head_kv, key, kv_out.v))
            key -= plan.tile_n
            kv_out = kv_out.after_k(paging.load_keys(plan, args, args.k, args.k_tail, k_chunks, seq.batch, seq.k, head_kv, key, kv_out.k))
        kv_out = kv_out.after_v(paging.load_keys(plan, args, args.v, args.v_tail, v_chunks, seq.batch, seq.v, head_kv, key, kv_out.v))
        tile, handout = take(plan, handout, asked)
        at = coords_of(plan, args, tile, num_tiles)
        tiles_out = send_tile(tiles_out, at)
    q_out.drain()
    kv_out.k.drain()
    if not plan.shared_kv_ring:
        kv_out.v.drain()
