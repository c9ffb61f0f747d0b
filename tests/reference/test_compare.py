"""The accuracy rule itself: it must fail where it should, and name the right element."""

from __future__ import annotations

import pytest
import torch

from tandem_attn.reference import compare
from tests.support import truth
from tests.support.cases import Case, build

TRUTH = torch.linspace(-1, 1, 24, dtype=torch.float64).view(2, 3, 4)


def test_equal_is_ok() -> None:
    found = compare.compare("out", TRUTH.float(), TRUTH, TRUTH.float())
    assert found.ok and found.max_error < 1e-7


def test_the_worst_element_is_named() -> None:
    got = TRUTH.float()
    got[1, 2, 0] += 0.5
    got[0, 1, 1] -= 0.25
    found = compare.compare("out", got, TRUTH, TRUTH.float())
    assert not found.ok and found.worst is not None and found.worst.index == (1, 2, 0)
    assert "out: worst element [1, 2, 0] got 1.2391305, truth 0.739130435" in str(found)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_non_finite_positions_come_first(value: float) -> None:
    got = TRUTH.float()
    got[0, 2, 3] = value
    got[1, 0, 0] = value
    found = compare.compare("lse", got, TRUTH, TRUTH.float())
    assert not found.ok and found.wrong_count == 2 and [e.index for e in found.wrong] == [(0, 2, 3), (1, 0, 0)]
    assert str(found).startswith("lse: 2 elements are NaN or infinite where the truth is not, or the reverse\n  [0, 2, 3] got ")
    assert found.max_error < 1e-6, "the others are compared all the same"


def test_infinities_of_the_truth_must_be_met() -> None:
    exact = TRUTH.clone()
    exact[0, 0, 0] = -float("inf")
    assert compare.compare("lse", exact.float(), exact, exact.float()).ok
    for wrong in (0.0, float("inf"), float("nan"), -3e38):
        got = exact.float()
        got[0, 0, 0] = wrong
        assert compare.compare("lse", got, exact, exact.float()).wrong_count == 1


def test_twice_the_plain_error_is_the_bound() -> None:
    plain = TRUTH + 1e-3 * torch.sign(TRUTH)
    for factor, ok in ((1.9, True), (2.1, False)):
        got = TRUTH + factor * 1e-3 * torch.sign(TRUTH)
        assert compare.compare("out", got.float(), TRUTH, plain).ok is ok


def test_one_large_error_and_many_small_ones_both_count() -> None:
    plain = TRUTH.clone()
    plain[0, 0, 0] += 1e-2
    spread = TRUTH + 1e-2
    found = compare.compare("out", spread.float(), TRUTH, plain)
    assert found.max_error <= found.max_bound and found.relative_error > found.relative_bound and not found.ok


def test_a_plain_result_that_overflowed_sets_no_bound() -> None:
    plain = TRUTH.clone()
    plain[0, 0, 0] = float("inf")
    got = TRUTH.float()
    got[1, 1, 1] += 0.1
    assert not compare.compare("out", got, TRUTH, plain).ok


def test_magnitudes_allow_for_what_cancelled() -> None:
    zero = torch.zeros(4, dtype=torch.float64)
    got = torch.full((4,), 1e-6)
    assert not compare.compare("dbias", got, zero, zero).ok
    assert compare.compare("dbias", got, zero, zero, magnitude=torch.full((4,), 10.0)).ok
    assert not compare.compare("dbias", 100 * got, zero, zero, magnitude=torch.full((4,), 10.0)).ok


def test_shapes_must_agree() -> None:
    with pytest.raises(ValueError, match=r"got must have truth's shape \(2, 3, 4\) in dq, got \(24,\)"):
        compare.compare("dq", TRUTH.flatten(), TRUTH, TRUTH)


def test_empty_results_are_equal() -> None:
    empty = torch.zeros(0, 3, dtype=torch.float64)
    assert compare.compare("out", empty.float(), empty, empty).ok


DENSE = [
    Case(grad_lse=True), Case(mask="causal", sink=True, softcap=3.0, grad_lse=True), Case(mask="captured", alibi=2, bias="b1q1"),
    Case(used_q=(3, 37), used_k=(50, 0), mask="window(5,2)", grad_lse=True), Case(batch=1, seqlen_q=0), Case(scale=-1.0, head_dim_v=5),
    Case(layout="packed", batch=3, lengths_q=(4, 0, 9), lengths_k=(7, 3, 0), tail_q=2, mask="causal", sink=True, bias="11qk"),
]  # fmt: skip


@pytest.mark.parametrize("case", DENSE, ids=str)
def test_dense_is_the_truth(case: Case) -> None:
    """``reference.dense`` against the tests' own truth, which shares no code with it."""
    call = build(case)
    gradients = (call.grad_out.nan_to_num(0.0) if call.grad_out is not None else None), call.grad_lse
    gradients = (gradients[0], None if call.grad_lse is None else call.grad_lse.nan_to_num(0.0))
    got = compare.results(call.problem(), call.inputs(), torch.float64, *gradients)
    for name, want in truth.results(call, torch.float64).items():
        torch.testing.assert_close(got[name], want, rtol=1e-12, atol=1e-12)


def test_plainly_takes_float32_where_float16_overflows() -> None:
    call = build(Case(dtype="fp16", amplify=200.0, backward=False))
    plain = compare.plainly(call.problem(), call.inputs())
    assert plain["out"].dtype == torch.float16 and bool(plain["out"].isfinite().all()) and plain["lse"].dtype == torch.float32
