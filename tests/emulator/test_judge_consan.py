"""Triton's ConSan: instrumented kernels run in the emulator, and what they assert comes out as reports with the kernel's line."""

import inspect

import pytest
import torch

pytest.importorskip("triton", reason="ConSan is Triton's: pip install tandem-attn[cuda]")

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tandem_attn.emulator import run
from tests.emulator.subjects.subject import compile_kernel


@gluon.jit
def copy_kernel(source, out, WAIT: gl.constexpr):
    """One tile by TMA into shared memory, from there to `out`; without WAIT it is read while it may still arrive."""
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])
    tile = gl.allocate_shared_memory(gl.float32, source.block_shape, source.layout)
    ready = mbarrier.allocate_mbarrier()
    mbarrier.init(ready, count=1)
    mbarrier.expect(ready, source.nbytes_per_cta)
    tma.async_load(source, [0, 0], ready, tile)
    if WAIT:
        mbarrier.wait(ready, 0)
    values = tile.load(layout)
    if not WAIT:
        mbarrier.wait(ready, 0)
    rows = gl.arange(0, 32, gl.SliceLayout(1, layout))
    columns = gl.arange(0, 32, gl.SliceLayout(0, layout))
    gl.store(out + rows[:, None] * 32 + columns[None, :], values)


def launched(wait, **options):
    source = torch.randn(32, 32, generator=torch.Generator().manual_seed(0))
    out = torch.zeros(32, 32)
    layout = gl.NVMMASharedLayout.get_default_for([32, 32], gl.float32)
    descriptor = TensorDescriptor.from_tensor(source, [32, 32], layout)
    kernel = compile_kernel(copy_kernel, (descriptor, out), {"WAIT": wait}, arch=90, num_warps=4, instrumentation_mode="consan")
    return run(kernel, (descriptor, out), 1, **options), source, out


def test_consan_and_the_tracker_pass_a_right_kernel():
    result, source, out = launched(True, checks="all")
    assert result.ok, [str(r) for r in result.reports]
    assert torch.equal(source, out)


def test_consan_reports_a_missing_wait():
    """The emulator completes the copy at once, so that the numbers would be right: ConSan sees the missing wait all the same."""
    result, _, _ = launched(False)
    assert [r.kind for r in result.reports] == ["assert"], result.reports
    lines, first = inspect.getsourcelines(copy_kernel.fn)
    line = first + next(i for i, text in enumerate(lines) if "tile.load" in text)
    report = result.reports[0]
    assert "outstanding" in report.message, report.message
    assert report.source is not None and report.source.line == line, (report.source, line)


def test_the_tracker_reports_the_same_wait():
    result, _, _ = launched(False, checks=("race",))
    assert any(r.kind == "race" for r in result.reports) or result.reports[0].kind == "assert"
