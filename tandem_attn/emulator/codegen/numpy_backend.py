"""Segments as generated Python over 32-lane NumPy arrays.

One function per segment and per case (all lanes active, under a mask, all lanes of several warps). Registers are read from the warp's file
once, kept in local variables, and those that are live behind the segment are written back at its end, or before a machine instruction that
names them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tandem_attn.emulator.codegen import numpy_runtime
from tandem_attn.emulator.codegen.builder import Builder, Val, size_of, width_of
from tandem_attn.emulator.codegen.unit_tables import TABLES
from tandem_attn.emulator.ops.registry import Handler, lookup
from tandem_attn.emulator.ptx.nodes import Instruction, Reg
from tandem_attn.emulator.ptx.operands import registers
from tandem_attn.emulator.ptx.program import Program

DTYPE = {"b": "bool", **{f"{k}{n}": f"{w}{n * 8}" for k, w in (("u", "uint"), ("i", "int")) for n in (1, 2, 4, 8)}}
DTYPE |= {"f2": "float16", "f4": "float32", "f8": "float64"}
_VIEW = {"h": {"u": "Hu", "i": "Hi", "f": "Hf"}, "r": {"u": "Ru", "i": "Ri", "f": "Rf"}, "d": {"u": "Du", "i": "Di", "f": "Df"}}
_SPACE = {"np": np, "rt": numpy_runtime} | {name: np.dtype(name) for name in DTYPE.values()}
_INFIX = {"add": "+", "sub": "-", "mul": "*", "and": "&", "or": "|", "xor": "^", "shl": "<<", "shr": ">>"}
_COMPARE = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_UNARY = {
    "sqrt": "np.sqrt",
    "floor": "np.floor",
    "ceil": "np.ceil",
    "trunc": "np.trunc",
    "rint": "np.rint",
    "abs": "np.abs",
}
_UNARY |= {"popc": "rt.popc", "clz": "rt.clz", "brev": "rt.brev", "exp2": "rt.exp2"}


class Joined(Val):
    """Two halves side by side; the joining line is written only when the whole is asked for."""

    def __init__(self, builder: NumpyBuilder, low: Val, high: Val, t: str) -> None:
        self.t, self.alias, self.flushed, self.noisy, self.parts = t, False, False, False, (low, high)
        self.builder = builder
        self.whole: str | None = None

    @property
    def x(self) -> str:
        if self.whole is None:
            assert self.parts is not None
            low, high = self.parts
            unsigned = f"u{2 * size_of(low.t)}"
            made = self.builder.emit(f"rt.join{8 * size_of(low.t)}({low.x},{high.x})", unsigned, low, high)
            self.whole = self.builder.bits(made, self.t).x
        return str(self.whole)


class NumpyBuilder(Builder):
    """Writes the lines of one function."""

    def __init__(self, resolve: Callable[[str], Reg], masked: bool, team: bool = False) -> None:
        self.resolve = resolve  # symbol or special register -> the register that holds it
        self.masked, self.team = masked, team
        self.lines: list[str] = []
        self.names: dict[str, Any] = {}
        self.local: dict[tuple[str, int], Val] = {}
        self.views: dict[tuple[str, int, str], Val] = {}
        self.dirty: dict[tuple[str, int], Val] = {}
        self.guard: str | None = None  # the mask of side effects: None is all lanes
        self.predicate: str | None = None  # the guard predicate of the instruction, for partial writes
        self.count = 0

    def known(self, array: Any, t: str) -> Val:
        """A constant value."""
        array = np.ascontiguousarray(np.broadcast_to(array, (32,)), DTYPE[t])
        array.setflags(write=False)
        name = f"K{t}_{array.tobytes().hex() if (array != array[0]).any() else array[:1].tobytes().hex()}"
        self.names[name] = array
        return Val(name, t, flushed=t[0] == "f")

    def emit(self, expression: str, t: str, *operands: Val, alias: bool = False) -> Val:
        """A line that computes an expression of `operands`; done at once when they are all constants."""
        if operands and all(v.x in self.names for v in operands):
            with np.errstate(all="ignore"):
                return self.known(eval(expression, _SPACE, self.names), t)
        self.count += 1
        name = f"t{self.count}"
        self.lines.append(f"{name}={expression}")
        return Val(name, t, alias)

    # ---- operands
    def const(self, t: str, value: int | float) -> Val:
        if t[0] in "ui":
            value = int(value) & ((1 << 8 * size_of(t)) - 1)
            return self.known(np.full(32, value, f"uint{8 * size_of(t)}").view(DTYPE[t]), t)
        return self.known(np.full(32, value, DTYPE[t]), t)

    def read_reg(self, reg: Reg, t: str) -> Val:
        key = (reg.cls, reg.slot)
        if reg.cls == "p":
            if key not in self.local:
                self.local[key] = self.emit(f"P[{reg.slot}]", "b", alias=True)
            return self.local[key]
        found = self.views.get((key[0], key[1], t))
        if found is not None:
            return found
        held = self.local.get(key)
        width = width_of(reg)
        if held is None:
            exact = t if size_of(t) == width else f"u{width}"
            held = self.views.get((key[0], key[1], exact)) or self.emit(f"{_VIEW[reg.cls][exact[0]]}[{reg.slot}]", exact, alias=True)
            self.views[key[0], key[1], exact] = held
        out = held if held.t == t else self.reinterpret(held, t)
        self.views[key[0], key[1], t] = out
        return out

    def reinterpret(self, held: Val, t: str) -> Val:
        if size_of(held.t) == size_of(t):
            return self.bits(held, t)
        unsigned = self.bits(held, f"u{held.t[1:]}")
        return self.bits(self.cast(unsigned, f"u{t[1:]}"), t)

    def write_reg(self, reg: Reg, value: Val) -> None:
        key = (reg.cls, reg.slot)
        if reg.cls != "p":
            width = width_of(reg)
            if size_of(value.t) != width:
                value = self.cast(value, f"{value.t[0]}{width}") if value.t[0] in "ui" else self.reinterpret(value, f"u{width}")
        if self.predicate is not None:
            value = self.merge(reg, value)
        elif value.alias:
            noisy, value = value.noisy, self.emit(f"{value.x}.copy()", value.t)
            value.noisy = noisy
        for view in [v for v in self.views if v[:2] == key]:
            del self.views[view]
        self.local[key] = self.dirty[key] = value
        if reg.cls != "p":
            self.views[key[0], key[1], value.t] = value

    def merge(self, reg: Reg, value: Val) -> Val:
        old = self.read_reg(reg, value.t)
        out = self.emit(f"np.where({self.predicate},{value.x},{old.x})", value.t)
        out.noisy = value.noisy or old.noisy
        return out

    def read_symbol(self, name: str, t: str) -> Val:
        return self.read_reg(self.resolve(name), t)

    def lanes(self) -> Val:
        return self.known(numpy_runtime.LANES, "u4")

    def active(self) -> Val:
        return Val(self.guard, "b") if self.guard else self.const("b", 1)

    # ---- arithmetic
    def binary(self, op: str, a: Val, b: Val) -> Val:
        floating = a.t[0] == "f"
        if op in _INFIX:
            text = f"{a.x}{_INFIX[op]}{b.x}"
        elif op in ("min", "max"):
            text = f"np.{'f' + op if floating else op + 'imum'}({a.x},{b.x})"
        elif floating:
            text = f"{a.x}/{b.x}"
        else:
            text = f"rt.{'divide' if op == 'div' else 'remainder'}({a.x},{b.x})"
        return self.arithmetic(self.emit(text, a.t, a, b))

    def compare(self, op: str, a: Val, b: Val) -> Val:
        return self.emit(f"{a.x}{_COMPARE[op]}{b.x}", "b", a, b)

    def unary(self, op: str, a: Val) -> Val:
        if op in ("not", "neg"):
            return self.arithmetic(self.emit(f"{'~' if op == 'not' else '-'}{a.x}", a.t, a))
        if op in ("log2", "sin", "cos", "tanh"):
            return self.arithmetic(self.emit(f"rt.wide(np.{op},{a.x})", a.t))
        t = "u4" if op in ("popc", "clz") else a.t
        return self.arithmetic(self.emit(f"{_UNARY[op]}({a.x})", t, a))

    def select(self, c: Val, a: Val, b: Val) -> Val:
        if c.x in self.names and (self.names[c.x] == self.names[c.x][0]).all():
            return a if self.names[c.x][0] else b
        out = self.emit(f"np.where({c.x},{a.x},{b.x})", a.t, c, a, b)
        out.flushed, out.noisy = a.flushed and b.flushed, a.noisy or b.noisy
        return out

    def cast(self, a: Val, t: str) -> Val:
        return a if a.t == t else self.arithmetic(self.emit(f"{a.x}.astype({DTYPE[t]})", t, a))

    def bits(self, a: Val, t: str) -> Val:
        if a.t == t:
            return a
        a = self.quiet(a)
        if a.parts is not None and t[0] != "f":
            return Joined(self, *a.parts, t)
        return self.emit(f"{a.x}.view({DTYPE[t]})", t, a, alias=a.alias)

    def extremum(self, op: str, a: Val, b: Val) -> Val:
        if a.t != "f4":
            return super().extremum(op, a, b)
        out = self.emit(f"rt.f{op}({a.x},{b.x})", a.t, a, b)
        out.flushed = a.flushed and b.flushed
        return out

    def flush(self, v: Val) -> Val:
        if v.flushed or v.t != "f4":
            return super().flush(v)
        out = self.arithmetic(self.emit(f"rt.flush({v.x})", v.t, v))
        out.flushed = True
        return out

    def quiet(self, v: Val) -> Val:
        return self.emit(f"rt.quiet({v.x})", v.t, v) if v.noisy else v

    def fma(self, a: Val, b: Val, c: Val) -> Val:
        return self.arithmetic(self.emit(f"rt.fma{8 * size_of(a.t)}({a.x},{b.x},{c.x})", a.t))

    def mulhi(self, a: Val, b: Val) -> Val:
        return self.emit(f"rt.mulhi{8 * size_of(a.t)}({a.x},{b.x})", a.t)

    def lookup(self, table: str, index: Val) -> Val:
        name = f"T{table}"
        self.names[name] = np.array(TABLES[table], np.float64)
        return self.emit(f"{name}[{index.x}]", "f8")

    def shorter(self, name: str, composition: Callable[..., Val], *values: Val) -> Val:
        del composition
        return self.arithmetic(self.emit(f"rt.{name}({','.join(v.x for v in values)})", values[0].t, *values))

    # ---- lanes and pieces
    def permute(self, a: Val, index: Val) -> Val:
        a = self.quiet(a)
        return self.emit(f"rt.permute({a.x},{index.x})" if self.team else f"{a.x}[{index.x}]", a.t, a, index)

    def ballot(self, p: Val) -> Val:
        return self.emit(f"rt.ballot({p.x})", "u4", p)

    def split(self, a: Val) -> tuple[Val, Val]:
        if a.parts is not None:
            return a.parts
        half = f"u{size_of(a.t) // 2}"
        if a.x in self.names:
            raw = self.names[a.x].view(DTYPE[half])
            return self.known(raw[0::2], half), self.known(raw[1::2], half)
        both = self.emit(f"{a.x}.view({DTYPE[half]})", half)
        a.parts = self.emit(f"{both.x}[...,0::2].copy()", half), self.emit(f"{both.x}[...,1::2].copy()", half)
        return a.parts

    def join(self, low: Val, high: Val) -> Val:
        low, high = (self.emit(f"{v.x}.copy()", v.t) if v.alias else v for v in (low, high))
        return Joined(self, low, high, f"u{2 * size_of(low.t)}")

    # ---- memory
    def load(self, space: str, address: Val, offset: int, t: str, count: int) -> list[Val]:
        got = self.emit(f"w.load_{space}({address.x},{offset},{DTYPE[t]},{count},{self.guard},{self.ins.index})", t)
        return [Val(f"{got.x}[{i}]", t) for i in range(count)]

    def store(self, space: str, address: Val, offset: int, values: list[Val]) -> None:
        items = ",".join(self.quiet(v).x for v in values)
        self.lines.append(f"w.store_{space}({address.x},{offset},({items},),{self.guard},{self.ins.index})")

    # ---- the frame
    def begin(self, ins: Instruction) -> None:
        """Set the guard for one instruction."""
        self.ins = ins
        self.predicate, self.guard = None, "m" if self.masked else None
        if ins.predicate is not None:
            p = self.read_reg(ins.predicate, "b")
            self.predicate = self.emit(f"~{p.x}", "b").x if ins.negated else p.x
            self.guard = self.emit(f"{self.predicate}&m", "b").x if self.masked else self.predicate

    def write_back(self, keys: set[tuple[str, int]]) -> None:
        """Write the changed registers among `keys` back to the register file."""
        for key in [k for k in self.dirty if k in keys]:
            value = self.quiet(self.dirty.pop(key))
            place = f"P[{key[1]}]" if key[0] == "p" else f"{_VIEW[key[0]][value.t[0]]}[{key[1]}]"
            self.lines.append(f"copyto({place},{value.x},where=m)" if self.masked else f"{place}={value.x}")

    def forget(self, keys: set[tuple[str, int]]) -> None:
        """Registers that something else has written: read them again."""
        for key in keys:
            self.local.pop(key, None)
            for view in [v for v in self.views if v[:2] == key]:
                del self.views[view]

    def machine(self, ins: Instruction, name: str) -> None:
        """A call of a machine instruction's handler."""
        named = {(r.cls, r.slot) for operand in ins.operands for r in registers(operand)}
        if ins.predicate is not None:
            named.add((ins.predicate.cls, ins.predicate.slot))
        self.write_back(named)
        guard = self.guard
        if self.team:
            self.lines.append(f"w.each({name},{guard})")
        else:
            call = f"{name}(w,{guard})"
            self.lines.append(f"if {guard}.tobytes()!=NOBODY: {call}" if guard is not None else call)
        self.forget(named)


def compile_range(
    program: Program, indices: Sequence[int], live: set[tuple[str, int]], masked: bool, resolve: Callable[[str], Reg],
    handler: Callable[[int], Handler], team: bool = False,
) -> Callable[[Any, Any], None]:  # fmt: skip
    """A function of some instructions: f(warp, mask), or with `team` f(team, None).

    `live` are the registers that must be in the register file behind it.
    """
    b = NumpyBuilder(resolve, masked, team)
    for i in indices:
        ins = program.code[i]
        b.begin(ins)
        semantic = lookup(ins).pure
        if semantic is not None:
            semantic(b, ins)
        else:
            name = f"h{i}"
            b.names[name] = handler(i)
            b.machine(ins, name)
    b.guard = b.predicate = None
    b.write_back(live)
    return _function(b, f"<PTX instructions {indices[0]} .. {indices[-1]}>")


def _function(b: NumpyBuilder, label: str) -> Callable[[Any, Any], None]:
    text = "\n ".join(b.lines or ["pass"])
    used = [v for v in ("P", "Hu", "Hi", "Hf", "Ru", "Ri", "Rf", "Du", "Di", "Df") if f"{v}[" in text]
    head = "def segment(w,m):\n " + "".join(f"{v}=w.{v}\n " for v in used)
    space: dict[str, Any] = {"np": np, "rt": numpy_runtime, "copyto": np.copyto, "NOBODY": bytes(32)}
    space |= {name: np.dtype(name) for name in DTYPE.values()}
    space |= b.names
    exec(compile(head + text + "\n", label, "exec"), space)
    made: Callable[[Any, Any], None] = space["segment"]
    return made
