"""A kernel whose conversions between layouts go through shared memory of the compiler's own."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def swap(x):
    rows: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])
    columns: gl.constexpr = gl.BlockedLayout([4, 1], [8, 4], [1, 4], [0, 1])
    row = gl.arange(0, 64, layout=gl.SliceLayout(1, rows))[:, None]
    column = gl.arange(0, 64, layout=gl.SliceLayout(0, rows))[None, :]
    at = x + row * 64 + column
    there = gl.convert_layout(gl.load(at), columns)
    gl.store(at, gl.convert_layout(there * there, rows))
