"""The benchmark on a CPU: wrong outputs are never timed, what is missing is named, and the results say what they are."""

from __future__ import annotations

import dataclasses
import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

from tandem_attn.bench import machine, ours, peers, presets, protocol, report, run, truth
from tandem_attn.bench.cases import BACKWARD, DECODE, VARLEN, Case, by_tokens, tensors
from tandem_attn.bench.machine import commit
from tandem_attn.bench.plot import plot
from tandem_attn.cli.main import main

SMALL = {
    "full": Case(16, 40, 2, 2, dtype="float32"),
    "causal": Case(16, 40, 2, 4, "causal", heads_kv=2, dtype="float32"),
    "head_dim_v": Case(16, 33, 1, 2, "causal", head_dim_v=8),
    "backward": Case(16, 40, 2, 4, "causal", heads_kv=2, dtype="float32", direction=BACKWARD),
    "varlen": Case(16, 20, 3, 2, "causal", dtype="float32", lengths=(20, 1, 7), kind=VARLEN),
    "varlen, backward": Case(16, 20, 3, 2, "causal", dtype="float32", lengths=(20, 1, 7), kind=VARLEN, direction=BACKWARD),
    "decode": Case(16, 50, 3, 4, heads_kv=2, dtype="float32", kind=DECODE),
}
SETTINGS = run.Settings("cpu", "reference", ("sdpa",), rounds=2, round_ms=1.0)


def cells(*cases: Case, settings: run.Settings = SETTINGS) -> list[dict[str, Any]]:
    return list(run.measure(list(cases), settings, run.start(settings)))


@pytest.mark.parametrize("name", SMALL)
def test_ours_is_right_and_timed(name: str) -> None:
    (cell,) = cells(SMALL[name])
    assert 0 < cell["error"]["tandem"] < truth.tolerance(SMALL[name])
    assert cell["tflops"]["tandem"] > 0
    packed = SMALL[name].kind == VARLEN
    assert ("sdpa" in cell["failed"]) == packed and ("sdpa" in cell["tflops"]) != packed
    assert (cell["ratio"] is None) == packed
    if not packed:
        assert cell["ratio"] == pytest.approx(cell["ms"]["sdpa"] / cell["ms"]["tandem"], rel=0.02)
    assert {"head_dim", "head_dim_v", "seqlen", "batch", "heads", "heads_kv", "mask", "direction", "tflops", "ratio"} <= set(cell)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda out: out * 1.01,
        lambda out: out.index_fill(1, torch.tensor([39]), 0.0),
        lambda out: out.clone().masked_fill_(torch.arange(16) == 3, float("nan")),
        lambda out: out.roll(1, 2),
    ],
)
def test_wrong_outputs_are_not_timed(spoil: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    real = peers.PEERS["sdpa"]
    wrong = dataclasses.replace(real, make=lambda case, t: lambda: spoil(real.make(case, t)()))
    monkeypatch.setitem(peers.PEERS, "sdpa", wrong)
    (cell,) = cells(SMALL["full"])
    assert "wrong: relative error" in cell["failed"]["sdpa"]
    assert "sdpa" not in cell["tflops"] and cell["ratio"] is None and "tandem" in cell["tflops"]


@pytest.mark.parametrize("name", ["causal", "backward", "varlen"])
def test_truth_in_blocks_is_the_truth(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = SMALL[name]
    t = tensors(case, "cpu")
    whole = truth.expected(case, t, "cpu")
    monkeypatch.setitem(truth._BLOCK, "cpu", 100)
    for a, b in zip(whole, truth.expected(case, t, "cpu"), strict=True):
        assert (a.output, a.index) == (b.output, b.index)
        torch.testing.assert_close(a.values, b.values, rtol=1e-12, atol=1e-12)


def test_budget_spreads_over_sequences_and_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(16, 40, 3, 4, dtype="float32")
    t = tensors(case, "cpu")
    assert len(truth.expected(case, t, "cpu")) == 12
    monkeypatch.setitem(truth._BUDGET, "cpu", 3 * 40 * 40)
    places = [x.index for x in truth.expected(case, t, "cpu")]
    assert len(places) == 3 and {place[0] for place in places} == {0, 1, 2}
    assert places[0] == (0, slice(None), 0) and places[-1] == (2, slice(None), 3)


def test_missing_and_failing_peers_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    absent = dataclasses.replace(peers.PEERS["sdpa"], module="no_such_module")

    def refuse(case: Case, t: Any) -> Any:
        raise ValueError("not today")

    monkeypatch.setitem(peers.PEERS, "absent", absent)
    monkeypatch.setitem(peers.PEERS, "refuses", dataclasses.replace(absent, module="torch", make=refuse))
    settings = dataclasses.replace(SETTINGS, peers=("sdpa", "absent", "fa3", "refuses"))
    results = run.start(settings)
    assert "No module named 'no_such_module'" in results.missing["absent"]
    assert results.missing["fa3"] == "runs on cuda only"
    monkeypatch.setattr(run, "_PATIENCE_S", -1.0)
    first, second = run.measure([SMALL["full"], SMALL["causal"]], settings, results)
    assert first["failed"] == {"refuses": "ValueError: not today"} and not second["failed"]
    assert "not tried again" in results.missing["refuses"]


def test_our_failure_is_named_too() -> None:
    (cell,) = cells(SMALL["full"], settings=dataclasses.replace(SETTINGS, backend="tandem"))
    assert "UnsupportedError" in cell["failed"]["tandem"] and cell["ratio"] is None and "sdpa" in cell["tflops"]


def test_work_is_counted_as_in_the_papers() -> None:
    """4 S^2 d h, halved for causal masks, times 2.5 in the backward; K and V once in decoding."""
    case = by_tokens(128, 4096, "full")
    assert (case.batch, case.heads) == (8, 16)
    assert case.flops == 4 * 4096**2 * 128 * 16 * 8
    assert by_tokens(128, 4096, "causal").flops == case.flops / 2
    assert dataclasses.replace(case, direction=BACKWARD).flops == case.flops * 2.5
    assert by_tokens(192, 1024, "full", head_dim_v=128, heads=16).flops == 2 * 1024**2 * (192 + 128) * 16 * 32
    packed = Case(128, 30, 2, 4, "causal", lengths=(10, 30), kind=VARLEN)
    assert packed.flops == 4 * (10**2 + 30**2) / 2 * 128 * 4
    cache = Case(128, 1000, 2, 8, heads_kv=2, kind=DECODE)
    assert (cache.flops, cache.kv_bytes) == (4 * 1000 * 128 * 8 * 2, 2 * 1000 * 2 * 2 * 128 * 2)


def test_presets() -> None:
    grid = presets.grid()
    dims = Counter((case.head_dim, case.head_dim_v, case.heads) for case in grid)
    assert dims == {(64, 64, 32): 14, (128, 128, 16): 14, (192, 128, 16): 14, (256, 256, 8): 14}
    assert all(case.batch * case.seqlen == 32768 for case in grid)
    assert [(case.heads, case.heads_kv, case.seqlen) for case in presets.gqa()] == [(32, 4, 8192)] * 2 + [(16, 1, 8192)] * 2
    (packed,) = presets.varlen()
    assert (packed.batch, packed.seqlen, sum(packed.lengths)) == (32, 16384, 2 * sum(packed.lengths[::2]))
    assert len(presets.cases(("grid", "quick"), ("fwd",))) == len(grid), "each case once"
    assert {case.direction for case in presets.cases(("decode", "varlen"), ("fwd", "bwd")) if case.kind == DECODE} == {"fwd"}


def test_naive_order_is_the_same_kernel() -> None:
    case = presets.schedule()[0]
    lpt, naive = ours.plans([case])
    assert lpt.schedule.kind != naive.schedule.kind
    assert lpt == naive.with_(schedule=lpt.schedule)


def test_rounds_are_interleaved() -> None:
    order: list[str] = []
    times = protocol.milliseconds({name: (lambda name=name: order.append(name)) for name in "abc"}, rounds=5, round_ms=0.0, device="cpu")
    assert {name: len(values) for name, values in times.items()} == dict.fromkeys("abc", 5)
    rounds = ["".join(order[i : i + 3]) for i in range(3, len(order), 3)]
    assert len(rounds) == 5 and all(sorted(each) == list("abc") for each in rounds) and len(set(rounds)) > 1


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["bench", *arguments], env={"COLUMNS": "160"})


QUICK = ("--preset", "cpu", "--seqlen", "512", "--round-ms", "1", "--rounds", "1")


def test_command_measures_and_shows(tmp_path: Path) -> None:
    out = tmp_path / "results.json"
    done = invoke(*QUICK, "--out", str(out))
    assert done.exit_code == 0, done.output
    assert "geometric mean of 2 ratios" in done.output
    stored = json.loads(out.read_text())
    assert len(stored["cells"]) == 2 and stored["environment"]["torch"] == torch.__version__
    assert stored["settings"]["backend"] == "auto" and stored["settings"]["seconds"] >= 0
    again = invoke("--show", str(out))
    assert again.exit_code == 0 and "d64 S512 B2 H8/2 causal float32 fwd" in again.output
    assert json.loads(invoke("--show", str(out), "--json").output) == stored


def test_command_lists(tmp_path: Path) -> None:
    done = invoke("--preset", "grid", "--head-dim", "192,128", "--mask", "causal", "--list", "--peers", "fa3,sdpa")
    assert done.exit_code == 0
    assert "7 cases" in done.output and "d192,128 S512 B64 H16 causal fwd" in done.output
    assert "fa3    FlashAttention-3: missing, runs on cuda only" in done.output


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--peers", "fa9"], "'fa9' is not one of"),
        (["--seqlen", "3"], "no case of cpu is left"),
        (["--head-dim", "x"], "not a head dimension"),
        (["--device", "cuda"], "needs a CUDA device"),
    ],
)
def test_command_refuses(arguments: list[str], words: str) -> None:
    if arguments == ["--device", "cuda"] and torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    done = invoke("--preset", "cpu", *arguments)
    assert done.exit_code != 0 and words in done.output


def test_table_marks_what_failed() -> None:
    (cell,) = cells(SMALL["varlen"])
    table = report.table([cell], {"processor": "P"})
    assert [str(next(iter(column.cells))) for column in table.columns][-1] == "-"
    assert report.summary([cell]) == "no cell has both ours and a peer"


def test_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="plots are drawn by matplotlib: pip install tandem-attn[plot]")
    found = cells(SMALL["full"], dataclasses.replace(SMALL["full"], seqlen=20))
    plot(found, {"processor": "P", "commit": "c", "date": "2026-11-30"}, tmp_path / "plot.svg")
    assert "<svg" in (tmp_path / "plot.svg").read_text()
    with pytest.raises(ValueError, match="dense"):
        plot(cells(SMALL["decode"]), {}, tmp_path / "none.svg")


@pytest.mark.parametrize(
    "lines, found",
    [
        ("1500, 3201, 600.5, 60\\n1600, 3201, 650.5, 62", {"sm_mhz": 1550.0, "memory_mhz": 3201.0, "watts": 625.5, "celsius": 61.0}),
        ("1500, [N/A], 600, 60", {}),
    ],
)
def test_telemetry_reads_nvidia_smi(lines: str, found: dict[str, float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "nvidia-smi"
    script.write_text(f"#!/bin/sh\nprintf '{lines}\\n'\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(machine, "_which", lambda: [])
    with machine.Telemetry() as telemetry:
        assert telemetry._process is not None
        telemetry._process.wait(timeout=10)
        telemetry._reader.join(timeout=10)
        assert telemetry.since(0.0) == found
        later = telemetry.since(time.monotonic())
    assert later == ({} if not found else {"sm_mhz": 1500.0, "memory_mhz": 3201.0, "watts": 600.5, "celsius": 60.0})


def test_commit_can_be_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_COMMIT", "abc")
    assert commit() == "abc"
