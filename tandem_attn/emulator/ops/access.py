"""How handlers of machine instructions read and write operands: closures made once per instruction."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tandem_attn.emulator.errors import UnsupportedInstruction
from tandem_attn.emulator.machine.team import Team
from tandem_attn.emulator.machine.warp import Warp
from tandem_attn.emulator.memory.addresses import SHARED_WINDOW, WINDOW_MASK
from tandem_attn.emulator.memory.faults import Fault
from tandem_attn.emulator.ptx.nodes import Discard, Imm, Instruction, Memory, Negated, Operand, Reg, Vector

Array = NDArray[Any]
Read = Callable[[Warp | Team], Array]


def reader(operand: Operand, dtype: Any) -> Read:
    """The 32 lanes of an operand as a type: registers are reinterpreted, or converted by value where the widths differ."""
    dtype = np.dtype(dtype)
    if isinstance(operand, Imm):
        raw = operand.value & ((1 << 8 * dtype.itemsize) - 1) if dtype.kind != "b" else operand.value != 0
        constant = np.full(32, raw, f"u{dtype.itemsize}" if dtype.kind != "b" else bool)
        constant = constant.view(dtype)
        return lambda _: constant
    if isinstance(operand, Negated):
        inner = reader(operand.operand, dtype)
        return lambda w: ~inner(w)
    if not isinstance(operand, Reg):
        raise TypeError(f"{operand} cannot be read as lanes")
    cls, slot = operand.cls, operand.slot
    if cls == "p":
        return lambda w: w.P[slot]
    width = {"h": 2, "r": 4, "d": 8}[cls]
    name = {"h": "Hu", "r": "Ru", "d": "Du"}[cls]
    if width == dtype.itemsize:
        typed = f"{name[0]}{dtype.kind}"
        return lambda w: getattr(w, typed)[slot]
    return lambda w: getattr(w, name)[slot].astype(f"u{dtype.itemsize}").view(dtype)


def items(operand: Operand) -> tuple[Operand, ...]:
    return operand.items if isinstance(operand, Vector) else (operand,)


Scalar = Callable[[Warp, int], int]


def scalar(operand: Operand, signed: bool = False) -> Scalar:
    """The value of one lane of a register or a constant, as an int."""
    if isinstance(operand, Imm):
        value = operand.value
        return lambda _, __: value
    if isinstance(operand, Negated):
        inner = scalar(operand.operand)
        return lambda w, lane: int(not inner(w, lane))
    if not isinstance(operand, Reg):
        raise TypeError(f"{operand} cannot be read")
    slot, cls = operand.slot, operand.cls
    if cls == "p":
        return lambda w, lane: int(w.P.item(slot, lane))
    if cls == "r":
        return (lambda w, lane: w.Ri.item(slot, lane)) if signed else (lambda w, lane: w.Ru.item(slot, lane))
    if cls == "d":
        return (lambda w, lane: w.Di.item(slot, lane)) if signed else (lambda w, lane: w.Du.item(slot, lane))
    return (lambda w, lane: w.Hi.item(slot, lane)) if signed else (lambda w, lane: w.Hu.item(slot, lane))


def uniform(operand: Operand, dtype: Any = np.int64) -> Callable[[Warp, Array | None], int]:
    """The value of the first active lane, for operands that are the same in all."""
    del dtype
    read = scalar(operand)
    return lambda w, m: read(w, 0 if m is None else m.tobytes().index(1))


def agreed(operand: Operand) -> Callable[[Team], int | None]:
    """The value of a register or a constant in the first lane of every warp of a team; None where the warps differ."""
    if isinstance(operand, Imm):
        value = operand.value
        return lambda _: value
    if not isinstance(operand, Reg):
        raise TypeError(f"{operand} cannot be read")
    slot, name = operand.slot, {"p": "P", "h": "Hu", "r": "Ru", "d": "Du"}[operand.cls]

    def read(t: Team) -> int | None:
        values: list[int] = getattr(t, name)[slot, :, 0].tolist()
        return values[0] if values.count(values[0]) == len(values) else None

    return read


def shared_scalar(ins: Instruction, operand: Operand) -> Scalar:
    """The shared address (rank and offset) of one lane."""
    if not isinstance(operand, Memory):
        raise UnsupportedInstruction("a shared memory operand is expected", ins.line, ins.text)
    offset, read = operand.offset, scalar(operand.base)
    strict = not any(m.startswith("shared") for m in ins.mods) and getattr(operand.base, "cls", "r") == "d"

    def address(w: Warp, lane: int) -> int:
        raw = read(w, lane)
        if strict and raw < SHARED_WINDOW:
            raise Fault("out-of-bounds", f"generic address {raw:#x} is not in shared memory")
        return (raw & 0xFFFFFFFF) + offset

    return address


def shared_address(ins: Instruction, operand: Operand) -> Callable[[Warp], Array]:
    """Shared addresses (rank and offset) of a memory operand as int64; generic ones must point into shared memory."""
    if not isinstance(operand, Memory):
        raise UnsupportedInstruction("a shared memory operand is expected", ins.line, ins.text)
    offset = operand.offset
    wide = isinstance(operand.base, Reg) and operand.base.cls == "d"
    read = reader(operand.base, np.uint64 if wide else np.uint32)
    strict = not any(m.startswith("shared") for m in ins.mods)

    def addresses(w: Warp) -> Array:
        raw = read(w)
        if wide:
            if strict and (raw < np.uint64(SHARED_WINDOW)).all():
                raise Fault("out-of-bounds", f"generic address {int(raw[0]):#x} is not in shared memory")
            raw = raw & np.uint64(WINDOW_MASK) & np.uint64(0xFFFFFFFF)
        return raw.astype(np.int64) + offset

    return addresses


def global_address(operand: Operand) -> Callable[[Warp], Array]:
    """Global addresses of a memory operand as int64."""
    assert isinstance(operand, Memory)
    offset = operand.offset
    read = reader(operand.base, np.uint64)
    return lambda w: read(w).astype(np.int64) + offset


_ALL = np.arange(32)
_ONE = [np.array([i]) for i in range(32)]


def lanes_of(mask: Array | None) -> Array:
    """Indices of the active lanes."""
    if mask is None:
        return _ALL
    raw = mask.tobytes()
    return _ONE[raw.index(1)] if raw.count(1) == 1 else np.flatnonzero(mask)


def lane_list(mask: Array | None) -> Sequence[int]:
    """The active lanes as ints."""
    if mask is None:
        return range(32)
    raw = mask.tobytes()
    return (raw.index(1),) if raw.count(1) == 1 else [i for i, on in enumerate(raw) if on]


def writer(operand: Operand) -> Callable[[Warp, Array, Array | None], None]:
    """Write 32 lanes (any unsigned type not wider than the register)."""
    if isinstance(operand, Discard):
        return lambda *_: None
    if not isinstance(operand, Reg):
        raise TypeError(f"{operand} cannot be written")
    reg = operand
    dtype = {"p": np.bool_, "h": np.uint16, "r": np.uint32, "d": np.uint64, "q": np.uint64}[reg.cls]
    return lambda w, value, m: w.put(reg, value if value.dtype == dtype else value.astype(dtype), m)


def one_copy(lanes: Array, *operands: Array) -> tuple[Array, bool]:
    """The lanes that must act: one where all have the same operands (un-elected code issues identical copies), else all.

    The second item says that copies were dropped.
    """
    if len(lanes) > 1 and all((o[lanes] == o[lanes[0]]).all() for o in operands):
        return _ONE[lanes[0]], True
    return lanes, False


def compact(slots: list[int]) -> Any:
    """Register slots as an index: a slice where they are consecutive (as compilers number them), else the list."""
    return slice(slots[0], slots[-1] + 1) if slots and slots == list(range(slots[0], slots[0] + len(slots))) else slots
