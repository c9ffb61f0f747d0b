"""Groups of asynchronous operations: bulk, cp.async, wgmma. PTX manual, "Async-group mechanism"."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from tandem_attn.emulator.events import GroupCommit, GroupWait
from tandem_attn.emulator.machine.async_ops import AsyncOp
from tandem_attn.emulator.machine.warp import Blocked, Warp
from tandem_attn.emulator.ops.access import Array, lanes_of, uniform
from tandem_attn.emulator.ops.registry import Handler, machine
from tandem_attn.emulator.ptx.nodes import Instruction


@dataclass(slots=True)
class Groups:
    """Of one lane (bulk, cp.async) or warp (wgmma): operations not yet committed, and the committed groups in order."""

    open: list[AsyncOp] = field(default_factory=list)
    committed: list[list[AsyncOp]] = field(default_factory=list)
    done: int = 0  # groups known to be complete, and dropped from the front of `committed`


def groups_of(w: Warp, kind: str, lane: int) -> Groups:
    found: Groups | None = w.groups.get((kind, lane))
    if found is None:
        found = w.groups[kind, lane] = Groups()
    return found


def add_to_group(w: Warp, kind: str, lanes: Iterable[int], op: AsyncOp) -> None:
    for lane in lanes:
        groups_of(w, kind, int(lane)).open.append(op)


def commit(w: Warp, kind: str, lanes: Array, index: int) -> None:
    """The open operations of each lane become a group (an empty one where there are none)."""
    engine = w.cta.machine
    for lane in lanes:
        groups = groups_of(w, kind, int(lane))
        groups.committed.append(groups.open)
        if engine.observed:
            members = tuple(op.agent for op in groups.open if op.agent is not None)
            number = groups.done + len(groups.committed) - 1
            engine.emit(GroupCommit(w.agent, engine.site(index), kind, 1 << int(lane), number, members))
        groups.open = []


def wait(w: Warp, kind: str, lanes: Array, keep: int, read: bool, index: int) -> Blocked | None:
    """Block until at most `keep` groups of each lane are pending (`read`: have unread sources)."""
    engine = w.cta.machine
    for lane in lanes:
        groups = groups_of(w, kind, int(lane))
        count = len(groups.committed) - keep
        for group in groups.committed[: max(0, count)]:
            for op in group:
                if not (op.read_done if read else op.done):
                    op.waiters.append(w)
                    return Blocked(f"waits for {op.kind} of PTX line {engine.site(op.index).ptx_line} ({kind} group)")
        if count > 0:
            if engine.observed:
                members = tuple(op.agent for group in groups.committed[:count] for op in group if op.agent is not None)
                last = groups.done + count - 1
                engine.emit(GroupWait(w.agent, engine.site(index), kind, 1 << int(lane), last, read, members))
            if not read:
                groups.done += count
                del groups.committed[:count]
    return None


@machine("cp.async.bulk.commit_group", section="Data Movement: cp.async.bulk.commit_group")
def bulk_commit(ins: Instruction) -> Handler:
    def run(w: Warp, m: Array | None) -> None:
        commit(w, "bulk", lanes_of(m), ins.index)

    return run


@machine("cp.async.bulk.wait_group", section="Data Movement: cp.async.bulk.wait_group")
def bulk_wait(ins: Instruction) -> Handler:
    keep = uniform(ins.operands[0])
    read = ins.has("read")

    def run(w: Warp, m: Array | None) -> Blocked | None:
        return wait(w, "bulk", lanes_of(m), keep(w, m), read, ins.index)

    return run


@machine("cp.async.commit_group", section="Data Movement: cp.async.commit_group")
def async_commit(ins: Instruction) -> Handler:
    def run(w: Warp, m: Array | None) -> None:
        commit(w, "cp.async", lanes_of(m), ins.index)

    return run


@machine("cp.async.wait_group", "cp.async.wait_all", section="Data Movement: cp.async.wait_group, cp.async.wait_all")
def async_wait(ins: Instruction) -> Handler:
    """wait_all commits what is open and waits for everything."""
    everything = ins.mods[2] == "wait_all"
    keep = uniform(ins.operands[0]) if ins.operands else None

    def run(w: Warp, m: Array | None) -> Blocked | None:
        lanes = lanes_of(m)
        if everything:
            for lane in lanes:
                groups = groups_of(w, "cp.async", int(lane))
                if groups.open:
                    commit(w, "cp.async", lanes, ins.index)
                    break
        return wait(w, "cp.async", lanes, keep(w, m) if keep is not None else 0, False, ins.index)

    return run
