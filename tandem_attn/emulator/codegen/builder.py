"""What a pure instruction's semantic is written in: a few dozen primitives over 32-lane values.

A value has one of the types below; there is no implicit conversion. A backend implements the primitives (`Builder`), semantics in
`ops/` use them and the compositions at the end of this file, so each instruction is described once for every backend.

Types: b (predicate); u1 u2 u4 u8, i1 i2 i4 i8 (unsigned, signed, of 1 to 8 bytes); f2 f4 f8 (IEEE half, single, double).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from tandem_attn.emulator.errors import UnsupportedInstruction
from tandem_attn.emulator.ptx.nodes import TYPE_BYTES, Discard, Imm, Instruction, Negated, Operand, Reg


class Val:
    """A value of a backend: `x` is its own (a variable's name, an LLVM value), `t` the type.

    `alias`: it is the register file's own storage, which a later write may change. `flushed`: it holds no subnormal numbers.
    `parts`: its low and high half, where they are known as values of their own. `noisy`: an f4 that arithmetic has made, whose NaNs may
    have other bits than the chip's; `Builder.quiet` sees to it where bits show (registers, memory, integer operations).
    """

    __slots__ = ("alias", "flushed", "noisy", "parts", "t", "x")

    def __init__(self, x: Any, t: str, alias: bool = False, flushed: bool = False) -> None:
        self.x, self.t, self.alias, self.flushed = x, t, alias, flushed
        self.noisy = False
        self.parts: tuple[Val, Val] | None = None


PTX_TYPE = {
    **{f"{kind}{bits}": f"{code}{bits // 8}" for kind, code in (("b", "u"), ("u", "u"), ("s", "i")) for bits in (8, 16, 32, 64)},
    **{"f16": "f2", "f32": "f4", "f64": "f8", "bf16": "u2", "bf16x2": "u4", "f16x2": "u4", "f32x2": "u8", "pred": "b", "tf32": "u4"},
    **{"u16x2": "u4", "s16x2": "u4"},
}


TINY = {"f4": 2.0**-126, "f8": 2.0**-1022}  # the smallest normal numbers


def size_of(t: str) -> int:
    """Bytes of a value type."""
    return int(t[1:])


def width_of(operand: Operand) -> int:
    """Bytes of a register operand (8-bit registers count as 2, their slot)."""
    assert isinstance(operand, Reg)
    return TYPE_BYTES[operand.type] if operand.type not in ("b8", "u8", "s8") else 2


class Builder(ABC):
    """The primitives. `ins` is the instruction being built, for error messages."""

    ins: Instruction

    def unsupported(self, why: str = "this form is not executed") -> UnsupportedInstruction:
        return UnsupportedInstruction(why, self.ins.line, self.ins.text)

    # ---- operands
    @abstractmethod
    def const(self, t: str, value: int | float) -> Val:
        """A constant; for f4 and f8 a Python float, else an integer (wrapped to the type)."""

    @abstractmethod
    def read_reg(self, reg: Reg, t: str) -> Val: ...

    @abstractmethod
    def write_reg(self, reg: Reg, value: Val) -> None: ...

    @abstractmethod
    def read_symbol(self, name: str, t: str) -> Val: ...

    @abstractmethod
    def lanes(self) -> Val:
        """0 .. 31 as u4."""

    @abstractmethod
    def active(self) -> Val:
        """The lanes that execute the instruction, as a predicate."""

    # ---- arithmetic; integers wrap
    @abstractmethod
    def binary(self, op: str, a: Val, b: Val) -> Val:
        """add sub mul and or xor shl shr (amount < width; shr is arithmetic for signed) min max div rem (non-zero divisor; C rounding).

        Float min and max are fmin and fmax (the number where one is NaN, -0 < +0 left open).
        """

    @abstractmethod
    def compare(self, op: str, a: Val, b: Val) -> Val:
        """eq ne lt le gt ge; on floats ordered, except ne, which is true where unordered."""

    @abstractmethod
    def unary(self, op: str, a: Val) -> Val:
        """not neg abs sqrt floor ceil trunc rint popc clz brev exp2 log2 sin cos tanh."""

    @abstractmethod
    def select(self, c: Val, a: Val, b: Val) -> Val: ...

    @abstractmethod
    def cast(self, a: Val, t: str) -> Val:
        """Value conversion: integers wrap or extend, to float rounds to nearest even, float to integer truncates (in range)."""

    @abstractmethod
    def bits(self, a: Val, t: str) -> Val:
        """Reinterpret, same width."""

    @abstractmethod
    def fma(self, a: Val, b: Val, c: Val) -> Val:
        """f4 or f8, rounded once."""

    @abstractmethod
    def mulhi(self, a: Val, b: Val) -> Val:
        """The upper half of the product."""

    @abstractmethod
    def lookup(self, table: str, index: Val) -> Val:
        """An element of one of `unit_tables.TABLES` as f8; index is u4 and in range."""

    def shorter(self, name: str, composition: Callable[..., Val], *values: Val) -> Val:
        """composition(builder, *values), of the first value's type. A backend may have a function of its own with the same bits."""
        del name
        return composition(self, *values)

    # ---- lanes
    @abstractmethod
    def permute(self, a: Val, index: Val) -> Val:
        """Lane i gets a[index[i]]; index is u4 below 32."""

    @abstractmethod
    def ballot(self, p: Val) -> Val:
        """u4 with bit i set where p holds in lane i, the same in all lanes."""

    # ---- pieces
    @abstractmethod
    def split(self, a: Val) -> tuple[Val, Val]:
        """u8 -> (low, high) u4, or u4 -> (low, high) u2."""

    @abstractmethod
    def join(self, low: Val, high: Val) -> Val: ...

    # ---- memory
    @abstractmethod
    def load(self, space: str, address: Val, offset: int, t: str, count: int) -> list[Val]: ...

    @abstractmethod
    def store(self, space: str, address: Val, offset: int, values: list[Val]) -> None: ...

    # ---- compositions
    def read(self, operand: Operand, t: str) -> Val:
        """An operand as type `t`: registers are reinterpreted (truncated or zero-extended where widths differ), constants converted."""
        if isinstance(operand, Reg):
            if t == "b" and operand.cls == "r":  # a special register that is a predicate
                return self.compare("ne", self.read_reg(operand, "u4"), self.const("u4", 0))
            return self.read_reg(operand, t)
        if isinstance(operand, Imm):
            return self.constant(operand, t)
        if isinstance(operand, Negated):
            inner = self.read(operand.operand, t)
            return self.unary("not" if t == "b" else "neg", inner)
        name = getattr(operand, "name", None)
        if name is None:
            raise self.unsupported(f"operand {operand} in this place")
        return self.read_symbol(name, t)

    def constant(self, imm: Imm, t: str) -> Val:
        if t == "b":
            return self.const("b", int(imm.value != 0))
        if t[0] == "f" and imm.real:
            return self.const(t, imm.as_float()) if size_of(t) * 8 != imm.real else self.raw(t, imm.value)
        if imm.real == 64 and size_of(t) == 4:
            return self.bits(self.const("f4", imm.as_float()), t)
        return self.raw(t, imm.value)

    def raw(self, t: str, value: int) -> Val:
        """A constant given by its bits."""
        return self.bits(self.const(f"u{t[1:]}", value), t) if t[0] == "f" else self.const(t, value)

    def write(self, operand: Operand, value: Val) -> None:
        if isinstance(operand, Discard):
            return
        if not isinstance(operand, Reg):
            raise self.unsupported(f"{operand} as a destination")
        self.write_reg(operand, value)

    def add(self, a: Val, b: Val) -> Val:
        return self.binary("add", a, b)

    def sub(self, a: Val, b: Val) -> Val:
        return self.binary("sub", a, b)

    def mul(self, a: Val, b: Val) -> Val:
        return self.binary("mul", a, b)

    def and_(self, a: Val, b: Val) -> Val:
        return self.binary("and", a, b)

    def or_(self, a: Val, b: Val) -> Val:
        return self.binary("or", a, b)

    def not_(self, a: Val) -> Val:
        return self.unary("not", a)

    def is_nan(self, a: Val) -> Val:
        return self.compare("ne", a, a)

    def extremum(self, op: str, a: Val, b: Val) -> Val:
        """min or max of floats: the number where one is NaN, the canonical NaN where both are, -0 below +0."""
        unsigned = f"u{a.t[1:]}"
        out = self.binary(op, a, b)
        # Equal operands differ at most in the sign of zero: and-ing or or-ing the bits gives +0 for max, -0 for min.
        merged = self.binary("and" if op == "max" else "or", self.bits(a, unsigned), self.bits(b, unsigned))
        out = self.select(self.compare("eq", a, b), self.bits(merged, a.t), out)
        return self.select(self.is_nan(out), self.raw(a.t, 0x7FFFFFFF if a.t == "f4" else 0x7FFFFFFFFFFFFFFF), out)

    def arithmetic(self, v: Val) -> Val:
        """Mark the result of a floating-point operation."""
        v.noisy = v.t == "f4"
        return v

    def quiet(self, v: Val) -> Val:
        """Every NaN that f32 arithmetic makes is 0x7fffffff (seen on an H200; f64 keeps the operand's payload, as CPUs do)."""
        if not v.noisy:
            return v
        return self.select(self.is_nan(v), self.raw(v.t, 0x7FFFFFFF), self.trusted(v))

    def trusted(self, v: Val) -> Val:
        """The value with its NaNs' bits left as they are."""
        if not v.noisy:
            return v
        out = Val(v.x, v.t, v.alias, v.flushed)
        out.parts = v.parts
        return out

    def flush(self, v: Val) -> Val:
        """Subnormal numbers become zero of their sign (`.ftz`)."""
        if v.flushed:
            return v
        return self.zero_where(self.compare("lt", self.unary("abs", v), self.const(v.t, TINY[v.t])), v)

    def zero_where(self, small: Val, v: Val) -> Val:
        """v with zero of its sign where `small` holds, which is to be so for every subnormal number."""
        unsigned = f"u{v.t[1:]}"
        raw = self.bits(self.trusted(v), unsigned)
        out = self.bits(self.select(small, self.and_(raw, self.const(unsigned, 1 << 8 * size_of(v.t) - 1)), raw), v.t)
        out.flushed = True
        return self.arithmetic(out)

    def like(self, value: int | float, v: Val) -> Val:
        """A constant of the type of `v`."""
        return self.const(v.t, value)

    def clamp(self, v: Val, low: int | float, high: int | float) -> Val:
        return self.binary("min", self.binary("max", v, self.like(low, v)), self.like(high, v))
