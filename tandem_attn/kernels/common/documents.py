"""Key ranges of document masks: which keys a query tile's documents may hold.

A launch of ``document_ranges`` before the attention kernel writes four numbers for each query tile: keys outside ``[lo, hi)`` share no
document with any of its queries, keys inside ``[inner_lo, inner_hi)`` share theirs with all. Ids that ascend, as packing makes them, give
ranges without waste; any other ids give correct ones.
"""

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.core import _aggregate as aggregate

from tandem_attn.kernels.common import predicates, ptx

NONE = gl.constexpr(1 << 29)  # an empty range starts here and ends at its negative: hulls and intersections need no cases
FIELDS = gl.constexpr(4)  # numbers a tile


@aggregate
class KeyRange:
    """Keys ``[lo, hi)`` contain those that a tile's queries see; each query sees all of ``[inner_lo, inner_hi)``."""

    lo: gl.tensor
    hi: gl.tensor
    inner_lo: gl.tensor
    inner_hi: gl.tensor


@gluon.jit
def both(a, b):
    return KeyRange(gl.maximum(a.lo, b.lo), gl.minimum(a.hi, b.hi), gl.maximum(a.inner_lo, b.inner_lo), gl.minimum(a.inner_hi, b.inner_hi))


@gluon.jit
def either(a, b):
    """The hull of the outer ranges; of the inner ones a's, or b's where a's is empty."""
    take_a = a.inner_lo < a.inner_hi
    inner_lo = gl.where(take_a, a.inner_lo, b.inner_lo)
    inner_hi = gl.where(take_a, a.inner_hi, b.inner_hi)
    a_lo = gl.where(a.lo < a.hi, a.lo, NONE)
    a_hi = gl.where(a.lo < a.hi, a.hi, -NONE)
    b_lo = gl.where(b.lo < b.hi, b.lo, NONE)
    b_hi = gl.where(b.lo < b.hi, b.hi, -NONE)
    return KeyRange(gl.minimum(a_lo, b_lo), gl.maximum(a_hi, b_hi), inner_lo, inner_hi)


@gluon.jit
def load_range(pointer):
    """A tile's key range, as ``document_ranges`` wrote it."""
    return KeyRange(gl.load(pointer), gl.load(pointer + 1), gl.load(pointer + 2), gl.load(pointer + 3))


@gluon.jit
def blocks(keys, tile_n: gl.constexpr, seqlen_k):
    """The blocks of a key range, as ``masks.block_range``: at least one, and the last is always masked."""
    low = gl.minimum(gl.maximum(keys.lo, 0), gl.maximum(seqlen_k, 0))
    high = gl.minimum(keys.hi, seqlen_k)
    start = low // tile_n
    stop = gl.maximum(gl.cdiv(gl.maximum(high, 0), tile_n), start + 1)
    full_start = gl.maximum(gl.cdiv(gl.maximum(keys.inner_lo, 0), tile_n), start)
    full_stop = gl.minimum(gl.maximum(gl.minimum(keys.inner_hi, seqlen_k), 0) // tile_n, stop - 1)
    return BlockRange(start, gl.minimum(full_start, full_stop), full_stop, stop)


@aggregate
class BlockRange:
    """Key blocks a query tile visits, ``[start, stop)``, at least one; those in ``[full_start, full_stop)`` need no element mask."""

    start: gl.tensor
    full_start: gl.tensor
    full_stop: gl.tensor
    stop: gl.tensor


@gluon.jit
def hide(s, seen: gl.constexpr, site, row, n_start, seqlen_k):
    """Scores s (64, N), a warpgroup's accumulator, with -inf where query (``row``, (64,)) and key carry different ids.

    In assembly, as ``masks.hide_columns``: 32 loads whose columns are constants, none of them held through the loop.
    """
    ids, keys, stop = compared(seen, site, row, n_start, seqlen_k)
    bits: gl.constexpr = id_bits(seen)
    asm: gl.constexpr = _hide_asm(s.type.shape[1] // 2, seen.args[1].element, bits)
    operand: gl.constexpr = "l" if bits == 64 else "r"
    return gl.inline_asm(asm, ("=&f", "f", operand, "l", "r"), [s, ids, keys, stop], s.type, is_pure=False)


@gluon.constexpr_function
def id_bits(seen):
    """Bits in which ids are compared."""
    return 64 if seen.args[0].element == "i64" or seen.args[1].element == "i64" else 32


@gluon.jit
def compared(seen: gl.constexpr, site, row, n_start, seqlen_k):
    """Ids of queries ``row``, the pointer to those of the keys from ``n_start`` on, and how many keys there have one."""
    of_queries: gl.constexpr = seen.args[0]
    of_keys: gl.constexpr = seen.args[1]
    row = ptx.pinned(row)  # else whether rows have an id is kept from block to block, on the stack
    ids = predicates.evaluate(of_queries, site, row, row)
    keys = site.data[of_keys.at] + site.batch.to(gl.int64) * site.data[of_keys.at + 3] + n_start
    stop = gl.minimum(seqlen_k, site.data[of_keys.at + 2])
    stop = gl.where(site.batch < site.data[of_keys.at + 1], stop, 0) - n_start
    if id_bits(seen) == 64:
        ids = ids.to(gl.int64)
    return ids, keys, stop


@gluon.constexpr_function
def _hide_asm(count, element, bits):
    """Registers of the accumulator as in ``masks.hide_columns``."""
    ids = 2 * count
    size = 8 if element == "i64" else 4
    lines = ["{ .reg .pred inside, same; .reg .b32 lane, stop; .reg .b64 at;", f".reg .b{8 * size} loaded; .reg .b{bits} id;"]
    lines += ["mov.u32 lane, %laneid;", "and.b32 lane, lane, 3;", "shl.b32 lane, lane, 1;"]
    lines += [f"sub.s32 stop, ${ids + 3}, lane;", f"mad.wide.s32 at, lane, {size}, ${ids + 2};"]
    widen = "cvt.s64.s32" if bits > 8 * size else f"mov.b{bits}"
    for column in (8 * group + i for group in range(count // 4) for i in range(2)):
        lines += [f"setp.gt.s32 inside, stop, {column};", f"mov.b{8 * size} loaded, 0;"]
        lines += [f"@inside ld.global.b{8 * size} loaded, [at+{column * size}];", f"{widen} id, loaded;"]
        for half in range(2):
            register = column // 8 * 4 + 2 * half + column % 8
            lines.append(f"setp.eq.and.s{bits} same, id, ${ids + half}, inside;")
            lines.append(f"selp.f32 ${register}, ${count + register}, 0fFF800000, same;")
    return "\n".join([*lines, "}"])


@gluon.jit
def range_pointers(plan: gl.constexpr, tree: gl.constexpr, args, seq, m_block):
    """Where the key ranges of a query tile lie, one pointer a document mask."""
    places: gl.constexpr = _range_places(tree)
    if len(places) == 0:
        return ()
    else:
        at = slot_of(plan, args, seq, m_block) * FIELDS
        if len(places) == 1:
            return (args.mask_data[places[0]] + at,)
        else:
            pointers = (args.mask_data[places[0]] + at,)
            for n in gl.static_range(1, len(places)):
                pointers = pointers + (args.mask_data[places[n]] + at,)
            return pointers


@gluon.constexpr_function
def _range_places(tree):
    """Places of the ranges in the mask's data, document by document."""
    if tree.kind in ("and", "or"):
        return (*_range_places(tree.a), *_range_places(tree.b))
    return (tree.ranges,) if tree.kind == "document" else ()


@gluon.jit
def slot_of(plan: gl.constexpr, args, seq, m_block):
    """A number of its own for each query tile: tiles of packed sequences have one by the rows before them, without a sum over sequences."""
    if plan.varlen:
        return seq.q.start // plan.queries_per_tile + seq.batch + m_block
    else:
        return seq.batch * args.blocks + m_block


@triton.jit
def document_ranges(
    q_ids, k_ids, cu_q, cu_k, used_q, used_k, out,
    q_batches, q_size, q_batch_stride, q_stride, k_batches, k_size, k_batch_stride, k_stride, batch, seqlen_q, seqlen_k, blocks,
    queries: tl.constexpr, power: tl.constexpr, chunk: tl.constexpr, varlen: tl.constexpr,
    part_of_q: tl.constexpr, part_of_k: tl.constexpr,
):  # fmt: skip
    """Key ranges of one document mask, one program a query tile.

    Args:
        q_ids, k_ids: (batch, seqlen) ids, with their sizes and strides.
        cu_q, cu_k, used_q, used_k: int32, as the attention kernel's; read where ``varlen``, ``part_of_q`` and ``part_of_k`` say so.
        out: int32 (tiles, FIELDS).
        blocks: query tiles of a padded sequence.
        queries: queries of a tile; power: the next power of two.
        chunk: keys looked at together.
    """
    slot = tl.program_id(0)
    if varlen:
        b = _sequence_of(slot, cu_q, batch, queries)
        start_q = tl.load(cu_q + b)
        m_block = slot - start_q // queries - b
        length_q = tl.load(cu_q + b + 1) - start_q
        length_k = tl.load(cu_k + b + 1) - tl.load(cu_k + b)
    else:
        b = slot // blocks
        m_block = slot - b * blocks
        length_q = seqlen_q
        length_k = seqlen_k
    if part_of_q:
        length_q = tl.minimum(length_q, tl.load(used_q + b))
    if part_of_k:
        length_k = tl.minimum(length_k, tl.load(used_k + b))
    length_q = tl.minimum(length_q, q_size)
    length_k = tl.minimum(length_k, k_size)
    i = m_block * queries + tl.arange(0, power)
    in_tile = (tl.arange(0, power) < queries) & (i < length_q) & (b < q_batches)
    ids = tl.load(q_ids + b.to(tl.int64) * q_batch_stride + i.to(tl.int64) * q_stride, mask=in_tile, other=0).to(tl.int64)
    least = tl.min(tl.where(in_tile, ids, 0x7FFFFFFFFFFFFFFF), 0)
    most = tl.max(tl.where(in_tile, ids, -0x7FFFFFFFFFFFFFFF - 1), 0)
    first = tl.full([chunk], 1 << 29, tl.int32)
    last = tl.full([chunk], -(1 << 29), tl.int32)
    count = tl.zeros([chunk], tl.int32)
    row = k_ids + b.to(tl.int64) * k_batch_stride
    for start in range(0, length_k, chunk):
        j = start + tl.arange(0, chunk)
        in_use = (j < length_k) & (b < k_batches)
        key = tl.load(row + j.to(tl.int64) * k_stride, mask=in_use, other=0).to(tl.int64)
        match = in_use & (key >= least) & (key <= most)
        first = tl.where(match, tl.minimum(first, j), first)
        last = tl.where(match, j, last)
        count += match.to(tl.int32)
    lo, hi = tl.min(first, 0), tl.max(last, 0) + 1
    whole = (least == most) & (tl.sum(count, 0) == hi - lo)  # one document, and its keys lie side by side
    at = out + slot * 4
    tl.store(at, lo)
    tl.store(at + 1, hi)
    tl.store(at + 2, tl.where(whole, lo, 1 << 29))
    tl.store(at + 3, tl.where(whole, hi, -(1 << 29)))


@triton.jit
def _sequence_of(slot, cu_q, batch, queries: tl.constexpr):
    """The packed sequence whose tiles ``slot_of`` counts up to ``slot``: the last that starts at it or before."""
    low = 0
    high = batch
    while high - low > 1:
        middle = (low + high) // 2
        before = tl.load(cu_q + middle) // queries + middle <= slot
        low = tl.where(before, middle, low)
        high = tl.where(before, high, middle)
    return low
