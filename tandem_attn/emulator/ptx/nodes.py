"""Records of parsed PTX. PTX manual, chapters "Syntax" and "State Spaces, Types, and Variables"."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import TypeAlias

from tandem_attn.emulator.report import Source

# Bytes of each fundamental type; a predicate has no size in memory.
TYPE_BYTES = {
    **{f"{kind}{bits}": bits // 8 for kind in "bus" for bits in (8, 16, 32, 64)},
    **{"f16": 2, "f16x2": 4, "f32": 4, "f64": 8, "bf16": 2, "bf16x2": 4, "f32x2": 8, "b128": 16, "tf32": 4, "pred": 0},
    **{"u16x2": 4, "s16x2": 4, "e4m3x2": 2, "e5m2x2": 2},
}

# Register file class of a register type: predicate, 16, 32, 64 and 128 bits (8-bit registers live in 16-bit slots).
REGISTER_CLASS = {"pred": "p", "b8": "h", "u8": "h", "s8": "h", "f16": "h", "bf16": "h", "b128": "q"}
REGISTER_CLASS |= {f"{kind}16": "h" for kind in "bus"} | {f"{kind}32": "r" for kind in "busf"} | {f"{kind}64": "d" for kind in "busf"}
REGISTER_CLASS |= {"f16x2": "r", "bf16x2": "r", "f32x2": "d"}
CLASS_BYTES = {"h": 2, "r": 4, "d": 8, "q": 16, "p": 0}


@dataclass(frozen=True, slots=True)
class Reg:
    """A register; `slot` is its place in the register file of its class."""

    name: str
    type: str
    cls: str
    slot: int


@dataclass(frozen=True, slots=True)
class Imm:
    """An integer constant, or the bits of a floating-point one (`real` is 32 or 64 then, else 0)."""

    value: int
    real: int = 0

    def as_float(self) -> float:
        if self.real == 64:
            return float(struct.unpack("<d", struct.pack("<Q", self.value))[0])
        if self.real == 32:
            return float(struct.unpack("<f", struct.pack("<I", self.value))[0])
        return float(self.value)


@dataclass(frozen=True, slots=True)
class Special:
    """A special register, `%tid.x`."""

    name: str


@dataclass(frozen=True, slots=True)
class Symbol:
    """A name that is no register: a variable, a parameter, a function, a label."""

    name: str


@dataclass(frozen=True, slots=True)
class Vector:
    """`{a, b, ...}`."""

    items: tuple[Operand, ...]


@dataclass(frozen=True, slots=True)
class Memory:
    """`[base + offset, more...]`: `more` holds what follows, as TMA's coordinate vector."""

    base: Operand
    offset: int
    more: tuple[Operand, ...] = ()


@dataclass(frozen=True, slots=True)
class Pair:
    """`d|p`: two destinations."""

    first: Operand
    second: Operand


@dataclass(frozen=True, slots=True)
class Negated:
    """`!p` or `-r` as an operand."""

    operand: Operand


@dataclass(frozen=True, slots=True)
class Discard:
    """`_`."""


@dataclass(frozen=True, slots=True)
class Group:
    """`(a, b)`: arguments or results of a call."""

    items: tuple[Operand, ...]


Operand: TypeAlias = Reg | Imm | Special | Symbol | Vector | Memory | Pair | Negated | Discard | Group


@dataclass(slots=True)
class Instruction:
    """One instruction. `opcode` is the whole dotted name, `mods` its parts; `index` its place in the module."""

    opcode: str
    mods: tuple[str, ...]
    operands: tuple[Operand, ...]
    predicate: Reg | None
    negated: bool
    line: int
    text: str
    source: Source | None
    index: int = -1

    @property
    def name(self) -> str:
        return self.mods[0]

    def has(self, *mods: str) -> bool:
        """Whether every one of `mods` is among the modifiers."""
        return all(mod in self.mods for mod in mods)


@dataclass(slots=True)
class Variable:
    """A variable of any state space. `data` is its initial value; `links` are (offset, symbol, addend)."""

    name: str
    space: str
    align: int
    size: int
    type: str = "b8"
    data: bytes | None = None
    links: list[tuple[int, str, int]] = field(default_factory=list)
    offset: int = 0  # in the parameter block, or in static shared memory
    pointee: str = ""  # `.ptr .global`: the space that a pointer parameter points to


@dataclass(slots=True)
class Function:
    """An `.entry` or `.func`. Instructions are module.code[start:end]."""

    name: str
    entry: bool
    params: list[Variable]
    results: list[Variable]
    start: int = 0
    end: int = 0
    line: int = 0
    directives: dict[str, tuple[int, ...]] = field(default_factory=dict)
    locals: dict[str, Variable] = field(default_factory=dict)
    labels: dict[str, int] = field(default_factory=dict)  # unique label name -> instruction index
    tables: dict[str, tuple[str, ...]] = field(default_factory=dict)  # .branchtargets
    registers: dict[str, Reg] = field(default_factory=dict)  # parameters and results that are registers


@dataclass(slots=True)
class Module:
    """A parsed PTX text."""

    version: tuple[int, int]
    target: str
    functions: dict[str, Function]
    variables: dict[str, Variable]
    code: list[Instruction]
    slots: dict[str, int]  # registers per class
    externals: set[str]
    text: str = ""

    def entry(self, name: str | None = None) -> Function:
        """The entry of that name, or the only one. Raises KeyError with what there is."""
        entries = {f.name: f for f in self.functions.values() if f.entry}
        if name is None and len(entries) == 1:
            return next(iter(entries.values()))
        if name not in entries:
            raise KeyError(f"entry {name!r} is not among {sorted(entries)}")
        return entries[name]
