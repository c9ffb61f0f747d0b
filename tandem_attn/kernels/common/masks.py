"""Masks on the device: the bands of ``spec.bands`` and the predicates of ``spec.masks``, compiled in from a plan's mask structure.

The structure is text, such as ``and(window(None,0,bottom-right),document(#,#))``; a ``#`` in a window is a runtime scalar.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.core import _aggregate as aggregate

FAR = gl.constexpr(1 << 29)  # an unbounded side; sums of two stay within int32
MAX_SCALARS = 4  # runtime window bounds a kernel takes


@gluon.constexpr_function
def parse(code):
    """The structure as nested tuples; a runtime bound becomes ``("scalar", its number)``."""
    tree, rest = _parse(code, iter(range(MAX_SCALARS)))
    assert not rest, code
    return tree


@gluon.constexpr_function
def _parse(text, scalars):
    kind, _, rest = text.partition("(")
    if kind in ("and", "or"):
        a, rest = _parse(rest, scalars)
        b, rest = _parse(rest[1:], scalars)
        return (kind, a, b), rest[1:]
    body, _, rest = rest.partition(")")
    if kind == "window":
        left, right, align = body.split(",")
        return (kind, _bound(left, scalars), _bound(right, scalars), align), rest
    return (kind,), rest


@gluon.constexpr_function
def _bound(text, scalars):
    if text == "None":
        return None
    return ("scalar", next(scalars)) if text == "#" else int(text)


@gluon.constexpr_function
def has_full_blocks(tree):
    """Whether some blocks may need no element mask."""
    if tree[0] in ("and", "or"):
        parts = [has_full_blocks(tree[1]), has_full_blocks(tree[2])]
        return all(parts) if tree[0] == "and" else any(parts)
    return tree[0] in ("full", "window")


@gluon.constexpr_function
def bounded_left(tree):
    """Whether the first visited blocks may need an element mask because of a left bound."""
    if tree[0] in ("and", "or"):
        return bounded_left(tree[1]) or bounded_left(tree[2])
    return tree[0] == "window" and tree[1] is not None


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
    if tree[0] == "and":
        a = bounds(tree[1], scalars, seqlen_q, seqlen_k)
        b = bounds(tree[2], scalars, seqlen_q, seqlen_k)
        return Bounds(
            gl.maximum(a.lo, b.lo), gl.minimum(a.hi, b.hi), gl.maximum(a.inner_lo, b.inner_lo), gl.minimum(a.inner_hi, b.inner_hi)
        )
    elif tree[0] == "or":
        a = bounds(tree[1], scalars, seqlen_q, seqlen_k)
        b = bounds(tree[2], scalars, seqlen_q, seqlen_k)
        if has_full_blocks(tree[1]):
            inner = a
        else:
            inner = b
        return Bounds(gl.minimum(a.lo, b.lo), gl.maximum(a.hi, b.hi), inner.inner_lo, inner.inner_hi)
    elif tree[0] == "window":
        lo, hi = _edges(tree, scalars, seqlen_q, seqlen_k)
        return Bounds(lo, hi, lo, hi)
    elif tree[0] == "full":
        far = gl.to_tensor(FAR)
        return Bounds(-far, far, -far, far)
    else:
        far = gl.to_tensor(FAR)
        return Bounds(-far, far, far, -far)


@gluon.jit
def _edges(tree: gl.constexpr, scalars, seqlen_q, seqlen_k):
    """Lowest and highest j - i of a window."""
    if tree[3] == "bottom-right":
        shift = seqlen_k - seqlen_q
    else:
        shift = gl.to_tensor(0)
    lo = gl.to_tensor(-FAR)
    hi = gl.to_tensor(FAR)
    if tree[1] is not None:
        lo = shift - _value(tree[1], scalars)
    if tree[2] is not None:
        hi = shift + _value(tree[2], scalars)
    return lo, hi


@gluon.jit
def _value(bound: gl.constexpr, scalars):
    if _is_scalar(bound):
        return scalars[bound[1]]
    else:
        return gl.to_tensor(bound)


@gluon.constexpr_function
def _is_scalar(bound):
    return isinstance(bound, tuple)


@gluon.jit
def allowed(tree: gl.constexpr, scalars, seqlen_q, seqlen_k, i, j):
    """Whether query ``i`` (M, 1) sees key ``j`` (1, N)."""
    if tree[0] == "and":
        return allowed(tree[1], scalars, seqlen_q, seqlen_k, i, j) & allowed(tree[2], scalars, seqlen_q, seqlen_k, i, j)
    elif tree[0] == "or":
        return allowed(tree[1], scalars, seqlen_q, seqlen_k, i, j) | allowed(tree[2], scalars, seqlen_q, seqlen_k, i, j)
    else:
        lo, hi = _edges(tree, scalars, seqlen_q, seqlen_k)
        if tree[1] is None:
            return j <= i + hi
        elif tree[2] is None:
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
def hide(s, tree: gl.constexpr, scalars, seq, row, column):
    """Scores with -inf where a query sees no key. ``row`` (M,) and ``column`` (N,) index within the sequence."""
    j = column[None, :]
    if tree[0] == "full":
        seen = j < seq.k.used
    elif tree[0] == "window" and tree[1] is None:
        lo, hi = _edges(tree, scalars, seq.q.used, seq.k.used)
        seen = j < gl.minimum(row + hi + 1, seq.k.used)[:, None]
    else:
        seen = (j < seq.k.used) & allowed(tree, scalars, seq.q.used, seq.k.used, row[:, None], j)
    return gl.where(seen, s, float("-inf"))
