"""Masks where one thread holds a whole row of scores (Blackwell): every mask of windows is a union of column intervals of a row."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tandem_attn.kernels.common import documents, masks, predicates, ptx, softmax

WORD = gl.constexpr(16)  # columns whose bits a word holds, of masks that are dear to compute


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
def _bounded_left(tree):
    return tuple(any(window.left != "None" for window in windows) for windows in conjunctions(tree))


@gluon.jit
def hide(s, tree: gl.constexpr, scalars, seq, row, n_start, masked, site):
    """Scores s (M, N) of one row a thread, with -inf where a query sees no key; untouched if ``masked`` is 0.

    ``row`` (M,) are the queries, ``n_start`` is the first key, both within the sequence. ``site`` is read by masks that read data.
    """
    if not masks.reads_data(tree):
        return _hide_windows(s, tree, scalars, seq, row, n_start, masked)
    elif tree.kind == "and":  # one after the other: fewer registers than the conjunction of all elements
        s = hide(s, tree.a, scalars, seq, row, n_start, masked, site)
        return hide(s, tree.b, scalars, seq, row, n_start, masked, site)
    elif tree.kind == "document":
        return _hide_documents(s, tree.seen, site, row, n_start, seq.k.used, masked)
    elif _is_dear(tree):
        words = _every_bit(s)
        if masked != 0:
            words = _seen_words(s, tree, scalars, seq, row, n_start, site)
        return gl.inline_asm(_unseen(s.type.shape[1]), _constraints(s.type.shape[1] // WORD), (s,) + words + (masked,), s.type)
    else:
        if masked != 0:
            j = (n_start + gl.arange(0, s.type.shape[1], layout=gl.SliceLayout(0, s.type.layout)))[None, :]
            seen = (j < seq.k.used) & masks.allowed(tree, scalars, seq.q.used, seq.k.used, row[:, None], j, site)
            s = gl.where(seen, s, float("-inf"))
        return s


@gluon.constexpr_function
def _is_dear(tree):
    """Whether what a mask computes of each element takes more registers than scores leave, were all elements computed at once."""
    return _dear_operations(tree) > 1


@gluon.constexpr_function
def _dear_operations(tree):
    if tree.kind in ("and", "or"):
        return _dear_operations(tree.a) + _dear_operations(tree.b)
    return _dear_in(tree.seen) if tree.kind in ("document", "predicate") else 0


@gluon.constexpr_function
def _dear_in(e):
    """Table elements and integer quotients of both a query and a key, and twice the quotients that are not integers."""
    found = sum(_dear_in(a) for a in e.args)
    if e.kind == "div":
        return found + 2 * _depends(e, "j")
    return found + (e.kind in ("mod", "floordiv", "table") and _depends(e, "j") and (e.kind == "table" or _depends(e, "i")))


@gluon.constexpr_function
def _depends(e, leaf):
    return e.kind == leaf or any(_depends(a, leaf) for a in e.args)


@gluon.jit
def _every_bit(s):
    full = gl.full([s.type.shape[0]], -1, gl.int32, gl.SliceLayout(1, s.type.layout))
    words = ()
    for _ in gl.static_range(s.type.shape[1] // WORD):
        words = words + (full,)
    return words


@gluon.jit
def _seen_words(s, tree: gl.constexpr, scalars, seq, row, n_start, site):
    """For each ``WORD`` columns a word a row whose bits say which of them the row's query sees.

    The values of a predicate take registers for as many columns only, beside the scores.
    """
    layout: gl.constexpr = _narrow(s.type.layout, WORD)
    i = gl.convert_layout(row, gl.SliceLayout(1, layout))[:, None]
    head = site.head
    if len(head.shape) > 0:
        head = gl.convert_layout(head, layout)
    site = predicates.Site(site.batch, head, site.data)
    bit = gl.arange(0, WORD, layout=gl.SliceLayout(0, layout))
    words = ()
    for which in gl.static_range(s.type.shape[1] // WORD):
        j = (n_start + which * WORD + bit)[None, :]
        seen = (j < seq.k.used) & masks.allowed(tree, scalars, seq.q.used, seq.k.used, i, j, site)
        word = gl.reduce_or(gl.where(seen, 1 << bit[None, :], 0), 1)
        word, n_start = ptx.apart(word, n_start, seq.k.used, which + 1)
        words = words + (gl.convert_layout(word, gl.SliceLayout(1, s.type.layout)),)
    return words


@gluon.constexpr_function
def _narrow(layout, columns):
    return gl.BlockedLayout([1, columns], layout.threads_per_warp, layout.warps_per_cta, layout.order, layout.cga_layout)


@gluon.constexpr_function
def _unseen(count):
    """-inf where a bit of the words is 0, behind a branch as in ``_outside``."""
    words, masked = [f"${2 * count + i}" for i in range(count // WORD.value)], f"${2 * count + count // WORD.value}"
    lines = ["{ .reg .pred skip, seen; .reg .b32 bit;", *(f"mov.f32 ${i}, ${count + i};" for i in range(count))]
    lines += [f"setp.eq.s32 skip, {masked}, 0;", "@skip bra.uni done${:uid};"]
    for i in range(count):
        lines += _hidden_by_bit(i, words[i // WORD.value], WORD.value)
    return "\n".join([*lines, "done${:uid}:", "}"])


@gluon.constexpr_function
def _hidden_by_bit(column, word, per_word):
    return [
        f"and.b32 bit, {word}, {1 << column % per_word};",
        "setp.ne.u32 seen, bit, 0;",
        f"selp.f32 ${column}, ${column}, 0fFF800000, seen;",
    ]


@gluon.jit
def _hide_documents(s, seen: gl.constexpr, site, row, n_start, seqlen_k, masked):
    """``documents.hide`` where one thread holds a row: every thread loads the ids of all keys, the same in all of them."""
    ids, keys, stop = documents.compared(seen, site, row, n_start, seqlen_k)
    bits: gl.constexpr = documents.id_bits(seen)
    asm: gl.constexpr = _other_documents(s.type.shape[1], seen.args[1].element, bits)
    operand: gl.constexpr = "l" if bits == 64 else "r"
    return gl.inline_asm(asm, ("=&f", "f", operand, "l", "r", "r"), [s, ids, keys, stop, masked], s.type)


@gluon.constexpr_function
def _other_documents(count, element, bits):
    ids, keys, stop, masked = (f"${2 * count + i}" for i in range(4))
    size = 8 if element == "i64" else 4
    widen = "cvt.s64.s32" if bits > 8 * size else f"mov.b{bits}"
    lines = [f"{{ .reg .pred skip, inside, same; .reg .b{8 * size} loaded; .reg .b{bits} id;"]
    lines += [f"mov.f32 ${i}, ${count + i};" for i in range(count)]
    lines += [f"setp.eq.s32 skip, {masked}, 0;", "@skip bra.uni done${:uid};"]
    for i in range(count):
        lines += [f"setp.gt.s32 inside, {stop}, {i};", f"mov.b{8 * size} loaded, 0;"]
        lines += [f"@inside ld.global.b{8 * size} loaded, [{keys} + {i * size}];", f"{widen} id, loaded;"]
        lines += [f"setp.eq.and.b{bits} same, id, {ids}, inside;", f"selp.f32 ${i}, ${i}, 0fFF800000, same;"]
    return "\n".join([*lines, "done${:uid}:", "}"])


@gluon.jit
def _hide_windows(s, tree: gl.constexpr, scalars, seq, row, n_start, masked):
    """All intervals at once: a copy of the scores for each would not fit a thread."""
    edges = ()
    for which in gl.static_range(_alternatives(tree)):
        start, stop = _interval(tree, which, scalars, seq, row)
        edges = edges + (start - n_start, stop - n_start)
    asm: gl.constexpr = _outside(s.type.shape[1], _bounded_left(tree))
    return gl.inline_asm(asm, _constraints(2 * _alternatives(tree)), (s,) + edges + (masked,), s.type)


@gluon.jit
def _interval(tree: gl.constexpr, which: gl.constexpr, scalars, seq, row):
    """The columns ``[start, stop)`` that one of the intersections of windows lets ``row`` see."""
    start = row * 0 - masks.FAR
    stop = row * 0 + seq.k.used
    for i in gl.static_range(_windows(tree, which)):
        start, stop = _narrowed(_window(tree, which, i), scalars, seq, row, start, stop)
    return start, stop


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
def _constraints(numbers):
    """Of assembly with scores in and out, some numbers a row and whether the block is masked."""
    return ("=&f", "f", *("r",) * numbers, "r")


@gluon.constexpr_function
def _outside(count, bounded):
    """A branch around selects by the bits of words, which ptxas turns into predicates seven at a time; a Gluon ``if`` becomes selects in
    every block, and comparisons of column numbers cost one instruction a column more. ``bounded``: which intervals have a first column.
    """
    edges, masked = [f"${2 * count + i}" for i in range(2 * len(bounded))], f"${2 * (count + len(bounded))}"
    lines = ["{ .reg .pred skip, seen; .reg .b32 edge, word, bit;", *(f"mov.f32 ${i}, ${count + i};" for i in range(count))]
    lines += [".reg .b32 more;"] if len(bounded) > 1 else []
    lines += [f"setp.eq.s32 skip, {masked}, 0;", "@skip bra.uni done${:uid};"]
    for first in range(0, count, 32):
        for which, has_left in enumerate(bounded):
            word = "more" if which else "word"
            lines += _bits_below(word, edges[2 * which + 1], first)
            if has_left:
                lines += [*_bits_below("bit", edges[2 * which], first), "not.b32 bit, bit;", f"and.b32 {word}, {word}, bit;"]
            lines += ["or.b32 word, word, more;"] if which else []
        for i in range(first, min(first + 32, count)):
            lines += _hidden_by_bit(i, "word", 32)
    return "\n".join([*lines, "done${:uid}:", "}"])


@gluon.constexpr_function
def _bits_below(word, column, first):
    """Bits of the columns from ``first`` on that lie before ``column`` (PTX ISA: bmsk)."""
    return [f"sub.s32 edge, {column}, {first};", "max.s32 edge, edge, 0;", f"bmsk.clamp.b32 {word}, 0, edge;"]


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
