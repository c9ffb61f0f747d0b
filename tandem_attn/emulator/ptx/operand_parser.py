"""Operands, and the registers and symbols that the open scopes know. PTX manual, "Instruction Operands"."""

from __future__ import annotations

from tandem_attn.emulator.ptx.declarations import Declarations
from tandem_attn.emulator.ptx.lexer import Token
from tandem_attn.emulator.ptx.nodes import (
    REGISTER_CLASS,
    Discard,
    Group,
    Memory,
    Module,
    Negated,
    Operand,
    Pair,
    Reg,
    Special,
    Symbol,
    Vector,
)

SPECIALS = frozenset(
    (
        "tid",
        "ntid",
        "laneid",
        "warpid",
        "nwarpid",
        "ctaid",
        "nctaid",
        "smid",
        "nsmid",
        "gridid",
        "clusterid",
        "nclusterid",
        "cluster_ctaid",
        "cluster_nctaid",
        "cluster_ctarank",
        "cluster_nctarank",
        "is_explicit_cluster",
        "lanemask_eq",
        "lanemask_le",
        "lanemask_lt",
        "lanemask_ge",
        "lanemask_gt",
        "clock",
        "clock_hi",
        "clock64",
        "globaltimer",
        "globaltimer_lo",
        "globaltimer_hi",
        "total_smem_size",
        "dynamic_smem_size",
        "aggr_smem_size",
        "reserved_smem_offset_begin",
        "reserved_smem_offset_end",
        "reserved_smem_offset_cap",
        "current_graph_exec",
    )
)


class Scope:
    def __init__(self, ident: int) -> None:
        self.ident = ident
        self.registers: dict[str, Reg] = {}
        self.symbols: dict[str, str] = {}  # name -> unique name


class OperandParser(Declarations):
    """Operands of instructions, and `.reg` declarations."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.module = Module((0, 0), "", {}, {}, [], dict.fromkeys("phrdq", 0) | {"p": 1}, set(), text)
        self.scopes: list[Scope] = []

    def register_declaration(self) -> None:
        self.next()
        kind = self.next().text[1:]
        if kind not in REGISTER_CLASS:
            raise self.error(f"unknown register type .{kind}")
        while True:
            name = self.next().text
            if self.accept("<"):
                count = self.integer()
                self.expect(">")
                for i in range(count):
                    self.add_register(f"{name}{i}", kind)
            else:
                self.add_register(name, kind)
            if self.accept(";"):
                return
            self.expect(",")

    def add_register(self, name: str, kind: str) -> None:
        cls = REGISTER_CLASS[kind]
        self.scopes[-1].registers[name] = Reg(name, kind, cls, self.module.slots[cls])
        self.module.slots[cls] += 1

    def operand(self, arguments: bool = False) -> Operand:
        """`arguments`: of a call, where parentheses hold its arguments and results."""
        token = self.peek()
        if not (arguments and token.text == "(") and self.begins_constant():
            return self.constant_operand()
        self.next()
        found: Operand
        if token.kind == "word":
            found = self.name(token)
            if isinstance(found, Symbol) and self.peek().text in ("+", "-"):
                self.accept("+")
                return Memory(found, self.constant_value())
        elif token.text in ("-", "!"):
            found = Negated(self.operand())
        elif token.text == "{":
            found = Vector(self.sequence("}"))
        elif token.text == "(":
            found = Group(self.sequence(")"))
        elif token.text == "[":
            found = self.address()
        else:
            raise self.error(f"operand expected, found {token.text!r}", token)
        return Pair(found, self.operand()) if self.accept("|") else found

    def sequence(self, close: str) -> tuple[Operand, ...]:
        items = []
        while not self.accept(close):
            items.append(self.operand())
            if not self.accept(",") and self.peek().text != close:
                raise self.error(f"expected ',' or {close!r}")
        return tuple(items)

    def address(self) -> Memory:
        base = self.operand()
        offset = 0
        if isinstance(base, Memory):  # symbol + constant
            offset, base = base.offset, base.base
        elif self.accept("+") or self.peek().text == "-":
            offset = self.constant_value()
        more: list[Operand] = []
        while self.accept(","):
            more.append(self.operand())
        self.expect("]")
        return Memory(base, offset, tuple(more))

    def name(self, token: Token) -> Operand:
        text = token.text
        if text == "_":
            return Discard()
        for scope in reversed(self.scopes):
            if text in scope.registers:
                return scope.registers[text]
            if text in scope.symbols:
                return Symbol(scope.symbols[text])
        if text.startswith("%"):
            if text[1:].split(".")[0] in SPECIALS or text.startswith(("%envreg", "%pm")):
                return Special(text)
            raise self.error(f"register {text} is not declared", token)
        return Symbol(text)
