"""The backends that the semantic suite runs over. A new backend joins with one line in ``BACKENDS``."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import pytest
import torch

import tandem_attn
from tests.support.cases import Case, build, size_of
from tests.support.judge import check


@dataclass(frozen=True)
class BackendUnderTest:
    """A name of ``backend=``, where its tensors live, and how a case must be changed for it.

    Attributes:
        name: of ``backend=``.
        device: of the tensors.
        dtypes: names of ``support.cases.DTYPES`` and what takes their place, so that float32 cases reach a 16-bit kernel too.
        largest: how large a case may be (batch * heads * queries * keys; None: any).
    """

    name: str
    device: str = "cpu"
    dtypes: tuple[tuple[str, str], ...] = ()
    largest: int | None = None

    def adapted(self, case: Case) -> Case:
        return replace(case, dtype=dict(self.dtypes).get(case.dtype, case.dtype))


BACKENDS = (
    BackendUnderTest("reference"),
    BackendUnderTest("sdpa"),
    BackendUnderTest("tandem", "cuda", (("fp32", "bf16"), ("fp64", "fp16"))),
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
        check(self.case, self.backend.name, roundings, self.backend.device)


@functools.lru_cache(maxsize=4096)
def _refused(case: Case, backend: BackendUnderTest) -> str:
    if backend.device == "cuda" and not torch.cuda.is_available():
        return "no CUDA device here"
    support = tandem_attn.supports(build(case).on(backend.device).problem(), backend.name)
    return "" if support else support.reason.split(" for seqlen")[0].partition("(")[0].partition("=")[0]


def cells(cases: Iterable[Case]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Parametrises a test over cases and backends; those of one case stand next to each other."""
    pairs = [Cell(backend.adapted(case), backend) for case in cases for backend in BACKENDS]
    return pytest.mark.parametrize("cell", pairs, ids=[f"{cell.case}-{cell.backend.name}" for cell in pairs])
