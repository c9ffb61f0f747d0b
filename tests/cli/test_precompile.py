"""``tandem precompile``: problems from flags or a file, one kernel for those that share it, refusals with their reason."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from tandem_attn.cli.main import main
from tandem_attn.kernels import cache
from tandem_attn.kernels import precompile as ahead
from tandem_attn.kernels.compile import Kernel
from tandem_attn.spec.plan import Plan

pytest.importorskip("triton", reason="kernels are compiled by Triton: pip install tandem-attn[cuda]")

CAUSAL = {"seqlen_q": 300, "heads": 2, "head_dim": 16, "mask": "causal"}


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TANDEM_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> list[Plan]:
    """Nothing is compiled: the plans that would be."""
    seen: list[Plan] = []

    def compiled(plan: Plan) -> Kernel:
        seen.append(plan)
        if plan.head_dim == 24:
            raise RuntimeError("ptxas is ill")
        return Kernel(plan, "k", b"", "", 1234, 384, 1, (), "", (0, 0))

    monkeypatch.setattr(ahead, "through_disk", compiled)
    monkeypatch.setattr(ahead, "usage", lambda cubin: ahead_usage)
    monkeypatch.setattr(ahead, "_helpers", lambda *_: None)
    return seen


class ahead_usage:  # noqa: N801  (stands for an instance)
    registers, stack_bytes = 168, 16


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["precompile", *arguments], env={"COLUMNS": "160"})


def write(tmp_path: Path, content: Any) -> str:
    path = tmp_path / "problems.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(path)


def test_fills_the_cache(place: Path) -> None:
    flags = ("--seqlen-q", "300", "--heads", "2", "--head-dim", "16", "--mask", "causal", "--json")
    first, second = (json.loads(invoke(*flags).stdout)[0] for _ in range(2))
    assert (first["cached"], second["cached"]) == (False, True)
    assert len(list(place.glob("*.kernel"))) == 1
    assert 0 < first["registers"] <= 255 and 0 < first["shared_bytes"] <= 232448 and first["stack_bytes"] % 8 == 0
    assert {**first, "seconds": 0, "cached": 0} == {**second, "seconds": 0, "cached": 0}


def test_problems_that_share_a_kernel(tmp_path: Path, fake: list[Plan]) -> None:
    problems = [CAUSAL, {**CAUSAL, "seqlen_q": 310}, {**CAUSAL, "heads": 8, "heads_kv": 2}, {**CAUSAL, "dtype": "fp16"}]
    done = invoke("--file", write(tmp_path, problems), "--workers", "1", "--json")
    assert done.exit_code == 0
    assert [len(row["problems"]) for row in json.loads(done.stdout)] == [3, 1]
    assert [plan.dtype for plan in fake] == ["bfloat16", "float16"]


def test_table(tmp_path: Path, fake: list[Plan]) -> None:
    problems = [{**CAUSAL, "seqlen_q": 300 + i} for i in range(5)]
    done = invoke("--file", write(tmp_path, problems), "--workers", "1")
    assert "B1 Sq300 Sk300 H2/2 d16 bfloat16" in done.stdout and "and 2 more" in done.stdout
    assert "1,234" in done.stdout and "168" in done.stdout


def test_architectures(fake: list[Plan]) -> None:
    for arch, chip in (("sm_90a", "H200"), ("sm_100a", "B200")):
        assert invoke("--mask", "causal", "--arch", arch, "--workers", "1").exit_code == 0
        assert fake[-1].arch == chip


def test_varlen_and_flags_in_a_file(tmp_path: Path, fake: list[Plan]) -> None:
    problems = [{"varlen": "512,0,100:300", "sink": True, "alibi": False, "heads_kv": None, "window": None}]
    done = invoke("--file", write(tmp_path, [{k: v for k, v in problems[0].items() if k != "window"}]), "--workers", "1")
    assert done.exit_code == 0
    assert fake[0].varlen and fake[0].sink and not fake[0].alibi


def test_what_is_refused_or_fails_is_named(tmp_path: Path, fake: list[Plan]) -> None:
    problems = [{"head_dim": 20}, {**CAUSAL, "head_dim": 24}, CAUSAL]
    done = invoke("--file", write(tmp_path, problems), "--workers", "1")
    assert done.exit_code == 1
    assert "not covered: head_dim=20" in done.stdout and "RuntimeError: ptxas is ill" in done.stdout and "failed" in done.stdout
    rows = json.loads(invoke("--file", write(tmp_path, problems), "--workers", "1", "--json").stdout)
    assert [bool(row["error"]) for row in rows] == [True, False, True]


@pytest.mark.parametrize(
    "content, words",
    [
        ("{", "not JSON"),
        ({"heads": 3}, "a list of objects"),
        ([3], "a list of objects"),
        ([CAUSAL, {"heads": "x"}], "problem 1"),
        ([{"head": 3}], "No such option"),
        ([{"heads": 3, "heads_kv": 2}], "heads must be a multiple"),
        ([{"varlen": "3,4", "batch": 2}], "cannot be combined with --varlen"),
    ],
)
def test_wrong_files(tmp_path: Path, content: Any, words: str) -> None:
    done = invoke("--file", write(tmp_path, content))
    assert done.exit_code == 2 and words in " ".join(done.output.split())


def test_workers_share_the_work(tmp_path: Path, place: Path) -> None:
    """Processes of their own, and each kernel once."""
    problems = [CAUSAL, {**CAUSAL, "mask": "full"}]
    done = invoke("--file", write(tmp_path, problems), "--workers", "2", "--json")
    assert done.exit_code == 0, done.output
    assert len(list(place.glob("*.kernel"))) == 2
    assert [row["problems"][0].split()[6].partition("(")[0] for row in json.loads(done.stdout)] == ["window", "full"]


def test_helpers_of_packed_sequences_are_there_too(place: Path) -> None:
    done = invoke("--varlen", "300,0,70", "--heads", "2", "--head-dim", "16", "--mask", "causal", "--sink")
    assert done.exit_code == 0, done.output
    assert len(list(place.glob("*.kernel"))) == 2  # the forward, and the order of its tiles


def test_contains(place: Path) -> None:
    cache.fetch("key", lambda: b"a")
    assert cache.contains("key") and not cache.contains("other")


@pytest.mark.parametrize("workers", [1, 2])
def test_says_nothing_when_it_ends(workers: int, place: Path, tmp_path: Path) -> None:
    """In a process of its own, since libraries speak as the interpreter ends; two kernels, so that two workers compile."""
    file = write(tmp_path, [CAUSAL, {**CAUSAL, "head_dim": 64}][:workers])
    environment = {**os.environ, "TANDEM_CACHE_DIR": str(place), "TRITON_CACHE_DIR": str(tmp_path / "triton")}
    command = [sys.executable, "-m", "tandem_attn", "precompile", "--workers", str(workers), "--json", "--file", file]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert [one["cached"] for one in json.loads(done.stdout)] == [False] * workers
    assert done.stderr.strip() == ""
