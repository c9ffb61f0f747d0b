"""Asynchronous operations: issued by an instruction, carried out when the schedule says so."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tandem_attn.emulator.events import AsyncAgent, Complete, Issue

if TYPE_CHECKING:
    from tandem_attn.emulator.machine.machine import Machine
    from tandem_attn.emulator.machine.warp import Warp

SCHEDULES = ("at-issue", "latest", "random")


@dataclass(slots=True, eq=False)
class AsyncOp:
    """One operation. `stages` are carried out one after the other: a store first reads its source, later writes.

    `order`: operations with the same key take effect in issue order. `via`: how completion becomes visible (`events.Complete`).
    """

    kind: str
    warp: Warp
    lanes: int
    index: int  # of the instruction
    stages: list[Callable[[], None]]
    order: Any = None
    via: str = "mbarrier"
    serial: int = 0
    agent: AsyncAgent | None = None
    stage: int = 0
    waiters: list[Any] = field(default_factory=list)
    partners: tuple[AsyncOp, ...] = ()  # operations of other warps that complete together with this one
    batch: Any = None  # consecutive operations of one queue with the same key may be carried out by one call of `together`
    together: Callable[[list[AsyncOp]], None] | None = None
    work: Any = None  # what `together` needs of each

    @property
    def done(self) -> bool:
        return self.stage >= len(self.stages)

    @property
    def read_done(self) -> bool:
        """Whether the sources may be overwritten."""
        return self.stage >= max(1, len(self.stages) - 1)


class AsyncEngine:
    """Holds the operations in flight and completes them by the schedule."""

    def __init__(self, machine: Machine, schedule: str, rng: random.Random) -> None:
        self.machine, self.schedule, self.rng = machine, schedule, rng
        self.queues: dict[Any, deque[AsyncOp]] = {}
        self.serial = 0
        self.unseen = schedule == "at-issue" and not machine.observers  # an operation done at once needs no record

    def submit(self, op: AsyncOp, now: bool = False) -> AsyncOp:
        """Start an operation; `now` completes it at once whatever the schedule."""
        for each in (*op.partners, op):
            self._announce(each)
        key = op.order if op.order is not None else ("free", op.serial)
        if now or (self.schedule == "at-issue" and not self._held_back(op, key)):
            while not op.done:
                self._advance(op)
            return op
        self.queues.setdefault(key, deque()).append(op)
        return op

    def _held_back(self, op: AsyncOp, key: Any) -> bool:
        """At issue: operations that can be batched wait for their successor (nothing can tell, before a commit does); others run now."""
        queue = self.queues.get(key)
        if queue and (op.batch is None or queue[-1].batch != op.batch):
            while key in self.queues:
                self._run_head(key)
        return op.batch is not None

    def _run_head(self, key: Any) -> None:
        """Carry out the head of a queue (one stage), with the operations behind it that belong to the same batch."""
        queue = self.queues[key]
        op = queue[0]
        ops = [op]
        if op.batch is not None:
            for other in list(queue)[1:]:
                if other.batch != op.batch:
                    break
                ops.append(other)
        if len(ops) > 1 and op.together is not None:
            together = op.together
            op.stages = [lambda: together(ops)]
            op.partners = tuple(ops[1:])
        self._advance(op)
        if op.done:
            for _ in range(len(ops)):
                queue.popleft()
            if not queue:
                del self.queues[key]

    def _announce(self, op: AsyncOp) -> None:
        self.serial += 1
        op.serial = self.serial
        machine = self.machine
        if machine.observed:
            op.agent = AsyncAgent(op.serial, op.kind, op.warp.agent, op.lanes, machine.site(op.index))
            machine.emit(Issue(op.agent, op.agent.site, str(op.order or "")))

    def _advance(self, op: AsyncOp) -> None:
        machine = self.machine
        previous, machine.acting = machine.acting, op
        try:
            op.stages[op.stage]()
        finally:
            machine.acting = previous
        machine.progress += 1
        for each in (op, *op.partners):
            each.stage += 1
            if machine.observed and each.agent is not None:
                machine.emit(Complete(each.agent, each.via, "done" if each.done else "read"))
            for warp in each.waiters:
                machine.wake(warp)
            each.waiters.clear()
            if each.done:
                each.stages = []  # they may refer to the operation: without them it is freed at once

    def complete_one(self) -> bool:
        """Carry out one stage of one operation; False when none is in flight. Latest: the youngest queue head goes first."""
        if not self.queues:
            return False
        youngest = max(self.queues, key=lambda k: self.queues[k][0].serial)
        key = self.rng.choice(list(self.queues)) if self.schedule == "random" else youngest
        self._run_head(key)
        return True

    def maybe_complete(self) -> None:
        """In the random schedule: now and then something completes."""
        while self.queues and self.rng.random() < 0.25:
            self.complete_one()

    def pending(self) -> list[AsyncOp]:
        return [op for queue in self.queues.values() for op in queue]
