"""How a warp moves: segments, branches and reconvergence, calls, exits, blocking instructions."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np

from tandem_attn.emulator.errors import ExecutionError
from tandem_attn.emulator.machine.in_flight import Watch
from tandem_attn.emulator.machine.team import Team
from tandem_attn.emulator.machine.warp import Blocked, Frame, Warp
from tandem_attn.emulator.memory.faults import Fault
from tandem_attn.emulator.ptx.nodes import Function, Group, Instruction, Operand, Reg, Symbol, Variable
from tandem_attn.emulator.ptx.program import EXIT, Segment

if TYPE_CHECKING:
    from tandem_attn.emulator.machine.machine import Machine

_ALL, _NONE = bytes([1]) * 32, bytes(32)
_YES, _NO = bytes([1]), bytes([0])
TOGETHER = frozenset(("next", "jump", "branch", "block"))  # endings of segments that several warps can execute together
NEVER = -3  # no segment
LONG_RUN = 256  # backward jumps after which a warp lets others run


class Control:
    """Executes warps of one machine."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.program = machine.program
        self.code = machine.program.code
        self.links = machine.launch.links
        self.orders: dict[int, tuple[str, str]] = {}
        self.watch = Watch(machine)
        self.runs = [0] * len(self.program.segments)  # how often each segment was executed, by all warps

    def ordering(self, index: int) -> tuple[str, str]:
        """Memory semantics and scope of an instruction, from its modifiers."""
        found = self.orders.get(index)
        if found is None:
            mods = self.code[index].mods
            kinds = ("weak", "relaxed", "acquire", "release", "acq_rel", "volatile", "mmio")
            semantics = next((m for m in mods if m in kinds), "weak")
            if mods[0] in ("atom", "red") and semantics == "weak":
                semantics = "relaxed"
            scope = next((m for m in mods if m in ("cta", "cluster", "gpu", "sys")), "gpu" if semantics not in ("weak",) else "")
            found = self.orders[index] = (semantics, scope)
        return found

    def opcodes(self) -> Counter[str]:
        """How often each instruction, by its dotted name, was executed."""
        found: Counter[str] = Counter()
        for segment, count in zip(self.program.segments, self.runs, strict=True):
            if count:
                for ins in self.code[segment.start : segment.end]:
                    found[ins.opcode] += count
        return found

    def run(self, warp: Warp, until: int = NEVER) -> bool:  # noqa: PLR0912, PLR0915 - the inner loop of the machine stays in one function
        """Until the warp blocks, yields or ends; or is whole and comes to segment `until`: True then."""
        segments = self.program.segments
        functions = self.machine.segments
        settled = functions.settled
        suspicious = self.watch.suspicious
        runs = self.runs
        stack = warp.stack
        jumps = 0
        random_order = self.machine.schedule == "random"
        path = self.machine.trace.warp(warp.agent).segments if self.machine.trace is not None else None
        while True:
            frame = stack[-1]
            at = frame.segment
            if at in (frame.stop, EXIT):
                if self.pop(warp):
                    return False
                continue
            if at == until and len(stack) == 1 and frame.mask is None:
                return True
            segment = segments[at]
            if path is not None:
                path.append(at)
            if warp.flight.items or warp.unwritten or at in suspicious:
                self.watch.check(warp, segment)
            function = settled[at] if frame.mask is None else None
            if function is not None:
                function(warp, None)
            else:
                functions.run(segment, warp, frame.mask)
            warp.instructions += segment.end - segment.start
            runs[at] += 1
            kind = segment.kind
            if kind in ("next", "jump"):
                frame.segment = segment.targets[0]
            elif kind == "branch":
                self.branch(warp, frame, segment)
            elif kind == "block":
                if self.block(warp, frame, segment):
                    warp.instructions -= 1  # it is executed again when the warp is woken
                    runs[at] -= 1
                    if path is not None:
                        path.pop()
                    return False
            else:
                getattr(self, kind)(warp, frame, segment)
            if warp.yielding:
                warp.yielding = False
                self.rotate(warp)
                self.machine.yielded(warp)
                return False
            if stack and stack[-1].segment <= at:
                jumps += 1
                if jumps >= LONG_RUN:
                    self.rotate(warp)
                    self.machine.yielded(warp)
                    return False
            if random_order and self.machine.rng.random() < 0.1:
                self.machine.enter(warp)
                return False

    # ---- several warps
    def run_team(self, team: Team) -> list[Warp]:
        """Until a warp blocks, yields or ends, or their ways part; returns those that go on alone."""
        segments, functions, teams = self.program.segments, self.machine.segments, self.machine.segments.teams
        warps, suspicious, runs = team.warps, self.watch.suspicious, self.runs
        frames = [warp.stack[0] for warp in warps]
        jumps = 0
        while jumps < LONG_RUN:
            at = frames[0].segment
            segment = segments[at]
            if at == EXIT or segment.kind not in TOGETHER:
                return warps
            count = segment.end - segment.start
            runs[at] += team.count
            for warp in warps:
                if warp.flight.items or warp.unwritten or at in suspicious:
                    self.watch.check(warp, segment)
                warp.instructions += count
            function = teams[at]
            if function is not None:
                function(team, None)
            else:
                functions.run_team(segment, team)
            if not self.leave_segment(team, frames, segment):
                return []
            jumps += frames[0].segment <= at
        for warp in warps:
            self.machine.yielded(warp)
        return []

    def leave_segment(self, team: Team, frames: list[Frame], segment: Segment) -> bool:
        """Execute the segment's last instruction; False when the warps do not go on together (each is seen to)."""
        if segment.kind == "branch":
            return self.branch_team(team, frames, segment)
        if segment.kind == "block":
            done = self.block_together(team, frames, segment)
            return self.block_team(team, frames, segment) if done is None else done
        for frame in frames:
            frame.segment = segment.targets[0]
        return True

    def branch_team(self, team: Team, frames: list[Frame], segment: Segment) -> bool:
        """True when all go the same way, at once or behind the branch."""
        ins = self.code[segment.last]
        there, behind = segment.targets
        assert ins.predicate is not None
        guard = team.P[ins.predicate.slot].tobytes()
        if _YES not in guard or _NO not in guard:
            target = there if (_YES in guard) != ins.negated else behind
            for frame in frames:
                frame.segment = target
            return True
        arrived = []
        for warp, frame in zip(team.warps, frames, strict=True):
            team.acting = warp
            self.branch(warp, frame, segment)
            if self.run(warp, segment.reconverge if segment.reconverge != EXIT else NEVER):
                arrived.append(warp)
        if len(arrived) == team.count:
            return True
        for warp in arrived:
            self.machine.enter(warp)
        return False

    def block_together(self, team: Team, frames: list[Frame], segment: Segment) -> bool | None:
        """By the instruction's form for several warps: whether they go on or all wait; None where there is none that fits."""
        form = getattr(self.machine.segments.handler(segment.last), "together", None)
        if form is None or self.code[segment.last].predicate is not None:
            return None
        team.acting = team.first
        done = form(team)
        if done is False:
            return None
        if done is True:
            for frame in frames:
                frame.segment = segment.targets[0]
            return True
        self.runs[segment.index] -= team.count
        for warp, frame in zip(team.warps, frames, strict=True):
            warp.instructions -= 1  # it is executed again when the warp is woken
            warp.current = segment.last
            frame.waits = True
            self.machine.blocked(warp, done)
        return False

    def block_team(self, team: Team, frames: list[Frame], segment: Segment) -> bool:
        """One warp after the other; True when none has to wait (any longer)."""
        waiting = []
        for warp, frame in zip(team.warps, frames, strict=True):
            team.acting = warp
            if self.block(warp, frame, segment):
                waiting.append((warp, frame))
        while woken := [pair for pair in waiting if pair[0].queued]:  # a later warp has opened what earlier ones wait for
            for pair in woken:
                warp, frame = pair
                team.acting = warp
                warp.queued = False
                if not self.block(warp, frame, segment):
                    waiting.remove(pair)
        spinning = [warp for warp in team.warps if warp.yielding]
        if not waiting and not spinning:
            return True
        for warp in spinning:
            warp.yielding = False
            self.machine.yielded(warp)
        for warp, _ in waiting:
            warp.instructions -= 1  # it is executed again when the warp is woken
            self.runs[segment.index] -= 1
        held = {id(warp) for warp, _ in waiting} | {id(warp) for warp in spinning}
        for warp in team.warps:
            if id(warp) not in held:
                self.machine.enter(warp)
        return False

    # ---- the stack
    def pop(self, warp: Warp) -> bool:
        """A path has reached its stop; True when the warp has ended."""
        warp.stack.pop()
        if not warp.stack:
            self.machine.exited(warp)
            return True
        return False

    def rotate(self, warp: Warp) -> bool:
        """Of two divergent paths that both wait to reconverge, run the other one next, so that a spinning path cannot starve it."""
        stack = warp.stack
        if len(stack) > 1 and stack[-2].waits:
            return False
        if (
            len(stack) > 2
            and stack[-2].stop == stack[-1].stop
            and not stack[-1].call
            and not stack[-2].call
            and stack[-2].segment != stack[-2].stop
        ):
            stack[-1], stack[-2] = stack[-2], stack[-1]
            return True
        return False

    def lanes_of(self, frame: Frame) -> np.ndarray[Any, Any]:
        return frame.mask if frame.mask is not None else np.ones(32, np.bool_)

    def taken(self, warp: Warp, frame: Frame, ins: Instruction) -> np.ndarray[Any, Any]:
        """The active lanes whose guard holds."""
        if ins.predicate is None:
            return self.lanes_of(frame)
        guard = warp.P[ins.predicate.slot]
        guard = ~guard if ins.negated else guard.copy()
        return guard if frame.mask is None else guard & frame.mask

    def branch(self, warp: Warp, frame: Frame, segment: Segment) -> None:
        ins = self.code[segment.last]
        there, behind = segment.targets
        if frame.mask is None and ins.predicate is not None:
            guard = warp.P[ins.predicate.slot].tobytes()
            if guard in (_ALL, _NONE):  # the usual case: all lanes agree
                frame.segment = there if (guard == _ALL) != ins.negated else behind
                return
        taken = self.taken(warp, frame, ins)
        count = int(np.count_nonzero(taken))
        if count == 0:
            frame.segment = behind
            return
        if count == (32 if frame.mask is None else int(np.count_nonzero(frame.mask))):
            frame.segment = there
            return
        rest = ~taken if frame.mask is None else frame.mask & ~taken
        stop = segment.reconverge
        frame.segment = stop
        if behind != stop:
            warp.stack.append(Frame(behind, stop, rest))
        if there != stop:
            warp.stack.append(Frame(there, stop, taken))

    def table(self, warp: Warp, frame: Frame, segment: Segment) -> None:
        """brx.idx: one target per index."""
        ins = self.code[segment.last]
        reg = ins.operands[0]
        assert isinstance(reg, Reg)
        index = warp.Ru[reg.slot] if frame.mask is None else warp.Ru[reg.slot][frame.mask]
        if int(index.max()) >= len(segment.targets):
            warp.current = segment.last
            raise Fault("undefined", f"brx.idx with index {int(index.max())} of {len(segment.targets)} targets")
        distinct = np.unique(index)
        if len(distinct) == 1:
            frame.segment = segment.targets[int(distinct[0])]
            return
        frame.segment = segment.reconverge
        lanes = self.lanes_of(frame)
        for value in distinct:
            warp.stack.append(Frame(segment.targets[int(value)], segment.reconverge, lanes & (warp.Ru[reg.slot] == value)))

    # ---- calls and ends
    def call(self, warp: Warp, frame: Frame, segment: Segment) -> None:
        ins = self.code[segment.last]
        lanes = self.taken(warp, frame, ins)
        frame.segment = segment.targets[0]
        if not lanes.any():
            return
        mask = frame.mask if ins.predicate is None else lanes
        groups = [o for o in ins.operands if isinstance(o, Group)]
        callee = next(o for o in ins.operands if isinstance(o, Symbol))
        first = isinstance(ins.operands[0], Group)
        results: tuple[Operand, ...] = groups[0].items if first else ()
        given: tuple[Operand, ...] = groups[-1].items if len(groups) > first else ()
        caller = segment.function
        warp.current = segment.last
        if callee.name not in self.program.entries:
            self.external(warp, mask, callee.name, [self.links.local_offsets[caller.name, o.name] for o in given if isinstance(o, Symbol)])
            return
        function = self.program.module.functions[callee.name]
        mark = -2 - self.program.entries[callee.name]
        if any(f.call and f.stop == mark for f in warp.stack):
            raise ExecutionError(f"recursion into {callee.name} is not supported")
        for operand, parameter in zip(given, function.params, strict=True):
            self.copy_argument(warp, mask, (caller, operand), (function, self.place(function, parameter)), parameter.size)
        bottom = Frame(self.program.entries[callee.name], mark, mask, call=True)
        bottom.returns = [
            ((function, self.place(function, r)), (caller, o), r.size) for r, o in zip(function.results, results, strict=True)
        ]
        warp.stack.append(bottom)

    def place(self, function: Function, variable: Variable) -> Operand:
        """A parameter or result as an operand inside its function."""
        return function.registers.get(variable.name) or Symbol(variable.name)

    def copy_argument(self, warp: Warp, mask: Any, source: tuple[Function, Operand], target: tuple[Function, Operand], size: int) -> None:
        """Between registers, or between variables in the thread's local memory."""
        a, b = source[1], target[1]
        if isinstance(b, Reg):
            warp.put(b, warp.get(a) if isinstance(a, Reg) else np.full(32, getattr(a, "value", 0), warp.get(b).dtype), mask)
            return
        if not isinstance(a, Symbol) or not isinstance(b, Symbol):
            raise ExecutionError("a call that passes a register for a .param argument")
        start, end = self.links.local_offsets[source[0].name, a.name], self.links.local_offsets[target[0].name, b.name]
        lanes = np.arange(32) if mask is None else np.flatnonzero(mask)
        warp.local[lanes, end : end + size] = warp.local[lanes, start : start + size]

    def external(self, warp: Warp, mask: Any, name: str, offsets: list[int]) -> None:
        """Functions of the runtime: __assertfail (CUDA programming guide, "Assertion") and vprintf."""
        lane = 0 if mask is None else int(mask.argmax())
        if name == "__assertfail":
            message, file, line, function = (warp.local[lane, o : o + 8].copy() for o in offsets[:4])
            texts = [self.text_at(int(v.view(np.uint64)[0])) for v in (message, file, function)]
            raise Fault("assert", f"lane {lane}: {texts[0]} [{texts[1]}:{int(line.view(np.uint32)[0])}, {texts[2]}]")
        if name != "vprintf":
            raise ExecutionError(f"the function {name} has no body in this PTX")

    def text_at(self, address: int) -> str:
        if not address:
            return ""
        found = self.machine.memory.find(address, 1)
        data = found.data[address - found.base :].tobytes()
        return data.split(b"\0", 1)[0].decode(errors="replace")

    def leave(self, warp: Warp, frame: Frame, segment: Segment, bottom: int) -> None:
        """Take lanes out of every frame from `bottom` up: they have returned or exited."""
        ins = self.code[segment.last]
        gone = self.taken(warp, frame, ins)
        if not gone.any():
            frame.segment = segment.targets[0]
            return
        kept = []
        for entry in warp.stack[bottom:]:
            left = self.lanes_of(entry) & ~gone
            if left.any():
                entry.mask = left
                if entry is frame:
                    entry.segment = segment.targets[0]
                kept.append(entry)
        warp.stack[bottom:] = kept

    def exit(self, warp: Warp, frame: Frame, segment: Segment) -> None:
        gone = self.taken(warp, frame, self.code[segment.last])
        alive = np.ones(32, np.bool_) if warp.alive is None else warp.alive
        warp.alive = alive & ~gone
        self.leave(warp, frame, segment, 0)
        if not warp.stack:
            warp.alive = gone  # the last lanes: what the barriers must count out
            warp.stack.append(Frame(EXIT, EXIT, None))

    def ret(self, warp: Warp, frame: Frame, segment: Segment) -> None:
        bottom = next((i for i in range(len(warp.stack) - 1, -1, -1) if warp.stack[i].call), None)
        if bottom is None:
            self.exit(warp, frame, segment)
            return
        ins = self.code[segment.last]
        gone = self.taken(warp, frame, ins)
        for source, target, size in warp.stack[bottom].returns:
            self.copy_argument(warp, gone, source, target, size)
        self.leave(warp, frame, segment, bottom)

    def trap(self, warp: Warp, frame: Frame, segment: Segment) -> None:
        if not self.taken(warp, frame, self.code[segment.last]).any():
            frame.segment = segment.targets[0]
            return
        warp.current = segment.last
        raise Fault("trap", "the kernel executes a trap (compilers leave one where a kernel exceeds a capacity)")

    # ---- blocking instructions
    def block(self, warp: Warp, frame: Frame, segment: Segment) -> bool:
        """Execute the instruction; True when the warp must wait (it is then entered in what it waits for)."""
        ins = self.code[segment.last]
        mask = frame.mask
        if ins.predicate is not None:
            mask = self.taken(warp, frame, ins)
            if not mask.any():
                frame.segment = segment.targets[0]
                return False
            if mask.all():
                mask = None
        warp.current = segment.last
        why = self.machine.segments.handler(segment.last)(warp, mask)
        if why is None:
            frame.segment = segment.targets[0]
            return False
        assert isinstance(why, Blocked)
        frame.waits = True
        if self.rotate(warp):  # the other side of a divergent branch goes on
            return False
        self.machine.blocked(warp, why)
        return True
