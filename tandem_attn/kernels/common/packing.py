"""Query heads of one KV head as rows of a tile: which query and which head a row is, and the copies of such tiles.

A query takes ``plan.pack_rows`` rows, its heads side by side; rows beyond ``plan.pack_gqa`` are empty. TMA sees the tensor as (batch,
groups of heads, rows, heads of a group, head_dim): heads beyond the group are out of bounds, read as zeros and not written. Rows that a
sequence does not use are read whatever they hold, since no row's result depends on another.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

from tandem_attn.kernels.common import ptx
from tandem_attn.kernels.common.copies import load_more, load_tile, store_tile


@gluon.jit
def head_groups(plan: gl.constexpr, args):
    """Heads as tiles count them."""
    if plan.pack_gqa == 1:
        return args.heads
    else:
        return args.heads // plan.pack_gqa


@gluon.jit
def head_kv(plan: gl.constexpr, args, group):
    """The KV head of a group."""
    if plan.pack_gqa == 1:
        return group // args.heads_per_kv
    else:
        return group * plan.pack_gqa // args.heads_per_kv


@gluon.jit
def queries(plan: gl.constexpr, rows):
    """The query of each row, counted through the sequence."""
    if plan.pack_gqa == 1:
        return rows
    else:
        return rows // plan.pack_rows


@gluon.jit
def heads(plan: gl.constexpr, group, rows):
    """The query head: one for all rows, or each row's. That of an empty row is the group's last."""
    if plan.pack_gqa == 1:
        return group
    else:
        return group * plan.pack_gqa + gl.minimum(rows % plan.pack_rows, plan.pack_gqa - 1)


@gluon.jit
def holds_query(plan: gl.constexpr, rows, exists):
    """Which rows exist and are not empty."""
    if plan.pack_gqa == 1:
        return exists
    else:
        return exists & (rows % plan.pack_rows < plan.pack_gqa)


@gluon.jit
def as_column(plan: gl.constexpr, x):
    """What ``heads`` gave, to go with (M, N) tiles."""
    if plan.pack_gqa == 1:
        return x
    else:
        return x[:, None]


@gluon.jit
def load_queries(plan: gl.constexpr, args, seq, group, row, out):
    """Rows of a query tile from ``row`` on into the next slot of channel end ``out``; returns the channel end behind it."""
    chunks: gl.constexpr = plan.head_dim_chunks
    if plan.pack_gqa == 1:
        return load_tile(plan, args.q, args.q_tail, chunks, seq.batch, seq.q, group, row, out)
    else:
        query = row // plan.pack_rows
        if len(chunks) == 1:
            out.acquire(args.q.nbytes_per_cta)
            tma.async_load(args.q, _q_coords(plan, seq, group, query, 0), out.ready(), out.slot())
        else:
            out.acquire(args.q.nbytes_per_cta + args.q_tail.nbytes_per_cta)
            tma.async_load(args.q, _q_coords(plan, seq, group, query, 0), out.ready(), out.slot())
            load_more(args.q_tail, _q_coords(plan, seq, group, query, chunks[0]), out.ready(), out.tail())
        return out.next()


@gluon.jit
def store_outputs(plan: gl.constexpr, args, seq, group, row, slot, slot_tail):
    """A tile of O from shared memory."""
    chunks: gl.constexpr = plan.head_dim_v_chunks
    if plan.pack_gqa == 1:
        store_tile(plan, args.o, args.o_tail, chunks, seq.batch, seq.q, group, row, slot, slot_tail)
    else:
        query = row // plan.pack_rows
        first, _ = _of_this_cta(plan, query)
        if not plan.varlen or first < seq.q.used:  # see _o_coords
            tma.async_store(args.o, _o_coords(plan, args, seq, group, query, 0), slot)
            if len(chunks) > 1:
                tma.async_store(args.o_tail, _o_coords(plan, args, seq, group, query, chunks[0]), slot_tail)


@gluon.jit
def _q_coords(plan: gl.constexpr, seq, group, query, column: gl.constexpr):
    query, head = _of_this_cta(plan, query)
    if plan.varlen:
        return [group, seq.q.start + query, head, column]
    else:
        return [seq.batch, group, query, head, column]


@gluon.jit
def _o_coords(plan: gl.constexpr, args, seq, group, query, column: gl.constexpr):
    """Of packed sequences with the two row dimensions of ``copies``: nothing is written beyond the rows in use.

    A sixth dimension there is not; the base lies all rows of the tensor before it, so no box may be out of bounds as a whole."""
    query, head = _of_this_cta(plan, query)
    if plan.varlen:
        return [seq.q.start + seq.q.used, group, args.lse_stride - seq.q.used + query, head, column]
    else:
        return [seq.batch, group, query, head, column]


@gluon.jit
def _of_this_cta(plan: gl.constexpr, query):
    """First query and head of a tile's part in this CTA, as coordinates to which the compiler adds where a CTA's part of the shared tile
    begins: it takes that tile's rows for the box's last but one dimension, which are the heads."""
    if plan.cta_group == 1:
        return query, 0
    else:
        rank = ptx.cta_rank()
        return query + rank * (plan.tile_m // plan.pack_rows), -rank * plan.tile_m
