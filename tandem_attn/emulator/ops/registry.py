"""The table of instructions: opcode prefix -> semantic. The longest prefix wins, so `mov.b128` may differ from `mov`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from tandem_attn.emulator.codegen.builder import Builder
from tandem_attn.emulator.errors import UnsupportedInstruction
from tandem_attn.emulator.ptx.nodes import Instruction

Pure = Callable[[Builder, Instruction], None]
Handler = Callable[[Any, Any], Any]  # (warp, mask or None) -> None, or Blocked
Factory = Callable[[Instruction], Handler]
# (team) -> True: the instruction is executed in all warps; False: the handler is to be called for each; Blocked: all of them wait.
Together = Callable[[Any], Any]


@dataclass(frozen=True, slots=True)
class Entry:
    """`pure` for instructions described by primitives, `machine` for those that act on the machine; `section` of the PTX manual."""

    pure: Pure | None
    machine: Factory | None
    section: str


TABLE: dict[str, Entry] = {}


def pure(*prefixes: str, section: str) -> Callable[[Pure], Pure]:
    """Register the semantic of instructions that only compute."""

    def register(semantic: Pure) -> Pure:
        for prefix in prefixes:
            TABLE[prefix] = Entry(semantic, None, section)
        return semantic

    return register


def machine(*prefixes: str, section: str) -> Callable[[Factory], Factory]:
    """Register the factory of a handler: called once per instruction, it returns what runs each time."""

    def register(factory: Factory) -> Factory:
        for prefix in prefixes:
            TABLE[prefix] = Entry(None, factory, section)
        return factory

    return register


def together(handler: Handler, form: Together) -> Handler:
    """Give a handler a form for several warps (`machine.team.Team`) with all their lanes."""
    handler.together = form  # type: ignore[attr-defined]
    return handler


_CLOCKS = ("%clock", "%globaltimer")


@cache
def _lookup(opcode: str) -> Entry | None:
    parts = [part.split("::")[0] for part in opcode.split(".")]
    for end in range(len(parts), 0, -1):
        found = TABLE.get(".".join(parts[:end]))
        if found is not None:
            return found
    return None


def lookup(ins: Instruction) -> Entry:
    """The table's entry. Raises UnsupportedInstruction naming the line."""
    opcode = ins.opcode
    if ins.name == "mov" and len(ins.operands) == 2 and getattr(ins.operands[1], "name", "").startswith(_CLOCKS):
        opcode = "mov.clock"
    found = _lookup(opcode)
    if found is None:
        raise UnsupportedInstruction(f"{ins.opcode} is not known", ins.line, ins.text)
    return found
