"""PTX text -> Module. Scopes, local labels, inline assembly, functions and calls, data; anything else is a ParseError."""

from __future__ import annotations

from tandem_attn.emulator.errors import ParseError
from tandem_attn.emulator.ptx.declarations import SPACES
from tandem_attn.emulator.ptx.nodes import Function, Instruction, Module, Operand, Reg, Symbol, Variable, Vector
from tandem_attn.emulator.ptx.operand_parser import OperandParser, Scope
from tandem_attn.emulator.report import Source

_LINKAGE = (".visible", ".extern", ".weak", ".common")
_ENTRY_DIRECTIVES = (".reqntid", ".maxntid", ".minnctapersm", ".maxnreg", ".maxnctapersm", ".reqnctapercluster", ".maxclusterrank")
_FLAG_DIRECTIVES = (".explicitcluster", ".noreturn", ".blocksareclusters")


class Parser(OperandParser):
    """Recursive descent over the tokens of one module: its statements, functions and instructions."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.files: dict[int, str] = {}
        self.scope_count = 0
        self.location_now: tuple[int, int] | None = None  # (file, line) of the last .loc
        self.locations: dict[int, tuple[int, int]] = {}  # of each instruction, by id
        self.function: Function | None = None
        self.branches: list[tuple[Instruction, int, list[int], Function]] = []
        self.label_scopes: dict[tuple[str, int], str] = {}

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
        elif word in SPACES:
            for variable in self.variable():
                self.place(variable, ".extern" in linkage)
                self.module.variables[variable.name] = variable
        else:
            raise self.error(f"unknown directive or statement {word!r}")

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
        self.scopes.append(Scope(self.scope_count))
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
                operands.append(self.operand(arguments=mods[0] == "call"))
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


def parse(text: str) -> Module:
    """Parse a PTX text. Raises ParseError naming the line of whatever is not understood."""
    parser = Parser(text)
    module = parser.parse()
    for ins in module.code:  # `.file` directives may stand behind their uses
        where = parser.locations.get(id(ins))
        if where is not None:
            ins.source = Source(parser.files.get(where[0], f"file {where[0]}"), where[1])
    return module
