"""The compile cache: one entry a code plan, shared by processes, safe when they compile at once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from problems import PROBLEMS

from tandem_attn.kernels import backend
from tandem_attn.kernels import compile as kernels
from tandem_attn.spec.plan import Launch, Schedule, ScheduleKind

SMALL = backend.plan(PROBLEMS["head_dim 16"]).with_(schedule=Schedule())

SCRIPT = """
import sys
from problems import PROBLEMS
from tandem_attn.kernels import backend, compile as kernels
from tandem_attn.spec.plan import Schedule
built = []
real = kernels.build
kernels.build = lambda *a, **k: built.append(1) or real(*a, **k)
kernels.compiled(backend.plan(PROBLEMS["head_dim 16"]).with_(schedule=Schedule()))
print(len(built))
"""


def test_runtime_fields_share_a_kernel() -> None:
    schedule = Schedule(ScheduleKind.LPT, Launch.DYNAMIC, 7)
    a, b = SMALL.with_(schedule=schedule), SMALL.with_(schedule=Schedule(ScheduleKind.LPT, Launch.DYNAMIC, 9), return_lse=True)
    assert kernels.code_plan(a) == kernels.code_plan(b)
    assert kernels.code_plan(a) != kernels.code_plan(SMALL)


def test_disk_cache_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_CACHE_DIR", str(tmp_path))
    first = kernels._load.__wrapped__(kernels.code_plan(SMALL), False, False)
    monkeypatch.setattr(kernels, "build", lambda *_, **__: pytest.fail("compiled again"))
    assert kernels._load.__wrapped__(kernels.code_plan(SMALL), False, False) == first


def test_damaged_file_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_CACHE_DIR", str(tmp_path))
    first = kernels._load.__wrapped__(kernels.code_plan(SMALL), False, False)
    (path,) = tmp_path.glob("*.json")
    path.write_text(path.read_text()[:100])
    assert kernels._load.__wrapped__(kernels.code_plan(SMALL), False, False) == first


def test_one_of_several_processes_compiles(tmp_path: Path) -> None:
    here = Path(__file__).parent
    env = os.environ | {"TANDEM_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join([str(here.parents[1]), str(here)])}
    processes = [subprocess.Popen([sys.executable, "-c", SCRIPT], env=env, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    counts = [int(process.communicate(timeout=300)[0].split()[0]) for process in processes]
    assert sorted(counts) == [0, 0, 1]


def test_import_needs_no_triton() -> None:
    code = "import sys; sys.modules['triton'] = None; import tandem_attn; from tandem_attn.kernels import backend, compile, launch"
    root = str(Path(__file__).parents[2])
    done = subprocess.run([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": root}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-500:]
