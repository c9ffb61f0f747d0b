"""Constant expressions. PTX manual, "Constant Expressions", "Integer Constant Expression Evaluation", and its table of rules.

Integers are 64 bits wide, signed (`.s64`) or unsigned (`.u64`); floating-point constants are double and know + - * / and comparisons.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from tandem_attn.emulator.ptx.cursor import Cursor
from tandem_attn.emulator.ptx.lexer import number
from tandem_attn.emulator.ptx.nodes import Imm

# Binary operators by how tightly they bind, as in C (manual, "Constant Expressions", operator precedence).
_LEVELS = (("||",), ("&&",), ("|",), ("^",), ("&",), ("==", "!="), ("<", ">", "<=", ">="), ("<<", ">>"), ("+", "-"), ("*", "/", "%"))
_PAIRS = frozenset(op for level in _LEVELS for op in level if len(op) == 2)
_MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Const:
    """A value: an integer in the range of its type, or a float."""

    value: int | float
    unsigned: bool = False


def integer(value: int, unsigned: bool) -> Const:
    """Wrapped to 64 bits."""
    value &= _MASK
    return Const(value if unsigned or value < 1 << 63 else value - (1 << 64), unsigned)


class ConstantExpressions(Cursor):
    """Reads constant expressions."""

    def begins_constant(self) -> bool:
        """Whether the next tokens are a constant expression: parentheses and signs, then a number."""
        at = self.at
        while self.tokens[at].text in ("(", "+", "-", "~", "!", ".s64", ".u64", ")"):
            at += 1
        return self.tokens[at].kind == "number" or self.tokens[at].text == "WARP_SZ"

    def constant_operand(self) -> Imm:
        """A constant expression as an operand. A single-precision hexadecimal constant keeps its bits."""
        token = self.peek()
        if token.kind == "number" and number(token.text)[1]:
            following = self.tokens[self.at + 1].text
            if following not in ("+", "-", "*", "/", "<", ">", "=", "!", "?"):
                self.next()
                return Imm(*number(token.text))
        found = self.conditional()
        if isinstance(found.value, float):
            return Imm(struct.unpack("<Q", struct.pack("<d", found.value))[0], 64)
        return Imm(found.value)

    def constant_value(self) -> int:
        """An integer constant expression."""
        token = self.peek()
        found = self.conditional()
        if isinstance(found.value, float):
            raise self.error("an integer constant is expected", token)
        return found.value

    def conditional(self) -> Const:
        condition = self.binary(0)
        if not self.accept("?"):
            return condition
        first = self.conditional()
        self.expect(":")
        second = self.conditional()
        return first if condition.value else second

    def binary(self, level: int) -> Const:
        if level == len(_LEVELS):
            return self.unary()
        left = self.binary(level + 1)
        while (op := self.operator()) in _LEVELS[level]:
            for _ in op:
                self.next()
            left = self.combine(op, left, self.binary(level + 1))
        return left

    def operator(self) -> str:
        """The operator that follows, one character or two side by side."""
        first, second = self.tokens[self.at], self.tokens[min(self.at + 1, len(self.tokens) - 1)]
        both = first.text + second.text
        return both if both in _PAIRS and first.end == second.start else first.text

    def unary(self) -> Const:
        token = self.next()
        if token.text in ("+", "-", "~", "!"):
            return self.signed(token.text, self.unary())
        if token.text == "(":
            cast = self.peek().text
            if cast in (".s64", ".u64"):
                self.next()
                self.expect(")")
                return integer(int(self.unary().value), cast == ".u64")
            inner = self.conditional()
            self.expect(")")
            return inner
        return self.primary()

    def signed(self, op: str, inner: Const) -> Const:
        if op == "+":
            return inner
        if op == "!":
            return Const(int(not inner.value))
        if isinstance(inner.value, float):
            if op == "~":
                raise self.error("~ of a floating-point constant")
            return Const(-inner.value)
        return integer(-inner.value if op == "-" else ~inner.value, inner.unsigned)

    def primary(self) -> Const:
        token = self.tokens[self.at - 1]
        if token.text == "WARP_SZ":
            return Const(32)
        if token.kind != "number":
            raise self.error(f"expected a constant, found {token.text!r}", token)
        value, real = number(token.text)
        if real == 32:
            raise self.error("a single-precision constant cannot be part of an expression", token)
        if real == 64:
            return Const(struct.unpack("<d", struct.pack("<Q", value))[0])
        return integer(value, token.text.endswith("U") or value >= 1 << 63)

    def combine(self, op: str, a: Const, b: Const) -> Const:  # noqa: PLR0911 - one return per row of the manual's table
        if op in ("&&", "||"):
            return Const(int(bool(a.value) and bool(b.value) if op == "&&" else bool(a.value) or bool(b.value)))
        if isinstance(a.value, float) or isinstance(b.value, float):
            return self.floating(op, a.value, b.value)
        if op in ("<<", ">>"):  # the type of the first operand stays
            amount = b.value & _MASK
            shifted = (a.value << amount if amount < 64 else 0) if op == "<<" else a.value >> min(amount, 64)
            return integer(shifted, a.unsigned)
        unsigned = a.unsigned or b.unsigned
        x, y = integer(a.value, unsigned).value, integer(b.value, unsigned).value
        assert isinstance(x, int) and isinstance(y, int)  # narrows the type
        if op in ("&", "|", "^"):
            return integer({"&": x & y, "|": x | y, "^": x ^ y}[op], True)
        if op in ("/", "%"):
            if not y:
                raise self.error("division by zero in a constant expression")
            quotient = abs(x) // abs(y) * (1 if (x < 0) == (y < 0) else -1)
            return integer(quotient if op == "/" else x - quotient * y, unsigned)
        if op in ("+", "-", "*"):
            return integer({"+": x + y, "-": x - y, "*": x * y}[op], unsigned)
        return Const(int({"<": x < y, ">": x > y, "<=": x <= y, ">=": x >= y, "==": x == y, "!=": x != y}[op]))

    def floating(self, op: str, x: int | float, y: int | float) -> Const:
        if not (isinstance(x, float) and isinstance(y, float)):
            raise self.error("integer and floating-point constants in one expression")
        if op == "/" and not y:
            raise self.error("division by zero in a constant expression")
        if op in ("+", "-", "*", "/"):
            return Const({"+": lambda: x + y, "-": lambda: x - y, "*": lambda: x * y, "/": lambda: x / y}[op]())
        if op in ("<", ">", "<=", ">=", "==", "!="):
            return Const(int({"<": x < y, ">": x > y, "<=": x <= y, ">=": x >= y, "==": x == y, "!=": x != y}[op]))
        raise self.error(f"{op} on floating-point constants")
