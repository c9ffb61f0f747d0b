"""The flag that says in which orders a kernel is emulated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import click

SCHEDULES = ("at-issue", "latest", "random")


@dataclass(frozen=True)
class Order:
    """A schedule of the emulator and, for ``random``, its seed."""

    schedule: str
    seed: int = 0

    def __str__(self) -> str:
        return f"{self.schedule}:{self.seed}" if self.schedule == "random" else self.schedule


class OrdersType(click.ParamType):
    """Comma-separated schedules: ``at-issue``, ``latest``, ``random:SEED``."""

    name = "schedules"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[Order, ...]:
        if isinstance(value, tuple):
            return value
        return tuple(self._order(item.strip(), param, ctx) for item in str(value).split(","))

    def _order(self, item: str, param: click.Parameter | None, ctx: click.Context | None) -> Order:
        schedule, colon, seed = item.partition(":")
        numbered = schedule == "random" and (seed.isdigit() or not colon)
        if schedule not in SCHEDULES or not (numbered or not colon):
            self.fail(f"{item!r} is not at-issue, latest or random:SEED (for example at-issue,latest,random:1)", param, ctx)
        return Order(schedule, int(seed or 0))
