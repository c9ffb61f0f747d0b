"""The command line: exit codes, JSON, and that wrong flags end in a message instead of a traceback."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from click.testing import CliRunner
from torch import Tensor

import tandem_attn.cli.check as check_module
from tandem_attn.cli.main import main
from tandem_attn.cli.support import markdown
from tandem_attn.kernels.emulated import CHIPS

README = Path(__file__).parents[2] / "README.md"


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(main, arguments)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


def test_check_prints_each_output_and_exits_0() -> None:
    code, text = run("check", "--seqlen-q", "70", "--heads", "4", "--heads-kv", "2", "--head-dim", "32", "--mask", "causal", "--backward")
    assert code == 0, text
    assert all(name in text for name in ("out", "lse", "dq", "dk", "dv", "backend sdpa"))


@pytest.mark.parametrize("flags", [("--varlen", "20,0,9:30"), ("--mask", "window:5,2"), ("--softcap", "3", "--sink", "--alibi")])
def test_check_json_reports_errors_within_bounds(flags: tuple[str, ...]) -> None:
    sizes = () if "--varlen" in flags else ("--seqlen-q", "40")
    code, text = run("check", *sizes, "--heads", "2", "--head-dim", "16", "--dtype", "fp32", "--backward", "--json", *flags)
    assert code == 0, text
    outputs = json.loads(text)["outputs"]
    assert {"out", "lse", "dq", "dk", "dv"} <= {output["name"] for output in outputs}
    for output in outputs:
        assert output["ok"]
        assert 0 <= output["max_error"] <= output["max_bound"]


def test_check_exits_1_and_names_the_worst_element_when_a_result_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    right = check_module.run

    def wrong(*arguments: object) -> dict[str, Tensor]:
        got = right(*arguments)  # type: ignore[arg-type]
        got["out"][0, 3, 1, 2] += 1.0
        return got

    monkeypatch.setattr(check_module, "run", wrong)
    code, text = run("check", "--seqlen-q", "10", "--heads", "2", "--head-dim", "8")
    assert code == 1
    assert "broken" in text
    assert "worst element [0, 3, 1, 2]" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("check", "--heads", "3", "--heads-kv", "2"), "heads must be a multiple of heads_kv"),
        (
            ("check", "--backend", "sdpa", "--softcap", "1"),
            "backend 'sdpa' does not cover softcap; nearest that works: backend='reference'",
        ),
        (("check", "--mask", "diagonal"), "is not full, causal or window:L,R"),
        (("check", "--device", "tpu"), "--device must be cpu or cuda, got 'tpu'"),
        (("check", "--softcap", "-1"), "softcap must be finite and >= 0"),
        (("check", "--seqlen-q", "100000"), "seqlen_q * seqlen_k must be <="),
        (("check", "--varlen", "3,-1"), "lengths must be >= 0"),
        (("check", "--varlen", "3", "--batch", "2"), "--batch cannot be combined with --varlen"),
        (("check", "--dtype", "int8"), "is not one of float16, bfloat16"),
    ],
)
def test_wrong_flags_end_in_a_message(arguments: tuple[str, ...], message: str) -> None:
    code, text = run(*arguments)
    assert code != 0
    assert message in re.sub(r"\s+", " ", text)
    assert "Traceback" not in text


@pytest.mark.parametrize("flags", [("--batch", "0"), ("--varlen", "0"), ("--seqlen-q", "5", "--seqlen-k", "0")], ids=" ".join)
def test_check_of_nothing_is_valid_json(flags: tuple[str, ...]) -> None:
    """Without keys LSE is -inf, which JSON cannot hold as a number; without sequences nothing has a gradient."""
    result = CliRunner().invoke(main, ["check", *flags, "--heads", "2", "--head-dim", "8", "--backward", "--json"])
    assert result.exit_code == 0, result.output
    json.loads(result.stdout, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


def test_output_in_a_locale_without_unicode() -> None:
    command = [sys.executable, "-m", "tandem_attn", "plan", "--seqlen-q", "64"]
    done = subprocess.run(command, env={**os.environ, "PYTHONIOENCODING": "ascii"}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "Shared memory" in done.stdout


def test_doctor_names_versions_and_fixes() -> None:
    code, text = run("doctor", "--json")
    assert code == 0
    found = {finding["name"]: finding for finding in json.loads(text)}
    assert found["torch"]["fix"] == ""
    assert found["auto on cpu"]["found"].startswith("sdpa for dense full attention")
    assert "sdpa" in run("doctor")[1]


def test_doctor_says_how_to_install_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    real = metadata.version

    def version(name: str) -> str:
        if name == "gguf":
            raise metadata.PackageNotFoundError(name)
        return "2.0.1" if name == "triton" else real(name)

    monkeypatch.setattr(metadata, "version", version)
    found = {finding["name"]: finding for finding in json.loads(run("doctor", "--json")[1])}
    assert found["gguf"]["found"] == "not installed"
    assert found["gguf"]["fix"] == "pip install 'tandem-attn[demo]'"
    assert found["triton"]["found"] == "2.0.1, needs 3.9"


def test_support_answers_for_every_backend() -> None:
    code, text = run("support", "--device", "cpu", "--json")
    table = json.loads(text)
    assert code == 0
    kernels = {name: answer for name, answer in table["softcap"].items() if name.startswith("emulator:")}
    assert table["softcap"] == {"auto": "yes (reference)", "sdpa": "-", "reference": "yes"} | kernels
    assert kernels.keys() == {f"emulator:{arch}" for arch in CHIPS}
    assert set(kernels.values()) <= {"forward", "-"}  # without triton they run nothing
    assert table["KV cache, contiguous or paged"]["reference"] == "forward"


def test_support_table_of_the_readme_is_the_generated_one() -> None:
    pytest.importorskip("triton", reason="the table shows what the kernels cover, which triton compiles")
    block = re.search(r"<!-- tandem support --device cpu --markdown -->\n(.*?)\n<!-- end -->", README.read_text(), re.DOTALL)
    assert block is not None, "README.md has lost its generated support table"
    assert block[1].strip() == markdown("cpu")


def test_help_of_every_command_has_an_example() -> None:
    for name, command in main.commands.items():
        code, text = run(name, "--help")
        assert code == 0
        assert command.help, name
        assert len(text.splitlines()) > 3, name


def test_doctor_prints_brackets_of_a_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    monkeypatch.setenv("COLUMNS", "200")
    assert "pip install 'tandem-attn[cuda]'" in run("doctor")[1]
