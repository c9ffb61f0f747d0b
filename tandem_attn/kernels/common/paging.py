"""Tiles of keys and values: from tensors, or from the pages of a cache.

A page is to TMA what a sequence is in ``copies``: its rows in use end where the sequence does, and beyond they read as zeros. Tiles start at
a sequence's first key, so a tile lies in one page where a sequence has one page only, or pages hold whole tiles; otherwise it is put
together from copies of ``plan.page_rows`` rows, which do.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

from tandem_attn.kernels.common.copies import load_tile


@gluon.jit
def load_keys(plan: gl.constexpr, args, desc, tail, chunks: gl.constexpr, seq, head, key, out):
    """Keys or values from ``key`` on into the next slot of channel end ``out``; returns the channel end behind it."""
    if plan.page_size == 0:
        return load_tile(plan, desc, tail, chunks, seq.batch, seq.k, head, key, out)
    else:
        copies: gl.constexpr = plan.tile_n // plan.page_rows
        if len(chunks) == 1:
            out.acquire(desc.nbytes_per_cta * copies)
        else:
            out.acquire((desc.nbytes_per_cta + tail.nbytes_per_cta) * copies)
        if copies == 1:
            page, used, row = place(args, seq, key)
            _copy(desc, tail, chunks, page, used, row, seq.k.limit, head, out.ready(), out.slot(), out.tail())
        else:
            for i in gl.static_range(copies):
                page, used, row = place(args, seq, key + i * plan.page_rows)
                slot = out.slot().slice(i * plan.page_rows, plan.page_rows)
                rest = out.tail().slice(i * plan.page_rows, plan.page_rows)
                _copy(desc, tail, chunks, page, used, row, seq.k.limit, head, out.ready(), slot, rest)
        return out.next()


@gluon.jit
def place(args, seq, key):
    """Page and row of a key, and the page's rows in use by the sequence; none behind its last key."""
    table, by_sequence, columns, page_size = args.pages[0], args.pages[1], args.pages[2], args.pages[3]
    at = seq.k.start + key
    column = at // page_size
    row = at - column * page_size
    used = gl.minimum(gl.maximum(seq.k.start + seq.k.used - column * page_size, 0), page_size)
    page = gl.load(table + seq.batch * by_sequence + gl.minimum(column, columns - 1))
    return page, used, row


@gluon.jit
def _copy(desc, tail, chunks: gl.constexpr, page, used, row, limit, head, barrier, slot, slot_tail):
    tma.async_load(desc, [page, used, head, limit - used + row, 0], barrier, slot)
    if len(chunks) > 1:
        tma.async_load(tail, [page, used, head, limit - used + row, chunks[0]], barrier, slot_tail)
