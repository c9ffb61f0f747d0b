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
def _has_left(windows):
    return any(window.left != "None" for window in windows)


@gluon.jit
def hide(s, tree: gl.constexpr, scalars, seq, row, n_start, masked):
    """Scores s (M, N) of one row a thread, with -inf where a query sees no key; untouched if ``masked`` is 0.

    ``row`` (M,) are the queries, ``n_start`` is the first key, both within the sequence.
    """
    union: gl.constexpr = conjunctions(tree)
    out = _hide(s, union[0], scalars, seq, row, n_start, masked)
    for i in gl.static_range(1, len(union)):
        out = gl.maximum(out, _hide(s, union[i], scalars, seq, row, n_start, masked))
    return out


@gluon.jit
def _hide(s, windows: gl.constexpr, scalars, seq, row, n_start, masked):
    start = row
    stop = row * 0 + seq.k.used
    for i in gl.static_range(len(windows)):
        lo, hi = masks.edges(windows[i], scalars, seq.q.used, seq.k.used)
        if windows[i].right != "None":
            stop = gl.minimum(stop, row + hi + 1)
        if windows[i].left != "None":
            if _has_left(windows[:i]):
                start = gl.maximum(start, row + lo)
            else:
                start = row + lo
    asm: gl.constexpr = _outside(s.type.shape[1], _has_left(windows))
    return gl.inline_asm(asm, ("=&f", "f", "r", "r", "r"), [s, start - n_start, stop - n_start, masked], s.type)


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

