"""exp2 polynomials: coefficients against Remez' optimum, computed bounds against measurement and against the paper."""

from __future__ import annotations

import math
import random
from fractions import Fraction

import numpy as np
import pytest

from tandem_attn.spec.exp2 import (
    COEFFICIENTS,
    DEGREES,
    Exp2Split,
    approximation_error,
    error_bound,
    exp2_poly,
    fma_float32,
    round_to_float32,
)

# Largest relative error over 4 million float32 inputs, arXiv 2603.05451.
PAPER = {3: 8.77e-5, 4: 3.05e-6, 5: 1.44e-7}


def remez(degree: int, points: int = 200_001) -> tuple[list[float], float]:
    """Minimax of the relative error of p against 2^f on [0, 1] with p(0) = 1: coefficients and error."""
    grid = np.linspace(0.0, 1.0, points)
    x = np.linspace(0.0, 1.0, degree + 2)[1:]
    for _ in range(20):
        rows = np.array([[xi**k * 2.0**-xi for k in range(1, degree + 1)] + [(-1.0) ** i] for i, xi in enumerate(x)])
        solved = np.linalg.solve(rows, 1.0 - 2.0**-x)
        coefficients = [1.0, *solved[:degree]]
        error = np.polyval(coefficients[::-1], grid) * 2.0**-grid - 1.0
        turns = np.flatnonzero(np.diff(np.sign(error[1:]))) + 2
        x = np.array([grid[part][np.argmax(np.abs(error[part]))] for part in np.split(np.arange(points), turns)])
        assert len(x) == degree + 1, "the error of a minimax polynomial alternates degree + 1 times"
    return coefficients, float(np.abs(error).max())


@pytest.mark.parametrize("degree", DEGREES)
def test_coefficients_are_float32_and_minimax(degree: int) -> None:
    best, optimum = remez(degree)
    for ours, exact in zip(COEFFICIENTS[degree], best, strict=True):
        assert ours == round_to_float32(ours)
        assert ours == pytest.approx(exact, rel=1e-4)
    assert optimum <= approximation_error(degree) <= 1.01 * optimum


@pytest.mark.parametrize("degree", DEGREES)
def test_error_reproduces_the_paper(degree: int) -> None:
    rng = random.Random(5)
    worst = max(_relative_error(round_to_float32(rng.random()), degree) for _ in range(30_000))
    assert 0.96 * PAPER[degree] < worst <= PAPER[degree]


@pytest.mark.parametrize("degree", DEGREES)
def test_error_bound_holds_and_is_tight(degree: int) -> None:
    worst = max(_relative_error(x, degree) for x in _inputs(30_000))
    assert 0.9 * error_bound(degree) < worst <= error_bound(degree)


def _inputs(count: int) -> list[float]:
    rng = random.Random(7)
    near_zero = [-(2.0**-k) * (1 + rng.random()) for k in range(1, 40)]
    below_zero = [-0.5 * rng.random() for _ in range(count)]  # where x - floor(x) rounds
    return [round_to_float32(x) for x in (*near_zero, *below_zero, *(rng.uniform(-126, 8) for _ in range(count)))]


def _relative_error(x: float, degree: int) -> float:
    return abs(exp2_poly(x, degree) / 2.0**x - 1)


@pytest.mark.parametrize("degree", DEGREES)
def test_integers_are_exact_and_masked_logits_vanish(degree: int) -> None:
    assert all(exp2_poly(float(k), degree) == 2.0**k for k in range(-126, 128))
    assert [exp2_poly(x, degree) for x in (-math.inf, -1e30, -127.0, -128.5, math.nan)] == [0.0] * 5


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(ValueError, match=r"degree must be one of \(3, 4, 5\), got 6"):
        exp2_poly(0.0, 6)
    with pytest.raises(ValueError, match="x must be below 128"):
        exp2_poly(128.0)


def test_fma_rounds_once() -> None:
    rng = random.Random(3)
    cases = [tuple(round_to_float32(rng.uniform(-2, 2) * 2.0 ** rng.randint(-12, 12)) for _ in range(3)) for _ in range(5_000)]
    # The product is 2^-24 (1 - 2^-46): the double sum falls on a float32 tie, the exact one lies below it; and the mirrored case.
    cases.append((1 + 2.0**-23, 2.0**-24 * (1 - 2.0**-23), 1 + 2.0**-23))
    cases.append((-1 - 2.0**-23, 2.0**-24 * (1 - 2.0**-23), 1.0))
    for a, b, c in cases:
        exact = Fraction(a) * Fraction(b) + Fraction(c)
        got = fma_float32(a, b, c)
        neighbours = (float(np.nextafter(np.float32(got), np.float32(side))) for side in (-np.inf, np.inf))
        assert all(abs(Fraction(got) - exact) <= abs(Fraction(n) - exact) for n in neighbours), (a, b, c)


def test_split_places_pairs() -> None:
    split = Exp2Split(fma_pairs=3, group_pairs=16, first_pair=1)
    assert split.fraction == 0.1875
    assert split.columns(64) == (2, 3, 4, 5, 6, 7, 34, 35, 36, 37, 38, 39)
    assert Exp2Split().columns(128) == ()
    assert Exp2Split(fma_pairs=16).columns(128) == tuple(range(128))
    assert hash(split) == hash(Exp2Split(3, 3, 16, 1))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"degree": 2}, "exp2.degree must be one of"),
        ({"fma_pairs": -1}, "exp2.fma_pairs must be an int >= 0, got -1"),
        ({"fma_pairs": True}, "exp2.fma_pairs must be an int"),
        ({"fma_pairs": 9, "first_pair": 8}, "must fit group_pairs"),
        ({"group_pairs": 0}, "must fit group_pairs"),
    ],
)
def test_split_checks_its_fields(arguments: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Exp2Split(**arguments)
