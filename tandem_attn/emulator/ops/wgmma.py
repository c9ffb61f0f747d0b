"""Warpgroup matrix multiply. PTX manual, "Asynchronous Warpgroup Level Matrix Multiply-Accumulate Instructions".

The four warps of a warpgroup issue an instruction each; the work is done once per group, when it completes. Until then the accumulators
and A registers are in flight: touching them is reported.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from tandem_attn.emulator.errors import UnsupportedInstruction
from tandem_attn.emulator.events import AccessKind, Fence, Proxy, Space
from tandem_attn.emulator.machine.async_ops import AsyncOp
from tandem_attn.emulator.machine.cta import CTA
from tandem_attn.emulator.machine.in_flight import InFlight, bits
from tandem_attn.emulator.machine.team import Team
from tandem_attn.emulator.machine.warp import Blocked, Warp
from tandem_attn.emulator.memory.faults import Fault
from tandem_attn.emulator.memory.operands import ELEMENT_BYTES, Descriptor, Layout, gather, layout, to_float, wgmma_descriptor
from tandem_attn.emulator.ops import tensor_core
from tandem_attn.emulator.ops.access import Array, agreed, compact, reader, uniform
from tandem_attn.emulator.ops.groups import add_to_group, commit, groups_of, wait
from tandem_attn.emulator.ops.registry import Handler, machine, together
from tandem_attn.emulator.ptx.nodes import Imm, Instruction, Reg, Vector

SECTION = "Asynchronous Warpgroup Level Matrix Instructions: "
_K_BYTES = 32
GROUP = 4  # warps of a warpgroup
DTYPE = {"f32": np.float32, "f16": np.float16, "s32": np.int32}
KEPT_TILES = 512  # converted operands that a CTA keeps
_SHAPE = re.compile(r"m64n(\d+)k(\d+)")


@dataclass(frozen=True, slots=True)
class Form:
    """What is fixed by the instruction's text."""

    n: int
    d_kind: str  # f32, f16, s32
    a_kind: str
    b_kind: str
    d: tuple[int, ...]  # register slots
    a: tuple[int, ...]  # register slots, empty when A is in shared memory
    negate_a: bool
    negate_b: bool
    mn_a: bool
    mn_b: bool
    saturate: bool
    index: int


@dataclass(slots=True, eq=False)
class Work:
    """One instruction of one warp, waiting for its warpgroup."""

    form: Form
    warp: Warp
    a: int  # descriptor
    b: int
    accumulate: bool
    op: AsyncOp | None = None


def parse(ins: Instruction) -> Form:
    shape = next((_SHAPE.fullmatch(m) for m in ins.mods if m.startswith("m64")), None)
    kinds = [m for m in ins.mods if m in ("f32", "f16", "bf16", "tf32", "e4m3", "e5m2", "s32", "s8", "u8", "b1")]
    if "sp" in ins.mods:
        raise UnsupportedInstruction("sparse wgmma (wgmma.mma_async.sp) is not executed", ins.line, ins.text)
    if shape is None or len(kinds) != 3:
        raise UnsupportedInstruction("this form of wgmma is not executed", ins.line, ins.text)
    d, a = ins.operands[0], ins.operands[1]
    assert isinstance(d, Vector)
    n = int(shape[1])
    d_slots = tuple(r.slot for r in d.items if isinstance(r, Reg))
    if len(d_slots) != (n // 4 if kinds[0] == "f16" else n // 2):
        raise UnsupportedInstruction(f"{len(d_slots)} accumulator registers for n{n}", ins.line, ins.text)
    a_slots = tuple(r.slot for r in a.items if isinstance(r, Reg)) if isinstance(a, Vector) else ()
    constants = [o.value for o in ins.operands[4:] if isinstance(o, Imm)]
    integer = kinds[0] == "s32"
    signs = [1, 1] if integer else constants[:2]
    trans = [] if integer else constants[2:]
    mn_a = bool(trans[0]) if trans and not a_slots else False
    mn_b = bool(trans[-1]) if trans else False
    return Form(
        n, kinds[0], kinds[1], kinds[2], d_slots, a_slots, signs[0] < 0, signs[1] < 0, mn_a, mn_b, "satfinite" in ins.mods, ins.index
    )


@machine("wgmma.mma_async", section=SECTION + "wgmma.mma_async")
def mma_async(ins: Instruction) -> Handler:
    form = parse(ins)
    written, read = bits(form.d), bits(form.a)
    a = uniform(ins.operands[1], np.uint64) if not form.a else None
    b = uniform(ins.operands[2], np.uint64)
    scale_d = reader(ins.operands[3], np.bool_)
    one_a, one_b, one_scale = agreed(ins.operands[1]) if not form.a else None, agreed(ins.operands[2]), agreed(ins.operands[3])

    def run(w: Warp, m: Array | None) -> None:
        if m is not None:
            raise Fault("undefined", "wgmma.mma_async by a part of a warp")
        if w.index % 4 == 0 and len(w.cta.warps) < w.index + 4:
            raise Fault("undefined", "wgmma.mma_async outside a complete warpgroup")
        work = Work(form, w, a(w, m) if a is not None else 0, b(w, m), bool(scale_d(w)[0]))
        op = AsyncOp("wgmma", w, 0xFFFFFFFF, ins.index, [], order=("wgmma", w.cta.linear, w.index // 4), via="wgmma-group")
        op.stages = [_partner]
        work.op = op
        add_to_group(w, "wgmma", (0,), op)
        w.flight.add(InFlight(op, ins, written, read, chain=ins.opcode))
        w.wgmma_open.append(work)

    def team(t: Team) -> bool:
        """One operation stands for the parts of all four warps."""
        w = t.first
        if t.count != GROUP:
            return False
        op = AsyncOp("wgmma", w, 0xFFFFFFFF, ins.index, [_partner], order=("wgmma", w.cta.linear, w.index // GROUP), via="wgmma-group")
        left, right, enable = one_a(t) if one_a is not None else 0, one_b(t), one_scale(t)
        if left is None or right is None or enable is None:
            return False
        work, item = Work(form, w, left, right, bool(enable), op), InFlight(op, ins, written, read, chain=ins.opcode)
        for each in t.warps:
            groups_of(each, "wgmma", 0).open.append(op)
            each.flight.add(item)
            each.wgmma_open.append(work)
        return True

    return together(run, team)


@machine("wgmma.fence", section=SECTION + "wgmma.fence")
def fence(ins: Instruction) -> Handler:
    def run(w: Warp, m: Array | None) -> None:
        if w.cta.machine.observed:
            w.cta.machine.emit(Fence(w.agent, w.cta.machine.site(ins.index), "wgmma.fence", w.lane_bits(m)))

    return together(run, lambda _: True)


@machine("wgmma.commit_group", section=SECTION + "wgmma.commit_group")
def commit_group(ins: Instruction) -> Handler:
    """The operations start to run here: nothing can tell before."""

    def run(w: Warp, m: Array | None) -> None:
        del m
        commit(w, "wgmma", np.zeros(1, np.int64), ins.index)
        opened, w.wgmma_open = w.wgmma_open, []
        w.wgmma_ready += opened
        mates = w.cta.warps[w.index // GROUP * GROUP : w.index // GROUP * GROUP + GROUP]
        count = min(len(mate.wgmma_ready) for mate in mates)
        start([checked([mate.wgmma_ready[i] for mate in mates]) for i in range(count)], w.cta.machine.observed)
        for mate in mates:
            del mate.wgmma_ready[:count]

    def team(t: Team) -> bool:
        opened = t.first.wgmma_open
        if any(w.wgmma_ready or w.wgmma_open != opened for w in t.warps):
            return False
        for w in t.warps:
            commit(w, "wgmma", np.zeros(1, np.int64), ins.index)
            w.wgmma_open = []
        start([[work] * GROUP for work in opened], False)
        return True

    return together(run, team)


@machine("wgmma.wait_group", section=SECTION + "wgmma.wait_group")
def wait_group(ins: Instruction) -> Handler:
    keep = uniform(ins.operands[0])
    lane = np.zeros(1, np.int64)

    def run(w: Warp, m: Array | None) -> Blocked | None:
        why = wait(w, "wgmma", lane, keep(w, m), False, ins.index)
        if why is None:
            w.flight.release(lambda item: item.op.done)
        return why

    def team(t: Team) -> bool:
        """The groups of all warps hold the same operations, and those that are waited for are done."""
        own = [groups_of(w, "wgmma", 0) for w in t.warps]
        committed = own[0].committed
        count = len(committed) - keep(t.first, None)
        if any(each.committed != committed for each in own) or any(not op.done for group in committed[: max(0, count)] for op in group):
            return False
        for w, groups in zip(t.warps, own, strict=True):
            if count > 0:
                groups.done += count
                del groups.committed[:count]
            w.flight.release(lambda item: item.op.done)
        return True

    return together(run, team)


# ---- execution
def _partner() -> None:
    """The part of a warp is done with the part of the last warp of its warpgroup."""


def checked(parts: list[Work]) -> list[Work]:
    """The parts of one instruction, which must agree. Raises Fault where they do not."""
    first = parts[0]
    if all(p is first for p in parts):
        return parts
    if any(p.form.index != first.form.index for p in parts):
        raise Fault("undefined", "the warps of a warpgroup execute different wgmma instructions")
    if len({(p.b, p.accumulate) for p in parts}) != 1 or (not first.form.a and len({p.a for p in parts}) != 1):
        raise Fault("undefined", "the warps of a warpgroup pass different descriptors")
    return parts


def start(instructions: list[list[Work]], observed: bool) -> None:
    """Start instructions in order, those that continue each other along K as one."""
    chain: list[list[Work]] = []
    for parts in instructions:
        if chain and not (continues(chain[-1][0], parts[0]) and not observed):
            launch(chain)
            chain = []
        chain.append(parts)
    if chain:
        launch(chain)


def continues(first: Work, second: Work) -> bool:
    """Whether the second instruction is a further step along K on the same accumulators."""
    a, b = first.form, second.form
    same = bool(a.a) == bool(b.a) and (a.n, a.d, a.d_kind, a.a_kind, a.b_kind, a.mn_a, a.mn_b) == (
        b.n,
        b.d,
        b.d_kind,
        b.a_kind,
        b.b_kind,
        b.mn_a,
        b.mn_b,
    )
    return same and second.accumulate and (a.negate_a, a.negate_b) == (b.negate_a, b.negate_b)


def launch(chain: list[list[Work]]) -> None:
    """Start instructions that all four warps have committed: at once for the warpgroup, and for steps along K on one accumulator."""
    ops = list(dict.fromkeys(p.op for parts in chain for p in parts if p.op is not None))
    last = ops[-1]
    last.partners = tuple(ops[:-1])
    last.stages = [lambda: execute(chain)]
    last.warp.cta.machine.engine.submit(last)


def tile(w: Warp, chain: list[list[Work]], steps: tuple[Descriptor, ...], rows: int, kind: str, mn: bool) -> tensor_core.Operand:
    """An operand in shared memory prepared, kept until shared memory changes; the judge is told of every read."""
    cta = w.cta
    engine = cta.machine
    key = (steps, rows, kind, mn)
    kept = cta.tiles.get(key)
    if kept is not None and cta.shared.same_since(*kept[0]) and not engine.observed:
        known: tensor_core.Operand = kept[1]
        return known
    element = ELEMENT_BYTES[kind]
    where = layout(steps, rows, _K_BYTES, element, mn)
    check_read(w, cta, where, "wgmma")
    value = tensor_core.operand(to_float(gather(cta.shared.data, where, rows, element, mn), kind), kind)
    if len(cta.tiles) > KEPT_TILES:
        cta.tiles.clear()
    cta.tiles[key] = ((cta.shared.version, where.low, where.high), value)
    for part in chain[0] if engine.observed else ():  # an observed chain is one instruction
        previous, engine.acting = engine.acting, part.op
        engine.access(part.warp, part.form.index, Space.SHARED, cta.linear, AccessKind.READ, Proxy.ASYNC, where.index * 16, 16)
        engine.acting = previous
    return value


def check_read(w: Warp, cta: CTA, where: Layout, what: str) -> None:
    """Bounds and initialised-ness of the chunks that a matrix operand is read from."""
    shared = cta.shared
    if where.low < shared.base or where.high > shared.end:
        span = f"{where.low:#x} .. {where.high:#x}, outside {shared.base:#x} .. {shared.end:#x}"
        raise Fault("out-of-bounds", f"{what} operand spans shared offsets {span}")
    if not cta.machine.check_uninitialised or shared.written[where.low : where.high].all():
        return
    known = shared.written[where.index * 16]
    if not known.all():
        op = cta.machine.acting
        fault = Fault("uninitialised", f"{what} reads shared offset {int(where.index[~known][0]) * 16:#x}, which was never written")
        cta.machine.report(fault, w, op.index if op is not None else w.current)


def registers_a(chain: list[list[Work]]) -> tensor_core.Operand:
    """A from registers: each warp holds 16 rows of 32 bytes in four registers (rows 0-7 and 8-15, bytes 0-15 and 16-31)."""
    kind = chain[0][0].form.a_kind
    slots = compact([slot for parts in chain for slot in parts[0].form.a])
    words = np.ascontiguousarray(registers(chain[0])[slots]).view(np.complex128)  # four lanes: 16 bytes of one row
    raw = np.ascontiguousarray(words.reshape(len(chain), 2, 2, GROUP, 8).transpose(3, 2, 4, 0, 1))  # warp, row half, row, step, k half
    return tensor_core.operand(to_float(raw.reshape(64, -1).view(f"u{ELEMENT_BYTES[kind]}"), kind), kind)


def registers(parts: list[Work]) -> Array:
    """The 32-bit registers of a warpgroup: [slot, warp, lane]."""
    warp = parts[0].warp
    return warp.cta.files[warp.index // GROUP].r


def execute(chain: list[list[Work]]) -> None:
    """D = A B (+ D) for a warpgroup, one step along K after the other."""
    first = chain[0]
    form, w = first[0].form, first[0].warp
    if form.a:
        left = registers_a(chain)
    else:
        left = tile(w, chain, tuple(wgmma_descriptor(parts[0].a) for parts in chain), 64, form.a_kind, form.mn_a)
    right = tile(w, chain, tuple(wgmma_descriptor(parts[0].b) for parts in chain), form.n, form.b_kind, form.mn_b)
    if form.negate_a != form.negate_b:
        left = left.negated()
    slots = compact(list(form.d))
    total = accumulators(first, slots) if first[0].accumulate else np.zeros((64, form.n), DTYPE[form.d_kind])
    k = left.values.shape[1] // len(chain)
    total = product(form, left, right, total, k)
    w.cta.machine.statistics.mma_flops += 2 * 64 * form.n * k * len(chain)
    # (warp, row half, row, column group, thread in quad, pair) -> register (group, row half, pair) x warp x lane (row, thread)
    order = (3, 1, 5, 0, 2, 4) if form.d_kind != "f16" else (3, 1, 0, 2, 4, 5)  # a register of f16 holds the pair
    fragments = np.ascontiguousarray(total.reshape(4, 2, 8, form.n // 8, 4, 2).transpose(order)).view(np.uint32)
    registers(first)[slots] = fragments.reshape(-1, GROUP, 32)


def accumulators(parts: list[Work], slots: Any) -> Array:
    """The four warps' registers of D as a (64, n) matrix."""
    form = parts[0].form
    raw = np.ascontiguousarray(registers(parts)[slots]).view(DTYPE[form.d_kind])
    if form.d_kind == "f16":
        return raw.reshape(form.n // 8, 2, GROUP, 8, 4, 2).transpose(2, 1, 3, 0, 4, 5).reshape(64, form.n)
    return raw.reshape(form.n // 8, 2, 2, GROUP, 8, 4).transpose(3, 1, 4, 0, 5, 2).reshape(64, form.n)


def product(form: Form, left: tensor_core.Operand, right: tensor_core.Operand, total: Array, k: int) -> Array:
    """Products of k places each added to the accumulators, one after the other."""
    if form.d_kind == "s32":
        for start in range(0, left.values.shape[1], k):
            a, b = (x.values[:, start : start + k].astype(np.int64) for x in (left, right))
            wide = a @ b.T + total
            total = (np.clip(wide, -(2**31), 2**31 - 1) if form.saturate else wide).astype(np.int32)
        return total
    if form.a_kind in ("e4m3", "e5m2"):
        return tensor_core.accumulate(left, right, total, k, tensor_core.FP8_FRACTION, tensor_core.FP8_FRACTION)
    return tensor_core.accumulate(left, right, total, k)
