"""The backends that the semantic suite runs over. A new backend joins with one line in ``BACKENDS``."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import pytest

import tandem_attn
from tests.support.cases import Case, build, size_of
from tests.support.judge import check


@dataclass(frozen=True)
class BackendUnderTest:
    """A name of ``backend=``, and how large a case may be for it (heads * queries * keys; None: any)."""

    name: str
    largest: int | None = None


BACKENDS = (
    BackendUnderTest("reference"),
    BackendUnderTest("sdpa"),
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
        return _refused(self.case, self.backend.name)

    def check(self, roundings: float = 0.0) -> None:
        check(self.case, self.backend.name, roundings)


@functools.lru_cache(maxsize=4096)
def _refused(case: Case, backend: str) -> str:
    support = tandem_attn.supports(build(case).problem(), backend)
    return "" if support else support.reason.split(" for seqlen")[0].partition("(")[0].partition("=")[0]


def cells(cases: Iterable[Case]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Parametrises a test over cases and backends; the two of one case stand next to each other."""
    pairs = [Cell(case, backend) for case in cases for backend in BACKENDS]
    return pytest.mark.parametrize("cell", pairs, ids=[f"{cell.case}-{cell.backend.name}" for cell in pairs])
