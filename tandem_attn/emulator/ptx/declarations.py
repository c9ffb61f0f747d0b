"""Declarations of variables and parameters. PTX manual, "State Spaces, Types, and Variables"."""

from __future__ import annotations

import struct

from tandem_attn.emulator.ptx.constants import ConstantExpressions
from tandem_attn.emulator.ptx.nodes import TYPE_BYTES, Variable

SPACES = (".global", ".const", ".shared", ".local", ".param")


class Declarations(ConstantExpressions):
    """Variables of every state space, with their initial values."""

    shared_size = 0  # of the static shared variables so far

    def place(self, variable: Variable, extern: bool) -> None:
        """Give a shared variable its offset in static shared memory; an extern one begins behind all static ones."""
        if variable.space == "shared" and not extern:
            self.shared_size = -(-self.shared_size // variable.align) * variable.align
            variable.offset = self.shared_size
            self.shared_size += variable.size
        if variable.space == "shared" and extern:
            variable.offset = -1

    def variable(self) -> list[Variable]:
        """`.space [.align n] .type name[size] [= init], ...;` with the semicolon."""
        space = self.next().text[1:]
        align, kind, pointee = self.qualifiers()
        found = []
        while True:
            found.append(self.declarator(space, align, kind, pointee))
            if self.accept(";"):
                return found
            self.expect(",")

    def qualifiers(self) -> tuple[int, str, str]:
        align, kind, vector, pointee = 0, "", 1, ""
        while self.peek().text.startswith("."):
            word = self.next().text
            if word == ".align":
                given = self.integer()
                align = align if pointee else given
            elif word == ".ptr":
                pointee = "generic"
            elif word in (".v2", ".v4", ".v8"):
                vector = int(word[2:])
            elif word in SPACES:
                pointee = word[1:]
            elif word.startswith(".attribute"):
                self.group_tokens()
            elif word[1:] in TYPE_BYTES:
                kind = word[1:]
            else:
                raise self.error(f"unknown type or qualifier {word!r}")
        if not kind:
            raise self.error("a variable without a type")
        return align or max(1, TYPE_BYTES[kind] * vector), kind, pointee

    def group_tokens(self) -> None:
        self.expect("(")
        while not self.accept(")"):
            self.next()

    def declarator(self, space: str, align: int, kind: str, pointee: str) -> Variable:
        token = self.next()
        if token.kind != "word":
            raise self.error(f"expected a name, found {token.text!r}", token)
        count, unsized = 1, False
        while self.accept("["):
            if self.accept("]"):
                unsized, count = True, 0
            else:
                count *= self.constant_value()
                self.expect("]")
        variable = Variable(token.text, space, align, count * TYPE_BYTES[kind], kind, pointee=pointee)
        if self.accept("="):
            self.initializer(variable)
            if unsized:
                variable.size = len(variable.data or b"")
        return variable

    def initializer(self, variable: Variable) -> None:
        size = TYPE_BYTES[variable.type]
        out = bytearray()
        depth = 0
        while True:
            if self.accept("{"):
                depth += 1
            elif self.accept("}"):
                depth -= 1
            elif depth and self.accept(","):
                continue
            elif self.peek().kind == "string":
                out += self.next().text[1:-1].encode().decode("unicode_escape").encode("latin-1") + b"\0"
            elif self.peek().kind == "word":
                out += self.link(variable, len(out), size)
            else:
                out += self.constant(variable.type, size)
            if depth == 0:
                break
        variable.data = bytes(out).ljust(variable.size, b"\0")

    def link(self, variable: Variable, offset: int, size: int) -> bytes:
        name = self.next().text
        if name == "generic":
            self.expect("(")
            name = self.next().text
            self.expect(")")
        addend = self.constant_value() if self.accept("+") else 0
        variable.links.append((offset, name, addend))
        return bytes(size)

    def constant(self, kind: str, size: int) -> bytes:
        found = self.constant_operand()
        value = found.value
        if found.real == 64 and kind in ("f32", "b32"):
            value = struct.unpack("<I", struct.pack("<f", struct.unpack("<d", struct.pack("<Q", value))[0]))[0]
        return (value & ((1 << 8 * size) - 1)).to_bytes(size, "little")

    def parameters(self) -> list[Variable]:
        self.expect("(")
        found: list[Variable] = []
        while not self.accept(")"):
            space = self.next().text
            if space not in (".param", ".reg"):
                raise self.error(f"expected .param, found {space!r}")
            found.append(self.declarator(space[1:], *self.qualifiers()))
            self.accept(",")
        return found
