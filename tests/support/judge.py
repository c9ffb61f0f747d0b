"""Runs a case on a backend and compares everything it returns with the truth."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator

import torch
from torch import Tensor

from tandem_attn.reference.compare import compare_all, rounded_where_needed
from tests.support import truth
from tests.support.cases import FLOAT8, Call, Case, build


@contextlib.contextmanager
def nan_filled_memory() -> Iterator[None]:
    """Every tensor that PyTorch allocates without a value holds NaN: what a backend forgets to write shows."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)  # turns torch.utils.deterministic.fill_uninitialized_memory on
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


@functools.lru_cache(maxsize=64)
def expected(case: Case) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
    """The float64 truth of a case, the plain computation in its dtype (LSE in float32), and the gradients' magnitudes.

    PyTorch computes nothing in 8 bits: for inputs of 8 bits the plain computation rounds weights to them and O to its dtype.
    """
    call = build(case)
    sums = truth.magnitudes(call)
    exact, wide = truth.results(call, torch.float64), truth.results(call, case.accumulator_dtype)
    if case.torch_dtype in (torch.float32, torch.float64):
        return exact, wide, sums
    if case.dtype in FLOAT8:
        rounded = truth.results(call, case.accumulator_dtype, weights=case.torch_dtype)
        return exact, wide | {"out": rounded["out"].to(case.out_dtype)}, sums
    narrow = truth.results(call, case.torch_dtype)
    return exact, {name: wide[name] if name == "lse" else rounded_where_needed(x, wide[name]) for name, x in narrow.items()}, sums


def check(case: Case, backend: str, roundings: float = 0.0, device: str = "cpu") -> None:
    """Fails with the worst element of every result that breaks the contract's accuracy rule.

    ``roundings`` of a summand, in the case's dtype, are allowed besides: with few elements the plain computation's error is luck.
    """
    call = build(case).on(device)
    with nan_filled_memory():
        got = call.run(backend)
    compare_call(call.on("cpu"), {name: x.cpu() for name, x in got.items()}, *expected(case), roundings)


def compare_call(
    call: Call, got: dict[str, Tensor], exact: dict[str, Tensor], plain: dict[str, Tensor], sums: dict[str, Tensor], roundings: float = 0.0
) -> None:
    case = call.case
    assert got["out"].dtype == case.out_dtype
    assert got["lse"].dtype == case.accumulator_dtype
    for name, x in call.leaves.items():
        if f"d{name}" in got:
            assert got[f"d{name}"].dtype == x.dtype, f"gradient of {name} has dtype {got[f'd{name}'].dtype}"
    bad = [str(c) for c in compare_all(got, exact, plain, case.torch_dtype, sums, roundings) if not c.ok]
    if call.cache_after is not None:
        bad += _cache_differs(call)
    assert not bad, f"{case}\n" + "\n".join(bad)


def _cache_differs(call: Call) -> list[str]:
    """The cache after an append: the new tokens in their places, bit for bit, and nothing else touched."""
    assert call.cache_after is not None
    bad = []
    for name, after in zip(("k", "v"), call.cache_after, strict=True):
        same = torch.eq(call.leaves[name], after) | (call.leaves[name].isnan() & after.isnan())
        if not bool(same.all()):
            bad.append(f"{name}_cache differs after appending, first at {(~same).nonzero()[0].tolist()}")
    return bad
