"""P = 2^(S - m) of one row a thread, written to tensor memory part by part, and its row sum: the inner loop of the softmax roles.

The planned columns take the polynomial of ``spec.exp2`` in packed float32 pairs on FMA units, the others MUFU. In assembly because Gluon
has neither the packed add that rounds down nor a store to tensor memory of some columns of a register tile.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tandem_attn.kernels.common import ptx, softmax

WIDTH = gl.constexpr(32)  # columns a piece; fewer registers hold P between the exponentials and their store


@gluon.constexpr_function
def pieces(plan, part, widest):
    """(first column, columns) of each piece of a part of P: powers of two up to ``widest``, at multiples of themselves."""
    first = 0 if part == 0 else round(plan.p_parts[part - 1] * plan.tile_n)
    stop = round(plan.p_parts[part] * plan.tile_n)
    found = []
    while first < stop:
        width = min(widest, 1 << (stop - first).bit_length() - 1, first & -first or widest)
        found.append((first, width))
        first += width
    return found


@gluon.jit
def write_p(plan: gl.constexpr, s, scale, row_max, sums, address, never, p_ready):
    """Stores P = 2^(s * scale - row_max), gives each part's signal once it is written, and returns the row sums with P's added.

    ``s`` (128, N) is a row a thread, ``address`` its place for P in tensor memory; ``sums`` are two partial row sums (128,).
    """
    low, high = sums
    minus = ptx.in_order(-row_max, never, 1)
    for part in gl.static_range(len(plan.p_parts)):
        for i in gl.static_range(len(pieces(plan, part, WIDTH))):
            low, high = gl.inline_asm(
                _piece(plan, *pieces(plan, part, WIDTH)[i]),
                ("=&f", "=&f", "f", "f", "f", "f", "f", "r"),
                [s, scale, minus, low, high, address],
                (low.type, high.type),
            )
        p_ready[part].arrive_tmem()
        if part + 1 < len(plan.p_parts):
            minus = ptx.in_order(minus, never, part + 2)
    return low, high


@gluon.jit
def weights_of(plan: gl.constexpr, s, scale, minus):
    """2^(s * scale + minus) in registers, as ``write_p`` computes it."""
    return gl.inline_asm(_weights(plan), ("=&f", "f", "f", "f"), [s, scale, minus], s.type, is_pure=True)


@gluon.constexpr_function
def _weights(plan):
    n = plan.tile_n
    scores, scale, minus = [f"${n + i}" for i in range(n)], f"${2 * n}", f"${2 * n + 1}"
    lines = ["{ .reg .b64 scale, minus, x; .reg .b32 x0, x1;", _pair("scale", scale, scale), _pair("minus", minus, minus)]
    lines += _constants(plan.exp2.degree)
    for i in range(n // 2):
        lines += _weight_pair(plan, i, scores[2 * i], scores[2 * i + 1])
        lines += [f"mov.b32 ${2 * i}, x0;", f"mov.b32 ${2 * i + 1}, x1;"]
    return "\n".join([*lines, "}"])


@gluon.constexpr_function
def _piece(plan, first, width):
    """Columns [first, first + width): weights, their conversion and store, and the two partial row sums."""
    n = plan.tile_n
    low, high, scores = "$0", "$1", [f"${2 + i}" for i in range(n)]
    scale, minus, low_in, high_in, address = (f"${2 + n + i}" for i in range(5))
    pairs = width // 2
    lines = [f"{{ .reg .b64 scale, minus, x, sum<2>, total; .reg .b32 x0, x1, p<{pairs}>;"]
    lines += [".reg .b16 half<2>;"] if plan.element_bytes == 1 else []
    lines += [_pair("scale", scale, scale), _pair("minus", minus, minus)]
    lines += _constants(plan.exp2.degree)
    for i in range(pairs):
        lines += _weight_pair(plan, first // 2 + i, scores[first + 2 * i], scores[first + 2 * i + 1])
        lines += [*_rounded(plan, i), _pair("x", "x0", "x1")]
        lines += [f"mov.b64 sum{i}, x;" if i < 2 else f"add.rn.ftz.f32x2 sum{i % 2}, sum{i % 2}, x;"]
    columns = width * plan.element_bytes // 4  # of tensor memory
    stored = ", ".join(f"p{i}" for i in range(columns))
    lines += [f"tcgen05.st.sync.aligned.32x32b.x{columns}.b32 [{address} + {first * plan.element_bytes // 4}], {{{stored}}};"]
    lines += ["add.rn.ftz.f32x2 sum0, sum0, sum1;"] if pairs > 1 else []
    lines += [_pair("total", low_in, high_in), "add.rn.ftz.f32x2 total, total, sum0;", f"mov.b64 {{{low}, {high}}}, total;", "}"]
    return "\n".join(lines)


@gluon.constexpr_function
def _weight_pair(plan, pair, a, b):
    """x0, x1 = 2^(scale * score + minus) of two neighbouring columns."""
    lines = [_pair("x", a, b), "fma.rn.ftz.f32x2 x, x, scale, minus;"]
    return lines + (_polynomial(plan.exp2.degree) if _on_fma(plan.exp2, pair) else _on_mufu())


@gluon.constexpr_function
def _on_fma(split, pair):
    return pair % split.group_pairs in range(split.first_pair, split.first_pair + split.fma_pairs)


@gluon.constexpr_function
def _rounded(plan, pair):
    """x0, x1 as elements of P: two, or four of a pair and its neighbour, to a 32-bit register (PTX ISA: cvt, packed destination types).

    ``satfinite`` is the one form that 8-bit types have; the plan keeps P within them.
    """
    if plan.element_bytes == 2:
        return [f"cvt.rn.{ {'bfloat16': 'bf16x2', 'float16': 'f16x2'}[plan.dtype] }.f32 p{pair}, x1, x0;"]
    kind = {"float8_e4m3fn": "e4m3x2", "float8_e5m2": "e5m2x2"}[plan.dtype]
    lines = [f"cvt.rn.satfinite.{kind}.f32 half{pair % 2}, x1, x0;"]
    return lines + ([f"mov.b32 p{pair // 2}, {{half0, half1}};"] if pair % 2 else [])


@gluon.constexpr_function
def _on_mufu():
    return ["mov.b64 {x0, x1}, x;", "ex2.approx.ftz.f32 x0, x0;", "ex2.approx.ftz.f32 x1, x1;"]


@gluon.constexpr_function
def _constants(degree):
    from tandem_attn.spec.exp2 import COEFFICIENTS, MAGIC

    named = {"magic": MAGIC, **{f"c{i}": c for i, c in enumerate(COEFFICIENTS[degree])}}
    lines = [f".reg .b64 {', '.join(named)}, whole, part, poly; .reg .b32 w0, w1, q0, q1;"]
    return lines + [_pair(name, softmax.float_bits(value), softmax.float_bits(value)) for name, value in named.items()]


@gluon.constexpr_function
def _polynomial(degree):
    """x0, x1 = 2^x: Cody-Waite and a Horner chain on pairs, step by step as ``spec.exp2.exp2_poly``."""
    from tandem_attn.spec.exp2 import CLAMP

    clamp = softmax.float_bits(CLAMP)
    lines = ["mov.b64 {x0, x1}, x;", *(f"max.ftz.f32 x{i}, x{i}, {clamp};" for i in (0, 1)), _pair("x", "x0", "x1")]
    lines += ["add.rm.ftz.f32x2 whole, x, magic;", "sub.rn.ftz.f32x2 part, whole, magic;", "sub.rn.ftz.f32x2 part, x, part;"]
    lines += [f"fma.rn.ftz.f32x2 poly, part, c{degree}, c{degree - 1};"]
    lines += [f"fma.rn.ftz.f32x2 poly, poly, part, c{i};" for i in reversed(range(degree - 1))]
    lines += ["mov.b64 {w0, w1}, whole;", "mov.b64 {q0, q1}, poly;"]
    return lines + [f"shl.b32 w{i}, w{i}, 23; add.s32 x{i}, w{i}, q{i};" for i in (0, 1)]


@gluon.constexpr_function
def _pair(register, a, b):
    return f"mov.b64 {register}, {{{a}, {b}}};"
