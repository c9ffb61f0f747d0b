"""TMA in im2col mode against a walk over pixels in plain Python. PTX manual, "Tensors: im2col mode"; rests on the manual alone."""

import numpy as np
import pytest

from tandem_attn.emulator import LaunchError, run
from tandem_attn.emulator.launch.tensormap import TensorDescriptor
from tests.emulator.kernels import kernel, kinds

LOAD = """
    mov.b64 %rd1, p1; cvta.param.u64 %rd1, %rd1; mov.b32 %r1, smem; setp.eq.u32 %p1, %tid, 0;
    @%p1 mbarrier.init.shared::cta.b64 [%r1], 1; bar.sync 0; {offsets}
    @%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r1], {size};
    @%p1 cp.async.bulk.tensor.{rank}d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes
        [%r1+1024], [%rd1, {{{at}}}], [%r1], {{{names}}};
    L: mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r1], 0; @!%p2 bra L;
"""
OUT = """
    ld.param.u64 %rd2, [p0];
    @%p1 cp.async.bulk.global.shared::cta.bulk_group [%rd2], [%r1+1024], {size}; @%p1 cp.async.bulk.commit_group;
    @%p1 cp.async.bulk.wait_group 0;
"""
STORE = """
    mov.b64 %rd1, p1; cvta.param.u64 %rd1, %rd1; mov.b32 %r1, smem; setp.eq.u32 %p1, %tid, 0; add.u32 %r2, %tid, 1;
    cvt.u16.u32 %h1, %r2; shl.b32 %r3, %tid, 1; add.u32 %r3, %r3, %r1; {fill} fence.proxy.async; bar.sync 0;
    @%p1 cp.async.bulk.tensor.{rank}d.global.shared::cta.im2col_no_offs.bulk_group [%rd1, {{{at}}}], [%r1+1024];
    @%p1 cp.async.bulk.commit_group; @%p1 cp.async.bulk.wait_group 0;
"""


def walk(shape, low, high, steps, base, pixels):
    """Filter bases in order, (n, [d,] [h,] w): one step along w, then h, then d, then the next image, inside the bounding box."""
    *space, _ = shape[1:]
    ranges = [(lo, dim - 1 + up) for lo, up, dim in zip(low, high, space, strict=True)]
    n, *at = base
    found = []
    for _ in range(pixels):
        found.append((n, *at))
        axis = len(at) - 1
        while axis >= 0:
            at[axis] += steps[axis]
            if at[axis] <= ranges[axis][1]:
                break
            at[axis] = ranges[axis][0]
            axis -= 1
        if axis < 0:
            n += 1
    return found


def text(body: str) -> str:
    return kernel(body, 2).replace(".param .u64 p1", ".param .align 64 .b8 p1[128]")


def load(x, low, high, block, base, offsets, channel=0, steps=None, padding="zero"):
    shape = x.shape
    given = [1, *steps, 1] if steps else None
    d = TensorDescriptor.of(x, block, pixel_box_lower_corner=low, pixel_box_upper_corner=high, element_strides=given, padding=padding)
    out = np.zeros(block, x.dtype)
    names = [f"%h{i}" for i in range(len(offsets))]
    moves = "".join(f" mov.b16 {name}, {value};" for name, value in zip(names, reversed(offsets), strict=True))
    at = ", ".join(map(str, (channel, *reversed(base))))
    body = LOAD.format(size=out.nbytes, rank=len(shape), at=at, names=", ".join(names), offsets=moves) + OUT.format(size=out.nbytes)
    result = run(text(body), [out, d], (1,), block=(32,), shared=1024 + out.nbytes, checks="all")
    return result, out


def expected(x, low, high, block, base, offsets, channel=0, steps=None, fill=0):
    pixels, channels = block
    out = np.full(block, fill, x.dtype)
    for row, (n, *place) in enumerate(walk(x.shape, low, high, steps or [1] * len(low), base, pixels)):
        where = (n, *(p + o for p, o in zip(place, offsets, strict=True)))
        if all(0 <= p < dim for p, dim in zip(where, x.shape[:-1], strict=True)):
            part = x[where][channel : channel + channels]
            out[row, : len(part)] = part
    return out


def image(*shape):
    return np.arange(1, np.prod(shape) + 1, dtype=np.uint16).reshape(shape)


@pytest.mark.parametrize(
    ("shape", "low", "high", "block", "base", "offsets", "channel", "steps"),
    [
        ((4, 14, 9, 16), (-1, -1), (-1, -1), (64, 8), (0, 4, 7), (0, 0), 0, None),  # the manual's example 1, fewer channels
        ((4, 14, 9, 16), (0, 0), (-2, -2), (64, 8), (0, 4, 6), (2, 2), 8, None),  # its example 2: a 3 x 3 filter's last place
        ((4, 14, 8, 16), (-1, -1), (-1, -1), (32, 16), (0, 5, 5), (1, 1), 0, (2, 2)),  # its example 3: traversal stride 2
        ((2, 7, 16), (-1,), (0,), (12, 16), (0, -1), (1,), 0, None),  # NWC
        ((2, 3, 4, 5, 8), (0, -1, 0), (0, 0, -1), (40, 8), (0, 1, -1, 2), (0, 1, 1), 0, None),  # NDHWC
        ((1, 4, 4, 8), (0, 0), (0, 0), (32, 8), (0, 2, 2), (0, 0), 0, None),  # beyond the last image
        ((1, 4, 4, 24), (0, 0), (0, 0), (16, 16), (0, 0, 0), (0, 0), 16, None),  # channels beyond the last
    ],
)
def test_load(shape, low, high, block, base, offsets, channel, steps):
    x = image(*shape)
    result, got = load(x, low, high, block, base, offsets, channel, steps)
    assert result.ok, result.reports
    want = expected(x, low, high, block, base, offsets, channel, steps)
    wrong = np.argwhere(got != want)
    assert not len(wrong), f"pixel {wrong[0][0]}, channel {wrong[0][1]}: {got[tuple(wrong[0])]}, not {want[tuple(wrong[0])]}"


def test_pixels_outside_are_filled_with_nan_when_asked():
    x = np.ones((1, 2, 2, 8), np.float16)
    result, got = load(x, (-1, -1), (0, 0), (9, 8), (0, -1, -1), (0, 0), padding="nan")
    assert result.ok and np.isnan(got[0]).all() and not np.isnan(got[4]).any()


def test_store_writes_the_pixels_inside():
    """ "cp.async.bulk.tensor": .im2col_no_offs, shared to global."""
    x = np.zeros((1, 4, 4, 8), np.uint16)
    d = TensorDescriptor.of(x, (8, 8), pixel_box_lower_corner=(0, 0), pixel_box_upper_corner=(0, -1))
    fill = "".join(f"st.shared.b16 [%r3+{1024 + 64 * i}], %h1;" for i in range(2))
    result = run(text(STORE.format(rank=4, at="0, 1, 2, 0", fill=fill)), [np.zeros(4, np.uint32), d], (1,), block=(32,), shared=2048)
    assert result.ok, result.reports
    places = [p for p in walk(x.shape, (0, 0), (0, -1), (1, 1), (0, 2, 1), 8) if p[0] == 0]
    assert len(places) == 5 and np.count_nonzero(x) == 40
    assert all(x[p].tolist() == [row % 4 * 8 + c + 1 for c in range(8)] for row, p in enumerate(places))


def test_a_base_outside_the_box_and_a_tiled_descriptor_are_reported():
    x = image(1, 4, 4, 8)
    result, _ = load(x, (0, 0), (-1, -1), (4, 8), (0, 3, 0), (0, 0))
    assert kinds(result) == ["undefined"] and "outside the bounding box" in result.reports[0].message
    tiled = TensorDescriptor.of(x, (1, 1, 4, 8))
    body = LOAD.format(size=64, rank=4, at="0, 0, 0, 0", names="%h0, %h1", offsets="")
    result = run(text(body), [x, tiled], (1,), block=(32,), shared=2048)
    assert kinds(result) == ["undefined"] and "mode" in result.reports[0].message


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"pixel_box_lower_corner": (-129, 0)}, "corners"),
        ({"pixel_box_upper_corner": (0,)}, "corners"),
        ({"block": (2000, 8)}, "2000 pixels"),
    ],
)
def test_descriptors_that_the_driver_refuses(options, words):
    block = options.pop("block", (4, 8))
    d = TensorDescriptor.of(image(1, 4, 4, 8), block, **({"pixel_box_lower_corner": (0, 0), "pixel_box_upper_corner": (0, 0)} | options))
    with pytest.raises(LaunchError, match=words):
        run(text("ret;"), [np.zeros(1, np.uint32), d], (1,), block=(32,))
