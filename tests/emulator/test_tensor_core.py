"""The tensor core's addition as an H200 showed it: against exact rational arithmetic, and the compiled sum against NumPy's."""

from fractions import Fraction

import numpy as np
import pytest

from tandem_attn.emulator.codegen import native_tensor_core, native_tensor_core_chain
from tandem_attn.emulator.ops import tensor_core


def spread(shape, rng, low, high):
    """Random signs and 8-bit mantissas, exponents between low and high; one in eight is zero."""
    values = np.ldexp(rng.integers(128, 256, shape) / 128.0, rng.integers(low, high, shape)) * rng.choice([-1.0, 1.0], shape)
    return np.where(rng.integers(0, 8, shape) == 0, 0.0, values).astype(np.float32)


def floor_log2(x):
    return int(np.frexp(np.float64(x))[1]) - 1


def by_definition(a, b, c, fraction, lowest):
    """One element in rational arithmetic: align to the largest exponent, cut toward zero, add, cut to f32."""
    terms = [
        (Fraction(float(x)) * Fraction(float(y)), max(floor_log2(x), lowest) + max(floor_log2(y), lowest))
        for x, y in zip(a, b, strict=True)
    ]
    terms = [t for t in [*terms, (Fraction(float(c)), floor_log2(c))] if t[0]]
    if not terms:
        return 0.0
    quantum = Fraction(2) ** (max(e for _, e in terms) - fraction)
    total = sum(int(value / quantum) for value, _ in terms) * quantum
    if not total:
        return 0.0
    step = Fraction(2) ** (max(floor_log2(float(total)), -126) - 23)
    return float(int(total / step) * step)


@pytest.mark.parametrize("kind, low, high", [("bf16", -6, 6), ("bf16", -126, 60), ("f16", -14, 15), ("tf32", -40, 40)])
def test_sum_is_aligned_and_cut(kind, low, high):
    rng = np.random.default_rng(1)
    a, b = spread((16, 16), rng, low, high), spread((8, 16), rng, low, high)
    c = spread((16, 8), rng, max(2 * low, -126), min(2 * high, 120))
    got = tensor_core.multiply_add(tensor_core.operand(a, kind), tensor_core.operand(b, kind), c)
    want = np.array([[by_definition(a[i], b[j], c[i, j], 25, tensor_core.LOWEST[kind]) for j in range(8)] for i in range(16)])
    worst = np.argmax(got != want)
    assert (got == want).all(), (worst, got.flat[worst], want.flat[worst])


def test_products_below_the_cut_are_lost():
    """1 + 16 products of 2^-26 gives 1: each is cut before they are added; of 2^-25 each counts."""
    ones = tensor_core.operand(np.ones((8, 16), np.float32), "f16")
    for exponent, want in ((-26, 1.0), (-25, 1.0 + 2.0**-21)):
        a = np.full((16, 16), 2.0**-12, np.float32)
        small = tensor_core.operand(a, "bf16"), tensor_core.operand(np.full((8, 16), 2.0 ** (exponent + 12), np.float32), "bf16")
        got = tensor_core.multiply_add(*small, np.ones((16, 8), np.float32))
        assert (got == np.float32(want)).all(), (exponent, got[0, 0])
    assert ones.finite


def test_specials():
    a = np.ones((16, 16), np.float32)
    a[0, 0], a[1, 0], a[2, 0] = np.inf, np.nan, np.inf
    b = np.ones((8, 16), np.float32)
    b[3, 0] = 0.0
    c = np.zeros((16, 8), np.float32)
    c[2] = -np.inf
    got = tensor_core.multiply_add(tensor_core.operand(a, "f16"), tensor_core.operand(b, "f16"), c).view(np.uint32)
    assert got[0, 0] == 0x7F800000 and got[0, 3] == 0x7FFFFFFF
    assert (got[1] == 0x7FFFFFFF).all() and got[2, 0] == 0x7FFFFFFF and (got[3:, 0] == 0x41800000).all()


@pytest.mark.skipif(not native_tensor_core.available(), reason="needs llvmlite: pip install tandem-attn[emulator]")
@pytest.mark.parametrize("fraction, mantissa", [(13, 13), (25, 23), (25, 52)])
def test_compiled_sum_equals_numpy(fraction, mantissa):
    rng = np.random.default_rng(2)
    a, b = (tensor_core.operand(spread((rows, 32), rng, -126, 100), "bf16") for rows in (64, 24))
    c = spread((64, 24), rng, -126, 127).astype(np.float64)
    factors = [x for o in (a, b) for x in (o.values.astype(np.float64), o.exponents.astype(np.int32))]
    terms = *factors, c, fraction, mantissa
    native, plain = native_tensor_core.sum_terms(*terms), tensor_core.sum_terms_numpy(*terms)
    assert np.array_equal(native, plain)


@pytest.mark.skipif(not native_tensor_core.available(), reason="needs llvmlite: pip install tandem-attn[emulator]")
@pytest.mark.parametrize(
    "kind, low, high, step, inside",
    [("bf16", -6, 6, 16, True), ("bf16", -50, 10, 16, True), ("f16", -14, 15, 16, True), ("tf32", -20, 20, 8, True),
     ("e4m3", -6, 8, 32, True), ("bf16", -60, -30, 16, False)],
)  # fmt: skip
def test_chain_in_single_precision_equals_one_step_after_the_other(kind, low, high, step, inside):
    """The compiled chain gives the steps' bits, or says that it cannot."""
    rng = np.random.default_rng(3)
    a, b = (tensor_core.operand(spread((rows, 64), rng, low, high), kind) for rows in (64, 136))
    c = spread((64, 136), rng, max(2 * low, -126), min(2 * high, 120))
    form = (tensor_core.FP8_FRACTION, tensor_core.FP8_FRACTION) if kind == "e4m3" else (tensor_core.FRACTION, tensor_core.F32_MANTISSA)
    got = native_tensor_core_chain.accumulate(a.values, a.exponents, b.packed, c, step, *form)
    assert (got is not None) == inside
    want = c
    for start in range(0, 64, step):
        want = tensor_core.multiply_add(a.part(slice(start, start + step)), b.part(slice(start, start + step)), want, *form)
    out = tensor_core.accumulate(a, b, c, step, *form)
    wrong = np.argwhere(out.view(np.uint32) != want.view(np.uint32))
    assert not len(wrong), f"{len(wrong)} elements differ, the first {wrong[0]}: {out[tuple(wrong[0])]} and {want[tuple(wrong[0])]}"


@pytest.mark.skipif(not native_tensor_core.available(), reason="needs llvmlite: pip install tandem-attn[emulator]")
def test_chain_declines_an_accumulator_that_overflows():
    big = tensor_core.operand(np.full((64, 32), 2.0**40, np.float32), "bf16")
    c = np.full((64, 16), np.float32(3.0e38), np.float32)
    other = tensor_core.operand(np.full((16, 32), 2.0**90, np.float32), "bf16")
    assert native_tensor_core_chain.accumulate(big.values, big.exponents, other.packed, c, 16, 25, 23) is None
    assert np.isinf(tensor_core.accumulate(big, other, c, 16)).all()
