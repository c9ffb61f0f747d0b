"""Run every micro kernel of tests/emulator/ptx on a Hopper GPU and write what each left in its output.

    python3 -m tools.compare_h200 --out DIR [--commit HASH] [--family NAME ...]

from the repository's root. Needs Python 3.10+, NumPy and libcuda. A family runs in a process of its own; a kernel that faults or hangs
costs that process alone: its error is recorded and the family goes on after it. DIR receives h200.json (chip, driver, date, commit, and
per case the digests of its PTX and input, or its error) and h200_<n>.npz (outputs by case name, each file below 15 MiB).
"""

import argparse
import datetime
import hashlib
import io
import json
import pickle
import subprocess
import sys
import tempfile
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from tests.emulator.ptx.case import Case
from tests.emulator.ptx.catalog import EXTRA, FAMILIES, cases

WORKERS = 6
TIMEOUT = 40  # seconds without a finished case before a worker counts as hung
FILE_LIMIT = 15 << 20


def digest(*parts: bytes) -> str:
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def case_digests(case: Case) -> dict[str, str]:
    """What identifies a case's launch: its PTX (white space aside), and its buffers and geometry."""
    buffers = [array.tobytes() for array in case.make_buffers().values()]
    geometry = repr((case.grid, case.threads, case.cluster, case.shared, case.maps)).encode()
    return {"ptx": digest(" ".join(case.ptx.split()).encode()), "launch": digest(geometry, *buffers)}


def work(family: str, done: set[str], log: Path) -> None:
    """Worker: run the family's cases that are not done; append (name, output or error text) to `log` as they finish."""
    from tools.cuda_driver import CudaError, Device  # noqa: PLC0415 (a machine without libcuda may still list the cases)

    device = Device()
    with log.open("ab") as stream:
        for case in cases(family):
            if case.name in done:
                continue
            pickle.dump((case.name, None), stream)
            stream.flush()
            try:
                first, second = (output.tobytes() for output in device.launch(case, times=2))
                result: object = first if first == second else "unstable: a second launch left other bytes"
            except CudaError as error:
                result = str(error)
            pickle.dump((case.name, result), stream)
            stream.flush()
            if isinstance(result, str) and "cuCtxSynchronize" in result:
                sys.exit(1)  # the context is lost


def read_log(log: Path) -> dict[str, object]:
    """name -> output bytes, error text, or None for a case that was begun and never finished."""
    results: dict[str, object] = {}
    if log.exists():
        with log.open("rb") as stream:
            try:
                while True:
                    name, result = pickle.load(stream)
                    results[name] = result
            except (EOFError, pickle.UnpicklingError):
                pass
    return results


def run_family(family: str, folder: Path) -> dict[str, object]:
    """Run a family to its end, with a fresh process after every fault."""
    log = folder / f"{family}.log"
    names = [case.name for case in cases(family)]
    results: dict[str, object] = {}
    failures = 0
    while set(names) - set(results) and failures < 60:
        process = subprocess.Popen(
            [sys.executable, "-m", "tools.compare_h200", "--worker", family, "--log", str(log)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        stderr = wait_while_it_grows(process, log)
        before = len(results)
        results = read_log(log)
        for name, result in results.items():
            if result is None:
                results[name] = f"hung or killed: {stderr.strip()[-300:]}"
                with log.open("ab") as stream:
                    pickle.dump((name, results[name]), stream)
        failures += process.returncode != 0
        if len(results) == before:
            missing = {name: f"never ran: {stderr.strip()[-300:]}" for name in names if name not in results}
            return results | missing
    return results


def wait_while_it_grows(process: subprocess.Popen, log: Path) -> str:
    """Wait for the end, or kill the process when its log has not grown for TIMEOUT seconds; its standard error."""
    size, since = -1, time.monotonic()
    while True:
        try:
            return process.communicate(timeout=1)[1]
        except subprocess.TimeoutExpired:
            now = log.stat().st_size if log.exists() else 0
            if now != size:
                size, since = now, time.monotonic()
            elif time.monotonic() - since > TIMEOUT:
                process.kill()


def write(out: Path, results: dict[str, object], record: dict[str, object], families: list[str]) -> None:
    """h200.json and the outputs, split over files of at most FILE_LIMIT bytes."""
    entries: dict[str, dict[str, str]] = {}
    archives: list[dict[str, bytes]] = [{}]
    size = 0
    for family in families:
        for case in cases(family):
            entry = case_digests(case) | {"family": family}
            result = results.get(case.name, "never ran")
            if isinstance(result, bytes):
                entry["out"] = digest(result)
                buffer = io.BytesIO()
                np.save(buffer, np.frombuffer(result, np.uint8))
                compressed = zipped_size(buffer.getvalue())
                if size + compressed > FILE_LIMIT:
                    archives.append({})
                    size = 0
                archives[-1][case.name] = buffer.getvalue()
                size += compressed
            else:
                entry["error"] = str(result)
            entries[case.name] = entry
    (out / "h200.json").write_text(json.dumps(record | {"families": families, "cases": entries}, indent=1) + "\n")
    for number, archive in enumerate(archives):
        with zipfile.ZipFile(out / f"h200_{number}.npz", "w", zipfile.ZIP_DEFLATED) as file:
            for name, data in archive.items():
                file.writestr(f"{name.replace('/', '|')}.npy", data)


def zipped_size(data: bytes) -> int:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("x", data)
    return buffer.tell() + 400  # and its two directory entries


def ask(*command: str) -> str:
    """What the command prints, or "unknown"."""
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def describe(commit: str | None) -> dict[str, object]:
    """Chip, driver, date and commit, asked in a process of its own so that this one holds no context."""
    code = "import json; from tools.cuda_driver import Device; print(json.dumps(Device().describe()))"
    device = json.loads(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout)
    driver = ask("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    commit = commit or ask("git", "rev-parse", "HEAD")
    date = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    return {**device, "driver": driver, "date": date, "commit": commit}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--commit")
    parser.add_argument("--family", nargs="*", default=[*FAMILIES, *EXTRA])
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--log", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options.worker, set(read_log(options.log)), options.log)
        return
    if options.out is None:
        parser.error("--out is required")
    options.out.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    record = describe(options.commit)
    print({key: record[key] for key in ("chip", "driver", "cuda_version", "date", "commit")}, flush=True)
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(WORKERS) as pool:
        parts = {family: pool.submit(run_family, family, Path(folder)) for family in options.family}
        results: dict[str, object] = {}
        for family, part in parts.items():
            found = part.result()
            errors = {name: result for name, result in found.items() if not isinstance(result, bytes)}
            print(f"{family:16} {len(found):5} cases, {len(errors)} errors, {time.monotonic() - started:.0f} s", flush=True)
            for name, error in list(errors.items())[:12]:
                print(f"    {name}: {str(error)[:160]}", flush=True)
            results |= found
    write(options.out, results, record, options.family)
    print(f"wrote {sorted(path.name for path in options.out.iterdir())} in {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
