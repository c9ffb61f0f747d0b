"""tcgen05.mma. PTX manual, "Tensor Core 5th Generation Instructions: tcgen05.mma", "Instruction descriptor", "Data path layouts"."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from tandem_attn.emulator.errors import UnsupportedInstruction
from tandem_attn.emulator.events import AccessKind, Proxy, Space
from tandem_attn.emulator.machine.async_ops import AsyncOp
from tandem_attn.emulator.machine.cta import CTA
from tandem_attn.emulator.machine.warp import Warp
from tandem_attn.emulator.memory.faults import Fault
from tandem_attn.emulator.memory.operands import ELEMENT_BYTES, gather, layout, tcgen05_descriptor, to_float
from tandem_attn.emulator.ops import tcgen05_scaled
from tandem_attn.emulator.ops.access import Array, items, lane_list, scalar
from tandem_attn.emulator.ops.registry import Handler, machine
from tandem_attn.emulator.ops.wgmma import KEPT_TILES, check_read
from tandem_attn.emulator.ptx.nodes import Imm, Instruction, Memory, Operand, Vector

_A_FORMATS = {
    "f16": {0: "f16", 1: "bf16"},
    "tf32": {2: "tf32"},
    "f8f6f4": {0: "e4m3", 1: "e5m2", 3: "e2m3", 4: "e3m2", 5: "e2m1"},
    "i8": {0: "u8", 1: "s8"},
    "mxf4": {1: "e2m1x2"},
    "mxf4nvf4": {1: "e2m1x2"},
}
_A_FORMATS["mxf8f6f4"] = _A_FORMATS["f8f6f4"]
_K_BYTES = 32  # of every kind: 16 halves, 8 tf32, 32 bytes


@dataclass(frozen=True, slots=True)
class Shape:
    """A decoded instruction descriptor."""

    m: int
    n: int
    d_kind: str
    a_kind: str
    b_kind: str
    negate: bool
    mn_a: bool
    mn_b: bool
    saturate: bool


@lru_cache(maxsize=256)
def decode_idesc(raw: int, kind: str, group: int, ws: bool) -> Shape:
    """The 32-bit instruction descriptor. Raises Fault for what the manual does not allow."""
    m, n = (raw >> 24 & 31) << 4, (raw >> 17 & 63) << 3
    formats = _A_FORMATS[kind]
    a, b, d = raw >> 7 & 7, raw >> 10 & 7, raw >> 4 & 3
    if a not in formats or b not in formats:
        raise Fault("undefined", f"instruction descriptor {raw:#x}: operand formats {a}, {b} for kind::{kind}")
    if raw & 7:
        raise Fault("undefined", f"instruction descriptor {raw:#x}: sparsity bits are set")
    scaled = kind in tcgen05_scaled.KINDS
    allowed = {1: (128,) if scaled else (32, 64, 128) if ws else (64, 128), 2: (128, 256)}[group]
    step = 16 if group == 2 else 8
    if kind == "i8":
        step = 32 if group == 2 else 16 if n > 32 else 8
    good = n in (64, 128, 256) if ws else step <= n <= 256 and n % step == 0
    if m not in allowed or not good:
        raise Fault("undefined", f"instruction descriptor {raw:#x}: M {m}, N {n} with cta_group::{group}")
    if raw >> 16 & 1 and ELEMENT_BYTES[formats[b]] == 1 and n % (16 * group):  # "Transpose and Negate operations", 8bit transpose B
        raise Fault("undefined", f"instruction descriptor {raw:#x}: N {n} of an 8-bit transposed B with cta_group::{group}")
    d_kind = "f32" if scaled else {0: "f16", 1: "f32", 2: "s32"}.get(d)
    if d_kind is None:
        raise Fault("undefined", f"instruction descriptor {raw:#x}: type {d} of D")
    return Shape(
        m,
        n,
        d_kind,
        formats[a],
        formats[b],
        bool((raw >> 13 ^ raw >> 14) & 1),
        bool(raw >> 15 & 1),
        bool(raw >> 16 & 1),
        bool(raw >> 3 & 1),
    )


@dataclass(slots=True)
class Mma:
    """One instruction, ready to execute."""

    shape: Shape
    group: int
    ws: bool
    d: int
    a: int
    a_tmem: bool
    b: int
    accumulate: bool
    scale: int
    disabled: int
    scales: tcgen05_scaled.Scales | None = None


@machine("tcgen05.mma", section="Tensor Core 5th Generation Instructions: tcgen05.mma")
def mma(ins: Instruction) -> Handler:
    kind = next(m.split("::")[1] for m in ins.mods if m.startswith("kind::"))
    ws = "ws" in ins.mods
    for mod, what in (("sp", "sparse tcgen05.mma (.sp)"), ("ashift", "convolution tcgen05.mma (.ashift)")):
        if mod in ins.mods:
            raise UnsupportedInstruction(f"{what} is not executed", ins.line, ins.text)
    if kind not in _A_FORMATS:
        raise UnsupportedInstruction(f"tcgen05.mma of kind::{kind} is not executed", ins.line, ins.text)
    group = 2 if ins.has("cta_group::2") else 1
    d, a, b, idesc = ins.operands[:4]
    assert isinstance(d, Memory)
    a_tmem = isinstance(a, Memory)
    read_d, read_i = scalar(d.base), scalar(idesc)
    read_a = scalar(a.base) if isinstance(a, Memory) else scalar(a)
    a_offset = a.offset if isinstance(a, Memory) else 0
    read_b = scalar(b)
    given = tcgen05_scaled.ScaleOperands(ins, kind, *ins.operands[4:6]) if kind in tcgen05_scaled.KINDS else None
    masks, enable, scale = _tail(ins, ins.operands[6 if given is not None else 4 :], ws)
    read_masks = [scalar(o) for o in masks]
    read_enable = scalar(enable)

    def run(w: Warp, m: Array | None) -> None:
        w.current = ins.index
        lanes = lane_list(m)
        if len(lanes) != 1:
            text = f"{len(lanes)} lanes issue tcgen05.mma; one thread should"
            w.cta.machine.report(Fault("unelected", text), w, ins.index)
        for lane in lanes:
            shape = decode_idesc(read_i(w, lane), kind, group, ws)
            disabled = sum(r(w, lane) << 32 * i for i, r in enumerate(read_masks)) if read_masks else 0
            work = Mma(
                shape, group, ws, read_d(w, lane) + d.offset, read_a(w, lane) + a_offset, a_tmem, read_b(w, lane),
                bool(read_enable(w, lane)), scale, disabled, given.read(w, lane, read_i) if given is not None else None,
            )  # fmt: skip
            submit(w, ins, lane, work)

    return run


def submit(w: Warp, ins: Instruction, lane: int, work: Mma) -> None:
    """Start it. Steps along K on one accumulator are carried out together, but for a judge that wants to see each."""
    engine = w.cta.machine
    key = order_key(w)
    if engine.observed or work.scale or work.scales is not None:
        op = AsyncOp("tcgen05.mma", w, 1 << lane, ins.index, [lambda: execute(w, [work])], order=key, via="tcgen05-order")
        engine.engine.submit(op)
        return
    if not work.accumulate:
        w.mma_chain += 1
    batch = (w, w.mma_chain, work.shape, work.group, work.ws, work.d, work.a_tmem, work.disabled)
    queue = engine.engine.queues.get(key)
    if queue and engine.engine.unseen and queue[-1].batch == batch:  # a further step of an operation that has not begun
        queue[-1].work.append(work)
        return
    works = [work]
    op = AsyncOp("tcgen05.mma", w, 1 << lane, ins.index, [lambda: execute(w, works)], order=key, via="tcgen05-order")
    op.batch, op.work = batch, works
    op.together = lambda ops: execute(w, [each for op in ops for each in op.work])
    engine.engine.submit(op)


def _tail(ins: Instruction, rest: tuple[Operand, ...], ws: bool) -> tuple[tuple[Operand, ...], Operand, int]:
    """Disable-lane masks, enable-input-d, scale-input-d."""
    masks: tuple[Operand, ...] = ()
    if rest and isinstance(rest[0], Vector):
        masks, rest = items(rest[0]), rest[1:]
    if not rest:
        raise UnsupportedInstruction("tcgen05.mma without enable-input-d", ins.line, ins.text)
    enable, rest = rest[0], rest[1:]
    scale = 0
    if rest and not ws:
        if not isinstance(rest[0], Imm):
            raise UnsupportedInstruction("scale-input-d that is no constant", ins.line, ins.text)
        scale = rest[0].value
    elif rest:
        raise UnsupportedInstruction("a zero-column mask is not executed", ins.line, ins.text)
    return masks, enable, scale


def order_key(w: Warp) -> tuple[str, int]:
    """Asynchronous tcgen05 operations of a CTA pair take effect in issue order (PTX manual, "pipelined tcgen05 instructions")."""
    return "tcgen05", w.cta.linear - (w.cta.rank & 1)


def pair(w: Warp, group: int) -> list[CTA]:
    """The CTAs that take part: the issuer, or the even and odd CTA of its pair."""
    if group == 1:
        return [w.cta]
    even = w.cta.rank & ~1
    return [w.cta.peer(even), w.cta.peer(even + 1)]


def shared_operand(w: Warp, cta: CTA, raws: tuple[int, ...], rows: int, kind: str, mn: bool) -> Array:
    """The tiles of consecutive steps along K as f4, kept until shared memory changes."""
    engine = cta.machine
    key = (raws, rows, kind, mn)
    kept = cta.tiles.get(key)
    if kept is not None and cta.shared.same_since(*kept[0]) and not engine.observed:
        found: Array = kept[1]
        return found
    element = ELEMENT_BYTES[kind]
    where = layout(tuple(tcgen05_descriptor(raw) for raw in raws), rows, _K_BYTES, element, mn)
    check_read(w, cta, where, "tcgen05.mma")
    words = gather(cta.shared.data, where, rows, element, mn)
    if engine.observed:
        engine.access(w, w.current, Space.SHARED, cta.linear, AccessKind.READ, Proxy.ASYNC, where.index * 16, 16)
    if kind in ("e2m1", "e2m3", "e3m2"):
        if mn:
            raise Fault("undefined", "packed 4- and 6-bit operands must be K-major")
        words = unpack(words, 4 if kind == "e2m1" else 6)
    if len(cta.tiles) > KEPT_TILES:
        cta.tiles.clear()
    value = to_float(words, kind)
    cta.tiles[key] = ((cta.shared.version, where.low, where.high), value)
    return value


def unpack(raw: Array, bits: int) -> Array:
    """16-byte chunks of 16 packed elements (behind which padding lies) -> one byte each."""
    chunks = np.ascontiguousarray(raw).reshape(-1, 16)[:, : 2 * bits]
    stream = np.unpackbits(chunks, axis=1, bitorder="little").reshape(-1, 16, bits)
    return np.packbits(stream, axis=2, bitorder="little").reshape(raw.shape)


def tmem_operand(w: Warp, cta: CTA, addresses: list[int], rows: int, kind: str, twice: bool) -> Array:
    """A in TMEM, 8 columns for each step; row i in lane i, or for 64 rows 16 lanes of each warp.

    twice: 64 rows in lanes 0 .. 63 and again in 64 .. 127, whose data paths make the other half of the columns of D (layout B).
    """
    half = half_of(addresses[0], 128 if twice else rows, "A")
    columns = [address & 0xFFFF for address in addresses]
    if columns == list(range(columns[0], columns[0] + 8 * len(columns), 8)):
        return to_float(_tmem_columns(w, cta, columns[0], 8 * len(columns), rows, half, twice).view(f"u{ELEMENT_BYTES[kind]}"), kind)
    return joined([to_float(_tmem_columns(w, cta, c, 8, rows, half, twice).view(f"u{ELEMENT_BYTES[kind]}"), kind) for c in columns])


def _tmem_columns(w: Warp, cta: CTA, first: int, count: int, rows: int, half: int, twice: bool) -> Array:
    memory = cta.tmem
    memory.require_allocated(first, count)
    if twice:
        data = _tmem_columns(w, cta, first, count, 128, 0, False)
        if (data[:64] != data[64:]).any():
            text = (
                f"A in TMEM columns {first} .. {first + count - 1} with M = 128 and cta_group::2 is not the same in lanes 0-63 and 64-127"
            )
            raise Fault("undefined", text)
        return data[:64]
    lanes: Any = slice(None) if rows == 128 else row_lanes(rows) + half
    observe(w, cta, first, count, AccessKind.READ, rows, half)
    if memory.track and not memory.written[first : first + count, lanes].all():
        report(
            w, Fault("uninitialised", f"tcgen05.mma reads A from TMEM columns {first} .. {first + count - 1}, which were not all written")
        )
    return np.ascontiguousarray(memory.data[first : first + count, lanes].T)


def report(w: Warp, fault: Fault) -> None:
    op = w.cta.machine.acting
    w.cta.machine.report(fault, w, op.index if op is not None else w.current)


@lru_cache(maxsize=8)
def row_lanes(rows: int) -> Array:
    """Lane of each row: layouts A and D, and for 64 rows layout F (rows 16 w .. 16 w + 15 in the first lanes of warp w)."""
    return np.arange(rows) if rows == 128 else np.arange(rows) // 16 * 32 + np.arange(rows) % 16


def half_of(address: int, rows: int, operand: str) -> int:
    """First lane of an operand in TMEM: 0, or 16 where 64 rows take the upper half of each warp's lanes (layout F)."""
    lane = address >> 16
    if lane != 0 and (lane, rows) != (16, 64):
        raise Fault("undefined", f"the lane of the address of {operand} is {lane}: it must be 0, or 16 with 64 rows")
    return lane


def observe(w: Warp, cta: CTA, column: int, columns: int, kind: AccessKind, rows: int = 128, half: int = 0) -> None:
    engine = cta.machine
    if engine.observed:
        first = np.arange(column, column + columns, dtype=np.int64)[:, None] * 128 + half
        starts = first + (np.arange(0, 128, 32)[None, :] if rows == 64 else np.zeros((1, 1), np.int64))
        engine.access(w, w.current, Space.TMEM, cta.linear, kind, Proxy.TENSOR, starts * 4, 64 if rows == 64 else 512)


def execute(w: Warp, works: list[Mma]) -> None:
    """D = A B (+ D * 2^-scale) in the TMEM of the CTAs of the group, for consecutive steps along K."""
    work = works[0]
    shape, ctas = work.shape, pair(w, work.group)
    rows = shape.m // work.group
    b_steps, a_steps = tuple(step.b for step in works), tuple(step.a for step in works)
    pieces = [shared_operand(w, cta, b_steps, shape.n // work.group, shape.b_kind, shape.mn_b) for cta in ctas]
    b = np.concatenate(pieces) if len(pieces) > 1 else pieces[0]
    for i, cta in enumerate(ctas):
        if work.a_tmem:
            a = tmem_operand(w, cta, list(a_steps), rows, shape.a_kind, twice=work.group == 2 and rows == 64)
        else:
            a = shared_operand(w, cta, a_steps, rows, shape.a_kind, shape.mn_a)
        # Transposed, as TMEM is kept: (N, rows).
        product = b @ a.T if work.scales is None else scaled_product(w, cta, work.scales, a, b)
        if shape.negate:
            product = -product
        w.cta.machine.statistics.mma_flops += 2 * rows * shape.n * a.shape[1]
        write(w, cta, work, product, rows, work.disabled >> 128 * i & ((1 << 128) - 1))


def scaled_product(w: Warp, cta: CTA, scales: tcgen05_scaled.Scales, a: Array, b: Array) -> Array:
    """(N, rows): both operands times their factors, which every CTA has for its rows of A and for all columns of B; rounded once."""
    sides = []
    for values, address, byte in ((a, scales.a, scales.a_byte), (b, scales.b, scales.b_byte)):
        first, count = address & 0xFFFF, tcgen05_scaled.columns_of(len(values))
        memory = cta.tmem
        memory.require_allocated(first, count)
        observe(w, cta, first, count, AccessKind.READ)
        if memory.track and not memory.written[first : first + count].all():
            report(w, Fault("uninitialised", f"scale factors in TMEM columns {first} .. {first + count - 1} were not all written"))
        sides.append(tcgen05_scaled.scaled(values, tcgen05_scaled.factors(cta, address, len(values), byte, scales)))
    left, right = sides
    with np.errstate(all="ignore"):
        return (right @ left.T).astype(np.float32)


def joined(tiles: list[Array]) -> Array:
    """Tiles side by side along K."""
    return np.concatenate(tiles, axis=1) if len(tiles) > 1 else tiles[0]


def write(w: Warp, cta: CTA, work: Mma, product: Array, rows: int, disabled: int) -> None:
    """Place (N, rows) by the data path layout: A, D one row per lane; B, E, G columns folded over the lanes; F 16 rows per warp."""
    shape = work.shape
    folded = work.ws or (work.group == 2 and rows == 64)
    fold = 128 // rows if folded else 1
    columns = shape.n // fold
    first = work.d & 0xFFFF
    memory = cta.tmem
    memory.require_allocated(first, columns)
    half = half_of(work.d, 128 if folded else rows, "D")
    if fold > 1:
        product = np.concatenate([product[p * columns : (p + 1) * columns] for p in range(fold)], axis=1)
    lanes: Any = slice(None) if rows == 128 or folded else row_lanes(rows) + half
    if disabled:
        on = np.array([not disabled >> i & 1 for i in range(128)])
        chosen = np.arange(128)[lanes]
        product, lanes = product[:, on[chosen]], chosen[on[chosen]]
    if work.accumulate and memory.track and not memory.written[first : first + columns, lanes].all():
        report(
            w,
            Fault("uninitialised", f"tcgen05.mma accumulates on TMEM columns {first} .. {first + columns - 1}, which were not all written"),
        )
    if work.accumulate:
        observe(w, cta, first, columns, AccessKind.READ, rows if not folded else 128, half)
    observe(w, cta, first, columns, AccessKind.WRITE, rows if not folded else 128, half)
    cells = memory.data[first : first + columns]
    cells[:, lanes] = accumulate(work, cells[:, lanes], product)
    memory.written[first : first + columns, lanes] = True


def accumulate(work: Mma, old: Array, new: Array) -> Array:
    """New cells from the old ones and the product, as bits."""
    kind = work.shape.d_kind
    if kind == "f32":
        if not work.accumulate:
            return np.ascontiguousarray(new).view(np.uint32)
        base = np.ascontiguousarray(old).view(np.float32)
        return (new + (base * np.float32(2.0**-work.scale) if work.scale else base)).view(np.uint32)
    if kind == "s32":
        total = new.astype(np.int64) + (np.ascontiguousarray(old).view(np.int32) if work.accumulate else 0)
        return (np.clip(total, -(2**31), 2**31 - 1) if work.shape.saturate else total).astype(np.int32).view(np.uint32)
    if work.accumulate:
        base = (old & np.uint32(0xFFFF)).astype(np.uint16).view(np.float16).astype(np.float32)
        new = new + base * np.float32(2.0**-work.scale)
    return np.ascontiguousarray(new).astype(np.float16).view(np.uint16).astype(np.uint32)
