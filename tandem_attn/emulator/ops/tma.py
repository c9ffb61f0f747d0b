"""TMA tensor copies. PTX manual, "cp.async.bulk.tensor, cp.reduce.async.bulk.tensor, cp.async.bulk.prefetch.tensor"."""

from __future__ import annotations

from typing import Any

import numpy as np

from tandem_attn.emulator.errors import UnsupportedInstruction
from tandem_attn.emulator.events import AccessKind, Proxy, Space
from tandem_attn.emulator.launch import tensormap
from tandem_attn.emulator.machine.async_ops import AsyncOp
from tandem_attn.emulator.machine.cta import CTA
from tandem_attn.emulator.machine.warp import Warp
from tandem_attn.emulator.memory.addresses import OFFSET_MASK, PARAM_WINDOW, RANK_SHIFT
from tandem_attn.emulator.memory.faults import Fault
from tandem_attn.emulator.memory.im2col import Columns
from tandem_attn.emulator.memory.reductions import combine
from tandem_attn.emulator.memory.tiles import Box, placed_bytes, swizzle_of, swizzled
from tandem_attn.emulator.ops import mbarrier
from tandem_attn.emulator.ops.access import Array, items, lanes_of, one_copy, reader, scalar, shared_address, shared_scalar
from tandem_attn.emulator.ops.groups import add_to_group
from tandem_attn.emulator.ops.registry import Handler, machine
from tandem_attn.emulator.ptx.nodes import Instruction, Memory

REDUCTIONS = ("add", "min", "max", "inc", "dec", "and", "or", "xor")


def read_tensormap(w: Warp, address: int) -> tensormap.TensorMap:
    """The descriptor at a generic address: a kernel parameter, or global memory. Decoded once per content."""
    if address >= PARAM_WINDOW:
        at = address - PARAM_WINDOW
        raw = w.cta.launch.parameters[at : at + tensormap.SIZE]
    else:
        raw = w.cta.machine.memory.bytes_at(address, tensormap.SIZE).tobytes()
        if w.cta.machine.observed:
            w.cta.machine.access(w, w.current, Space.GLOBAL, -1, AccessKind.READ, Proxy.TENSORMAP, [address], tensormap.SIZE)
    cache = w.cta.machine.tensormaps
    found = cache.get(raw)
    if found is None:
        found = cache[raw] = tensormap.decode(raw)
    return found


class _Tile:
    """Reads the operands of one tensor instruction: descriptor address and coordinates."""

    def __init__(self, ins: Instruction, operand: Memory) -> None:
        self.ins = ins
        self.map_address = reader(operand.base, np.uint64)
        self.offset = operand.offset
        self.map_of, self.place = scalar(operand.base), [scalar(c, signed=True) for c in items(operand.more[0])]
        self.coordinates = [reader(c, np.int32) for c in items(operand.more[0])]
        self.gather = ins.has("tile::gather4") or ins.has("tile::scatter4")
        self.im2col = any(m.startswith("im2col") for m in ins.mods)
        if any(m.startswith("im2col::w") for m in ins.mods):
            raise UnsupportedInstruction("TMA in mode im2col::w is not executed", ins.line, ins.text)

    def at(self, w: Warp, lane: int) -> list[int]:
        """The coordinates of one lane."""
        return [(read(w, lane) + 2**31) % 2**32 - 2**31 for read in self.place]

    def boxes(self, w: Warp, tensor: tensormap.TensorMap, at: list[int], offsets: list[int]) -> list[Box | Columns]:
        """One box; for gather4 and scatter4 four rows, whose boxes are one row high; in im2col mode pixels beside `offsets`."""
        memory = w.cta.machine.memory
        if self.im2col != bool(tensor.corners):
            raise Fault("undefined", "the descriptor's mode (im2col or tiled) is not the instruction's")
        if self.im2col:
            return [Columns(memory, tensor, at, offsets or [0] * (tensor.rank - 2))]
        if not self.gather:
            return [Box(memory, tensor, at)]
        if tensor.rank != 2 or tensor.box[1] != 1:
            raise Fault("undefined", "gather4 and scatter4 need a tensor of rank 2 and a box of one row")
        return [Box(memory, tensor, [at[0], row]) for row in at[1:5]]


def check_destination(tensor: tensormap.TensorMap, offset: int) -> None:
    """Shared addresses of tensor copies: 128-byte aligned (PTX manual, cp.async.bulk.tensor)."""
    del tensor
    if offset % 128:
        raise Fault("misaligned", f"shared offset {offset:#x} of a tensor copy is not a multiple of 128")


def check_coordinates(tensor: tensormap.TensorMap, at: list[int], writes: bool) -> None:
    """What an H200 answers with an illegal instruction.

    The innermost coordinate must be a multiple of 16 bytes, and of a write no coordinate may be negative (CUDA programming guide, on
    multi-dimensional copies by TMA).
    """
    if at[0] * tensor.size % 16:
        raise Fault("misaligned", f"the innermost coordinate {at[0]} of a tensor copy is no multiple of 16 bytes ({tensor.element})")
    if writes and min(at) < 0:
        raise Fault("out-of-bounds", f"coordinate {min(at)} of a tensor copy to global memory is negative")


def load(ins: Instruction) -> Handler:
    """global -> shared: the bytes arrive, then complete-tx on the mbarrier of each destination CTA."""
    target, source, signal = ins.operands[:3]
    assert isinstance(source, Memory)
    tile = _Tile(ins, source)
    to, bar = shared_address(ins, target), shared_address(ins, signal)
    to_one, bar_one = shared_scalar(ins, target), shared_scalar(ins, signal)
    rest = list(ins.operands[3:])
    beside = [scalar(o) for o in items(rest.pop(0))] if tile.im2col else []
    multicast = ins.has("multicast::cluster")
    mask_of = scalar(rest[0]) if multicast else None
    pair = ins.has("cta_group::2")

    def run(w: Warp, m: Array | None) -> None:
        w.current = ins.index
        lanes = lanes_of(m)
        if len(lanes) > 1:
            lanes, _ = one_copy(lanes, tile.map_address(w), to(w), bar(w), *[c(w) for c in tile.coordinates])
        for lane in lanes.tolist():
            address, target_at, signal_at = tile.map_of(w, lane) + tile.offset, to_one(w, lane), bar_one(w, lane)
            at = tile.at(w, lane)
            offsets = [o(w, lane) & 0xFFFF for o in beside]
            tensor = read_tensormap(w, address)
            check_destination(tensor, target_at & OFFSET_MASK)
            check_coordinates(tensor, at, writes=False)
            chosen = mask_of(w, lane) & 0xFFFF if mask_of is not None else 0
            ranks = [r for r in range(16) if chosen >> r & 1] if multicast else [target_at >> RANK_SHIFT]

            def stage(
                tensor: Any = tensor, at: list[int] = at, ranks: list[int] = ranks, where: tuple[int, int] = (target_at, signal_at),
                offsets: list[int] = offsets,
            ) -> None:  # fmt: skip
                boxes = tile.boxes(w, tensor, at, offsets)
                for box in boxes:
                    observe_global(w, box, AccessKind.READ)
                raw = np.concatenate([box.load() for box in boxes]) if len(boxes) > 1 else boxes[0].load()
                arrived = sum(box.counted for box in boxes)
                for rank in ranks:
                    cta = w.cta.peer(rank)
                    write_shared(w, cta, where[0] & OFFSET_MASK, raw, boxes[0].row, tensor)
                    signalled = where[1] >> RANK_SHIFT if not multicast else rank & ~1 | where[1] >> RANK_SHIFT & 1 if pair else rank
                    mbarrier.complete_tx(w, w.cta.peer(signalled), where[1] & OFFSET_MASK, arrived)
                w.cta.machine.statistics.tma_bytes += raw.size * len(ranks)

            w.cta.machine.engine.submit(AsyncOp("tma-load", w, w.lane_bits(m), ins.index, [stage]))

    return run


def observe_global(w: Warp, box: Box | Columns, kind: AccessKind) -> None:
    if w.cta.machine.observed and not box.empty:
        starts, size = box.rows()
        w.cta.machine.access(w, w.current, Space.GLOBAL, -1, kind, Proxy.ASYNC, starts, size)


def write_shared(w: Warp, cta: CTA, offset: int, raw: Array, row: int, tensor: tensormap.TensorMap) -> None:
    span, atom = swizzle_of(tensor)
    size = placed_bytes(raw.size, row, span)
    cta.shared.check(np.array([offset, offset + size - 1]), 1, 1)
    if cta.machine.observed:
        cta.machine.access(w, w.current, Space.SHARED, cta.linear, AccessKind.WRITE, Proxy.ASYNC, [offset], size)
    if not span or raw.size % 16:
        cta.shared.data[offset : offset + raw.size] = raw
    else:
        cta.shared.data.view(np.complex128)[swizzled(offset, raw.size, row, span, atom)] = raw.view(np.complex128)
    cta.shared.written[offset : offset + size] = True
    cta.shared.changed(offset, offset + size)


def read_shared(w: Warp, cta: CTA, offset: int, size: int, row: int, tensor: tensormap.TensorMap) -> Array:
    span, atom = swizzle_of(tensor)
    placed = placed_bytes(size, row, span)
    cta.shared.check(np.array([offset, offset + placed - 1]), 1, 1)
    machine_ = cta.machine
    if machine_.observed:
        machine_.access(w, w.current, Space.SHARED, cta.linear, AccessKind.READ, Proxy.ASYNC, [offset], placed)
    if placed == size and machine_.check_uninitialised and not cta.shared.written[offset : offset + size].all():
        bad = offset + int((~cta.shared.written[offset : offset + size]).argmax())
        op = machine_.acting
        fault = Fault("uninitialised", f"a tensor copy reads shared offset {bad:#x}, which was never written")
        machine_.report(fault, w, op.index if op is not None else w.current)
    if not span or size % 16:
        return cta.shared.data[offset : offset + size].copy()
    return cta.shared.data.view(np.complex128)[swizzled(offset, size, row, span, atom)].view(np.uint8)


def store(ins: Instruction) -> Handler:
    """shared -> global, plain or reducing; completion through a bulk async-group."""
    target, source = ins.operands[:2]
    assert isinstance(target, Memory)
    tile = _Tile(ins, target)
    come = shared_address(ins, source)
    reduction = next((m for m in ins.mods if m in REDUCTIONS), None) if ins.mods[1] == "reduce" else None

    def run(w: Warp, m: Array | None) -> None:
        w.current = ins.index
        lanes = lanes_of(m)
        maps, sources = tile.map_address(w), come(w)
        where = [c(w) for c in tile.coordinates]
        acting, dropped = one_copy(lanes, maps, sources, *where)
        if dropped and reduction is not None:
            text = f"{len(lanes)} lanes issue the same reduction; one elected lane should"
            w.cta.machine.report(Fault("unelected", text), w, ins.index)
        for lane in acting:
            address, source_at = int(maps[lane]) + tile.offset, int(sources[lane])
            at = [int(c[lane]) for c in where]
            tensor = read_tensormap(w, address)
            check_destination(tensor, source_at & OFFSET_MASK)
            check_coordinates(tensor, at, writes=True)
            held: list[tuple[Box | Columns, Array]] = []

            def read(tensor: Any = tensor, at: list[int] = at, source_at: int = source_at, held: list[Any] = held) -> None:
                offset = source_at & OFFSET_MASK
                boxes = tile.boxes(w, tensor, at, [])
                raw = read_shared(w, w.cta.peer(source_at >> RANK_SHIFT), offset, sum(box.size for box in boxes), boxes[0].row, tensor)
                start = 0
                for box in boxes:
                    held.append((box, raw[start : start + box.size]))
                    start += box.size

            def write(held: list[tuple[Box | Columns, Array]] = held, tensor: Any = tensor) -> None:
                for box, raw in held:
                    observe_global(w, box, AccessKind.ATOMIC if reduction else AccessKind.WRITE)
                    if reduction is None:
                        box.store(raw)
                    elif isinstance(box, Columns):
                        raise Fault("undefined", "a reduction in im2col mode is not modelled")
                    elif not box.empty:
                        view, new = box.view(), box.narrow(raw)
                        view[...] = combine(reduction, tensor.element, np.ascontiguousarray(view), np.ascontiguousarray(new))
                    w.cta.machine.statistics.tma_bytes += box.size

            kind = "tma-reduce" if reduction else "tma-store"
            op = AsyncOp(kind, w, w.lane_bits(m), ins.index, [read, write], via="bulk-group")
            add_to_group(w, "bulk", lanes if dropped else [lane], op)
            w.cta.machine.engine.submit(op)

    return run


@machine("cp.async.bulk.tensor", "cp.reduce.async.bulk.tensor", section="Data Movement: cp.async.bulk.tensor, cp.reduce.async.bulk.tensor")
def tensor_copy(ins: Instruction) -> Handler:
    spaces = [m.split("::")[0] for m in ins.mods if m.split("::")[0] in ("shared", "global")]
    if spaces[:2] == ["shared", "global"]:
        return load(ins)
    if spaces[:2] == ["global", "shared"]:
        return store(ins)
    raise UnsupportedInstruction("this direction of a tensor copy is not executed", ins.line, ins.text)


@machine("cp.async.bulk.prefetch.tensor", section="Data Movement: cp.async.bulk.prefetch.tensor")
def prefetch(ins: Instruction) -> Handler:
    """Reads the descriptor (so that a wrong one is found) and moves nothing."""
    source = ins.operands[0]
    assert isinstance(source, Memory)
    tile = _Tile(ins, source)

    def run(w: Warp, m: Array | None) -> None:
        w.current = ins.index
        maps = tile.map_address(w)
        for lane in lanes_of(m)[:1]:
            read_tensormap(w, int(maps[lane]) + tile.offset)

    return run
