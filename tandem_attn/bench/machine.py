"""What a result must carry beside its numbers: commit, versions, chip, and clocks, power and temperature while it was measured."""

from __future__ import annotations

import contextlib
import datetime
import importlib.metadata
import os
import platform
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch

FIELDS = {"clocks.sm": "sm_mhz", "clocks.mem": "memory_mhz", "power.draw": "watts", "temperature.gpu": "celsius"}
PERIOD_MS = 100


def environment(packages: list[str]) -> dict[str, Any]:
    """Commit, date, command, versions, processor and, where there is one, GPU."""
    return {
        "commit": commit(),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": " ".join([_program(), *sys.argv[1:]]),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "versions": {name: _version(name) for name in dict.fromkeys(["tandem-attn", "triton", *packages])},
        "processor": _processor(),
        "threads": torch.get_num_threads(),
        **(_gpu() if torch.cuda.is_available() else {}),
    }


def _program() -> str:
    """What was started; ``tandem``, however that was."""
    name = Path(sys.argv[0]).name
    return "tandem" if name in ("-c", "__main__.py", "tandem") else name


def commit() -> str:
    """``TANDEM_COMMIT``, for a copy without its repository, or what git says, ``+`` behind it where files differ from it."""
    if found := os.environ.get("TANDEM_COMMIT"):
        return found
    git = ["git", "-C", str(Path(__file__).parent)]
    head = _output([*git, "rev-parse", "HEAD"]).strip()
    return head + ("+" if head and _output([*git, "status", "--porcelain", "--untracked-files=no"]).strip() else "")


def _output(command: list[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout
    except OSError:  # not installed
        return ""


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())


def _gpu() -> dict[str, Any]:
    names = "name,driver_version,power.limit"
    found = dict(zip(names.split(","), _query(names), strict=False))
    return {"gpu": torch.cuda.get_device_name(), "cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version(), "nvidia_smi": found}


def _query(names: str, form: str = "csv,noheader") -> list[str]:
    line = _output(["nvidia-smi", *_which(), f"--query-gpu={names}", f"--format={form}"]).splitlines()
    return [part.strip() for part in line[0].split(",")] if line else []


def _which() -> list[str]:
    """The current device, which nvidia-smi may number differently."""
    uuid = getattr(torch.cuda.get_device_properties(torch.cuda.current_device()), "uuid", None)
    return [] if uuid is None else ["-i", f"GPU-{uuid}"]


class Telemetry(contextlib.AbstractContextManager["Telemetry"]):
    """Clocks, power and temperature every 100 ms, read from one nvidia-smi that runs beside the measurements."""

    def __init__(self) -> None:
        self._samples: list[tuple[float, dict[str, float]]] = []
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Telemetry:
        if torch.cuda.is_available():
            command = [
                "nvidia-smi",
                *_which(),
                f"--query-gpu={','.join(FIELDS)}",
                "--format=csv,noheader,nounits",
                f"--loop-ms={PERIOD_MS}",
            ]
            with contextlib.suppress(OSError):
                self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
                self._reader = threading.Thread(target=self._read, daemon=True)
                self._reader.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait()

    def _read(self) -> None:
        assert self._process is not None and self._process.stdout is not None  # narrows the type: this thread reads what was started
        for line in self._process.stdout:
            if values := _sample(line):
                self._samples.append((time.monotonic(), values))

    def since(self, start: float) -> dict[str, float]:
        """Means of the samples since a ``time.monotonic()``, or the state right now where there are none; empty without nvidia-smi."""
        seen = [values for at, values in self._samples if at >= start]
        if not seen and self._process is not None:
            seen = [values for values in (_sample(",".join(_query(",".join(FIELDS), "csv,noheader,nounits"))),) if values]
        return {name: round(statistics.mean(values[name] for values in seen), 1) for name in FIELDS.values()} if seen else {}


def _sample(line: str) -> dict[str, float]:
    """Values of one line; empty where this chip does not report one of them."""
    try:
        return dict(zip(FIELDS.values(), map(float, line.split(",")), strict=True))
    except ValueError:
        return {}
