"""Online softmax in base 2 over register tiles, as ``spec.softmax`` defines it."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

LOG2_E = gl.constexpr(1.4426950408889634)
LN_2 = gl.constexpr(0.6931471805599453)


@gluon.jit
def finite_or_zero(row_max):
    """What to subtract: 0 where no key was seen, so that -inf - m stays -inf instead of NaN."""
    return gl.where(row_max == float("-inf"), 0.0, row_max)


@gluon.jit
def partial_sum(p):
    """Row sums (M, 4) of p (M, N), the four lanes of a row kept apart: no shuffles until the end.

    A lane of an MMA accumulator holds two neighbouring columns of every eight.
    """
    m: gl.constexpr = p.type.shape[0]
    n: gl.constexpr = p.type.shape[1]
    return gl.sum(gl.sum(gl.reshape(p, [m, n // 8, 4, 2]), axis=3), axis=1)


@gluon.jit
def tanh(x):
    """Accurate to 2e-7 absolute, from one exponential and one reciprocal (``tanh.approx`` errs by 5e-4)."""
    return 1.0 - 2.0 / (gl.exp2(x * (2 * LOG2_E)) + 1.0)


@gluon.jit
def grown_max(old, new, tau: gl.constexpr):
    """The new row maxima if one of this warp's rows grew by more than ``tau`` (log2 units), else the old ones."""
    return gl.inline_asm(_grown_max, ("=f", "f", "f", "f"), [old, new, gl.to_tensor(tau)], new.type, is_pure=False)


@gluon.constexpr_function
def _grown_max(outputs, inputs):
    (out,) = outputs
    old, new, (tau,) = inputs
    lines = ["{ .reg .pred grew; .reg .f32 limit;"]
    for i, (a, b) in enumerate(zip(old, new, strict=True)):
        grew = "setp.gt.or.f32 grew, {}, limit, grew;" if i else "setp.gt.f32 grew, {}, limit;"
        lines += [f"add.f32 limit, {a}, {tau};", grew.format(b)]
    lines.append("vote.sync.any.pred grew, grew, 0xffffffff;")
    lines += [f"selp.f32 {o}, {b}, {a}, grew;" for o, a, b in zip(out, old, new, strict=True)]
    return "\n".join([*lines, "}"])


@gluon.jit
def scaled_rows(acc, alpha):
    """acc (M, N) with its rows multiplied by alpha (M,); a warp whose rows all have alpha = 1 skips the multiplications."""
    columns: gl.constexpr = acc.type.shape[1]
    return gl.inline_asm(_scaled_rows_asm(columns), _scaled_rows_constraints(columns), [acc, alpha], acc.type, is_pure=False)


@gluon.constexpr_function
def _scaled_rows_asm(columns):
    """Registers of a warpgroup's accumulator: 4 for every 8 columns, two of the upper row and two of the lower."""
    count = columns // 2
    upper, lower = f"${2 * count}", f"${2 * count + 1}"
    lines = ["{ .reg .pred skip;", f"setp.eq.f32 skip, {upper}, 0f3F800000;", f"setp.eq.and.f32 skip, {lower}, 0f3F800000, skip;"]
    lines += ["vote.sync.all.pred skip, skip, 0xffffffff;", "@skip bra.uni scaled${:uid};"]
    lines += [f"mul.f32 ${i}, ${i}, {lower if i % 4 >= 2 else upper};" for i in range(count)]
    return "\n".join([*lines, "scaled${:uid}:", "}"])


@gluon.constexpr_function
def _scaled_rows_constraints(columns):
    count = columns // 2
    return ",".join(["=f"] * count + [str(i) for i in range(count)] + ["f", "f"])


@gluon.jit
def rounded_over(old, p, acc):
    """p (64, N), an accumulator, rounded into the registers of ``old``, an MMA operand, not before ``acc`` is computed.

    ptxas would round as early as it can, while the last P is still an operand of the product in flight: both do not fit the registers.
    """
    asm: gl.constexpr = _rounded_over_asm(p.type.shape[1] // 2, old.dtype)
    return gl.inline_asm(asm, ("=h", "h", "f", "f"), [old, p, acc], old.type, is_pure=False)


@gluon.constexpr_function
def _rounded_over_asm(count, dtype):
    name = {"bf16": "bf16x2", "fp16": "f16x2"}[str(dtype)]
    lines = [f"{{ .reg .pred known; .reg .b32 bits, pair<{count}>;", f"mov.b32 bits, ${3 * count};", "setp.ne.u32 known, bits, 0xffffffff;"]
    for i in range(0, count, 2):
        old, p = count + i, 2 * count + i
        lines.append(f"mov.b32 pair{i}, {{${old}, ${old + 1}}};")
        lines.append(f"@known cvt.rn.{name}.f32 pair{i}, ${p + 1}, ${p};")
        lines.append(f"mov.b32 {{${i}, ${i + 1}}}, pair{i};")
    return "\n".join([*lines, "}"])


@gluon.jit
def behind(x, acc):
    """x (64,) of a warpgroup's rows, not before ``acc`` (64, N) is computed.

    ptxas would compute weights while the last ones are still an operand of the product in flight, see ``rounded_over``.
    """
    return gl.inline_asm(_behind_asm, ("=f", "f", "f"), [x, acc], x.type, is_pure=False)


@gluon.constexpr_function
def _behind_asm(outputs, inputs):
    (outs,), (xs, acc) = outputs, inputs
    lines = ["{ .reg .pred known; .reg .b32 bits;", f"mov.b32 bits, {acc[0]};", "setp.ne.u32 known, bits, 0xffffffff;"]
    return "\n".join([*lines, *(f"selp.f32 {out}, {x}, {acc[0]}, known;" for out, x in zip(outs, xs, strict=True)), "}"])


@gluon.jit
def exp2(x, split: gl.constexpr):
    """2^x, the planned columns by the polynomial on FMA units, the others on MUFU. x (64, N) is a warpgroup's accumulator."""
    if split.fma_pairs == 0:
        return gl.exp2(x)
    else:
        return gl.inline_asm(_exp2_asm(split, x.type.shape[1] // 2), ("=&f", "f"), [x], x.type, is_pure=True)


@gluon.constexpr_function
def _exp2_asm(split, count):
    lines = ["{ .reg .f32 x, whole, part; .reg .b32 bits;"]
    for i in range(count):
        out, x = f"${i}", f"${count + i}"
        lines += _polynomial(out, x, split.degree) if _on_fma(i, split) else [f"ex2.approx.ftz.f32 {out}, {x};"]
    return "\n".join([*lines, "}"])


@gluon.constexpr_function
def _on_fma(register, split):
    """Registers come 4 for every 8 columns; the four lanes of a row hold four pairs, so whole groups of four pairs go together."""
    return (register // 4 * 4) % split.group_pairs in range(split.first_pair, split.first_pair + split.fma_pairs)


@gluon.constexpr_function
def _polynomial(out, x, degree):
    """Cody-Waite and a Horner chain, step by step as ``spec.exp2.exp2_poly``."""
    from tandem_attn.spec.exp2 import CLAMP, COEFFICIENTS, MAGIC

    *rest, lead = [float_bits(c) for c in COEFFICIENTS[degree]]
    lines = [f"max.ftz.f32 x, {x}, {float_bits(CLAMP)};", f"add.rm.ftz.f32 whole, x, {float_bits(MAGIC)};"]
    lines += [f"sub.ftz.f32 part, whole, {float_bits(MAGIC)};", "sub.ftz.f32 part, x, part;"]
    lines += [f"fma.rn.ftz.f32 {out}, part, {lead}, {rest[-1]};"]
    lines += [f"fma.rn.ftz.f32 {out}, part, {out}, {c};" for c in reversed(rest[:-1])]
    return [*lines, "mov.b32 bits, whole;", "shl.b32 bits, bits, 23;", f"add.s32 {out}, {out}, bits;"]


@gluon.constexpr_function
def float_bits(value):
    import struct

    return f"0f{struct.unpack('<I', struct.pack('<f', value))[0]:08X}"
