"""Copies between global and shared memory: sequences, their TMA coordinates, and tiles cut into chunks of head_dim.

A descriptor names a tensor (batch, heads, rows, head_dim). Where the rows in use are known only on the device, it has two row dimensions
of the same stride. Row r of a sequence that starts at row ``start`` of the tensor and uses ``used`` rows has the coordinates
(start + used, END - used + r), and with ``END`` as the size of the second, r = used is out of bounds. TMA then reads zeros beyond the rows
in use, whatever lies there, and writes nothing there. That is END rows too far; an outermost dimension of stride 2^34 - (a row), always at
coordinate END = 2^30, takes them back, since addresses are computed modulo 2^64. (A base END rows before the tensor would do so as well,
but a box that is out of bounds as a whole touches the base, and on an H200 that is an illegal access where nothing is mapped.)
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.language.core import _aggregate as aggregate

from tandem_attn.kernels.common import ptx

END = gl.constexpr(1 << 30)


@aggregate
class Rows:
    """Rows of one sequence in q and o, or in k and v."""

    start: gl.tensor  # in packed tensors or in a cache, else 0
    used: gl.tensor
    pitch: gl.tensor  # rows from one sequence, or page, to the next in a tensor of several


@aggregate
class Sequence:
    batch: gl.tensor
    q: Rows
    k: Rows
    v: Rows  # as k, but for the pitch


@gluon.jit
def sequence(plan: gl.constexpr, args, batch):
    """Start and rows in use of sequence ``batch``."""
    q_start = gl.to_tensor(0)
    k_start = gl.to_tensor(0)
    used_q = ptx.pinned(args.seqlen_q)  # what is computed of them stays in its role
    used_k = ptx.pinned(args.seqlen_k)
    if plan.varlen:
        q_start = gl.load(args.cu_q + batch)
        k_start = gl.load(args.cu_k + batch)
        used_q = gl.load(args.cu_q + batch + 1) - q_start
        used_k = gl.load(args.cu_k + batch + 1) - k_start
    if plan.page_size > 0:
        k_start = gl.to_tensor(0)
    if plan.seqused and plan.uses_part_of_q:
        used_q = gl.minimum(used_q, gl.load(args.used_q + batch))
    if plan.seqused:
        used_k = gl.minimum(used_k, gl.load(args.used_k + batch))
    if plan.leftpad:
        k_start = gl.load(args.pages[4] + batch)
        used_k = gl.maximum(used_k - k_start, 0)
    return Sequence(batch, Rows(q_start, used_q, args.pitch_q), Rows(k_start, used_k, args.pitch_k), Rows(k_start, used_k, args.pitch_v))


@gluon.jit
def load_tile(plan: gl.constexpr, desc, tail, chunks: gl.constexpr, batch, rows, head, row, out):
    """Rows from ``row`` on into the next slot of channel end ``out``; returns the channel end behind it."""
    if len(chunks) == 1:
        out.acquire(desc.nbytes_per_cta)
        tma.async_load(desc, coordinates(plan, batch, rows, head, row, 0), out.ready(), out.slot())
    else:
        out.acquire(desc.nbytes_per_cta + tail.nbytes_per_cta)
        tma.async_load(desc, coordinates(plan, batch, rows, head, row, 0), out.ready(), out.slot())
        load_more(tail, coordinates(plan, batch, rows, head, row, chunks[0]), out.ready(), out.tail())
    return out.next()


@gluon.jit
def load_more(desc, coords, barrier, slot):
    """A copy into the slot of one before it. The compiler wants the role's threads in step between the two, and finds them so."""
    gl.barrier()
    tma.async_load(desc, coords, barrier, slot)


@gluon.jit
def store_tile(plan: gl.constexpr, desc, tail, chunks: gl.constexpr, batch, rows, head, row, slot, slot_tail):
    """A tile from shared memory to rows from ``row`` on; in padded tensors also rows that are not in use (they get zeros)."""
    if plan.varlen:
        tma.async_store(desc, coordinates(plan, batch, rows, head, row, 0), slot)
        if len(chunks) > 1:
            tma.async_store(tail, coordinates(plan, batch, rows, head, row, chunks[0]), slot_tail)
    else:
        tma.async_store(desc, [batch, head, row, 0], slot)
        if len(chunks) > 1:
            tma.async_store(tail, [batch, head, row, chunks[0]], slot_tail)


@gluon.jit
def coordinates(plan: gl.constexpr, batch, rows, head, row, column: gl.constexpr):
    """Of TMA, outermost first."""
    if plan.varlen:
        return [END, rows.start + rows.used, head, END - rows.used + row, column]
    elif plan.seqused:
        return [END, batch * rows.pitch + rows.used, head, END - rows.used + row, column]
    else:
        return [batch, head, row, column]
