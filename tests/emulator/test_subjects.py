"""The subjects compile without a GPU, fit the chip, and contain the instructions that they are there to exercise."""

import subprocess
from pathlib import Path

import pytest
import torch

triton = pytest.importorskip("triton", reason="subjects are written in Triton and Gluon: pip install tandem-attn[cuda]")

from tests.emulator.subjects import gemm_sm90, gemm_sm100, nvcc, plain_triton  # noqa: E402

PTXAS = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas-blackwell"
SHARED_LIMIT = 232_448  # bytes a CTA may use on sm_90 and sm_100: CUDA programming guide, "Technical specifications per compute capability"
TMEM_COLUMNS = 512  # PTX ISA 9.x, "Tensor Memory"


def assert_ptx(subject, *needed):
    ptx = subject.kernel if isinstance(subject.kernel, str) else subject.kernel.asm["ptx"]
    missing = [form for form in needed if form not in ptx]
    assert not missing, f"{subject.name}: {missing} not in its PTX"
    assert "\ttrap;" not in ptx, f"{subject.name} was compiled to a trap: it exceeds a capacity of the chip"


def assert_fits(subject):
    metadata = subject.kernel.metadata
    assert metadata.shared <= SHARED_LIMIT and metadata.tmem_size <= TMEM_COLUMNS, metadata


@pytest.mark.parametrize("ctas", [None, 2])
def test_gemm_sm90_compiles(ctas):
    subject = gemm_sm90.gemm_sm90(256, 384, 192, ctas)
    assert_fits(subject)
    assert_ptx(subject, "wgmma.mma_async", "cp.async.bulk.tensor.2d.global.shared::cta", "setmaxnreg", "mbarrier.try_wait")


@pytest.mark.parametrize("arch", [100, 103])
@pytest.mark.parametrize(
    "cluster, needed",
    [
        ("one", ["tcgen05.mma.cta_group::1.kind::f16"]),
        ("pair", ["tcgen05.mma.cta_group::2.kind::f16", "commit.cta_group::2.mbarrier::arrive::one.shared::cluster.multicast::cluster"]),
        ("multicast", ["tcgen05.mma.cta_group::1", "complete_tx::bytes.multicast::cluster"]),
        ("quad", ["tcgen05.mma.cta_group::2", "complete_tx::bytes.multicast::cluster"]),
    ],
)
def test_gemm_sm100_compiles(cluster, needed, arch):
    subject = gemm_sm100.gemm_sm100(512, 512, 192, cluster, arch=arch)
    assert_fits(subject)
    assert_ptx(subject, "tcgen05.alloc", "tcgen05.ld", "tcgen05.commit", *needed)


@pytest.mark.parametrize("arch", [90, 100])
@pytest.mark.parametrize(
    "make, needed",
    [
        (plain_triton.matmul, []),
        (plain_triton.softmax, ["ex2.approx", "shfl.sync.bfly"]),
        (plain_triton.layer_norm, ["sqrt", "shfl.sync.bfly"]),
        (plain_triton.histogram, ["red.global.gpu.relaxed.add.u32"]),
    ],
)
def test_plain_triton_compiles(make, needed, arch):
    subject = make(arch=arch)
    assert_fits(subject)
    assert_ptx(subject, *needed)


@pytest.mark.parametrize("dtype, mma", [(torch.float16, "f16.f16"), (torch.bfloat16, "bf16.bf16"), (torch.float32, "tf32.tf32")])
def test_matmul_uses_tensor_cores(dtype, mma):
    assert_ptx(plain_triton.matmul(dtype=dtype), f"f32.{mma}")


@pytest.mark.parametrize("use_nvcc", [True, False])
def test_block_sum_assembles(tmp_path, use_nvcc):
    if use_nvcc and not nvcc.nvcc_path():
        pytest.skip("nvcc, or a host compiler for it, is not installed: only the hand-written PTX of the same kernel is tested")
    subject = nvcc.block_sum(use_nvcc=use_nvcc)
    assert_ptx(subject, "shfl.sync.down", "bar.sync")
    source = tmp_path / "block_sum.ptx"
    source.write_text(subject.kernel)
    subprocess.run([PTXAS, "-arch=sm_90a", source, "-o", tmp_path / "out"], check=True)


def test_check_names_the_worst_element():
    subject = plain_triton.histogram()
    subject.out.copy_(subject.expected)
    subject.check()
    subject.out[3] += 1
    with pytest.raises(AssertionError, match=r"out\[3\]"):
        subject.check()
