"""The order in which packed sequences are worked on, in one launch.

Every program ranks some sequences against all: the work is quadratic in their number, but it needs no exchange between programs, and a
thousand sequences take a million comparisons.
"""

import triton
import triton.language as tl


@triton.jit
def packed_tiles(
    cu_q, cu_k, used_k, order, starts, batch, tiles_a_block,
    queries: tl.constexpr, seqused: tl.constexpr, own: tl.constexpr, chunk: tl.constexpr,
):  # fmt: skip
    """Longest keys first; of equally long ones the first, first.

    Args:
        cu_q, cu_k: int32 (batch + 1,), the sequences' first rows.
        used_k: int32 (batch,), keys in use; read if ``seqused``.
        order: int32 (batch,), written: the sequences in their order.
        starts: int32 (batch + 1,), written: tiles before each of them, and all.
        tiles_a_block: tiles of one block of ``queries`` rows.
        own: sequences that one program ranks; chunk: sequences that it compares them with at a time.
    """
    mine = tl.program_id(0) * own + tl.arange(0, own)
    my_length = _keys(mine, cu_k, used_k, batch, seqused)[:, None]
    rank = tl.zeros([own], tl.int32)
    before = tl.zeros([own], tl.int32)
    total = tl.zeros([chunk], tl.int32)
    for start in range(0, batch, chunk):
        other = start + tl.arange(0, chunk)
        length = _keys(other, cu_k, used_k, batch, seqused)[None, :]
        rows = tl.load(cu_q + other + 1, mask=other < batch, other=0) - tl.load(cu_q + other, mask=other < batch, other=0)
        blocks = tl.maximum(tl.cdiv(rows, queries), 0)
        first = (length > my_length) | ((length == my_length) & (other[None, :] < mine[:, None]))
        first = first & (other[None, :] < batch)
        rank += tl.sum(first.to(tl.int32), 1)
        before += tl.sum(tl.where(first, blocks[None, :], 0), 1)
        total += blocks
    tl.store(order + rank, mine, mask=mine < batch)
    tl.store(starts + rank, before * tiles_a_block, mask=mine < batch)
    if tl.program_id(0) == 0:
        tl.store(starts + batch, tl.sum(total, 0) * tiles_a_block)


@triton.jit
def _keys(b, cu_k, used_k, batch, seqused: tl.constexpr):
    """Keys of sequences ``b``."""
    length = tl.load(cu_k + b + 1, mask=b < batch, other=0) - tl.load(cu_k + b, mask=b < batch, other=0)
    if seqused:
        length = tl.minimum(length, tl.load(used_k + b, mask=b < batch, other=0))
    return length
