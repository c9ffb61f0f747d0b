"""Errors of the emulator: what cannot be run. What runs but is wrong is a `Report`, not an exception."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tandem_attn.emulator.report import Result


class EmulatorError(Exception):
    """Base of everything the emulator raises on purpose."""


class ParseError(EmulatorError):
    """PTX text that is malformed or not understood; the message names the line."""

    def __init__(self, message: str, line: int | None = None, text: str = "") -> None:
        self.line = line
        where = f"PTX line {line}: " if line is not None else ""
        shown = f"\n    {text.strip()}" if text else ""
        super().__init__(f"{where}{message}{shown}")


class UnsupportedInstruction(ParseError):  # noqa: N818 - the public name
    """A well-formed instruction, or a form of one, that the emulator does not execute."""


class LaunchError(EmulatorError, ValueError):
    """Arguments, grid or geometry that do not fit the kernel."""


class ExecutionError(EmulatorError):
    """Execution cannot go on (trap, access outside memory, deadlock); the run ends with a `Report` of the same text."""


class JudgementError(EmulatorError):
    """Raised by `Result.raise_for_reports` when a run left reports; `result` holds them."""

    def __init__(self, result: Result) -> None:
        self.result = result
        super().__init__("\n".join(map(str, result.reports)) or "the run did not finish")
