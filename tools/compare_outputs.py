"""Compare the emulator with outputs that tools.compare_h200 recorded on a GPU.

    python -m tools.compare_outputs --recorded DIR [--family NAME ...] [--backend numpy|llvm] [--report FILE.json] [--show N] [--keep DIR]

Runs every recorded case in the emulator on the same inputs, compares the outputs bit by bit (a case's stated tolerance aside) and prints
one line per family and the first N cases that differ. Exit status 1 when one differs. --keep writes the recording as the repository holds
it: every case's digests, and the bytes of those outputs alone that the emulator does not equal bit by bit.
"""

import argparse
import json
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from tests.emulator.ptx.case import Case
from tests.emulator.ptx.catalog import FAMILIES, cases
from tests.emulator.ptx.emulate import compare, run_case
from tools.compare_h200 import case_digests, digest

VERDICTS = ("equal", "tolerance", "differs", "refused", "fault", "missed", "gpu error", "stale", "new")
BAD = ("differs", "refused", "missed", "gpu error", "stale")


def load(folder: Path) -> tuple[dict, dict[str, np.ndarray]]:
    """The record, and output bytes by case name."""
    record = json.loads((folder / "h200.json").read_text())
    outputs: dict[str, np.ndarray] = {}
    for path in sorted(folder.glob("h200_*.npz")):
        with np.load(path) as archive:
            outputs |= {name.replace("|", "/"): archive[name] for name in archive.files}
    return record, outputs


def judge(case: Case, entry: dict[str, str], hardware: np.ndarray | None, backend: str = "numpy") -> tuple[str, str]:
    """(verdict, detail) of one case. hardware is the recorded output; without it the recorded digest decides.

    stale: the case has changed since it was recorded; new: it has been added. refused: the emulator raised or stopped. fault: a forbidden
    kernel, which the GPU stopped and the emulator reports; missed: it does not. gpu error: the GPU stopped a kernel that is allowed.
    """
    if "out" not in entry:
        return judge_fault(case, entry, backend)
    if case_digests(case) != {key: entry[key] for key in ("ptx", "launch")}:
        return "stale", "PTX or inputs have changed since the recording"
    try:
        got, result = run_case(case, checks="none", backend=backend)
    except Exception as error:  # whatever the emulator raises is this case's verdict
        return "refused", f"{type(error).__name__}: {str(error).splitlines()[0]}"
    if digest(got.tobytes()) == entry["out"]:
        return "equal", ""
    reports = f"; {result.reports[0]}" if result.reports else ""
    if hardware is None:
        return "differs", f"the digest of the output{reports}"
    difference = compare(case, got, hardware)
    return difference.verdict, f"{difference.elements} of {difference.of} elements; {difference.worst}{reports}"


def judge_fault(case: Case, entry: dict[str, str], backend: str) -> tuple[str, str]:
    """The verdict on a case without a recorded output."""
    if not entry:
        return "new", "not recorded"
    error = entry["error"]
    if not case.faults:
        return "gpu error", error
    _, result = run_case(case, backend=backend)
    reports = [str(report) for report in result.reports if report.kind in ("misaligned", "out-of-bounds")]
    return ("fault", reports[0]) if reports else ("missed", f"the GPU: {error}; the emulator reports {result.reports[:1]}")


def table(found: dict[str, dict[str, tuple[str, str]]]) -> str:
    rows = [f"{'family':14}{'cases':>7}" + "".join(f"{verdict:>11}" for verdict in VERDICTS)]
    for family, verdicts in found.items():
        counts = Counter(verdict for verdict, _ in verdicts.values())
        rows.append(f"{family:14}{len(verdicts):7}" + "".join(f"{counts[verdict]:11}" for verdict in VERDICTS))
    return "\n".join(rows)


def keep(folder: Path, record: dict, outputs: dict[str, np.ndarray], found: dict[str, dict[str, tuple[str, str]]]) -> None:
    """h200.json as it is, and h200_0.npz with what the digests alone cannot settle: unequal outputs, and all that have a tolerance."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "h200.json").write_text(json.dumps(record, indent=1) + "\n")
    loose = {case.name for family in found for case in cases(family) if case.tolerance}
    names = [name for verdicts in found.values() for name, (verdict, _) in verdicts.items() if verdict != "equal" or name in loose]
    arrays: dict[str, Any] = {name.replace("/", "|"): outputs[name] for name in names if name in outputs}
    np.savez_compressed(folder / "h200_0.npz", **arrays)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recorded", type=Path, required=True)
    parser.add_argument("--family", nargs="*", default=list(FAMILIES))
    parser.add_argument("--backend", default="numpy")
    parser.add_argument("--report", type=Path)
    parser.add_argument("--show", type=int, default=10)
    parser.add_argument("--keep", type=Path)
    options = parser.parse_args()
    record, outputs = load(options.recorded)
    started = time.monotonic()
    found: dict[str, dict[str, tuple[str, str]]] = {}
    for family in options.family:
        found[family] = {}
        for case in cases(family):
            entry = record["cases"].get(case.name, {})
            found[family][case.name] = judge(case, entry, outputs.get(case.name), options.backend)
        bad = [(name, *verdict) for name, verdict in found[family].items() if verdict[0] in BAD]
        for name, verdict, detail in bad[: options.show]:
            print(f"{family}: {name}: {verdict}: {detail}", flush=True)
    print(f"{record['chip']}, driver {record['driver']}, recorded {record['date']}; {time.monotonic() - started:.0f} s")
    print(table(found))
    if options.report:
        options.report.write_text(
            json.dumps({"record": {k: v for k, v in record.items() if k != "cases"}, "found": found}, indent=1) + "\n"
        )
    if options.keep:
        keep(options.keep, record, outputs, found)
    sys.exit(any(verdict in BAD for part in found.values() for verdict, _ in part.values()))


if __name__ == "__main__":
    main()
