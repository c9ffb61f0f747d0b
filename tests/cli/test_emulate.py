"""``tandem emulate``: the kernel's errors, judgement and statistics from the command line, and what it refuses."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from tandem_attn.cli.main import main
from tandem_attn.kernels import emulated
from tandem_attn.kernels.compile import Kernel
from tandem_attn.spec.plan import Plan

pytest.importorskip("triton", reason="the kernels are compiled by Triton: pip install tandem-attn[cuda]")

from tandem_attn.kernels.sm90 import consumer as sm90

SMALL = ("--seqlen-q", "40", "--heads", "2", "--heads-kv", "1", "--head-dim", "16", "--mask", "causal")


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(main, ["emulate", *arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


def test_errors_judgement_and_statistics_are_printed() -> None:
    code, text = run(*SMALL)
    assert code == 0, text
    assert all(words in text for words in ("kernel for sm_90a", "out", "lse", "ok", "reports", "instructions", "tensor", "mufu"))


def test_every_order_is_run_and_json_holds_all(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    code, text = run(*SMALL, "--schedule", "at-issue,latest,random:3", "--checks", "default", "--json", "--trace", str(trace))
    assert code == 0, text
    runs = json.loads(text)["runs"]
    assert [each["schedule"] for each in runs] == ["at-issue", "latest", "random:3"]
    for each in runs:
        assert each["ok"] and each["finished"] and each["reports"] == []
        assert [output["name"] for output in each["outputs"]] == ["out", "lse"]
        statistics = each["statistics"]
        assert statistics["instructions"] == sum(statistics["opcodes"].values()) == sum(statistics["units"].values())
    lines = [json.loads(line) for line in trace.read_text().splitlines()]
    assert len(lines) == runs[0]["statistics"]["instructions"]
    assert sum(line["opcode"].startswith("wgmma.mma") for line in lines) == runs[0]["statistics"]["units"]["tensor"]


def without_wait(ptx: str, line: int) -> str:
    """The PTX without the first mbarrier wait behind a line of the kernel's source."""
    start = ptx.index("{ .reg .pred done;", ptx.index(f"// consumer.py:{line}:"))
    return ptx[:start] + ptx[ptx.index("}", start) + 1 :]


def test_a_report_is_printed_and_exits_1(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel whose first consumer does not wait for Q."""
    right = emulated.compiled
    source = Path(sm90.__file__).read_text().splitlines()
    line = next(number for number, text in enumerate(source, 1) if "q_in.wait()" in text)

    def broken(plan: Plan, **options: bool) -> Kernel:
        kernel = right(plan, **options)
        return replace(kernel, ptx=without_wait(kernel.ptx, line))

    monkeypatch.setattr(emulated, "compiled", broken)
    code, text = run(*SMALL)
    assert code == 1, text
    assert "at-issue: [race]" in text and "consumer.py" in text, text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--arch", "sm_80"), "'sm_80' is not one of"),
        (("--backward",), "does not cover the backward"),
        (("--dtype", "fp32"), "'emulator:sm_90a' does not cover dtype float32 (the kernels for H200 take float16, bfloat16)"),
        (("--head-dim", "12"), "does not cover head_dim=12 (multiples of 8)"),
        (("--schedule", "sometimes"), "'sometimes' is not at-issue, latest or random:SEED"),
        (("--schedule", "latest:3"), "'latest:3' is not at-issue, latest or random:SEED"),
        ((*SMALL, "--checks", "most"), "['most'] unknown"),
        (("--clusters", "0"), "0 is not in the range x>=1"),
        (("--seqlen-q", "100000"), "seqlen_q * seqlen_k must be <="),
    ],
)
def test_wrong_flags_end_in_a_message(arguments: tuple[str, ...], message: str) -> None:
    code, text = run(*arguments)
    assert code != 0
    assert message in text, text
