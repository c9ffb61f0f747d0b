"""Additive biases: tiles of (B or 1, H or 1, Sq or 1, Sk or 1), whose sizes of 1 come with stride 0."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def add(s, bias, element: gl.constexpr, batch, head, row, n_start):
    """Scores s (64, N), a warpgroup's accumulator, plus the bias of queries ``row`` (64,) and keys from ``n_start`` on; 0 outside it.

    ``bias`` holds its address, rows and columns, and the strides of batch, head, row and column. In assembly, as ``masks.hide_columns``:
    two addresses walk along the rows, where a tensor of addresses would take all registers.
    """
    size: gl.constexpr = 4 if element == "float32" else 2
    first = batch.to(gl.int64) * bias[3] + head.to(gl.int64) * bias[4] + row.to(gl.int64) * bias[5] + n_start.to(gl.int64) * bias[6]
    address = bias[0].to(gl.int64) + first * size
    inside = (row < bias[1]).to(gl.int32)
    asm: gl.constexpr = _add_asm(s.type.shape[1] // 2, element)
    return gl.inline_asm(
        asm, ("=&f", "f", "l", "r", "l", "r"), [s, address, inside, bias[6] * size, bias[2] - n_start], s.type, is_pure=False
    )


@gluon.constexpr_function
def _add_asm(count, element):
    """Registers of the accumulator as in ``masks.hide_columns``."""
    rows, inside, step, stop = 2 * count, 2 * count + 2, 2 * count + 4, 2 * count + 5
    lines = ["{ .reg .pred row<2>, column, known; .reg .b32 lane, stop; .reg .b64 far, at<2>, after; .reg .b16 half; .reg .f32 x;"]
    lines += ["mov.u32 lane, %laneid;", "and.b32 lane, lane, 3;", "shl.b32 lane, lane, 1;", f"sub.s32 stop, ${stop}, lane;"]
    lines.append("cvt.s64.s32 far, lane;")
    for half in range(2):
        lines += [f"mad.lo.s64 at{half}, far, ${step}, ${rows + half};", f"setp.ne.s32 row{half}, ${inside + half}, 0;"]
    lines.append(f"shl.b64 far, ${step}, 3;")
    for group in range(count // 4):
        for neighbour in range(2):
            lines.append(f"setp.gt.s32 column, stop, {8 * group + neighbour};")
            for half in range(2):
                register = 4 * group + 2 * half + neighbour
                place = "after" if neighbour else f"at{half}"
                lines += [f"add.s64 after, at{half}, ${step};"] if neighbour else []
                lines += [f"and.pred known, column, row{half};", "mov.f32 x, 0f00000000;", *_load(place, element)]
                lines.append(f"add.f32 ${register}, ${count + register}, x;")
        lines += [f"add.s64 at{half}, at{half}, far;" for half in range(2)]
    return "\n".join([*lines, "}"])


@gluon.constexpr_function
def _load(place, element):
    """``x`` from memory, if ``known``."""
    if element == "float32":
        return [f"@known ld.global.f32 x, [{place}];"]
    convert = "cvt.f32.f16 x, half;" if element == "float16" else "mov.b32 x, {0, half};"
    return [f"@known ld.global.b16 half, [{place}];", f"@known {convert}"]
