"""The compile cache: one entry a code plan, shared by processes, safe when they compile at once."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from problems import PROBLEMS

from tandem_attn.kernels import backend, cache
from tandem_attn.kernels import compile as kernels
from tandem_attn.spec.plan import Launch, Plan, Schedule, ScheduleKind

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
print(len(built), 'triton' in sys.modules)
"""


def environment(place: Path) -> dict[str, str]:
    here = Path(__file__).parent
    return {**os.environ, "TANDEM_CACHE_DIR": str(place), "PYTHONPATH": os.pathsep.join([str(here.parents[1]), str(here)])}


def test_runtime_fields_share_a_kernel() -> None:
    schedule = Schedule(ScheduleKind.LPT, Launch.DYNAMIC, 7)
    a, b = SMALL.with_(schedule=schedule), SMALL.with_(schedule=Schedule(ScheduleKind.LPT, Launch.DYNAMIC, 9), return_lse=True)
    assert kernels.code_plan(a) == kernels.code_plan(b)
    assert kernels.code_plan(a) != kernels.code_plan(SMALL)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache; every test may be told anew that a directory cannot be written."""
    monkeypatch.setenv("TANDEM_CACHE_DIR", str(tmp_path / "cache"))
    cache._tell_once.cache_clear()
    return tmp_path / "cache"


def load(plan: Plan = SMALL) -> kernels.Kernel:
    return kernels._load.__wrapped__(kernels.code_plan(plan), False, False)


def test_disk_cache_is_read(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = load()
    monkeypatch.setattr(kernels, "build", lambda *_, **__: pytest.fail("compiled again"))
    assert load() == first
    assert [path.suffix for path in sorted(place.iterdir())] == [".kernel", ".lock"]


def test_loading_needs_no_triton(place: Path) -> None:
    load()
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=environment(place), capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["0", "False"], "compiled, or imported triton"


def damage(name: str, content: bytes) -> bytes:
    flipped = bytearray(content)
    flipped[len(content) // 2] ^= 1
    return {"empty": b"", "cut": content[:1000], "flipped": bytes(flipped), "longer": content + b"x"}[name]


@pytest.mark.parametrize("how", ["empty", "cut", "flipped", "longer"])
def test_damaged_file_is_replaced(how: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "_write", real := Counted(cache._write))
    path = place / "key.kernel"
    content = bytes(range(256)) * 20
    assert cache.fetch("key", lambda: content) == content
    whole = path.read_bytes()
    path.write_bytes(damage(how, whole))
    assert cache.fetch("key", lambda: content) == content
    assert path.read_bytes() == whole and real.calls == 2
    assert cache.fetch("key", lambda: pytest.fail("made again")) == content


class Counted:
    def __init__(self, function: Callable[..., Any]) -> None:
        self.function, self.calls = function, 0

    def __call__(self, *args: Any) -> Any:
        self.calls += 1
        return self.function(*args)


FETCH = """
import pathlib, sys, time, types
for name, path in (("tandem_attn", sys.argv[1]), ("tandem_attn.kernels", sys.argv[1] + "/kernels")):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [path]
from tandem_attn.kernels import cache

def make():
    with open(sys.argv[2], "a") as log:
        log.write("made\\n")
    time.sleep(0.5)
    return b"payload" * 100000

assert cache.fetch("key", make) == b"payload" * 100000
"""


def test_one_of_eight_processes_makes(place: Path, tmp_path: Path) -> None:
    """Without torch, so that they start at once."""
    log = tmp_path / "log"
    command = [sys.executable, "-c", FETCH, str(Path(kernels.__file__).parents[1]), str(log)]
    processes = [subprocess.Popen(command, env=environment(place)) for _ in range(8)]
    assert [process.wait(timeout=60) for process in processes] == [0] * 8
    assert log.read_text().split() == ["made"]


def test_one_of_several_processes_compiles(place: Path) -> None:
    command = [sys.executable, "-c", SCRIPT]
    processes = [subprocess.Popen(command, env=environment(place), stdout=subprocess.PIPE, text=True) for _ in range(2)]
    counts = [int(process.communicate(timeout=300)[0].split()[0]) for process in processes]
    assert sorted(counts) == [0, 1]


def test_directory_that_cannot_be_made(tmp_path: Path, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TANDEM_CACHE_DIR", str(tmp_path / "file" / "cache"))
    with pytest.warns(UserWarning, match=r"kept in memory only.*file/cache cannot be written \(Not a directory\).*TANDEM_CACHE_DIR"):
        assert cache.fetch("key", lambda: b"a") == b"a"
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it was said once
        assert cache.fetch("key", lambda: b"b") == b"b"


def test_directory_that_can_only_be_read(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.fetch("there", lambda: b"a")

    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    monkeypatch.setattr(Path, "read_bytes", _bytes)  # which uses open
    assert cache.fetch("there", lambda: pytest.fail("made again")) == b"a"
    with pytest.warns(UserWarning, match="Permission denied"):
        assert cache.fetch("new", lambda: b"b") == b"b"


def _bytes(path: Path) -> bytes:
    with open(path, "rb") as file:
        return file.read()


def test_full_disk(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Path.write_bytes

    def half(path: Path, content: bytes) -> int:
        real(path, content[: len(content) // 2])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", half)
    with pytest.warns(UserWarning, match="No space left"):
        assert cache.fetch("key", lambda: b"a") == b"a"
    assert [path.name for path in place.iterdir()] == ["key.lock"]


def test_no_home(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("TANDEM_CACHE_DIR")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    with pytest.warns(UserWarning, match="Could not determine home"):
        assert cache.fetch("key", lambda: b"a") == b"a"


def test_without_a_directory_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_CACHE_DIR", "")
    monkeypatch.chdir(tmp_path)
    assert cache.fetch("key", lambda: b"a") == b"a"
    assert not list(tmp_path.iterdir())


def test_failure_to_make_is_passed_on(place: Path) -> None:
    with pytest.raises(ValueError, match="no such kernel"):
        cache.fetch("key", lambda: _raise(ValueError("no such kernel")))
    assert cache.fetch("key", lambda: b"a") == b"a"


def _raise(error: Exception) -> bytes:
    raise error


def test_compiles_what_triton_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same as ``triton.compile``, whose own cache is left alone."""
    triton = pytest.importorskip("triton", reason="pip install tandem-attn[cuda]")
    place = tmp_path / "triton"
    monkeypatch.setenv("TRITON_CACHE_DIR", str(place))
    ours = kernels.build(SMALL)
    assert not place.exists()

    def theirs(source: Any, capability: int, options: dict[str, Any], *_: Any, **__: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        target = triton.backends.compiler.GPUTarget("cuda", capability, 32)
        out = triton.compile(source, target=target, options=options)
        return out.asm, out.metadata._asdict()

    monkeypatch.setattr(kernels, "translated", theirs)
    assert kernels.build(SMALL) == ours
    assert place.exists()


def test_import_needs_no_triton() -> None:
    code = "import sys; sys.modules['triton'] = None; import tandem_attn; from tandem_attn.kernels import backend, compile, launch"
    root = str(Path(__file__).parents[2])
    done = subprocess.run([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": root}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-500:]
