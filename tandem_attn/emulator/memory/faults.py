"""A fault found while an instruction accesses memory."""

from __future__ import annotations


class Fault(Exception):  # noqa: N818 - it becomes a Report
    """What an instruction did wrong: `kind` is a report kind. A fatal one ends the run."""

    def __init__(self, kind: str, message: str, *, fatal: bool = True) -> None:
        super().__init__(message)
        self.kind, self.message, self.fatal = kind, message, fatal
