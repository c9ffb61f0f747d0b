"""Additive biases: a tile of (B or 1, H or 1, Sq or 1, Sk or 1), whose sizes of 1 come with stride 0."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def tile(bias, batch, head, i, j):
    """Elements for queries ``i`` (M, 1) and keys ``j`` (1, N) in float32; 0 outside the tensor.

    ``bias`` holds its address, rows and columns, and the strides of batch, head, row and column.
    """
    pointer, rows, columns, by_batch, by_head, by_row, by_column = bias
    row = pointer + batch.to(gl.int64) * by_batch + head.to(gl.int64) * by_head + i.to(gl.int64) * by_row
    inside = (i < rows) & (j < columns)
    return gl.load(row + j.to(gl.int64) * by_column, mask=inside, other=0.0).to(gl.float32)
