"""TMA in tiled mode where addresses matter: modulo 2^64, and the base of a box that is out of bounds as a whole."""

from __future__ import annotations

import numpy as np
import pytest

from tandem_attn.emulator import run
from tandem_attn.emulator.launch.tensormap import TensorDescriptor
from tests.emulator.kernels import kernel, kinds

ROWS, COLUMNS = 8, 16
END = 1 << 30
BODY = """
    mov.b64 %rd1, p1; cvta.param.u64 %rd1, %rd1; mov.b32 %r1, smem; setp.eq.u32 %p1, %tid, 0;
    @%p1 mbarrier.init.shared::cta.b64 [%r1], 1; bar.sync 0;
    @%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r1], {size};
    @%p1 cp.async.bulk.tensor.{rank}d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%r1+1024], [%rd1, {{{at}}}], [%r1];
    L: mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r1], 0; @!%p2 bra L;
    ld.param.u64 %rd2, [p0];
    @%p1 cp.async.bulk.global.shared::cta.bulk_group [%rd2], [%r1+1024], {size}; @%p1 cp.async.bulk.commit_group;
    @%p1 cp.async.bulk.wait_group 0;
"""


def load(descriptor: TensorDescriptor, at: tuple[int, ...]) -> tuple[list[str], np.ndarray]:
    """Kinds of the reports, and the box at coordinates ``at``, outermost first."""
    out = np.full((4, COLUMNS), 7, np.uint16)
    body = BODY.format(size=out.nbytes, rank=len(at), at=", ".join(map(str, reversed(at))))
    text = kernel(body, 2).replace(".param .u64 p1", ".param .align 64 .b8 p1[128]")
    return kinds(run(text, [out, descriptor], (1,), block=(32,), shared=1024 + out.nbytes, checks="all")), out


def tensor() -> np.ndarray:
    return np.arange(1, ROWS * COLUMNS + 1, dtype=np.uint16).reshape(ROWS, COLUMNS)


@pytest.mark.parametrize(("start", "used", "row"), [(0, 8, 0), (2, 3, 0), (2, 3, 1), (3, 5, 4), (0, 8, 8), (5, 0, 0)])
def test_addresses_are_modulo_2_to_64(start: int, used: int, row: int) -> None:
    """Two dimensions of the row's stride, and one that takes END rows back: rows beyond those in use are zeros."""
    x = tensor()
    wrapped = TensorDescriptor(x, [END + 1, ROWS + 1, END, COLUMNS], [2**33 - COLUMNS, COLUMNS, COLUMNS, 1], [1, 1, 4, COLUMNS])
    found, out = load(wrapped, (END, start + used, END - used + row, 0))
    expected = np.zeros_like(out)
    seen = x[start + row : start + used][:4] if row < used else x[:0]
    expected[: len(seen)] = seen
    assert found == []
    np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize(("row", "reports"), [(ROWS - 1, []), (ROWS, ["out-of-bounds"])])
def test_box_out_of_bounds_as_a_whole_touches_the_base(row: int, reports: list[str]) -> None:
    """A base before the tensor serves every box but one that holds no element: an H200 ends it with an illegal address."""
    x = tensor()
    shifted = TensorDescriptor(x, [ROWS + 1, ROWS, COLUMNS], [COLUMNS, COLUMNS, 1], [1, 4, COLUMNS], offset=-x.nbytes)
    found, out = load(shifted, (ROWS, row, 0))
    assert found == reports
    if not reports:
        np.testing.assert_array_equal(out[0], x[-1])
        assert not out[1:].any()
