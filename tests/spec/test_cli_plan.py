"""``tandem plan`` and the problem flags: what is printed, what is JSON, and what each wrong flag says."""

from __future__ import annotations

import json
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from tandem_attn.cli.plan import draw, plan
from tandem_attn.cli.problem_flags import problem_flags
from tandem_attn.spec.masks import Causal, Full, Window
from tandem_attn.spec.problem import Problem
from tandem_attn.spec.resources import Region


def run(command: click.Command, *arguments: str) -> Result:
    return CliRunner().invoke(command, arguments)


def parsed(*arguments: str) -> Problem:
    seen: list[Problem] = []

    @click.command()
    @problem_flags
    @click.option("--seed", default=0)
    def probe(problem: Problem, seed: int) -> None:
        assert seed == 3
        seen.append(problem)

    result = run(probe, "--seed", "3", *arguments)
    assert result.exit_code == 0, result.output
    return seen[0]


def test_flags_fill_in_what_follows() -> None:
    got = parsed("--seqlen-q", "100", "--heads", "6")
    assert (got.batch, got.seqlen_q, got.seqlen_k, got.heads, got.heads_kv, got.head_dim, got.head_dim_v) == (1, 100, 100, 6, 6, 128, 128)
    assert (got.dtype, got.mask, got.backward, got.varlen) == ("bfloat16", Full(), False, False)
    got = parsed(
        "--seqlen-k", "0", "--heads-kv", "2", "--head-dim", "192", "--head-dim-v", "128", "--dtype", "fp16", "--backward", "--deterministic"
    )
    assert (got.seqlen_k, got.heads_kv, got.head_dim, got.head_dim_v, got.dtype) == (0, 2, 192, 128, "float16")
    assert got.backward and got.deterministic


@pytest.mark.parametrize(
    ("text", "mask"),
    [
        ("full", Full()),
        ("causal", Causal()),
        ("window:128,0", Window(128, 0)),
        ("window:,5", Window(None, 5)),
        ("window:none,-1", Window(None, -1)),
    ],
)
def test_mask_flag(text: str, mask: Any) -> None:
    assert parsed("--mask", text).mask == mask


def test_varlen_flag() -> None:
    got = parsed("--varlen", "512,0,100:300")
    assert got.varlen and got.lengths == ((512, 512), (0, 0), (100, 300))
    assert (got.batch, got.seqlen_q, got.seqlen_k, got.total_q, got.total_k) == (3, 512, 512, 612, 812)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--mask", "circle"), "'circle' is not full, causal or window:L,R"),
        (("--mask", "window:1"), "'window:1' is not full"),
        (("--mask", "window:a,0"), "L and R must be integers, or none"),
        (("--varlen", "5,x"), "'x' is not a length or q:k"),
        (("--varlen", "5,-1"), "lengths must be >= 0"),
        (("--varlen", "5,6", "--batch", "2"), "--batch cannot be combined with --varlen"),
        (("--varlen", "5,6", "--seqlen-k", "2"), "--seqlen-k cannot be combined with --varlen"),
        (("--dtype", "int8"), "'int8' is not one of float16, bfloat16"),
        (("--heads", "6", "--heads-kv", "4"), "heads must be a multiple of heads_kv, got heads=6, heads_kv=4"),
        (("--heads", "0"), "0 is not in the range x>=1"),
        (("--chip", "a100"), "'a100' is not one of"),
    ],
)
def test_wrong_flags_exit_2_and_say_what_is_right(arguments: tuple[str, ...], message: str) -> None:
    result = run(plan, *arguments)
    assert result.exit_code == 2 and message in result.output


def test_plan_draws_memory_and_gives_reasons() -> None:
    result = run(plan, "--chip", "b200", "--seqlen-q", "8192", "--heads", "16", "--mask", "causal")
    assert result.exit_code == 0
    for text in (
        "tile_m",
        "12.50% on FMA",
        "65,536 of 65,536 registers",
        "KV ring",
        "512 of 512 columns",
        "Reasons",
        "cluster launch control",
    ):
        assert text in result.output, text
    p_line = next(line for line in result.output.splitlines() if line.split()[:1] == ["P0"])
    assert p_line.split()[1:] == ["·" * 5 + "▒" * 5 + "·" * 30, "64", "64", "S0"]


def test_plan_as_json() -> None:
    got = json.loads(run(plan, "--chip", "h200", "--json", "--head-dim", "64", "--seqlen-q", "8192").output)
    assert got["plan"]["arch"] == "H200" and got["plan"]["q_stages"] == 3
    assert got["plan"]["schedule"]["kind"] == "naive" and got["reasons"] and len(got["digest"]) == 32
    assert [role["name"] for role in got["plan"]["roles"]] == ["consumer0", "consumer1", "consumer2", "producer"]


def test_plan_of_the_backward_and_of_the_cpu() -> None:
    assert "direction          backward" in run(plan, "--chip", "H100", "--backward").output
    cpu = run(plan, "--chip", "cpu", "--dtype", "fp32").output
    assert "Shared memory" not in cpu and "so that the reference rounds as those kernels do" in " ".join(cpu.split())


def test_unsupported_problem_exits_1_and_names_the_nearest() -> None:
    result = run(plan, "--chip", "b200", "--head-dim", "256", "--backward")
    assert result.exit_code == 1
    assert "tmem: " in result.output and "nearest that works: head_dim + head_dim_v up to 320" in result.output


def test_bar_shows_place_and_size() -> None:
    assert draw(Region("all", 0, 100), 100) == "█" * 40
    assert draw(Region("dot", 99, 1), 100) == "·" * 39 + "█"
    assert draw(Region("over", 50, 25, ("all",)), 100) == "·" * 20 + "▒" * 10 + "·" * 10
