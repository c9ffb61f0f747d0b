"""Delete or weaken every wait, fence, barrier, arrival and commit of the test kernels, and count what the emulator notices.

    python -m tools.mutation [--subject NAME ...] [--part K/N] [--json FILE] [--clean RUNS] [--list]

from the repository's root. Every mutant runs under the schedules at-issue, latest and random (two seeds) with all checks, until one shows
something. A mutant that nothing shows is *equivalent* when tests/emulator/mutation/equivalence.py has an argument, else *missed*.
--part K/N takes every Nth mutant from the Kth on: parts 1/N to N/N are the whole, and each is drawn at even distances.
--clean runs the originals that often in all, over random schedules, and counts false alarms. Exit code 1 below the 95 % or at an alarm.
"""

import argparse
import json
import sys
import time
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

from tests.emulator.mutation.equivalence import Log, log_of, reason
from tests.emulator.mutation.kernels import KERNELS, Kernel
from tests.emulator.mutation.mutants import Mutant, mutants, source_of
from tests.emulator.mutation.trial import attempt, judge, text_of

TARGET = 0.95
COLUMNS = ("race", "state", "deadlock", "numbers", "hang", "equivalent", "missed")


Part = tuple[int, int]  # the Kth of N


def examine(kernel: Kernel, part: Part = (1, 1)) -> list[dict[str, Any]]:
    """The mutants of a part of a kernel's with what became of each."""
    subjects = [launch() for launch in kernel.launches]
    text = text_of(subjects[0].kernel)
    assert all(text_of(subject.kernel) == text for subject in subjects), f"{kernel.name}: its launches are of different kernels"
    logs = [log_of(subject) for subject in subjects]
    found = []
    for mutant in islice(mutants(text), part[0] - 1, None, part[1]):
        outcome = judge(kernel.make, mutant.ptx, kernel.checks, kernel.others)
        why = "" if outcome.how else reason_in_all(mutant, logs) or by_hand(kernel, mutant, text)
        verdict = outcome.how or ("equivalent" if why else "missed")
        found.append(
            {"kernel": kernel.name, "line": mutant.line, "what": mutant.what, "instruction": mutant.before, "verdict": verdict,
             "schedule": outcome.schedule, "detail": (outcome.detail or why).split("\n")[0]}
        )  # fmt: skip
    return found


def reason_in_all(mutant: Mutant, logs: list[Log]) -> str:
    """Why the mutant is equivalent in every launch, or ""."""
    reasons = [reason(mutant, log) for log in logs]
    return "; ".join(dict.fromkeys(reasons)) if all(reasons) else ""


def by_hand(kernel: Kernel, mutant: Mutant, text: str) -> str:
    """Why the mutant is equivalent, by an argument given with the kernel, or ""."""
    source = source_of(text, mutant.line)
    held = (a for a in kernel.argued if a.what == mutant.what and all(any(part in place for place in source) for part in a.texts))
    return next((f"by hand: {argued.why}" for argued in held), "")


def clean_runs(kernels: list[Kernel], count: int) -> list[str]:
    """False alarms in `count` runs of the originals, spread over the kernels and seeds."""
    alarms = []
    for i in range(count):
        kernel = kernels[i % len(kernels)]
        make = kernel.launches[i // len(kernels) % len(kernel.launches)]
        schedule = ("random", "random", "latest", "at-issue")[i // len(kernels) % 4]
        outcome = attempt(make, None, schedule, i, kernel.checks)
        if outcome.how:
            alarms.append(f"{kernel.name}, {schedule} {i}: {outcome.how}: {outcome.detail}")
    return alarms


def table(results: list[dict[str, Any]]) -> str:
    """One row per kernel: how many mutants, what showed each, and the share caught of those that are not equivalent."""
    names = list(dict.fromkeys(r["kernel"] for r in results))
    lines = ["| kernel | mutants | " + " | ".join(COLUMNS) + " | caught |", "|---|" + "--:|" * (len(COLUMNS) + 2)]
    for name in [*names, "all"]:
        rows = [r for r in results if name in ("all", r["kernel"])]
        counts = Counter(r["verdict"] for r in rows)
        lines.append(f"| {name} | {len(rows)} | " + " | ".join(str(counts[c]) for c in COLUMNS) + f" | {share(rows):.1%} |")
    return "\n".join(lines)


def share(rows: list[dict[str, Any]]) -> float:
    """Caught mutants over those that are not equivalent."""
    real = [r for r in rows if r["verdict"] != "equivalent"]
    return 1 - sum(r["verdict"] == "missed" for r in real) / len(real) if real else 1.0


def _part(text: str) -> Part:
    numbers = [int(number) if number.isdigit() else 0 for number in text.split("/")]
    if len(numbers) != 2 or not 1 <= numbers[0] <= numbers[1]:
        raise argparse.ArgumentTypeError(f"{text!r} is not K/N with 1 <= K <= N")
    return numbers[0], numbers[1]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--subject", action="append", choices=list(KERNELS), help="only this kernel (may be repeated)")
    parser.add_argument("--part", type=_part, default=(1, 1), metavar="K/N", help="every Nth mutant from the Kth on")
    parser.add_argument("--json", type=Path, help="write every mutant with its verdict there")
    parser.add_argument("--clean", type=int, default=0, metavar="RUNS", help="runs of the originals to look for false alarms in")
    parser.add_argument("--list", action="store_true", help="name the kernels and stop")
    options = parser.parse_args(argv)
    if options.list:
        print("\n".join(KERNELS))
        return 0
    kernels = [KERNELS[name] for name in options.subject] if options.subject else [k for k in KERNELS.values() if not k.slow]
    results: list[dict[str, Any]] = []
    for kernel in kernels:
        began = time.perf_counter()
        rows = examine(kernel, options.part)
        results += rows
        print(f"{kernel.name}: {len(rows)} mutants, {share(rows):.1%} caught, {time.perf_counter() - began:.0f} s", flush=True)
        for row in rows:
            if row["verdict"] in ("missed", "hang"):
                print(f"  {row['verdict']}: line {row['line']}, {row['what']}: {row['instruction']}", flush=True)
    alarms = clean_runs(kernels, options.clean)
    print(f"\n{table(results)}\n\n{len(alarms)} false alarms in {options.clean} clean runs")
    print("\n".join(alarms))
    if options.json:
        options.json.write_text(json.dumps({"mutants": results, "clean_runs": options.clean, "false_alarms": alarms}, indent=1) + "\n")
    return int(bool(alarms) or share(results) < TARGET)


if __name__ == "__main__":
    sys.exit(main())
