"""The emulator runs every subject to the right numbers with nothing to report, whatever the schedule."""

from functools import partial

import pytest
import torch

pytest.importorskip("triton", reason="subjects are written in Triton and Gluon: pip install tandem-attn[cuda]")

from tandem_attn.emulator import run
from tests.emulator.ptx import catalog
from tests.emulator.ptx.emulate import run_case
from tests.emulator.subjects import nvcc, plain_triton
from tests.emulator.subjects.gemm_sm90 import gemm_sm90
from tests.emulator.subjects.gemm_sm100 import CLUSTERS, gemm_sm100

SUBJECTS = {
    "gemm_sm90": partial(gemm_sm90, 256, 256, 192),
    "gemm_sm90 persistent": partial(gemm_sm90, 384, 256, 192, ctas=2),
    "gemm_sm90 edges": partial(gemm_sm90, 200, 136, 104),
    "gemm_sm90 one K step": partial(gemm_sm90, 128, 128, 64),
    **{f"gemm_sm100 {cluster}": partial(gemm_sm100, 512, 256, 192, cluster) for cluster in CLUSTERS},
    **{f"gemm_sm100 {cluster} persistent": partial(gemm_sm100, 512, 512, 128, cluster, programs=1) for cluster in CLUSTERS},
    "gemm_sm100 edges": partial(gemm_sm100, 200, 136, 104),
    "gemm_sm103": partial(gemm_sm100, 256, 256, 128, "pair", arch=103),
    "matmul f16": plain_triton.matmul,
    "matmul bf16": partial(plain_triton.matmul, dtype=torch.bfloat16),
    "matmul tf32": partial(plain_triton.matmul, dtype=torch.float32),
    "matmul sm_100": partial(plain_triton.matmul, arch=100),
    "softmax": plain_triton.softmax,
    "layer_norm": plain_triton.layer_norm,
    "histogram": plain_triton.histogram,
    "block_sum by hand": partial(nvcc.block_sum, use_nvcc=False),
    "block_sum by nvcc": nvcc.block_sum,
}


def emulate(name, **options):
    if name == "block_sum by nvcc" and not nvcc.nvcc_path():
        pytest.skip("nvcc is not installed: only the hand-written PTX of the same kernel runs")
    subject = SUBJECTS[name]()
    if subject.block is not None:
        options["block"] = subject.block
    result = run(subject.kernel, subject.args, subject.grid, **options)
    assert not result.reports, result.reports[0]
    subject.check()


@pytest.mark.parametrize("name", SUBJECTS)
def test_subject_is_right(name):
    emulate(name)


@pytest.mark.parametrize("schedule, seed", [("latest", 0), ("random", 1), ("random", 2)])
@pytest.mark.parametrize("name", [name for name in SUBJECTS if "gemm" in name])
def test_gemm_is_right_in_any_order(name, schedule, seed):
    emulate(name, schedule=schedule, seed=seed)


def failures(cases):
    """What goes wrong in each case: an exception, or a finding of the state checks."""
    found = []
    for case in cases:
        try:
            _, result = run_case(case)
        except Exception as error:  # every failing case is listed, not the first alone
            found.append(f"{case.name}: {type(error).__name__}: {str(error).splitlines()[0]}")
        else:
            found += [f"{case.name}: {report}" for report in result.reports[:1]]
    return found


def test_forbidden_kernels_are_reported():
    """What an H200 stops with an illegal instruction or address is out of bounds or misaligned here."""
    cases = [case for case in catalog.all_cases() if case.faults]
    kinds = {case.name: {report.kind for report in run_case(case)[1].reports} for case in cases}
    unseen = [name for name, found in kinds.items() if not found & {"out-of-bounds", "misaligned"}]
    assert len(cases) > 50 and not unseen, unseen


@pytest.mark.parametrize("family", catalog.FAMILIES)
def test_micro_kernels_run_clean(family):
    found = failures(case for case in catalog.cases(family) if not case.faults)
    assert not found, f"{len(found)} cases:\n" + "\n".join(found[:40])
