"""Masks on the device: the bands of ``spec.bands`` and the predicates of ``spec.masks``, compiled in from a plan's mask structure.

The structure is text, such as ``and(window(None,0,bottom-right),document(i32,i32))``; a ``#`` in a window is a runtime scalar. What other
leaves read comes in a tuple of arguments, see ``spec.mask_tree``.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.core import _aggregate as aggregate

from tandem_attn.kernels.common import documents, predicates, softmax

FAR = gl.constexpr(1 << 29)  # an unbounded side; sums of two stay within int32


@gluon.constexpr_function
def parse(structure):
    """The tree of a mask's structure, see ``spec.mask_tree``."""
    from tandem_attn.spec import mask_tree

    return mask_tree.parse(structure).root


@gluon.constexpr_function
def has_documents(tree):
    """Whether key ranges of document masks limit what a tile visits."""
    if tree.kind in ("and", "or"):
        return has_documents(tree.a) or has_documents(tree.b)
    return tree.kind == "document"


@gluon.constexpr_function
def reads_data(tree):
    """Whether the mask is more than windows: its leaves read data or indices."""
    if tree.kind in ("and", "or"):
        return reads_data(tree.a) or reads_data(tree.b)
    return tree.seen is not None


@gluon.constexpr_function
def has_full_blocks(tree):
    """Whether some blocks may need no element mask."""
    if tree.kind in ("and", "or"):
        parts = [has_full_blocks(tree.a), has_full_blocks(tree.b)]
        return all(parts) if tree.kind == "and" else any(parts)
    return tree.kind in ("full", "window", "document")


@gluon.constexpr_function
def bounded_left(tree):
    """Whether the first visited blocks may need an element mask because of a left bound."""
    if tree.kind in ("and", "or"):
        return bounded_left(tree.a) or bounded_left(tree.b)
    return tree.kind == "document" or (tree.kind == "window" and tree.left != "None")


@aggregate
class Bounds:
    """Pairs with ``i + lo <= j <= i + hi`` contain the mask; the mask contains those with ``i + inner_lo <= j <= i + inner_hi``."""

    lo: gl.tensor
    hi: gl.tensor
    inner_lo: gl.tensor
    inner_hi: gl.tensor


@gluon.jit
def bounds(tree: gl.constexpr, scalars, seqlen_q, seqlen_k):
    """Outer and inner band of a mask for one sequence, see ``spec.masks.Mask.bounds``."""
    if tree.kind == "and":
        a = bounds(tree.a, scalars, seqlen_q, seqlen_k)
        b = bounds(tree.b, scalars, seqlen_q, seqlen_k)
        return Bounds(
            gl.maximum(a.lo, b.lo), gl.minimum(a.hi, b.hi), gl.maximum(a.inner_lo, b.inner_lo), gl.minimum(a.inner_hi, b.inner_hi)
        )
    elif tree.kind == "or":
        a = bounds(tree.a, scalars, seqlen_q, seqlen_k)
        b = bounds(tree.b, scalars, seqlen_q, seqlen_k)
        if has_full_blocks(tree.a):
            inner = a
        else:
            inner = b
        return Bounds(gl.minimum(a.lo, b.lo), gl.maximum(a.hi, b.hi), inner.inner_lo, inner.inner_hi)
    elif tree.kind == "window":
        lo, hi = edges(tree, scalars, seqlen_q, seqlen_k)
        return Bounds(lo, hi, lo, hi)
    elif tree.kind == "full":
        far = gl.to_tensor(FAR)
        return Bounds(-far, far, -far, far)
    else:
        far = gl.to_tensor(FAR)
        return Bounds(-far, far, far, -far)


@gluon.jit
def edges(tree: gl.constexpr, scalars, seqlen_q, seqlen_k):
    """Lowest and highest j - i of a window."""
    if tree.align == "bottom-right":
        shift = seqlen_k - seqlen_q
    else:
        shift = gl.to_tensor(0)
    lo = gl.to_tensor(-FAR)
    hi = gl.to_tensor(FAR)
    if tree.left != "None":
        lo = shift - _value(tree.left, scalars)
    if tree.right != "None":
        hi = shift + _value(tree.right, scalars)
    return lo, hi


@gluon.jit
def _value(bound: gl.constexpr, scalars):
    if _is_scalar(bound):
        return scalars[_number(bound)]
    else:
        return gl.to_tensor(_number(bound))


@gluon.constexpr_function
def _is_scalar(bound):
    return bound.startswith("#")


@gluon.constexpr_function
def _number(bound):
    return int(bound.lstrip("#"))


@gluon.jit
def allowed(tree: gl.constexpr, scalars, seqlen_q, seqlen_k, i, j, site=None):
    """Whether query ``i`` (M, 1) sees key ``j`` (1, N). ``site`` says where they are, for leaves that read data."""
    if tree.kind == "and":
        return allowed(tree.a, scalars, seqlen_q, seqlen_k, i, j, site) & allowed(tree.b, scalars, seqlen_q, seqlen_k, i, j, site)
    elif tree.kind == "or":
        return allowed(tree.a, scalars, seqlen_q, seqlen_k, i, j, site) | allowed(tree.b, scalars, seqlen_q, seqlen_k, i, j, site)
    elif tree.kind == "full":
        return j >= 0
    elif tree.kind == "document" or tree.kind == "predicate":
        return predicates.evaluate(tree.seen, site, i, j)
    else:
        lo, hi = edges(tree, scalars, seqlen_q, seqlen_k)
        if tree.left == "None" and tree.right == "None":
            return j >= 0
        elif tree.left == "None":
            return j <= i + hi
        elif tree.right == "None":
            return j >= i + lo
        else:
            return (j <= i + hi) & (j >= i + lo)


@gluon.jit
def block_range(band, m_start, m_stop, tile_n: gl.constexpr, seqlen_k):
    """The blocks that rows ``[m_start, m_stop)`` visit, see ``spec.bands.block_range``.

    A tile without keys visits one block all the same; its element mask hides all of it.
    """
    low = gl.maximum(m_start + band.lo, 0)
    high = gl.minimum(m_stop + band.hi, seqlen_k)
    start = low // tile_n
    stop = gl.maximum(gl.cdiv(high, tile_n), start + 1)
    full_start = gl.maximum(gl.cdiv(gl.maximum(m_stop - 1 + band.inner_lo, 0), tile_n), start)
    full_stop = gl.maximum(gl.minimum(m_start + band.inner_hi + 1, seqlen_k), 0) // tile_n
    full_stop = gl.minimum(full_stop, stop - 1)  # the last block is always masked
    return documents.BlockRange(start, gl.minimum(full_start, full_stop), full_stop, stop)


@gluon.jit
def visit(tree: gl.constexpr, scalars, seq, m_start, rows: gl.constexpr, tile_n: gl.constexpr, ranges):
    """The key blocks that ``rows`` queries from ``m_start`` on visit. ``ranges``: pointers to their key range in each document mask."""
    if has_documents(tree):
        m_stop = gl.minimum(m_start + rows, seq.q.used)
        keys = _key_range(tree, scalars, seq, m_start, m_stop, ranges)
        return documents.blocks(keys, tile_n, seq.k.used)
    else:
        band = bounds(tree, scalars, seq.q.used, seq.k.used)
        m_stop = gl.minimum(m_start + rows, seq.q.used)
        return block_range(band, m_start, m_stop, tile_n, seq.k.used)


@gluon.jit
def _key_range(tree: gl.constexpr, scalars, seq, m_start, m_stop, ranges):
    if tree.kind == "and":
        a = _key_range(tree.a, scalars, seq, m_start, m_stop, ranges)
        return documents.both(a, _key_range(tree.b, scalars, seq, m_start, m_stop, ranges))
    elif tree.kind == "or":
        a = _key_range(tree.a, scalars, seq, m_start, m_stop, ranges)
        return documents.either(a, _key_range(tree.b, scalars, seq, m_start, m_stop, ranges))
    elif tree.kind == "document":
        return documents.load_range(ranges[tree.document])
    else:
        band = bounds(tree, scalars, seq.q.used, seq.k.used)
        return documents.KeyRange(m_start + band.lo, m_stop + band.hi, m_stop - 1 + band.inner_lo, m_start + band.inner_hi + 1)


@gluon.jit
def hide(s, tree: gl.constexpr, scalars, seq, row, n_start, site=None):
    """Scores s (64, N), a warpgroup's accumulator, with -inf where a query sees no key.

    ``row`` (64,) are the queries, ``n_start`` is the first key, both within the sequence. ``site`` is needed by masks that read data.
    """
    if tree.kind == "full":
        stop = gl.full(row.type.shape, 0, gl.int32, row.type.layout) + (seq.k.used - n_start)
        return hide_columns(s, stop, stop, False)
    elif tree.kind == "window":
        lo, hi = edges(tree, scalars, seq.q.used, seq.k.used)
        stop = gl.minimum(row + hi + 1, seq.k.used) - n_start
        return hide_columns(s, row + lo - n_start, stop, tree.left != "None")
    elif tree.kind == "and" and reads_data(tree):  # one after the other: fewer registers than the conjunction of all elements
        s = hide(s, tree.a, scalars, seq, row, n_start, site)
        return hide(s, tree.b, scalars, seq, row, n_start, site)
    elif tree.kind == "document":
        return documents.hide(s, tree.seen, site, row, n_start, seq.k.used)
    else:
        n: gl.constexpr = s.type.shape[1]
        j = (n_start + gl.arange(0, n, layout=gl.SliceLayout(0, s.type.layout)))[None, :]
        seen = (j < seq.k.used) & allowed(tree, scalars, seq.q.used, seq.k.used, row[:, None], j, site)
        return gl.where(seen, s, float("-inf"))


@gluon.jit
def hide_columns(s, start, stop, bounded: gl.constexpr):
    """s (64, N) with -inf outside columns ``start`` (if ``bounded``) to ``stop - 1`` of each row.

    In assembly because column numbers are constants there; as a tensor the compiler keeps all of them in registers through the loop.
    """
    asm: gl.constexpr = _hide_columns(s.type.shape[1] // 2, bounded)
    return gl.inline_asm(asm, ("=&f", "f", "r", "r"), [s, start, stop], s.type, is_pure=True)


@gluon.constexpr_function
def _hide_columns(count, bounded):
    """Registers come 4 for every 8 columns: two neighbours of the upper row, two of the lower; lane l starts at column 2 (l % 4)."""
    starts, stops = (2 * count, 2 * count + 1), (2 * count + 2, 2 * count + 3)
    lines = ["{ .reg .pred seen; .reg .b32 lane, start<2>, stop<2>;", "mov.u32 lane, %laneid;", "and.b32 lane, lane, 3;"]
    lines.append("shl.b32 lane, lane, 1;")
    for half in range(2):
        lines += [f"sub.s32 start{half}, ${starts[half]}, lane;", f"sub.s32 stop{half}, ${stops[half]}, lane;"]
    for i in range(count):
        column, half = i // 4 * 8 + i % 2, i % 4 // 2
        lines.append(f"setp.gt.s32 seen, stop{half}, {column};")
        if bounded:
            lines.append(f"setp.le.and.s32 seen, start{half}, {column}, seen;")
        lines.append(f"selp.f32 ${i}, ${count + i}, 0fFF800000, seen;")
    return "\n".join([*lines, "}"])


@gluon.jit
def add_alibi(s, slope, distance):
    """s (64, N) - slope * |distance - column|, columns counted from 0. ``distance`` (64,) is float32, ``slope`` one number or (64,).

    In assembly for the reason that ``hide_columns`` has.
    """
    asm: gl.constexpr = _add_alibi(s.type.shape[1] // 2)
    return gl.inline_asm(asm, ("=&f", "f", "f", "f"), [s, distance * 0.0 - slope, distance], s.type, is_pure=True)


@gluon.constexpr_function
def _add_alibi(count):
    """Registers of the accumulator as in ``_hide_columns``."""
    slopes, distances = (2 * count, 2 * count + 1), (2 * count + 2, 2 * count + 3)
    lines = ["{ .reg .b32 lane; .reg .f32 first, distance<2>, far;", "mov.u32 lane, %laneid;", "and.b32 lane, lane, 3;"]
    lines += ["shl.b32 lane, lane, 1;", "cvt.rn.f32.s32 first, lane;"]
    lines += [f"sub.f32 distance{half}, ${distances[half]}, first;" for half in range(2)]
    for i in range(count):
        column, half = i // 4 * 8 + i % 2, i % 4 // 2
        lines += [f"sub.f32 far, distance{half}, {softmax.float_bits(column)};", "abs.f32 far, far;"]
        lines.append(f"fma.rn.f32 ${i}, far, ${slopes[half]}, ${count + i};")
    return "\n".join([*lines, "}"])
