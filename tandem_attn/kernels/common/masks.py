"""Masks on the device: the bands of ``spec.bands`` and the predicates of ``spec.masks``, compiled in from a plan's mask structure.

The structure is text, such as ``and(window(None,0,bottom-right),document(#,#))``; a ``#`` in a window is a runtime scalar.
"""

from __future__ import annotations

from dataclasses import dataclass

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.core import _aggregate as aggregate

FAR = gl.constexpr(1 << 29)  # an unbounded side; sums of two stay within int32
MAX_SCALARS = 4  # runtime window bounds a kernel takes


@dataclass(frozen=True)
class Node:
    """A mask structure, taken apart."""

    kind: str  # full, window, and, or
    a: Node | None = None
    b: Node | None = None
    left: str = ""  # window bounds: "None", a number, or "#i", the runtime bound number i
    right: str = ""
    align: str = ""


@gluon.constexpr_function
def parse(code):
    """The structure of a mask's code."""
    tree, rest = _parse(code, iter(range(MAX_SCALARS)))
    assert not rest, code
    return tree


@gluon.constexpr_function
def _parse(text, scalars):
    kind, _, rest = text.partition("(")
    if kind in ("and", "or"):
        a, rest = _parse(rest, scalars)
        b, rest = _parse(rest[1:], scalars)
        return Node(kind, a, b), rest[1:]
    body, _, rest = rest.partition(")")
    if kind == "window":
        left, right, align = body.split(",")
        return Node(kind, left=_bound(left, scalars), right=_bound(right, scalars), align=align), rest
    return Node(kind), rest


@gluon.constexpr_function
def _bound(text, scalars):
    return f"#{next(scalars)}" if text == "#" else text


@gluon.constexpr_function
def has_full_blocks(tree):
    """Whether some blocks may need no element mask."""
    if tree.kind in ("and", "or"):
        parts = [has_full_blocks(tree.a), has_full_blocks(tree.b)]
        return all(parts) if tree.kind == "and" else any(parts)
    return tree.kind in ("full", "window")


@gluon.constexpr_function
def bounded_left(tree):
    """Whether the first visited blocks may need an element mask because of a left bound."""
    if tree.kind in ("and", "or"):
        return bounded_left(tree.a) or bounded_left(tree.b)
    return tree.kind == "window" and tree.left != "None"


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
def allowed(tree: gl.constexpr, scalars, seqlen_q, seqlen_k, i, j):
    """Whether query ``i`` (M, 1) sees key ``j`` (1, N)."""
    if tree.kind == "and":
        return allowed(tree.a, scalars, seqlen_q, seqlen_k, i, j) & allowed(tree.b, scalars, seqlen_q, seqlen_k, i, j)
    elif tree.kind == "or":
        return allowed(tree.a, scalars, seqlen_q, seqlen_k, i, j) | allowed(tree.b, scalars, seqlen_q, seqlen_k, i, j)
    else:
        lo, hi = edges(tree, scalars, seqlen_q, seqlen_k)
        if tree.left == "None":
            return j <= i + hi
        elif tree.right == "None":
            return j >= i + lo
        else:
            return (j <= i + hi) & (j >= i + lo)


@aggregate
class BlockRange:
    """Key blocks a query tile visits, ``[start, stop)``, at least one; those in ``[full_start, full_stop)`` need no element mask."""

    start: gl.tensor
    full_start: gl.tensor
    full_stop: gl.tensor
    stop: gl.tensor


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
    return BlockRange(start, gl.minimum(full_start, full_stop), full_stop, stop)


@gluon.jit
def hide(s, tree: gl.constexpr, scalars, seq, row, n_start):
    """Scores s (64, N), a warpgroup's accumulator, with -inf where a query sees no key.

    ``row`` (64,) are the queries, ``n_start`` is the first key, both within the sequence.
    """
    if tree.kind == "full":
        stop = gl.full(row.type.shape, 0, gl.int32, row.type.layout) + (seq.k.used - n_start)
        return hide_columns(s, stop, stop, False)
    elif tree.kind == "window":
        lo, hi = edges(tree, scalars, seq.q.used, seq.k.used)
        stop = gl.minimum(row + hi + 1, seq.k.used) - n_start
        return hide_columns(s, row + lo - n_start, stop, tree.left != "None")
    else:
        n: gl.constexpr = s.type.shape[1]
        j = (n_start + gl.arange(0, n, layout=gl.SliceLayout(0, s.type.layout)))[None, :]
        seen = (j < seq.k.used) & allowed(tree, scalars, seq.q.used, seq.k.used, row[:, None], j)
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
