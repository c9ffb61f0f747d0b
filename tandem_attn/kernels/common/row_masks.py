"""Masks where one thread holds a whole row of scores (Blackwell): every mask of windows is a union of column intervals of a row."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tandem_attn.kernels.common import masks, softmax


@gluon.constexpr_function
def conjunctions(tree):
    """A mask of windows as a union of intersections: a tuple of tuples of windows; an empty one sees every key."""
    if tree.kind == "and":
        return tuple(a + b for a in conjunctions(tree.a) for b in conjunctions(tree.b))
    if tree.kind == "or":
        return conjunctions(tree.a) + conjunctions(tree.b)
    return ((tree,),) if tree.kind == "window" else ((),)


@gluon.constexpr_function
def _alternatives(tree):
    return len(conjunctions(tree))


@gluon.constexpr_function
def _windows(tree, which):
    return len(conjunctions(tree)[which])


@gluon.constexpr_function
def _window(tree, which, i):
    return conjunctions(tree)[which][i]


@gluon.constexpr_function
def _has_left(tree, which):
    return any(window.left != "None" for window in conjunctions(tree)[which])


@gluon.jit
def hide(s, tree: gl.constexpr, scalars, seq, row, n_start, masked):
    """Scores s (M, N) of one row a thread, with -inf where a query sees no key; untouched if ``masked`` is 0.

    ``row`` (M,) are the queries, ``n_start`` is the first key, both within the sequence.
    """
    out = _hide(s, tree, 0, scalars, seq, row, n_start, masked)
    for which in gl.static_range(1, _alternatives(tree)):
        out = gl.maximum(out, _hide(s, tree, which, scalars, seq, row, n_start, masked))
    return out


@gluon.jit
def _hide(s, tree: gl.constexpr, which: gl.constexpr, scalars, seq, row, n_start, masked):
    """``hide`` for one of the intersections of windows that the mask is a union of: one interval of columns."""
    start = row * 0 - masks.FAR
    stop = row * 0 + seq.k.used
    for i in gl.static_range(_windows(tree, which)):
        start, stop = _narrowed(_window(tree, which, i), scalars, seq, row, start, stop)
    asm: gl.constexpr = _outside(s.type.shape[1], _has_left(tree, which))
    return gl.inline_asm(asm, ("=&f", "f", "r", "r", "r"), [s, start - n_start, stop - n_start, masked], s.type)


@gluon.jit
def _narrowed(window: gl.constexpr, scalars, seq, row, start, stop):
    """The part of an interval of keys that a window lets ``row`` see."""
    lo, hi = masks.edges(window, scalars, seq.q.used, seq.k.used)
    if window.left != "None":
        start = gl.maximum(start, row + lo)
    if window.right != "None":
        stop = gl.minimum(stop, row + hi + 1)
    return start, stop


@gluon.constexpr_function
def _outside(count, bounded):
    """A branch around one predicated move a column, with the column numbers as constants; a Gluon ``if`` becomes selects in every block."""
    start, stop, masked = (f"${2 * count + i}" for i in range(3))
    lines = ["{ .reg .pred skip, hidden;", *(f"mov.f32 ${i}, ${count + i};" for i in range(count))]
    lines += [f"setp.eq.s32 skip, {masked}, 0;", "@skip bra.uni seen${:uid};"]
    for i in range(count):
        lines.append(f"setp.le.s32 hidden, {stop}, {i};")
        if bounded:
            lines.append(f"setp.gt.or.s32 hidden, {start}, {i}, hidden;")
        lines.append(f"@hidden mov.f32 ${i}, 0fFF800000;")
    return "\n".join([*lines, "seen${:uid}:", "}"])


@gluon.jit
def add_alibi(s, scale, slope, distance):
    """scale * s - slope * |distance - column|, the columns counted from 0; ``distance`` (M,) and ``slope`` are float32."""
    asm: gl.constexpr = _add_alibi(s.type.shape[1])
    return gl.inline_asm(asm, ("=&f", "f", "f", "f", "f"), [s, scale, -slope, distance], s.type)


@gluon.constexpr_function
def _add_alibi(count):
    scale, slope, distance = (f"${2 * count + i}" for i in range(3))
    lines = ["{ .reg .f32 x, far;"]
    for i in range(count):
        lines += [f"sub.f32 far, {distance}, {softmax.float_bits(i)};", "abs.f32 far, far;", f"mul.f32 x, ${count + i}, {scale};"]
        lines += [f"fma.rn.f32 ${i}, far, {slope}, x;"]
    return "\n".join([*lines, "}"])
