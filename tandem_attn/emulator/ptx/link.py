"""Gives special registers, symbols and local variables their places, so that generated code sees registers only."""

from __future__ import annotations

from dataclasses import dataclass, field

from tandem_attn.emulator.errors import ParseError
from tandem_attn.emulator.memory.addresses import PARAM_WINDOW
from tandem_attn.emulator.ptx.nodes import Function, Group, Instruction, Memory, Negated, Operand, Pair, Reg, Special, Symbol, Vector
from tandem_attn.emulator.ptx.program import Program

_WIDE = ("%clock64", "%globaltimer", "%gridid", "%current_graph_exec")


@dataclass(slots=True)
class Links:
    """`registers`: name of a special register or symbol -> the register that holds it; `values`: symbols known without a launch."""

    slots: dict[str, int]
    registers: dict[str, Reg] = field(default_factory=dict)
    values: dict[str, int] = field(default_factory=dict)
    local_offsets: dict[tuple[str, str], int] = field(default_factory=dict)  # (function, variable) -> offset in the thread's local memory
    local_bytes: int = 16

    def place(self, name: str, cls: str) -> None:
        if name not in self.registers:
            self.registers[name] = Reg(name, {"r": "u32", "d": "u64"}[cls], cls, self.slots[cls])
            self.slots[cls] += 1


def link(program: Program) -> Links:
    """Resolve every name. Raises ParseError naming the line of an undefined one."""
    links = Links(dict(program.module.slots))
    for function in program.module.functions.values():
        _place_locals(links, function)
    for function in program.module.functions.values():
        for ins in program.code[function.start : function.end]:
            if ins.name == "call":
                continue
            if ins.name == "isspacep":
                links.place("%cluster_ctarank", "r")
            ins.operands = tuple(_resolve(links, program, function, ins, o) for o in ins.operands)
    links.local_bytes = -(-links.local_bytes // 16) * 16
    return links


def _place_locals(links: Links, function: Function) -> None:
    for variable in function.locals.values():
        if function.entry and variable in function.params:
            links.values[f"{function.name}:{variable.name}"] = PARAM_WINDOW + variable.offset
            continue
        align = max(variable.align, 8)
        links.local_bytes = -(-links.local_bytes // align) * align
        links.local_offsets[function.name, variable.name] = links.local_bytes
        links.values[f"{function.name}:{variable.name}"] = links.local_bytes
        links.local_bytes += max(variable.size, 8)


def _resolve(  # noqa: PLR0911 - one return per kind of operand
    links: Links, program: Program, function: Function, ins: Instruction, operand: Operand
) -> Operand:
    if isinstance(operand, Special):
        links.place(operand.name, "d" if operand.name in _WIDE else "r")
        return links.registers[operand.name]
    if isinstance(operand, Symbol):
        if ins.name in ("bra", "brx"):
            return operand
        return _symbol(links, program, function, ins, operand)
    if isinstance(operand, Memory):
        base = _resolve(links, program, function, ins, operand.base)
        return Memory(base, operand.offset, tuple(_resolve(links, program, function, ins, o) for o in operand.more))
    if isinstance(operand, Vector):
        return operand if ins.name == "brx" else Vector(tuple(_resolve(links, program, function, ins, o) for o in operand.items))
    if isinstance(operand, Group):
        return Group(tuple(_resolve(links, program, function, ins, o) for o in operand.items))
    if isinstance(operand, Pair):
        return Pair(*(_resolve(links, program, function, ins, o) for o in (operand.first, operand.second)))
    if isinstance(operand, Negated):
        return Negated(_resolve(links, program, function, ins, operand.operand))
    return operand


def _symbol(links: Links, program: Program, function: Function, ins: Instruction, symbol: Symbol) -> Operand:
    local = f"{function.name}:{symbol.name}"
    if local in links.values:
        name = local
        if ins.name in ("ld", "st") and "param" in ins.mods and (function.name, symbol.name) in links.local_offsets:
            _as_local(ins)
    elif symbol.name in program.module.variables:
        name = symbol.name
    elif symbol.name in program.module.functions:
        raise ParseError("addresses of functions are not supported", ins.line, ins.text)
    else:
        raise ParseError(f"{symbol.name!r} is not defined", ins.line, ins.text)
    links.place(name, "d")
    return links.registers[name]


def _as_local(ins: Instruction) -> None:
    """Parameters of calls live in the thread's local memory; only the kernel's own are in the parameter window."""
    ins.mods = tuple("local" if m.startswith("param") else m for m in ins.mods)
    ins.opcode = ".".join(ins.mods)
