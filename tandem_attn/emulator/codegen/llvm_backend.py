"""Pure instructions as LLVM IR text over <8 x T>, in loops over the 32 lanes.

A run of pure instructions becomes one function of a pointer to a warp's register arrays and of how many warps behind it take part.
Instructions that look at other lanes are emitted 32 wide between the loops. Values that are needed behind a loop go through the register
file.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from typing import Any

from tandem_attn.emulator.codegen.builder import Builder, Val, size_of, width_of
from tandem_attn.emulator.codegen.unit_tables import TABLES
from tandem_attn.emulator.memory.registers import WARP, WARPS
from tandem_attn.emulator.ops.registry import lookup
from tandem_attn.emulator.ptx.nodes import Instruction, Reg
from tandem_attn.emulator.ptx.operands import sources

NARROW = 8
FILES = ("p", "h", "r", "d")  # order of the register arrays in the struct that a function gets
_FILE_BYTES = {"p": 1, "h": 2, "r": 4, "d": 8}
_INT = {"add": "add", "sub": "sub", "mul": "mul", "and": "and", "or": "or", "xor": "xor", "shl": "shl"}
_SAME_TYPE = {"abs": "fabs", "brev": "bitreverse"} | {op: op for op in ("sqrt", "floor", "ceil", "trunc", "rint")}
_FLOAT = {"add": "fadd", "sub": "fsub", "mul": "fmul", "div": "fdiv"}
_EXP2_TERMS = 13  # Taylor terms of 2^f on |f| <= 1/2: the rest is below 2e-16


class NeedWideError(Exception):
    """The instruction looks at other lanes."""


def scalar_type(t: str) -> str:
    return {"b": "i1", "f2": "half", "f4": "float", "f8": "double"}.get(t) or f"i{8 * size_of(t)}"


class LlvmBuilder(Builder):
    """Writes the body of one loop (width 8) or of one wide instruction (width 32)."""

    def __init__(self, resolve: Callable[[str], Reg], width: int, number: int) -> None:
        self.resolve, self.width, self.number, self.prefix = resolve, width, number, f"g{number}_"
        self.lines: list[str] = []
        self.held: dict[tuple[str, int], Val] = {}  # value of a register, with the type it was written or loaded as
        self.views: dict[tuple[str, int, str], Val] = {}
        self.dirty: dict[tuple[str, int], Val] = {}
        self.predicate: Val | None = None
        self.count = 0
        self.declared: set[str] = set()

    # ---- text
    def vector(self, t: str) -> str:
        return f"<{self.width} x {scalar_type(t)}>"

    def emit(self, text: str, t: str) -> Val:
        self.count += 1
        name = f"%{self.prefix}{self.count}"
        self.lines.append(f"  {name} = {text}")
        return Val(name, t)

    def line(self, text: str) -> str:
        self.count += 1
        name = f"%{self.prefix}{self.count}"
        self.lines.append(f"  {name} = {text}")
        return name

    def call(self, function: str, t: str, *arguments: Val, extra: str = "") -> Val:
        vector = self.vector(t)
        kinds = ", ".join(self.vector(a.t) for a in arguments) + (", i1" if extra else "")
        self.declared.add(f"declare {vector} @{function}({kinds})")
        given = ", ".join(f"{self.vector(a.t)} {a.x}" for a in arguments) + extra
        return self.emit(f"call {vector} @{function}({given})", t)

    def intrinsic(self, name: str, t: str, *arguments: Val, extra: str = "") -> Val:
        code = {"f": "f", "u": "i", "i": "i"}[t[0]] + str(8 * size_of(t))
        return self.call(f"llvm.{name}.v{self.width}{code}", t, *arguments, extra=extra)

    # ---- operands
    def const(self, t: str, value: int | float) -> Val:
        if t == "b":
            text = "true" if value else "false"
        elif t[0] == "f":
            number = struct.unpack("<f", struct.pack("<f", value))[0] if t == "f4" else value
            text = "0x" + struct.pack(">d", number).hex().upper()
        else:
            text = str(int(value) & ((1 << 8 * size_of(t)) - 1))
        return Val(f"splat ({scalar_type(t)} {text})", t, flushed=t[0] == "f")

    def address(self, cls: str, slot: int) -> str:
        offset = slot * WARPS * WARP * _FILE_BYTES[cls]
        base = self.line(f"getelementptr i8, ptr %{cls}, i64 {offset}")
        if self.width == WARP:
            return base
        return self.line(f"getelementptr i8, ptr {base}, i64 %lane{_FILE_BYTES[cls]}_{self.number}")

    def read_reg(self, reg: Reg, t: str) -> Val:
        key = (reg.cls, reg.slot)
        if reg.cls == "p":
            if key not in self.held:
                raw = self.line(f"load <{self.width} x i8>, ptr {self.address('p', reg.slot)}, align 1")
                self.held[key] = self.emit(f"icmp ne <{self.width} x i8> {raw}, zeroinitializer", "b")
            return self.held[key]
        if (key[0], key[1], t) in self.views:
            return self.views[key[0], key[1], t]
        held = self.held.get(key)
        if held is None:
            exact = t if size_of(t) == width_of(reg) else f"u{width_of(reg)}"
            held = self.emit(f"load {self.vector(exact)}, ptr {self.address(*key)}, align 1", exact)
            self.held[key] = self.views[key[0], key[1], exact] = held
        out = held
        if held.t != t:
            out = (
                self.bits(held, t)
                if size_of(held.t) == size_of(t)
                else self.bits(self.cast(self.bits(held, f"u{held.t[1:]}"), f"u{t[1:]}"), t)
            )
        self.views[key[0], key[1], t] = out
        return out

    def write_reg(self, reg: Reg, value: Val) -> None:
        key = (reg.cls, reg.slot)
        if reg.cls != "p":
            width = width_of(reg)
            if size_of(value.t) != width:
                if value.t[0] == "f":
                    value = self.bits(value, f"u{value.t[1:]}")
                value = self.cast(value, f"{value.t[0]}{width}")
        if self.predicate is not None:
            value = self.select(self.predicate, value, self.read_reg(reg, value.t))
        for view in [v for v in self.views if v[:2] == key]:
            del self.views[view]
        self.held[key] = self.dirty[key] = value
        if reg.cls != "p":
            self.views[key[0], key[1], value.t] = value

    def read_symbol(self, name: str, t: str) -> Val:
        return self.read_reg(self.resolve(name), t)

    def lanes(self) -> Val:
        items = ", ".join(f"i32 {i}" for i in range(self.width))
        if self.width == WARP:
            return Val(f"<{items}>", "u4")
        return Val(self.line(f"add <8 x i32> <{items}>, %lanes{self.number}"), "u4")

    def active(self) -> Val:
        self.wide()
        return self.predicate if self.predicate is not None else self.const("b", 1)

    def wide(self) -> None:
        if self.width != WARP:
            raise NeedWideError

    # ---- arithmetic
    def binary(self, op: str, a: Val, b: Val) -> Val:
        vector = self.vector(a.t)
        if a.t[0] == "f":
            if op in ("min", "max"):
                return self.arithmetic(self.intrinsic(f"{op}num", a.t, a, b))
            return self.arithmetic(self.emit(f"{_FLOAT[op]} {vector} {a.x}, {b.x}", a.t))
        signed = a.t[0] == "i"
        if op in ("min", "max"):
            return self.intrinsic(f"{'s' if signed else 'u'}{op}", a.t, a, b)
        name = (
            _INT.get(op)
            or {"shr": "ashr" if signed else "lshr", "div": "sdiv" if signed else "udiv", "rem": "srem" if signed else "urem"}[op]
        )
        return self.emit(f"{name} {vector} {a.x}, {b.x}", a.t)

    def compare(self, op: str, a: Val, b: Val) -> Val:
        if a.t[0] == "f":
            code = "une" if op == "ne" else "o" + op
            return self.emit(f"fcmp {code} {self.vector(a.t)} {a.x}, {b.x}", "b")
        code = op if op in ("eq", "ne") else ("s" if a.t[0] == "i" else "u") + op
        return self.emit(f"icmp {code} {self.vector(a.t)} {a.x}, {b.x}", "b")

    def unary(self, op: str, a: Val) -> Val:
        vector = self.vector(a.t)
        if op == "not":
            ones = self.const(a.t, -1 if a.t != "b" else 1)
            return self.emit(f"xor {vector} {a.x}, {ones.x}", a.t)
        if op == "neg":
            return self.arithmetic(self.emit(f"fneg {vector} {a.x}" if a.t[0] == "f" else f"sub {vector} zeroinitializer, {a.x}", a.t))
        if op in _SAME_TYPE:
            return self.arithmetic(self.intrinsic(_SAME_TYPE[op], a.t, a))
        if op in ("popc", "clz"):
            out = self.intrinsic("ctpop", a.t, a) if op == "popc" else self.intrinsic("ctlz", a.t, a, extra=", i1 false")
            return self.cast(Val(out.x, f"u{a.t[1:]}"), "u4")
        return self.exp2(a) if op == "exp2" else self.lanewise(op, a)

    def exp2(self, a: Val) -> Val:
        """2^x in double: 2^n times a polynomial in x - n, then rounded."""
        x = self.cast(a, "f8")
        nan = self.is_nan(x)
        x = self.clamp(self.select(nan, self.const("f8", 0.0), x), -1000.0, 1000.0)
        n = self.unary("rint", x)
        f = self.binary("sub", x, n)
        total = self.const("f8", math.log(2) ** (_EXP2_TERMS - 1) / math.factorial(_EXP2_TERMS - 1))
        for k in range(_EXP2_TERMS - 2, -1, -1):
            total = self.fma(total, f, self.const("f8", math.log(2) ** k / math.factorial(k)))
        power = self.binary("shl", self.binary("add", self.cast(n, "i8"), self.const("i8", 1023)), self.const("i8", 52))
        out = self.cast(self.binary("mul", total, self.bits(power, "f8")), a.t)
        return self.select(nan, a, out)

    def lanewise(self, op: str, a: Val) -> Val:
        """A function of the C library, lane by lane in double."""
        self.declared.add(f"declare double @{op}(double)")
        x = self.cast(a, "f8")
        out = "undef"
        for i in range(self.width):
            item = self.line(f"extractelement {self.vector('f8')} {x.x}, i32 {i}")
            got = self.line(f"call double @{op}(double {item})")
            out = self.line(f"insertelement {self.vector('f8')} {out}, double {got}, i32 {i}")
        return self.cast(Val(out, "f8"), a.t)

    def select(self, c: Val, a: Val, b: Val) -> Val:
        out = self.emit(f"select {self.vector('b')} {c.x}, {self.vector(a.t)} {a.x}, {self.vector(b.t)} {b.x}", a.t)
        out.flushed, out.noisy = a.flushed and b.flushed, a.noisy or b.noisy
        return out

    def cast(self, a: Val, t: str) -> Val:
        if a.t == t:
            return a
        source, target = self.vector(a.t), self.vector(t)
        if a.t == "b":
            return self.emit(f"zext {source} {a.x} to {target}", t)
        if a.t[0] == "f":
            if t[0] == "f":
                return self.arithmetic(self.emit(f"{'fpext' if size_of(t) > size_of(a.t) else 'fptrunc'} {source} {a.x} to {target}", t))
            return self.emit(f"{'fptosi' if t[0] == 'i' else 'fptoui'} {source} {a.x} to {target}", t)
        if t[0] == "f":
            return self.emit(f"{'sitofp' if a.t[0] == 'i' else 'uitofp'} {source} {a.x} to {target}", t)
        op = "trunc" if size_of(t) < size_of(a.t) else "sext" if a.t[0] == "i" else "zext"
        return Val(a.x, t) if size_of(t) == size_of(a.t) else self.emit(f"{op} {source} {a.x} to {target}", t)

    def bits(self, a: Val, t: str) -> Val:
        if a.t[0] != "f" and t[0] != "f":
            return Val(a.x, t)
        if a.t == t:
            return a
        a = self.quiet(a)
        return self.emit(f"bitcast {self.vector(a.t)} {a.x} to {self.vector(t)}", t)

    def fma(self, a: Val, b: Val, c: Val) -> Val:
        return self.arithmetic(self.intrinsic("fma", a.t, a, b, c))

    def mulhi(self, a: Val, b: Val) -> Val:
        bits = 8 * size_of(a.t)
        wide, narrow = f"<{self.width} x i{2 * bits}>", self.vector(a.t)
        extend, shift = ("sext", "ashr") if a.t[0] == "i" else ("zext", "lshr")
        x, y = (self.line(f"{extend} {narrow} {v.x} to {wide}") for v in (a, b))
        product = self.line(f"mul {wide} {x}, {y}")
        amount = f"splat (i{2 * bits} {bits})"
        high = self.line(f"{shift} {wide} {product}, {amount}")
        return self.emit(f"trunc {wide} {high} to {narrow}", a.t)

    def lookup(self, table: str, index: Val) -> Val:
        items = ", ".join("double 0x" + struct.pack(">d", value).hex().upper() for value in TABLES[table])
        count, vector = len(TABLES[table]), self.vector("f8")
        self.declared.add(f"@table_{table} = private constant [{count} x double] [{items}]")
        gather = f"@llvm.masked.gather.v{self.width}f64.v{self.width}p0"
        self.declared.add(f"declare {vector} {gather}(<{self.width} x ptr>, i32, <{self.width} x i1>, {vector})")
        places = self.line(f"getelementptr double, ptr @table_{table}, {self.vector('u4')} {index.x}")
        return self.emit(
            f"call {vector} {gather}(<{self.width} x ptr> {places}, i32 8, <{self.width} x i1> splat (i1 true), {vector} poison)", "f8"
        )

    # ---- lanes and pieces
    def permute(self, a: Val, index: Val) -> Val:
        self.wide()
        a = self.quiet(a)
        kind = scalar_type(a.t)
        room = self.line(f"alloca [32 x {kind}], align 64")
        self.lines.append(f"  store {self.vector(a.t)} {a.x}, ptr {room}, align 64")
        places = self.line(f"getelementptr {kind}, ptr {room}, <32 x i32> {index.x}")
        code = {"f": "f", "u": "i", "i": "i"}[a.t[0]] + str(8 * size_of(a.t))
        self.declared.add(f"declare {self.vector(a.t)} @llvm.masked.gather.v32{code}.v32p0(<32 x ptr>, i32, <32 x i1>, {self.vector(a.t)})")
        return self.emit(
            f"call {self.vector(a.t)} @llvm.masked.gather.v32{code}.v32p0(<32 x ptr> {places}, i32 1, <32 x i1> splat (i1 true), "
            f"{self.vector(a.t)} poison)", a.t,
        )  # fmt: skip

    def ballot(self, p: Val) -> Val:
        self.wide()
        raw = self.line(f"bitcast <32 x i1> {p.x} to i32")
        one = self.line(f"insertelement <32 x i32> poison, i32 {raw}, i32 0")
        return self.emit(f"shufflevector <32 x i32> {one}, <32 x i32> poison, <32 x i32> zeroinitializer", "u4")

    def split(self, a: Val) -> tuple[Val, Val]:
        half = f"u{size_of(a.t) // 2}"
        high = self.binary("shr", Val(a.x, f"u{a.t[1:]}"), self.const(f"u{a.t[1:]}", 4 * size_of(a.t)))
        return self.cast(Val(a.x, f"u{a.t[1:]}"), half), self.cast(high, half)

    def join(self, low: Val, high: Val) -> Val:
        t = f"u{2 * size_of(low.t)}"
        up = self.binary("shl", self.cast(Val(high.x, f"u{high.t[1:]}"), t), self.const(t, 8 * size_of(low.t)))
        return self.binary("or", self.cast(Val(low.x, f"u{low.t[1:]}"), t), up)

    # ---- memory is the machine's business here
    def load(self, *_: Any) -> list[Val]:
        raise self.unsupported("memory access in native code")

    def store(self, *_: Any) -> None:
        raise self.unsupported("memory access in native code")

    # ---- the frame
    def begin(self, ins: Instruction) -> None:
        self.ins = ins
        self.predicate = None
        if ins.predicate is not None:
            p = self.read_reg(ins.predicate, "b")
            self.predicate = self.unary("not", p) if ins.negated else p

    def write_back(self, keys: set[tuple[str, int]]) -> None:
        for key, held in self.dirty.items():
            if key not in keys:
                continue
            value = self.quiet(held)
            if key[0] == "p":
                wide = self.line(f"zext <{self.width} x i1> {value.x} to <{self.width} x i8>")
                self.lines.append(f"  store <{self.width} x i8> {wide}, ptr {self.address(*key)}, align 1")
            else:
                self.lines.append(f"  store {self.vector(value.t)} {value.x}, ptr {self.address(*key)}, align 1")
        self.dirty.clear()


def is_wide(ins: Instruction, resolve: Callable[[str], Reg]) -> bool:
    """Whether the instruction looks at other lanes: it is tried out."""
    trial = LlvmBuilder(resolve, NARROW, 0)
    trial.begin(ins)
    semantic = lookup(ins).pure
    assert semantic is not None
    try:
        semantic(trial, ins)
    except NeedWideError:
        return True
    return False


def function_text(name: str, code: list[Instruction], live: set[tuple[str, int]], resolve: Callable[[str], Reg]) -> str:
    """IR of a function that executes `code`; `live` are the registers needed behind it."""
    groups: list[tuple[bool, list[Instruction]]] = []
    known: dict[str, bool] = {}
    for ins in code:
        if ins.opcode not in known:
            known[ins.opcode] = is_wide(ins, resolve)
        wide = known[ins.opcode]
        if groups and not wide and not groups[-1][0]:
            groups[-1][1].append(ins)
        else:
            groups.append((wide, [ins]))
    needed = [set(live)]
    for _, group in reversed(groups[1:]):
        needed.append(needed[-1] | {(r.cls, r.slot) for ins in group for r in sources(ins)})
    needed.reverse()
    body: list[str] = []
    declared: set[str] = set()
    for number, ((wide, group), keep) in enumerate(zip(groups, needed, strict=True)):
        b = LlvmBuilder(resolve, WARP if wide else NARROW, number)
        for ins in group:
            b.begin(ins)
            semantic = lookup(ins).pure
            assert semantic is not None
            semantic(b, ins)
        b.write_back(keep)
        declared |= b.declared
        body += b.lines if wide else _loop(number, b.lines)
    return "\n".join([*sorted(declared), *_each_warp(name, body), ""])


def _each_warp(name: str, body: list[str]) -> list[str]:
    """The function: its body once for each warp."""
    head = [f"define void @{name}(ptr %files, i64 %count) {{", "entry:"]
    for i, cls in enumerate(FILES):
        head += [f"  %{cls}_at = getelementptr ptr, ptr %files, i64 {i}", f"  %{cls}_first = load ptr, ptr %{cls}_at, align 8"]
    head += ["  br label %warp", "warp:", "  %number = phi i64 [ 0, %entry ], [ %next, %behind ]"]
    for cls in FILES:
        head += [
            f"  %{cls}_skip = mul i64 %number, {WARP * _FILE_BYTES[cls]}",
            f"  %{cls} = getelementptr i8, ptr %{cls}_first, i64 %{cls}_skip",
        ]
    tail = ["  br label %behind", "behind:", "  %next = add i64 %number, 1", "  %more = icmp ult i64 %next, %count"]
    return [*head, *body, *tail, "  br i1 %more, label %warp, label %done", "done:", "  ret void", "}"]


def _loop(number: int, lines: list[str]) -> list[str]:
    """The body once for each eight lanes. Its own names carry the loop's number."""
    top, before, end = f"loop{number}", f"before{number}", f"done{number}"
    i = f"%i{number}"
    head = [f"  br label %{before}", f"{before}:", f"  br label %{top}", f"{top}:"]
    head.append(f"  {i} = phi i64 [ 0, %{before} ], [ %next{number}, %{top} ]")
    head += [f"  %lane{size}_{number} = mul i64 {i}, {size}" for size in (1, 2, 4, 8)]
    head += [
        f"  %low{number} = trunc i64 {i} to i32",
        f"  %first{number} = insertelement <8 x i32> poison, i32 %low{number}, i32 0",
        f"  %lanes{number} = shufflevector <8 x i32> %first{number}, <8 x i32> poison, <8 x i32> zeroinitializer",
    ]
    tail = [
        f"  %next{number} = add i64 {i}, 8",
        f"  %more{number} = icmp ult i64 %next{number}, 32",
        f"  br i1 %more{number}, label %{top}, label %{end}",
        f"{end}:",
    ]
    return [*head, *lines, *tail]
