"""Execute and judge compiled sm_90a, sm_100a and sm_103a PTX on a CPU. See docs/emulator.md."""

from tandem_attn.emulator.api import run
from tandem_attn.emulator.errors import (
    EmulatorError,
    ExecutionError,
    JudgementError,
    LaunchError,
    ParseError,
    UnsupportedInstruction,
)
from tandem_attn.emulator.report import Report, Result, Source, Statistics

__all__ = [
    "EmulatorError",
    "ExecutionError",
    "JudgementError",
    "LaunchError",
    "ParseError",
    "Report",
    "Result",
    "Source",
    "Statistics",
    "UnsupportedInstruction",
    "run",
]
