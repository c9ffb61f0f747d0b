"""Split keys: several tiles share a query tile's key blocks, write partial results, and ``combine`` joins them.

A part is normalised by itself, in float32. Beside it stand each row's maximum and sum, not its LSE: of large logits, differences of maxima
are exact where those of LSEs, rounded by themselves, are not.
"""

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tandem_attn.kernels.common.documents import BlockRange

UNUSED = gl.constexpr(float("inf"))  # the maximum of a row that is not in use


@gluon.jit
def part(visit, split, splits, tile_n: gl.constexpr, seqlen_k):
    """The blocks of one of ``splits`` parts. A part without blocks visits the one behind the last key: it is all masked."""
    share = gl.cdiv(visit.stop - visit.start, splits)
    start = visit.start + split * share
    stop = gl.minimum(start + share, visit.stop)
    empty = start >= stop
    start = gl.where(empty, gl.cdiv(seqlen_k, tile_n), start)
    stop = gl.where(empty, start + 1, stop)
    full_start = gl.minimum(gl.maximum(visit.full_start, start), stop - 1)
    full_stop = gl.minimum(visit.full_stop, stop - 1)  # the last block is always masked
    return BlockRange(start, gl.minimum(full_start, full_stop), full_stop, stop)


@gluon.jit
def store_statistics(parts, at, row_max, row_sum, exists):
    """Maximum and sum of rows (M,), of a row that is not in use UNUSED and 0; ``at`` numbers split, row and head together."""
    pointer = parts[1] + at * 2
    gl.store(pointer, row_max, mask=exists)
    gl.store(pointer + 1, row_sum, mask=exists)


@gluon.jit
def store_columns(parts, at, acc, inverse, first: gl.constexpr, columns: gl.constexpr, exists):
    """Columns of O from ``first`` on, rows of ``acc`` (M, N) times ``inverse`` (M,), of ``columns`` that there are."""
    layout: gl.constexpr = acc.type.layout
    rows: gl.constexpr = gl.SliceLayout(1, layout)
    column = first + gl.arange(0, acc.type.shape[1], layout=gl.SliceLayout(0, layout))
    pointer = parts[0] + (gl.convert_layout(at, rows) * columns)[:, None] + column[None, :]
    value = acc * gl.convert_layout(inverse, rows)[:, None]
    gl.store(pointer, value, mask=gl.convert_layout(exists, rows)[:, None] & (column[None, :] < columns))


@triton.jit
def combine(
    part_o, statistics, out, lse, sink, splits, rows, heads, seqlen_q, unit,
    columns: tl.constexpr, power: tl.constexpr, most: tl.constexpr, has_sink: tl.constexpr, packed: tl.constexpr,
):  # fmt: skip
    """Joins the parts of one row and head, one program each.

    Args:
        part_o: float32 (splits, rows, heads, columns), each part normalised.
        statistics: float32 (splits, rows, heads, 2), maximum and sum of each part.
        out: (rows, heads, columns), written.
        lse: float32 (batch, heads, seqlen_q), or (heads, rows) if ``packed``, written.
        sink: float32 (heads,), read if ``has_sink``.
        unit: log2 units of a maximum's unit.
        power: columns, as a power of two; most: splits, as a power of two.
    """
    index = tl.program_id(0).to(tl.int64)
    row = index // heads
    head = index - row * heads
    part = tl.arange(0, most)
    at = statistics + ((part.to(tl.int64) * rows + row) * heads + head) * 2
    each_max = tl.load(at, mask=part < splits, other=float("-inf")) * unit
    each_sum = tl.load(at + 1, mask=part < splits, other=0.0)
    top = tl.max(each_max, 0)
    unused = top == float("inf")
    if has_sink:
        logit = tl.load(sink + head) * 1.4426950408889634
        top = tl.maximum(top, logit)
    safe = tl.where((top == float("-inf")) | unused, 0.0, top)
    total = tl.sum(tl.where(unused, 0.0, each_sum * tl.exp2(each_max - safe)), 0)
    if has_sink:
        total += tl.where(unused, 0.0, tl.exp2(logit - safe))
    column = tl.arange(0, power)
    acc = tl.zeros([power], tl.float32)
    for split in range(splits):
        place = (tl.cast(split, tl.int64) * rows + row) * heads + head
        one_sum = tl.load(statistics + place * 2 + 1)
        share = one_sum * tl.exp2(tl.load(statistics + place * 2) * unit - safe)
        seen = one_sum != 0  # else O of the part is 0, whatever the exponential says
        acc += tl.load(part_o + place * columns + column, mask=(column < columns) & seen, other=0.0) * tl.where(seen, share, 0.0)
    empty = unused | (total == 0)
    tl.store(out + index * columns + column, tl.where(empty, 0.0, acc / total).to(out.dtype.element_ty), mask=column < columns)
    joined = tl.where(empty, float("-inf"), (safe + tl.log2(total)) * 0.6931471805599453)
    if packed:
        tl.store(lse + head * rows + row, joined)
    else:
        batch = row // seqlen_q
        tl.store(lse + (batch * heads + head) * seqlen_q + row - batch * seqlen_q, joined)
