"""Arguments, geometry and descriptors: what fits is passed, what does not is a clear error."""

import numpy as np
import pytest
import torch

from tandem_attn.emulator import LaunchError, run
from tandem_attn.emulator.launch.tensormap import TensorDescriptor, decode, encode, from_descriptor
from tests.emulator.kernels import kernel, launch, store_lanes


def test_arrays_and_tensors_are_written_in_place():
    for out in (np.zeros(32, np.uint32), torch.zeros(32, dtype=torch.int32)):
        assert launch(store_lanes("%tid"), out).ok
        assert out.tolist() == list(range(32))


def test_a_view_is_bounded_by_its_own_elements():
    whole = np.zeros(64, np.uint32)
    assert launch(store_lanes("%tid"), whole[16:48]).ok
    assert whole[16:48].tolist() == list(range(32)) and not whole[:16].any() and not whole[48:].any()
    result = launch(store_lanes("%tid"), whole[:16])
    assert [r.kind for r in result.reports] == ["out-of-bounds"] and not result.finished


def test_scalars_are_packed_by_the_parameter_type():
    text = kernel("").replace("kernel()", "kernel(.param .u64 p0, .param .f32 a, .param .s32 b, .param .u8 c)")
    body = """
    ld.param.f32 %f1, [a]; ld.param.s32 %r1, [b]; ld.param.u8 %h1, [c];
    cvt.rn.f32.s32 %f2, %r1; cvt.rn.f32.u16 %f3, %h1; add.f32 %f1, %f1, %f2; add.f32 %f1, %f1, %f3;
    """ + store_lanes("%f1", "f32")
    out = np.zeros(32, np.float32)
    assert run(text.replace("    ret;", body + "    ret;"), [out, 0.5, -3, 200], (1,), block=(32,)).ok
    assert (out == 197.5).all()


@pytest.mark.parametrize(
    ("args", "options", "message"),
    [
        ([], {}, "takes 1 arguments"),
        ([1, 2], {}, "takes 1 arguments"),
        ([b"abc"], {}, "3 bytes where the parameter has 8"),
        (["text"], {}, "str cannot be passed"),
        ([1 << 70], {}, "does not fit 64 bits"),
        ([0], {"block": (2048,)}, "at most 1024|is over"),
        ([0], {"cluster": (2,)}, "not a multiple of the cluster"),
        ([0], {"backend": "fortran"}, "backend 'fortran'"),
        ([0], {"schedule": "sometimes"}, "schedule 'sometimes'"),
        ([0], {"checks": "most"}, r"\['most'\] unknown"),
        ([0], {"block": None}, "block is needed"),
        ([0], {"entry": "other"}, "'other' is not among"),
        ([torch.zeros(4, device="meta")], {}, "is on meta"),
    ],
)
def test_bad_launches_say_what_is_wrong(args, options, message):
    with pytest.raises(LaunchError, match=message):
        run(kernel("", 1), args, (1,), **{"block": (32,), **options})


def test_a_kernel_for_another_chip_is_refused():
    with pytest.raises(LaunchError, match="compiled for sm_80"):
        run(kernel("", 0, "sm_80"), [], (1,), block=(32,))


def test_shared_memory_over_the_limit_is_reported():
    result = run(kernel(""), [], (1,), block=(32,), shared=300_000)
    assert not result.ok and result.reports[0].kind == "shared-capacity"


def test_descriptor_fields_survive_encoding():
    data = np.zeros((6, 64), np.float16)
    d = TensorDescriptor.of(data, [4, 32])
    assert (d.shape, d.strides) == ([6, 64], [64, 1])
    decoded = decode(encode(4096, 6, (6, 64), (128, 2), (4, 32), 2))
    assert (decoded.address, decoded.element, decoded.dims, decoded.box, decoded.strides, decoded.swizzle) == (
        4096,
        "f16",
        (64, 6),
        (32, 4),
        (128,),
        2,
    )


LOAD_ROWS = """
    mov.u32 %r1, smem; add.u32 %r2, %r1, 1024;
    setp.eq.u32 %p2, %tid, 0;
    @%p2 mbarrier.init.shared.b64 [%r2], 1;
    fence.proxy.async;
    bar.warp.sync -1;
    @%p2 mbarrier.arrive.expect_tx.shared.b64 %rd1, [%r2], 128;
    mov.b64 %rd2, tile; mov.u32 %r3, 3; mov.u32 %r4, 2; mov.u32 %r5, 0;
    @%p2 cp.async.bulk.tensor.3d.shared::cta.global.mbarrier::complete_tx::bytes [%r1], [%rd2, {%r5, %r4, %r3}], [%r2];
WAIT:
    mbarrier.try_wait.parity.shared.b64 %p1, [%r2], 0;
    @!%p1 bra WAIT;
    shl.b32 %r6, %tid, 2; add.u32 %r6, %r6, %r1; ld.shared.u32 %r7, [%r6];
"""


def test_a_descriptor_may_start_before_its_tensor():
    """Two dimensions of one stride and an origin four rows early: coordinates (3, 2) begin at row 1, and two of four rows are in bounds."""
    rows = np.arange(32, dtype=np.uint32).reshape(4, 8)
    out = np.zeros(32, np.uint32)
    text = kernel(LOAD_ROWS + store_lanes("%r7"), 1).replace("kernel(", "kernel(.param .align 64 .b8 tile[128], ")
    early = TensorDescriptor(rows, (8, 4, 8), (8, 8, 1), (1, 4, 8), offset=-4 * 32)
    result = run(text, [early, out], (1,), block=(32,), shared=2048)
    assert result.ok, result.reports
    assert out.reshape(4, 8).tolist() == [*rows[1:3].tolist(), [0] * 8, [0] * 8]


def test_a_descriptor_of_triton_may_round_to_tf32():
    class Rounding(TensorDescriptor):
        round_f32_to_tf32 = True

    data = np.zeros((4, 8), np.float32)
    assert decode(from_descriptor(Rounding.of(data, [4, 8]))).element == "tf32"
    assert decode(from_descriptor(TensorDescriptor.of(data, [4, 8]))).element == "f32"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ((8, 6, (6, 64), (128, 2), (4, 32), 0), "multiple of 16"),
        ((0, 6, (6, 64), (130, 2), (4, 32), 0), "not multiples of 16"),
        ((0, 6, (6, 64), (128, 2), (4, 512), 0), "outside 1 .. 256"),
        ((0, 6, (6, 64), (128, 2), (4, 64), 2), "exceeds the swizzle span"),
        ((0, 6, (6, 0), (128, 2), (4, 32), 0), "empty dimension"),
    ],
)
def test_descriptors_that_the_driver_refuses(values, message):
    with pytest.raises(LaunchError, match=message):
        encode(*values)
