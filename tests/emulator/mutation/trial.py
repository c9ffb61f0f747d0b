"""Runs one kernel or mutant under the schedules and says what was noticed."""

import signal
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from tandem_attn.emulator import run
from tandem_attn.emulator.errors import EmulatorError
from tandem_attn.emulator.events import Event
from tandem_attn.emulator.judge.checks import RACES, chosen
from tandem_attn.emulator.judge.races import RaceTracker
from tandem_attn.emulator.report import Report
from tests.emulator.subjects.subject import Subject

SCHEDULES = (("at-issue", 0), ("latest", 0), ("random", 1), ("random", 2))


class WithPtx:
    """A compiled kernel with other PTX."""

    def __init__(self, kernel: Any, ptx: str) -> None:
        self._kernel = kernel
        self.asm = {**kernel.asm, "ptx": ptx}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernel, name)


class FoundError(Exception):
    """A race report: the rest of the run is of no interest."""


class FirstRace(RaceTracker):
    """Ends the run at the first report."""

    def event(self, event: Event) -> list[Report]:
        for report in super().event(event):
            raise FoundError(str(report))
        return []


@dataclass(frozen=True)
class Outcome:
    """`how`: "" (nothing noticed), "race" (the tracker reports), "state" (a check of state or an error), "deadlock", "numbers", "hang"."""

    how: str
    schedule: str = ""
    detail: str = ""


def text_of(kernel: Any) -> str:
    text: str = kernel if isinstance(kernel, str) else kernel.asm["ptx"]
    return text


def with_ptx(kernel: Any, ptx: str) -> Any:
    return ptx if isinstance(kernel, str) else WithPtx(kernel, ptx)


def _timed_out(*_: Any) -> None:
    raise TimeoutError


def attempt(make: Callable[[], Subject], ptx: str | None, schedule: str, seed: int, checks: Any, limit: int = 60) -> Outcome:
    """One run with fresh tensors; `ptx` None is the kernel as it is."""
    subject = make()
    kernel = subject.kernel if ptx is None else with_ptx(subject.kernel, ptx)
    options = subject.options
    if ptx is not None:  # a mutant: stop at the first race
        wanted = chosen(checks)
        ctas = 1 if isinstance(kernel, str) else int(kernel.metadata.num_ctas)
        grid = (subject.grid[0] * ctas, *subject.grid[1:])
        options["observers"] = [FirstRace(grid, wanted & RACES)]
        checks = wanted - RACES
    label = schedule if schedule != "random" else f"random {seed}"
    signal.signal(signal.SIGALRM, _timed_out)
    signal.alarm(limit)
    try:
        result = run(kernel, subject.args, subject.grid, checks=checks, schedule=schedule, seed=seed, backend="numpy", **options)
    except FoundError as found:
        return Outcome("race", label, str(found))
    except TimeoutError:
        return Outcome("hang", label, f"no end within {limit} s")
    except EmulatorError as error:
        return Outcome("state", label, str(error))
    finally:
        signal.alarm(0)
    if result.reports:
        kinds = {r.kind for r in result.reports}
        race = next((r for r in result.reports if r.kind in RACES), None)
        how = "race" if race else "deadlock" if kinds == {"deadlock"} else "state"
        return Outcome(how, label, str(race or result.reports[0]))
    try:
        subject.check()
    except AssertionError as error:
        return Outcome("numbers", label, str(error))
    return Outcome("")


def judge(
    make: Callable[[], Subject], ptx: str | None = None, checks: Any = "all", others: Iterable[Callable[[], Subject]] = ()
) -> Outcome:
    """The first thing that any schedule shows, of this launch or of others."""
    for launch in (make, *others):
        for schedule, seed in SCHEDULES:
            outcome = attempt(launch, ptx, schedule, seed, checks)
            if outcome.how:
                return outcome
    return Outcome("")
