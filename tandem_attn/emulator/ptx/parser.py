"""PTX text -> Module. Scopes, local labels, inline assembly, functions and calls, data; anything else is a ParseError."""

from __future__ import annotations

import struct

from tandem_attn.emulator.errors import ParseError
from tandem_attn.emulator.ptx.lexer import Token, number, tokenize
from tandem_attn.emulator.ptx.nodes import (
    REGISTER_CLASS,
    TYPE_BYTES,
    Discard,
    Function,
    Group,
    Imm,
    Instruction,
    Memory,
    Module,
    Negated,
    Operand,
    Pair,
    Reg,
    Special,
    Symbol,
    Variable,
    Vector,
)
from tandem_attn.emulator.report import Source

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
_SPACES = (".global", ".const", ".shared", ".local", ".param")
_LINKAGE = (".visible", ".extern", ".weak", ".common")
_ENTRY_DIRECTIVES = (".reqntid", ".maxntid", ".minnctapersm", ".maxnreg", ".maxnctapersm", ".reqnctapercluster", ".maxclusterrank")
_FLAG_DIRECTIVES = (".explicitcluster", ".noreturn", ".blocksareclusters")


class _Scope:
    def __init__(self, ident: int) -> None:
        self.ident = ident
        self.registers: dict[str, Reg] = {}
        self.symbols: dict[str, str] = {}  # name -> unique name


class Parser:
    """Recursive descent over the tokens of one module."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.tokens = tokenize(text)
        self.at = 0
        self.files: dict[int, str] = {}
        self.module = Module((0, 0), "", {}, {}, [], dict.fromkeys("phrdq", 0) | {"p": 1}, set(), text)
        self.scopes: list[_Scope] = []
        self.scope_count = 0
        self.location_now: tuple[int, int] | None = None  # (file, line) of the last .loc
        self.locations: dict[int, tuple[int, int]] = {}  # of each instruction, by id
        self.function: Function | None = None
        self.branches: list[tuple[Instruction, int, list[int], Function]] = []
        self.label_scopes: dict[tuple[str, int], str] = {}
        self.shared_size = 0

    # ---- tokens
    def peek(self) -> Token:
        return self.tokens[self.at]

    def next(self) -> Token:
        token = self.tokens[self.at]
        self.at += 1
        return token

    def accept(self, text: str) -> bool:
        if self.tokens[self.at].text == text and self.tokens[self.at].kind != "string":
            self.at += 1
            return True
        return False

    def expect(self, text: str) -> Token:
        token = self.next()
        if token.text != text:
            raise self.error(f"expected {text!r}, found {token.text!r}", token)
        return token

    def error(self, message: str, token: Token | None = None) -> ParseError:
        token = token or self.peek()
        lines = self.text.split("\n")
        return ParseError(message, token.line, lines[token.line - 1] if token.line <= len(lines) else "")

    def integer(self) -> int:
        sign = -1 if self.accept("-") else 1
        token = self.next()
        if token.kind != "number":
            raise self.error(f"expected a number, found {token.text!r}", token)
        return sign * number(token.text)[0]

    # ---- module level
    def parse(self) -> Module:
        while self.peek().kind != "end":
            self.module_statement()
        self.resolve_branches()
        for index, ins in enumerate(self.module.code):
            ins.index = index
        return self.module

    def module_statement(self) -> None:
        token = self.peek()
        word = token.text
        if word == ".version":
            self.next()
            major, minor = self.next().text.split(".")
            self.module.version = (int(major), int(minor))
        elif word == ".target":
            self.next()
            self.module.target = self.next().text
            while self.accept(","):
                self.next()
        elif word == ".address_size":
            self.next()
            if self.integer() != 64:
                raise self.error("only 64-bit addresses are supported", token)
        elif word == ".file":
            self.file_directive()
        elif word == ".section":
            self.skip_section()
        elif word == ".pragma":
            self.skip_statement()
        else:
            self.declaration()

    def file_directive(self) -> None:
        self.next()
        ident = self.integer()
        self.files[ident] = self.next().text[1:-1]
        while self.accept(","):
            self.next()

    def skip_section(self) -> None:
        while not self.accept("{"):
            self.next()
        depth = 1
        while depth:
            token = self.next()
            depth += (token.text == "{") - (token.text == "}")
            if token.kind == "end":
                raise self.error("unterminated .section", token)

    def skip_statement(self) -> None:
        while not self.accept(";"):
            self.next()

    def declaration(self) -> None:
        linkage = set()
        while self.peek().text in _LINKAGE:
            linkage.add(self.next().text)
        word = self.peek().text
        if word in (".entry", ".func"):
            self.function_definition(word == ".entry", ".extern" in linkage)
        elif word in _SPACES:
            for variable in self.variable():
                self.place(variable, ".extern" in linkage)
                self.module.variables[variable.name] = variable
        else:
            raise self.error(f"unknown directive or statement {word!r}")

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
            elif word in _SPACES:
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
                count *= self.integer()
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
        addend = self.integer() if self.accept("+") else 0
        variable.links.append((offset, name, addend))
        return bytes(size)

    def constant(self, kind: str, size: int) -> bytes:
        sign = -1 if self.accept("-") else 1
        token = self.next()
        if token.kind != "number":
            raise self.error(f"expected a constant, found {token.text!r}", token)
        value, real = number(token.text)
        if real == 64 and kind in ("f32", "b32"):
            value = struct.unpack("<I", struct.pack("<f", sign * struct.unpack("<d", struct.pack("<Q", value))[0]))[0]
            sign = 1
        return ((sign * value) & ((1 << 8 * size) - 1)).to_bytes(size, "little")

    # ---- functions
    def function_definition(self, entry: bool, extern: bool) -> None:
        head = self.next()
        if self.peek().text.startswith(".attribute"):
            self.next()
            self.group_tokens()
        results = self.parameters() if self.peek().text == "(" else []
        name = self.next().text
        params = self.parameters() if self.peek().text == "(" else []
        function = Function(name, entry, params, results, line=head.line)
        self.lay_out(params)
        self.lay_out(results)
        self.function_directives(function)
        if self.accept(";"):
            self.module.externals.add(name)
            self.module.functions.setdefault(name, function) if not extern else None
            return
        self.expect("{")
        self.module.externals.discard(name)
        self.module.functions[name] = function
        self.function = function
        function.start = len(self.module.code)
        function.locals = {v.name: v for v in params + results if v.space == "param"}
        self.open_scope()
        for variable in (v for v in params + results if v.space == "reg"):
            self.add_register(variable.name, variable.type)
            function.registers[variable.name] = self.scopes[-1].registers[variable.name]
        self.body(function)
        function.end = len(self.module.code)
        if function.end == function.start or self.module.code[-1].name not in ("ret", "exit", "bra", "trap"):
            ret = Instruction("ret", ("ret",), (), None, False, self.tokens[self.at - 1].line, "ret;", None)
            self.module.code.append(ret)
            function.end += 1
        self.function, self.location_now = None, None

    def lay_out(self, variables: list[Variable]) -> None:
        offset = 0
        for variable in variables:
            offset = -(-offset // variable.align) * variable.align
            variable.offset = offset
            offset += variable.size

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

    def function_directives(self, function: Function) -> None:
        while self.peek().text.startswith("."):
            word = self.next().text
            if word == ".pragma":
                self.skip_statement()
            elif word in _ENTRY_DIRECTIVES:
                values = [self.integer()]
                while self.accept(","):
                    values.append(self.integer())
                function.directives[word[1:]] = tuple(values)
            elif word in _FLAG_DIRECTIVES:
                function.directives[word[1:]] = ()
            else:
                raise self.error(f"unknown function directive {word!r}")

    def open_scope(self) -> None:
        self.scopes.append(_Scope(self.scope_count))
        self.scope_count += 1

    def body(self, function: Function) -> None:
        depth = 1
        while depth:
            token = self.peek()
            if token.kind == "end":
                raise self.error(f"function {function.name} is not closed", token)
            if self.accept("{"):
                self.open_scope()
                depth += 1
            elif self.accept("}"):
                self.scopes.pop()
                depth -= 1
            elif self.accept(";"):
                continue
            else:
                self.statement(function)

    def statement(self, function: Function) -> None:
        token = self.peek()
        if token.kind == "word" and self.tokens[self.at + 1].text == ":":
            self.label(function)
        elif token.text == ".loc":
            self.location()
        elif token.text == ".file":
            self.file_directive()
        elif token.text == ".reg":
            self.register_declaration()
        elif token.text in (".local", ".shared", ".param", ".global", ".const"):
            self.local_variables(function)
        elif token.text == ".pragma":
            self.skip_statement()
        elif token.text.startswith("."):
            raise self.error(f"unknown directive {token.text!r}")
        else:
            self.instruction(function)

    def label(self, function: Function) -> None:
        token = self.next()
        self.expect(":")
        unique = f"{token.text}@{self.scopes[-1].ident}"
        if self.peek().text in (".branchtargets", ".calltargets"):
            self.next()
            targets = [self.next().text]
            while self.accept(","):
                targets.append(self.next().text)
            self.expect(";")
            function.tables[token.text] = tuple(targets)
            return
        if self.peek().text == ".callprototype":
            self.skip_statement()
            return
        if unique in function.labels:
            raise self.error(f"label {token.text!r} is defined twice", token)
        function.labels[unique] = len(self.module.code)
        self.label_scopes[token.text, self.scopes[-1].ident] = unique

    def location(self) -> None:
        line = self.next().line
        file, row = self.integer(), self.integer()
        while self.peek().line == line:
            self.next()
        if row:  # row 0 means "no line": the last known one says more than nothing
            self.location_now = (file, row)

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

    def local_variables(self, function: Function) -> None:
        for variable in self.variable():
            unique = variable.name if len(self.scopes) == 1 else f"{variable.name}@{self.scopes[-1].ident}"
            self.scopes[-1].symbols[variable.name] = unique
            variable.name = unique
            if variable.space in ("global", "const", "shared"):
                self.place(variable, False)
                self.module.variables[unique] = variable
            else:
                function.locals[unique] = variable

    # ---- instructions
    def instruction(self, function: Function) -> None:
        first = self.peek()
        predicate, negated = None, False
        if self.accept("@"):
            negated = self.accept("!")
            guard = self.operand()
            if not isinstance(guard, Reg) or guard.cls != "p":
                raise self.error("the guard is not a predicate register", first)
            predicate = guard
        token = self.next()
        if token.kind != "word" or token.text[0] in "%$.":
            raise self.error(f"expected an instruction, found {token.text!r}", token)
        mods = tuple(token.text.split("."))
        operands: list[Operand] = []
        if not self.accept(";"):
            while True:
                operands.append(self.operand())
                if self.accept(";"):
                    break
                if not self.accept(","):
                    raise self.error(f"expected ',' or ';', found {self.peek().text!r}")
        end = self.tokens[self.at - 1].end
        text = self.text[first.start : end]
        if "\n" in text or "\t" in text:
            text = " ".join(text.split())
        ins = Instruction(token.text, mods, tuple(operands), predicate, negated, first.line, text, None)
        if mods[0] in ("bra", "brx"):
            self.branches.append((ins, token.line, [s.ident for s in reversed(self.scopes)], function))
        self.module.code.append(ins)
        if self.location_now is not None:
            self.locations[id(ins)] = self.location_now

    def operand(self) -> Operand:
        token = self.next()
        found: Operand
        if token.kind == "number":
            found = Imm(*number(token.text))
        elif token.kind == "word":
            found = self.name(token)
            if isinstance(found, Symbol) and self.peek().text in "+-" and self.peek().kind == "punct":
                self.accept("+")
                return Memory(found, self.integer())
        elif token.text == "-":
            inner = self.operand()
            found = negate(inner) if isinstance(inner, Imm) else Negated(inner)
        elif token.text == "!":
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
            offset = self.integer()
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
        if text == "WARP_SZ":
            return Imm(32)
        return Symbol(text)

    def resolve_branches(self) -> None:
        """Replace the label of each branch by its unique name: the innermost enclosing scope that defines it."""
        for ins, line, scopes, function in self.branches:
            if ins.name == "brx":
                self.resolve_table(ins, function, scopes)
                continue
            target = ins.operands[0]
            if not isinstance(target, Symbol):
                raise ParseError("the target of a branch is a label", line, ins.text)
            ins.operands = (Symbol(self.find_label(target.name, scopes, ins)),)

    def resolve_table(self, ins: Instruction, function: Function, scopes: list[int]) -> None:
        index, table = ins.operands
        if not isinstance(table, Symbol) or table.name not in function.tables:
            raise ParseError("brx.idx without its .branchtargets", ins.line, ins.text)
        ins.operands = (index, Vector(tuple(Symbol(self.find_label(t, scopes, ins)) for t in function.tables[table.name])))

    def find_label(self, name: str, scopes: list[int], ins: Instruction) -> str:
        for ident in scopes:
            if (name, ident) in self.label_scopes:
                return self.label_scopes[name, ident]
        raise ParseError(f"label {name!r} is not defined", ins.line, ins.text)


def negate(imm: Imm) -> Imm:
    """The constant with its sign changed."""
    return Imm(imm.value ^ (1 << imm.real - 1), imm.real) if imm.real else Imm(-imm.value)


def parse(text: str) -> Module:
    """Parse a PTX text. Raises ParseError naming the line of whatever is not understood."""
    parser = Parser(text)
    module = parser.parse()
    for ins in module.code:  # `.file` directives may stand behind their uses
        where = parser.locations.get(id(ins))
        if where is not None:
            ins.source = Source(parser.files.get(where[0], f"file {where[0]}"), where[1])
    return module
