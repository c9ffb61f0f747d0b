"""The backends that the semantic suite runs over. A new backend joins with one line in ``BACKENDS``."""

from __future__ import annotations

import contextlib
import functools
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

import tandem_attn
from tandem_attn.kernels import emulated
from tests.support.cases import FLOAT8, Case, build, size_of
from tests.support.judge import check

ORDERS: tuple[dict[str, Any], ...] = (
    {"schedule": "at-issue"},
    {"schedule": "latest"},
    *({"schedule": "random", "seed": seed} for seed in range(3)),
)


@dataclass(frozen=True)
class BackendUnderTest:
    """A name of ``backend=``, where its tensors live, and how the suite runs over it.

    Attributes:
        name: of ``backend=``.
        device: of the tensors.
        largest: how large a case may be (batch * heads * queries * keys; None: any).
        kernels: it has 16-bit types only, so cases run in those.
        slow: its cells take seconds each, so ``make judge`` runs them.
    """

    name: str
    device: str = "cpu"
    largest: int | None = None
    kernels: bool = False
    slow: bool = False

    def form(self, case: Case) -> Case:
        """The case as this backend is asked it."""
        if not self.kernels:
            return case
        narrow = {"fp32": "bf16", "fp64": "fp16"}.get(case.dtype, case.dtype)
        if not self.slow:
            return replace(case, dtype=narrow)
        forward: dict[str, Any] = {"backward": False, "grad_lse": False, "grad_out": "contiguous", "deterministic": False}
        return replace(case, dtype=narrow, **forward)  # their backward is the reference's, which has cells of its own


BACKENDS = (
    BackendUnderTest("reference"),
    BackendUnderTest("sdpa"),
    BackendUnderTest("tandem", device="cuda", kernels=True),
    *(BackendUnderTest(emulated.PREFIX + arch, kernels=True, slow=True) for arch in ("sm_90a", "sm_100a")),  # sm_103a: test_emulated
)


@dataclass(frozen=True)
class Cell:
    """One case on one backend."""

    case: Case
    backend: BackendUnderTest

    def refused(self) -> str:
        """Why the backend does not run the case, '' when it does."""
        if self.backend.largest is not None and size_of(self.case) > self.backend.largest:
            return "too large for it"
        return _refused(self.case, self.backend)

    def check(self, roundings: float = 0.0) -> None:
        # Many cases are a few elements in 16 bits, where the plain computation's error is luck. Weights of 8 bits are mostly the same ones.
        if self.backend.kernels and self.case.dtype not in FLOAT8:
            roundings = max(roundings, 0.5)
        with self._order():
            check(self.case, self.backend.name, roundings, self.backend.device)

    def _order(self) -> contextlib.AbstractContextManager[None]:
        """Emulated kernels run in one of several orders, always the same for a case."""
        if not self.backend.slow:
            return contextlib.nullcontext()
        return emulated.settings(**ORDERS[zlib.crc32(str(self.case).encode()) % len(ORDERS)])


@functools.lru_cache(maxsize=4096)
def _refused(case: Case, backend: BackendUnderTest) -> str:
    if backend.device == "cuda" and not torch.cuda.is_available():
        return "no CUDA device here"
    support = tandem_attn.supports(build(case).on(backend.device).problem(), backend.name)
    return "" if support else support.reason.split(" for seqlen")[0].partition("(")[0].partition("=")[0]


def cells(cases: Iterable[Case]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Parametrises a test over cases and backends; those of one case stand next to each other."""
    pairs = dict.fromkeys(Cell(backend.form(case), backend) for case in cases for backend in BACKENDS)
    marked = [pytest.param(cell, marks=[pytest.mark.judge] if cell.backend.slow else []) for cell in pairs]
    return pytest.mark.parametrize("cell", marked, ids=[f"{cell.case}-{cell.backend.name}" for cell in pairs])
