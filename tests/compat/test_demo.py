"""tandem demo: the real model, end to end in a process of its own, and what it says where something is missing."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

from tandem_attn.cli import demo as module

RUN = "from tandem_attn.cli.demo import demo; demo()"
MISSING = [name for name in module.PACKAGES if importlib.util.find_spec(name) is None]
needs_model = pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)} (make demo installs them)")


@pytest.fixture(scope="module")
def output() -> tuple[dict[str, Any], str]:
    """Standard output as JSON, and standard error, of a short run; offline, and with every warning on."""
    env = os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "default"}
    command = [sys.executable, "-c", RUN, "--json", "--max-new-tokens", "4", "--device", "cpu"]
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr


@needs_model
def test_same_greedy_tokens_as_eager(output: tuple[dict[str, Any], str]) -> None:
    results = output[0]["results"]
    assert len(results) == 4
    for result in results:
        tandem, eager = result["runs"]["tandem"], result["runs"]["eager"]
        assert result["equal"]
        assert tandem["tokens"] == eager["tokens"]
        assert 1 <= len(tandem["tokens"]) <= 4
        assert tandem["text"]
        assert tandem["tokens_per_s"] > 0
        assert 0 < result["logit_difference"] < 1e-3 * result["largest_logit"]  # 0 would mean that eager was compared with itself


@needs_model
def test_one_prompt_has_more_than_1000_tokens(output: tuple[dict[str, Any], str]) -> None:
    assert max(result["prompt_tokens"] for result in output[0]["results"]) > 1000


@needs_model
def test_knows_the_capital_of_france(output: tuple[dict[str, Any], str]) -> None:
    assert output[0]["results"][0]["runs"]["tandem"]["text"].startswith("The capital of France")


@needs_model
def test_no_noise(output: tuple[dict[str, Any], str]) -> None:
    assert "Warning" not in output[1], output[1]
    assert "Converting" not in output[1], output[1]


def invoke(*args: str) -> Result:
    return CliRunner().invoke(module.demo, args)


def fake_result(equal: bool) -> module.Result:
    runs = {name: module.Run([1, 2 if equal or name == "eager" else 3], "text", 0.1, 9.0) for name in module.IMPLEMENTATIONS}
    return module.Result("prompt\nwith two lines", 5, runs, 1e-5, 40.0, equal)


@needs_model
@pytest.mark.parametrize(("dtype", "equal", "code"), [("float32", True, 0), ("float32", False, 1), ("bfloat16", False, 0)])
def test_exit_code_and_table(monkeypatch: pytest.MonkeyPatch, dtype: str, equal: bool, code: int) -> None:
    config = type("Config", (), {"num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64})
    monkeypatch.setattr(module, "_load", lambda *_: (None, type("Model", (), {"config": config})))
    monkeypatch.setattr(module, "_answer_all", lambda *_: [fake_result(True), fake_result(equal)])
    result = invoke("--dtype", dtype, "--device", "cpu")
    assert result.exit_code == code, result.output
    assert ("different tokens for 1 of 2 prompts" in result.output) != equal
    assert "prompt ... with two lines (5 tokens)" in result.output
    assert "9.0 / 9.0" in result.output


def test_missing_packages_are_named_with_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PACKAGES", ("torch", "no_such_package"))
    result = invoke()
    assert result.exit_code == 1
    assert "the demo needs no_such_package, not installed here. Fix: make demo" in result.output


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--device", "gpu7"), "'gpu7' is no device"),
        (("--device", "cuda:99"), f"this machine has {torch.cuda.device_count()} CUDA devices"),
        (("--max-new-tokens", "1"), "1 is not in the range x>=2"),
        (("--backend", "fast"), "'fast' is not one of"),
    ],
)
def test_wrong_flags(monkeypatch: pytest.MonkeyPatch, args: tuple[str, ...], words: str) -> None:
    monkeypatch.setattr(module, "_require_packages", lambda: None)
    result = invoke(*args)
    assert result.exit_code == 2
    assert words in " ".join(result.output.split())


def test_help_names_every_flag() -> None:
    text = invoke("--help").output
    for flag in ("--device", "--max-new-tokens", "--dtype", "--backend", "--json"):
        assert flag in text
    assert "Exits with 1" in text
