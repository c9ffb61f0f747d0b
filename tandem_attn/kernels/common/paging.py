"""Tiles of keys and values: from tensors, or from the pages of a cache.

A page is to TMA what a sequence is in ``copies``: its rows in use end where the sequence does, and beyond they read as zeros. Tiles start
at a sequence's first key, so a tile lies in one page where a sequence has one page only, or pages hold whole tiles; otherwise it is put
together from copies of ``plan.page_rows`` rows, which do.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

from tandem_attn.kernels.common.copies import END, load_more, load_tile

AT_ONCE = {True: 8, False: 2}  # places looked up before the first of their copies is issued: as many as the role's registers hold
MANY_REGISTERS = 64


@gluon.jit
def load_keys(plan: gl.constexpr, args, desc, tail, chunks: gl.constexpr, batch, rows, head, key, out):
    """A sequence's keys or values from ``key`` on into the next slot of channel end ``out``; returns the channel end behind it."""
    if plan.page_size == 0:
        return load_tile(plan, desc, tail, chunks, batch, rows, head, key, out)
    else:
        copies: gl.constexpr = plan.tile_n // plan.page_rows
        if len(chunks) == 1:
            out.acquire(desc.nbytes_per_cta * copies * panels(plan, chunks[0]))
        else:
            nbytes: gl.constexpr = desc.nbytes_per_cta * panels(plan, chunks[0]) + tail.nbytes_per_cta * panels(plan, chunks[1])
            out.acquire(nbytes * copies)
        for start in range(0, copies, _at_once(plan, copies)):
            places = _places(plan, args, batch, rows, key, start, _at_once(plan, copies))
            for i in gl.static_range(_at_once(plan, copies)):
                _load_place(plan, desc, rows, head, places[i], chunks[0], 0, start + i, out.ready(), out.slot())
                if len(chunks) == 2:
                    _load_place(plan, tail, rows, head, places[i], chunks[1], chunks[0], start + i, out.ready(), out.tail())
        return out.next()


@gluon.constexpr_function
def panels(plan, columns):
    """Blocks of 128 bytes of columns, which lie one behind the other in a swizzled tile; whole tiles are copied without this."""
    return 1 if plan.page_rows == plan.tile_n else max(1, columns * plan.element_bytes // 128)


@gluon.jit
def _load_place(plan: gl.constexpr, desc, rows, head, found, columns: gl.constexpr, first: gl.constexpr, number, barrier, slot):
    """Columns ``[first, first + columns)`` of the rows of a tile that come from one place, the ``number``-th of the tile."""
    copies: gl.constexpr = plan.tile_n // plan.page_rows
    page, used, row = found
    if copies == 1:
        if first == 0:
            tma.async_load(desc, [END, page * rows.pitch + used, head, END - used + row, first], barrier, slot)
        else:
            load_more(desc, [END, page * rows.pitch + used, head, END - used + row, first], barrier, slot)
    else:
        # To the compiler a piece is a tile of its own. Pieces are whole repetitions of the swizzle's pattern, so they read as one tile.
        count: gl.constexpr = panels(plan, columns)
        width: gl.constexpr = columns // count
        layout: gl.constexpr = gl.NVMMASharedLayout(slot.layout.swizzle_byte_width, slot.dtype.primitive_bitwidth, 2)
        pieces = slot.reinterpret(shape=[count * copies, plan.page_rows, width], layout=layout)
        for panel in gl.static_range(count):
            coords = [END, page * rows.pitch + used, head, END - used + row, first + panel * width]
            load_more(desc, coords, barrier, pieces.index(panel * copies + number))


@gluon.constexpr_function
def _at_once(plan, copies):
    return min(copies, AT_ONCE[plan.roles[-1].registers >= MANY_REGISTERS])


@gluon.jit
def _places(plan: gl.constexpr, args, batch, rows, key, start, count: gl.constexpr):
    places = (place(args, batch, rows, key + start * plan.page_rows),)
    for i in gl.static_range(1, count):
        places = places + (place(args, batch, rows, key + (start + i) * plan.page_rows),)
    return places


@gluon.jit
def place(args, batch, rows, key):
    """Page and row of a key, and the page's rows in use by the sequence; none behind its last key."""
    table, by_sequence, columns, page_size = args.pages[0], args.pages[1], args.pages[2], args.pages[3]
    at = rows.start + key
    column = at // page_size
    row = at - column * page_size
    used = gl.minimum(gl.maximum(rows.start + rows.used - column * page_size, 0), page_size)
    page = gl.load(table + batch * by_sequence + gl.minimum(column, columns - 1))
    return page, used, row
