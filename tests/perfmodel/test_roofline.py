"""Roofline: reproduces the cycle table of arXiv 2603.05451 term by term, and follows its formulas elsewhere."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tandem_attn.perfmodel.roofline import EXP, MMA, SMEM, Roofline, roofline, roofline_of
from tandem_attn.spec.exp2 import Exp2Split
from tandem_attn.spec.masks import Causal
from tandem_attn.spec.planner import plan
from tandem_attn.spec.problem import Problem


def smem_terms(got: Roofline) -> dict[str, float]:
    """Shared-memory cycles by the paper's headings."""
    parts = {"operands": 0.0, "dS written": 0.0, "dS exchanged": 0.0, "dQ written": 0.0}
    for term in got.terms:
        if term.unit == SMEM:
            parts[next(part for part in parts if term.name.startswith(part))] += term.cycles
    return {part: cycles for part, cycles in parts.items() if cycles}


@pytest.mark.parametrize(
    ("arguments", "mma", "exp", "smem", "bottleneck"),
    [
        ({"direction": "forward"}, 1024, 1024, {"operands": 768}, "MMA and exp"),
        ({"direction": "forward", "tile_m": 256}, 2048, 2048, {"operands": 1536}, "MMA and exp"),
        ({"direction": "backward"}, 2560, 1024, {"operands": 2048, "dS written": 256, "dQ written": 1024}, "shared memory"),
        (
            {"direction": "backward", "cta_group": 2},
            2560,
            1024,
            {"operands": 1536, "dS written": 256, "dS exchanged": 384, "dQ written": 512},
            "shared memory",
        ),
    ],
    ids=["forward 128", "forward 256", "backward 1-CTA", "backward 2-CTA"],
)
def test_paper_table_b200_d128(arguments: dict[str, Any], mma: float, exp: float, smem: dict[str, float], bottleneck: str) -> None:
    got = roofline("B200", **arguments)
    assert got.units == {MMA: mma, SMEM: sum(smem.values()), EXP: exp}
    assert smem_terms(got) == smem
    assert got.bottleneck == bottleneck and got.bound == max(mma, exp, sum(smem.values()))


def test_paper_totals() -> None:
    assert roofline("B200", "backward").cycles(SMEM) == 3328
    assert roofline("B200", "backward", cta_group=2).cycles(SMEM) == 2688


@pytest.mark.parametrize("head_dim", [32, 64, 128, 256])
@pytest.mark.parametrize("tile", [(128, 128), (256, 128), (128, 64)], ids=str)
def test_paper_formulas(head_dim: int, tile: tuple[int, int]) -> None:
    m, n = tile
    forward = roofline("B200", tile_m=m, tile_n=n, head_dim=head_dim)
    assert forward.cycles(MMA) == 4 * m * n * head_dim / 8192
    assert forward.cycles(EXP) == m * n / 16
    assert forward.cycles(EXP) / forward.cycles(MMA) == 128 / head_dim
    assert roofline("B200", "backward", tile_m=m, tile_n=n, head_dim=head_dim).cycles(MMA) == 10 * m * n * head_dim / 8192


def test_chips_move_the_bottleneck() -> None:
    assert roofline("B300").bottleneck == "MMA" and roofline("B300").cycles(EXP) == 512
    assert roofline("B200", exp_fraction=0.1875).bottleneck == "MMA"
    assert roofline("B200", head_dim=64).bottleneck == "exp"
    hopper = roofline("H200")
    assert hopper.units == {MMA: 2048, SMEM: 256 + 2 * 256 + 2 * 256, EXP: 1024}, "each 64-row wgmma reads K and V again"
    backward = roofline("H200", "backward", tile_m=64)
    assert backward.units == {MMA: 2560, SMEM: 2560, EXP: 512}, "the 64-row tile of the first Hopper backward has no slack"
    small = roofline("H200", "backward", tile_m=64, tile_n=64, head_dim=256)
    assert small.bottleneck == "shared memory", "64 keys: P and dS pass through shared memory"


def test_pair_halves_operand_b_only() -> None:
    one, two = roofline("B200"), roofline("B200", cta_group=2)
    assert (one.cycles(SMEM), two.cycles(SMEM)) == (768, 512)
    assert one.cycles(MMA) == two.cycles(MMA) and one.cycles(EXP) == two.cycles(EXP)


def test_chip_rate_at_the_bound() -> None:
    got = roofline("B200")
    assert got.tflops == pytest.approx(2243, abs=1), "the peak of the paper, as the MMA is the bound"
    assert roofline("B200", head_dim=64).tflops == pytest.approx(2243 / 2, abs=1)
    assert roofline("B300").tflops is None
    assert roofline("H200", dtype="float8_e4m3fn").cycles(MMA) == 1024


def test_padding_counts_as_work_but_not_as_flops() -> None:
    got = roofline("B200", head_dim=72)
    assert got.cycles(MMA) == roofline("B200", head_dim=80).cycles(MMA)
    assert got.flops == 4 * 128 * 128 * 72


def test_roofline_of_plans() -> None:
    problem = Problem(batch=2, seqlen_q=8192, seqlen_k=8192, heads=16, heads_kv=16, head_dim=128, mask=Causal())
    forward = roofline_of(plan(problem, "B200", exp2=Exp2Split(fma_pairs=4)).plan)
    assert (forward.tile_m, forward.cycles(MMA), forward.cycles(EXP)) == (256, 2048, 2048 * 0.75)
    backward = roofline_of(plan(problem, "B200", direction="backward").plan)
    assert (backward.tile_m, backward.cta_group, backward.cycles(SMEM)) == (128, 2, 2688)


def test_as_dict_is_json() -> None:
    got = json.loads(json.dumps(roofline("B200", "backward", cta_group=2).as_dict()))
    assert got["units"]["shared memory"] == 2688 and got["bottleneck"] == "shared memory"
    assert sum(term["cycles"] for term in got["terms"] if term["unit"] == "MMA") == 2560


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"arch": "CPU"}, "arch must be a GPU with known rates, got CPU"),
        ({"direction": "sideways"}, "direction must be 'forward' or 'backward'"),
        ({"dtype": "float32"}, "dtype must be one that B200's tensor cores take"),
        ({"cta_group": 3}, "cta_group must be 1, or 2 on Blackwell, got 3"),
        ({"arch": "H100", "cta_group": 2}, "cta_group must be 1, or 2 on Blackwell, got 2 on H100"),
        ({"exp_fraction": 1.5}, r"exp_fraction must be in \[0, 1\], got 1.5"),
        ({"tile_n": 0}, "tile_n must be >= 1, got 0"),
    ],
)
def test_wrong_arguments_are_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        roofline(**{"arch": "B200", **arguments})
