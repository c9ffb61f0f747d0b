"""``tandem roofline``: the paper's table in the terminal and as JSON, and its wrong flags."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner, Result

from tandem_attn.cli.roofline import roofline


def run(*arguments: str) -> Result:
    return CliRunner().invoke(roofline, arguments)


def test_defaults_print_the_papers_table() -> None:
    result = run()
    assert result.exit_code == 0
    rows = [[cell.strip() for cell in line.strip("│").split("│")] for line in result.output.splitlines() if "-CTA" in line]
    assert [row[:5] for row in rows] == [
        ["forward 1-CTA", "1024", "768", "1024", "MMA and exp"],
        ["forward 2-CTA", "1024", "512", "1024", "MMA and exp"],
        ["backward 1-CTA", "2560", "3328", "1024", "shared memory"],
        ["backward 2-CTA", "2560", "2688", "1024", "shared memory"],
    ]


def test_terms_are_printed() -> None:
    output = run("--direction", "backward", "--cta-group", "2", "--terms").output
    assert "dS exchanged through DSMEM" in output and "384" in output and "forward" not in output


def test_json_has_every_term() -> None:
    got = json.loads(run("--json", "--tile", "256x128", "--direction", "forward", "--cta-group", "1", "--exp-fraction", "0.25").output)
    assert len(got) == 1 and got[0]["units"] == {"MMA": 2048, "shared memory": 1536, "exp": 1536}


def test_hopper_has_no_pairs_and_b300_no_rate() -> None:
    hopper = run("--chip", "h200")
    assert hopper.exit_code == 0 and "forward 1-CTA" in hopper.output and "2-CTA" not in hopper.output
    assert "unknown" in run("--chip", "b300").output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--tile", "128"), "'128' is not MxN"),
        (("--tile", "0x128"), "'0x128' is not MxN"),
        (("--chip", "h100", "--cta-group", "2"), "cta_group must be 1, or 2 on Blackwell, got 2 on H100"),
        (("--dtype", "fp32"), "dtype must be one that B200's tensor cores take"),
        (("--exp-fraction", "2"), "2.0 is not in the range"),
        (("--chip", "cpu"), "'cpu' is not one of"),
    ],
)
def test_wrong_flags_exit_2_and_say_what_is_right(arguments: tuple[str, ...], message: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2 and message in result.output
