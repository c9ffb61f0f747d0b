"""The longer matrix of ``make judge``: every GEMM, all checks and the race tracker, in more orders than ``make test`` has time for."""

import pytest
import torch

pytest.importorskip("triton", reason="subjects are written in Triton and Gluon: pip install tandem-attn[cuda]")

from tests.emulator.test_subjects_emulated import SUBJECTS, emulate

ORDERS = [("at-issue", 0), ("latest", 0), *(("random", seed) for seed in range(10, 16))]


@pytest.mark.judge
@pytest.mark.parametrize(("schedule", "seed"), ORDERS)
@pytest.mark.parametrize("name", [name for name in SUBJECTS if "gemm" in name])
def test_gemm_is_clean_under_every_check(name: str, schedule: str, seed: int) -> None:
    torch.manual_seed(seed)
    emulate(name, checks="all", schedule=schedule, seed=seed)
