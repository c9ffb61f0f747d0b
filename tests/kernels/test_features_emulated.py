"""Every feature of the forward kernels, their compiled PTX executed by the emulator, against the fp64 truth."""

from __future__ import annotations

import pytest
from accuracy import assert_accurate
from features import FEATURES, MANY_QUERIES, for_a_pair, make

from tandem_attn.kernels import backend, emulated
from tandem_attn.spec.plan import FORWARD

pytest.importorskip("triton", reason="kernels are compiled by Triton: pip install tandem-attn[cuda]")
pytest.importorskip("numpy", reason="the emulator needs NumPy: pip install tandem-attn[emulator]")

# One for each device function runs with every suite; all of them, under all checks, with the judge's matrix.
QUICK = (
    "document, causal",
    "predicate, captured tensors",
    "bias that hides",
    "heads packed, 12",
    "splits, packed lengths",
    "pages of 16, leftpad",
)


QUICK_BLACKWELL = ("predicate, captured tensors", "splits, packed lengths", "pages of 16, leftpad")


MORE_THAN_TILES = 60  # clusters: the host only knows a bound of the tiles of packed batches, so some CTAs of a launch get none


def check(name: str, chip: str, checks: str, *, pair: bool = False, **settings: int) -> None:
    feature = make(name, "cpu")
    assert backend.lacks(feature.problem, chip) is None
    plan = backend.plan(feature.problem, FORWARD, chip).with_(**feature.plan)
    if pair:
        plan = for_a_pair(feature, plan)
    with emulated.settings(checks=checks, **settings):
        results = emulated.forward(feature.problem, plan, feature.inputs)
    assert_accurate(feature.problem, feature.inputs, *results)


@pytest.mark.parametrize(("name", "chip"), [*((name, "H200") for name in QUICK), *((name, "B200") for name in QUICK_BLACKWELL)])
def test_equals_truth(name: str, chip: str) -> None:
    check(name, chip, "default")


@pytest.mark.judge(each="name")
@pytest.mark.parametrize("name", FEATURES)
def test_judge_accepts(name: str) -> None:
    check(name, "B200", "all")


@pytest.mark.judge(each="name")
@pytest.mark.parametrize("name", FEATURES)
def test_judge_accepts_hopper(name: str) -> None:
    check(name, "H200", "all")


@pytest.mark.judge(each="name")
@pytest.mark.parametrize("name", [*FEATURES, *MANY_QUERIES])
def test_judge_accepts_a_pair(name: str) -> None:
    check(name, "B200", "all", pair=True)


@pytest.mark.judge(each="name")
@pytest.mark.parametrize("chip", ["H200", "B200"])
@pytest.mark.parametrize("name", [name for name in FEATURES if "packed" in name])
def test_judge_accepts_more_clusters_than_tiles(name: str, chip: str) -> None:
    check(name, chip, "all", clusters=MORE_THAN_TILES)
