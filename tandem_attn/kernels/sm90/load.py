"""The producer, one warp: hands out tiles and loads them by TMA."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tandem_attn.kernels.common import multicast, packing, paging, redo
from tandem_attn.kernels.common.arguments import work_at
from tandem_attn.kernels.common.scheduler import Coords, coords_of, send_tile, tile_count
from tandem_attn.kernels.sm90.staging import is_lent, lend


@gluon.jit
def producer(plan: gl.constexpr, args, q, kv_out, o, tiles, mail, again):  # noqa: ARG001
    """Hands out tiles and loads them; at the end those that must be computed again."""
    num_tiles = tile_count(plan, args)
    q_out = q.sender()
    rank = multicast.join(plan)
    mail = multicast.Mail(mail.slot, mail.came, mail.taken, mail.passed, rank)
    tile = gl.program_id(0) // plan.kv_multicast
    at = coords_of(plan, args, tile, num_tiles)
    tiles_out = send_tile(tiles.sender(), _told(plan, at))
    while at.valid != 0:
        tile, mail = multicast.next_tile(plan, args, tile, num_tiles, mail)
        following = coords_of(plan, args, tile, num_tiles)
        tiles_out = send_tile(tiles_out, _told(plan, following))
        q_out, kv_out = _load(plan, args, work_at(plan, args, at), rank, q_out, kv_out)
        at = following
    if plan.fixed_max:
        node, mail = redo.first(plan, again, mail)
        while node >= 0:
            at = redo.tile_of(plan, args, node)
            node, mail = redo.following(plan, args, at, mail)
            tiles_out = send_tile(tiles_out, at)
            q_out, kv_out = _load(plan, args, work_at(plan, args, at), rank, q_out, kv_out)
        send_tile(tiles_out, redo.nothing())
    if plan.kv_multicast > 1:  # consumers of the other CTA still say that slots are empty
        kv_out.k.drain()
        if not plan.shared_kv_ring:
            kv_out.v.drain()


@gluon.jit
def _told(plan: gl.constexpr, at):
    """What consumers are told instead of a tile that does not exist."""
    if plan.fixed_max:
        return Coords(gl.where(at.valid == 0, redo.REPORT, at.valid), at.m_block, at.head, at.batch)
    else:
        return at


@gluon.jit
def _load(plan: gl.constexpr, args, work, rank, q_out, kv_out):
    """A tile's Q, then K and V blocks from the last to the first, V one block behind K."""
    seq = work.seq
    head_kv = packing.head_kv(plan, args, work.head)
    row = work.row + rank * plan.rows_per_cta
    consumers: gl.constexpr = plan.q_stages
    for i in gl.static_range(consumers):
        q_out = packing.load_queries(plan, args, seq, work.head, row + i * plan.tile_m, q_out)
    key = (work.visit.stop - 1) * plan.tile_n
    kv_out = kv_out.after_k(_load_k(plan, args, seq, head_kv, key, rank, kv_out.k))
    for _ in range(work.visit.start, work.visit.stop - 1):
        before = key - plan.tile_n
        kv_out = kv_out.after_k(_load_k(plan, args, seq, head_kv, before, rank, kv_out.k))
        kv_out = kv_out.after_v(_load_v(plan, args, seq, head_kv, key, rank, kv_out.v))
        key = before
    kv_out = kv_out.after_v(_load_v(plan, args, seq, head_kv, key, rank, kv_out.v))
    if is_lent(plan):
        kv_out = kv_out.after_v(lend(plan, kv_out.v))
    return q_out, kv_out


@gluon.jit
def _load_k(plan: gl.constexpr, args, seq, head, key, rank, out):
    chunks: gl.constexpr = plan.head_dim_chunks
    if plan.kv_multicast > 1:
        return multicast.load_keys(plan, "k", chunks, seq.batch, seq.k, head, key, rank, out)
    else:
        return paging.load_keys(plan, args, args.k, args.k_tail, chunks, seq.batch, seq.k, head, key, out)


@gluon.jit
def _load_v(plan: gl.constexpr, args, seq, head, key, rank, out):
    chunks: gl.constexpr = plan.head_dim_v_chunks
    if plan.kv_multicast > 1:
        return multicast.load_keys(plan, "v", chunks, seq.batch, seq.v, head, key, rank, out)
    else:
        return paging.load_keys(plan, args, args.v, args.v_tail, chunks, seq.batch, seq.v, head, key, out)


@gluon.jit
def spare(plan: gl.constexpr):
    """Warps without work, which a barrier of the cluster would wait for."""
    multicast.join(plan)
