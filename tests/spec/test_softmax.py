"""Online softmax: every tau, row grouping, block size, sink and split gives the plain softmax, and the stated invariants hold."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem_attn.spec.exp2 import error_bound, exp2_poly
from tandem_attn.spec.softmax import LOG2_E, Partial, SoftmaxState, finalize, merge, rescale_groups, update

ROWS, KEYS, DIM = 4, 12, 2
LOGIT = st.one_of(st.floats(-30, 30), st.floats(-1e5, 1e5), st.just(-math.inf))
TABLE = st.lists(st.lists(LOGIT, min_size=KEYS, max_size=KEYS), min_size=ROWS, max_size=ROWS)
VALUES = [[math.sin(3.0 * i + j) for j in range(DIM)] for i in range(KEYS)]


def plain(logits: list[list[float]], sink: float | None = None) -> Partial:
    """Softmax by its definition; natural logits."""
    out, lse = [], []
    for row in logits:
        every = [*row, *([] if sink is None else [sink])]
        top = max(every)
        if top == -math.inf:
            out.append((0.0,) * DIM)
            lse.append(-math.inf)
            continue
        total = math.fsum(math.exp(x - top) for x in every)
        weights = [math.exp(x - top) / total for x in row]
        out.append(tuple(math.fsum(w * v[j] for w, v in zip(weights, VALUES, strict=True)) for j in range(DIM)))
        lse.append(top + math.log(total))
    return Partial(tuple(out), tuple(lse))


def online(logits: list[list[float]], block: int, keys: range = range(KEYS), **options: Any) -> SoftmaxState:
    state = SoftmaxState.start(len(logits), DIM)
    for start in range(keys.start, keys.stop, block):
        span = range(start, min(start + block, keys.stop))
        scores = [[row[j] * LOG2_E for j in span] for row in logits]
        state, _ = update(state, scores, [VALUES[j] for j in span], **options)
    return state


def assert_same(got: Partial, want: Partial, rel: float = 1e-9) -> None:
    for i, (a, b) in enumerate(zip(got.lse, want.lse, strict=True)):
        assert a == pytest.approx(b, rel=1e-12, abs=rel), f"lse of row {i}"
        assert got.out[i] == pytest.approx(want.out[i], rel=rel, abs=rel), f"row {i}"


@settings(max_examples=150, deadline=None)
@given(
    TABLE,
    st.sampled_from([1, 3, 4, 12]),
    st.sampled_from([0.0, 1.0, 8.0]),
    st.sampled_from([0, 1, 2, 4]),
    st.sampled_from([None, -3.0, 50.0]),
)
def test_equals_plain_softmax(logits: list[list[float]], block: int, tau: float, rescale_rows: int, sink: float | None) -> None:
    got = finalize(online(logits, block, tau=tau, rescale_rows=rescale_rows), sink)
    assert_same(got, plain(logits, sink))


@settings(max_examples=100, deadline=None)
@given(TABLE, st.sampled_from([1, 3, 4]), st.sampled_from([0.0, 1.0, 8.0]), st.sampled_from([1, 2, 4]))
def test_stabiliser_stays_within_tau_of_the_maximum(logits: list[list[float]], block: int, tau: float, rescale_rows: int) -> None:
    state = online(logits, block, tau=tau, rescale_rows=rescale_rows)
    for stabiliser, row in zip(state.row_max, logits, strict=True):
        top = max(row) * LOG2_E
        assert stabiliser <= top and (top == stabiliser or top - stabiliser <= tau)


@settings(max_examples=60, deadline=None)
@given(TABLE, st.sampled_from([(0, 5), (3, 3), (1, 11)]), st.sampled_from([None, 0.5]))
def test_merged_splits_equal_the_whole(logits: list[list[float]], cuts: tuple[int, int], sink: float | None) -> None:
    edges = [0, *cuts, KEYS]
    parts = [finalize(online(logits, 4, range(a, b))) for a, b in itertools.pairwise(edges)]
    assert_same(merge(parts, sink), plain(logits, sink))


def test_threshold_decides_by_group() -> None:
    old, new = (0.0, 0.0, 0.0, -math.inf), (9.0, 1.0, 8.0, -math.inf)
    assert rescale_groups(old, new, 8.0, 1) == (True, False, False, False)
    assert rescale_groups(old, new, 8.0, 2) == (True, False)
    assert rescale_groups(old, new, 8.0, 4) == (True,)
    assert rescale_groups(old, old, 8.0, 0) == (True,)
    assert rescale_groups(old, new, 0.0, 1) == (True, True, True, False)
    assert rescale_groups((-math.inf,), (-1e30,), 8.0, 1) == (True,), "the first key always sets the stabiliser"


def test_group_moves_together_and_others_stay() -> None:
    state, _ = update(SoftmaxState.start(4, 1), [[0.0]] * 4, [[1.0]], rescale_rows=2)
    state, moved = update(state, [[9.0], [1.0], [8.0], [2.0]], [[1.0]], tau=8.0, rescale_rows=2)
    assert moved == (True, False)
    assert state.row_max == (9.0, 1.0, 0.0, 0.0)
    assert state.row_sum == (2.0**-9 + 1, 1.5, 1 + 2.0**8, 5.0)


def test_rows_without_keys() -> None:
    state = online([[-math.inf] * KEYS], 4)
    assert finalize(state) == Partial(((0.0, 0.0),), (-math.inf,))
    assert finalize(state, sink=1.5).out == ((0.0, 0.0),) and finalize(state, sink=1.5).lse == (pytest.approx(1.5),)
    assert merge([finalize(state), finalize(state)]).lse == (-math.inf,)


def test_polynomial_exp2_stays_within_its_bound() -> None:
    logits = [[math.cos(7.0 * i * j) * 5 for j in range(KEYS)] for i in range(ROWS)]
    for degree in (3, 4, 5):
        got = finalize(online(logits, 4, exp2=lambda x, degree=degree: exp2_poly(x, degree)))
        assert_same(got, plain(logits), rel=4 * error_bound(degree))
