"""Module -> segments: straight-line pieces cut at branches, labels and blocking instructions, with reconvergence and liveness."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tandem_attn.emulator.errors import ParseError
from tandem_attn.emulator.ptx.nodes import Function, Instruction, Module, Reg, Symbol, Vector
from tandem_attn.emulator.ptx.operands import results, sources

EXIT = -1  # the segment index that stands for "the function has returned"

_CONTROL = frozenset(("bra", "brx", "ret", "exit", "trap", "call"))
# Instructions that may block, or after which another warp should get its turn.
_BLOCKING = (
    "mbarrier.try_wait", "mbarrier.test_wait", "barrier.", "bar.", "wgmma.wait_group", "cp.async.wait", "cp.async.bulk.wait_group",
    "setmaxnreg", "tcgen05.wait", "tcgen05.alloc", "nanosleep", "griddepcontrol.wait", "atom",
    "clusterlaunchcontrol.try_cancel",
)  # fmt: skip


def is_blocking(ins: Instruction) -> bool:
    """Whether an instruction ends its segment although control goes on behind it."""
    if ins.opcode.startswith("tcgen05.ld"):  # a judge of its registers must know whether it was executed
        return ins.predicate is not None
    return ins.opcode.startswith(_BLOCKING) and not ins.opcode.startswith("bar.warp")


@dataclass(slots=True)
class Segment:
    """Instructions code[start:end]. `kind` says how it ends:

    "next", "jump" (targets[0]), "branch" (taken targets[0], else targets[1]), "table" (brx.idx), "call" (behind: targets[0]), "ret",
    "exit", "trap" or "block" (its only instruction may block; behind: targets[0]).
    """

    index: int
    start: int
    end: int
    kind: str
    targets: tuple[int, ...]
    function: Function
    reconverge: int = EXIT
    live_out: frozenset[Reg] = frozenset()
    live_in: frozenset[Reg] = frozenset()
    touched: frozenset[Reg] = frozenset()
    last: int = field(init=False)

    def __post_init__(self) -> None:
        self.last = self.end - 1


@dataclass(slots=True)
class Program:
    """A module cut into segments."""

    module: Module
    segments: list[Segment]
    entries: dict[str, int]  # function -> its first segment
    at: dict[int, int] = field(default_factory=dict)  # instruction index -> segment that starts there
    exposed: frozenset[Reg] = frozenset()  # registers that some path may read before any write
    engines: dict[str, Any] = field(default_factory=dict)  # executable forms by backend, kept between runs
    uses: dict[int, Any] = field(default_factory=dict)  # what `machine.in_flight` knows of segments
    findings: list[Any] | None = None  # reports of the checks of the text alone, once made

    @property
    def code(self) -> list[Instruction]:
        return self.module.code


def build(module: Module) -> Program:
    """Cut every function of a module into segments."""
    program = Program(module, [], {})
    exposed: set[Reg] = set()
    for function in module.functions.values():
        if function.end > function.start:
            exposed |= _add_function(program, function)
    program.exposed = frozenset(exposed)
    return program


def _aims(ins: Instruction) -> list[str]:
    """Labels that an instruction may go to; compilers leave many more, for the debugger."""
    if ins.name == "bra":
        return [o.name for o in ins.operands[:1] if isinstance(o, Symbol)]
    if ins.name == "brx" and isinstance(ins.operands[1], Vector):
        return [o.name for o in ins.operands[1].items if isinstance(o, Symbol)]
    return []


def _leaders(module: Module, function: Function) -> list[int]:
    leaders = {function.start}
    for i in range(function.start, function.end):
        ins = module.code[i]
        leaders |= {function.labels[name] for name in _aims(ins)}
        if ins.name in _CONTROL:
            leaders.add(i + 1)
        elif is_blocking(ins):
            leaders |= {i, i + 1}
    return sorted(x for x in leaders if function.start <= x < function.end)


def _add_function(program: Program, function: Function) -> set[Reg]:
    leaders = _leaders(program.module, function)
    first = len(program.segments)
    number = {start: first + i for i, start in enumerate(leaders)}
    program.entries[function.name] = first
    program.at |= number
    for i, start in enumerate(leaders):
        end = leaders[i + 1] if i + 1 < len(leaders) else function.end
        behind = first + i + 1 if i + 1 < len(leaders) else EXIT
        kind, targets = _ending(program.module.code[end - 1], behind, number, function)
        program.segments.append(Segment(first + i, start, end, kind, targets, function))
    own = program.segments[first:]
    _reconvergence(own, first)
    return _liveness(program.module, own, first)


def _ending(ins: Instruction, behind: int, number: dict[int, int], function: Function) -> tuple[str, tuple[int, ...]]:
    def target(operand: object) -> int:
        assert isinstance(operand, Symbol)
        return number.get(function.labels[operand.name], EXIT)

    if ins.name == "bra":
        taken = target(ins.operands[0])
        return ("jump", (taken,)) if ins.predicate is None else ("branch", (taken, behind))
    if ins.name == "brx":
        table = ins.operands[1]
        if ins.predicate is not None or not isinstance(table, Vector):
            raise ParseError("a predicated brx.idx is not supported", ins.line, ins.text)
        return "table", tuple(target(item) for item in table.items)
    if ins.name in ("ret", "exit", "trap", "call"):
        return ins.name, (behind,)
    return ("block" if is_blocking(ins) else "next"), (behind,)


def _reconvergence(segments: list[Segment], first: int) -> None:
    """Immediate post-dominators (Cooper, Harvey, Kennedy: A Simple, Fast Dominance Algorithm, on the reversed graph)."""
    count = len(segments)
    after = [[t - first if t != EXIT else count for t in _flow(s)] for s in segments]
    before: list[list[int]] = [[] for _ in range(count + 1)]
    for i, targets in enumerate(after):
        for t in targets:
            before[t].append(i)
    order, seen, stack = [], {count}, [(count, iter(before[count]))]
    while stack:  # post-order of the reversed graph
        node, rest = stack[-1]
        step = next((n for n in rest if n not in seen), None)
        if step is None:
            order.append(node)
            stack.pop()
        else:
            seen.add(step)
            stack.append((step, iter(before[step])))
    rank = {node: i for i, node in enumerate(order)}
    idom = {count: count}

    def meet(a: int, b: int) -> int:
        while a != b:
            while rank[a] < rank[b]:
                a = idom[a]
            while rank[b] < rank[a]:
                b = idom[b]
        return a

    changed = True
    while changed:
        changed = False
        for node in reversed(order[:-1]):
            known = [t for t in after[node] if t in idom]
            best = known[0]
            for t in known[1:]:
                best = meet(best, t)
            if idom.get(node) != best:
                idom[node] = best
                changed = True
    for i, segment in enumerate(segments):  # a segment that never reaches the exit reconverges there
        found = idom.get(i, count)
        segment.reconverge = EXIT if found == count else found + first


def _flow(segment: Segment) -> tuple[int, ...]:
    return (EXIT, *segment.targets) if segment.kind in ("ret", "exit", "trap") else segment.targets


def _liveness(module: Module, segments: list[Segment], first: int) -> set[Reg]:
    """Fill live_in, live_out and touched; return the registers live at the function's start."""
    names: dict[Reg, int] = {}
    regs: list[Reg] = []
    use, define = [], []
    for segment in segments:
        used = defined = touched = 0
        for i in range(segment.start, segment.end):
            ins = module.code[i]
            for reg in sources(ins):
                bit = 1 << _number(reg, names, regs)
                touched |= bit
                if not defined & bit:
                    used |= bit
            for reg in results(ins):
                bit = 1 << _number(reg, names, regs)
                touched |= bit
                if ins.predicate is None:
                    defined |= bit
        use.append(used)
        define.append(defined)
        segment.touched = _members(touched, regs)
    kept = sum(1 << _number(reg, names, regs) for reg in segments[0].function.registers.values())
    live_in = [0] * len(segments)
    live_out = [0] * len(segments)
    changed = True
    while changed:
        changed = False
        for i in range(len(segments) - 1, -1, -1):
            out = kept if segments[i].kind == "ret" else 0
            for t in _flow(segments[i]):
                if t != EXIT:
                    out |= live_in[t - first]
            new = use[i] | (out & ~define[i])
            if new != live_in[i] or out != live_out[i]:
                live_in[i], live_out[i], changed = new, out, True
    for i, segment in enumerate(segments):
        segment.live_in, segment.live_out = _members(live_in[i], regs), _members(live_out[i], regs)
    return set(segments[0].live_in)


def _number(reg: Reg, names: dict[Reg, int], regs: list[Reg]) -> int:
    if reg not in names:
        names[reg] = len(regs)
        regs.append(reg)
    return names[reg]


def _members(bits: int, regs: list[Reg]) -> frozenset[Reg]:
    found = []
    while bits:
        low = bits & -bits
        found.append(regs[low.bit_length() - 1])
        bits ^= low
    return frozenset(found)
