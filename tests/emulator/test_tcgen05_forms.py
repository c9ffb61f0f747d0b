"""Further tcgen05 forms against NumPy: block scaling, descriptors, copies, .ws, reducing loads, CTA pairs. Sections of the PTX manual 9.x.

No Blackwell GPU is within reach; docs/emulator_hardware.md lists what rests on the manual alone.
"""

import numpy as np
import pytest

from tests.emulator.kernels import kinds, launch
from tests.emulator.test_tcgen05 import (
    ALLOCATE,
    COMMIT,
    FREE,
    OWN_LANES,
    RNG,
    SETUP,
    THREADS,
    k_major,
    multiply,
    packed_fp4,
    read_tile,
    values,
    worst,
)

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])  # "Alternate Floating-Point Data Formats": e2m1 by its three low bits
D, SFA, SFB = 0, 192, 224  # TMEM columns


# ---- block scaling
def scale_words(rows: int, count: int, byte: int, kind: str) -> tuple[np.ndarray, np.ndarray]:
    """(rows, count) factors and the words (columns, 32 lanes) that hold them from byte `byte` on; other bytes hold something else."""
    octets = (
        RNG.integers(124, 131, (rows, count), dtype=np.uint8)
        if kind == "ue8m0"
        else RNG.integers(0x30, 0x48, (rows, count), dtype=np.uint8)
    )
    factors = 2.0 ** (octets.astype(float) - 127)
    if kind == "ue4m3":
        factors = (1 + (octets & 7) / 8) * 2.0 ** ((octets >> 3).astype(float) - 7)
    words = RNG.integers(0, 250, (-(-rows // 32) * 32, 4), dtype=np.uint8)
    words[:rows, byte : byte + count] = octets
    return factors, words.view(np.uint32).reshape(-1, 32)


def fp4(rows: int, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Values, and their encoding two to a byte, the first in the low half ("Packing format ... kind::mxf4 ... in Shared Memory")."""
    code = RNG.integers(0, 16, (rows, k), dtype=np.uint8)
    return E2M1[code & 7] * np.where(code & 8, -1, 1), code[:, 0::2] | code[:, 1::2] << 4


def scaled(
    kind: str, a_kind: str, n: int, vector: str, count: int, scale: str = "ue8m0", ids: tuple[int, int] = (0, 0), spoil: bool = False
):
    """Run one block-scaled MMA of 128 x n and return the accumulator and the truth in fp64; `spoil` makes one group of lanes differ."""
    k = 32 if kind == "mxf8f6f4" else 64
    if kind == "mxf8f6f4":
        (a, raw_a), (b, raw_b) = values(a_kind, 128, k), values("e4m3", n, k)
        raw_a = packed_fp4(raw_a) if a_kind == "e2m1" else raw_a
        formats = {"e4m3": 0, "e5m2": 1, "e2m1": 5}[a_kind] << 7
    else:
        (a, raw_a), (b, raw_b) = fp4(128, k), fp4(n, k)
        formats = 1 << 7 | 1 << 10
    (bytes_a, fields), (bytes_b, _) = k_major(raw_a, False), k_major(raw_b, False)
    (fa, words_a), (fb, words_b) = (scale_words(rows, count, byte, scale) for rows, byte in ((128, ids[0]), (n, ids[1])))
    parts = [bytes_a, bytes_b, words_a.reshape(-1).view(np.uint8), words_b.reshape(-1).view(np.uint8)]
    offsets = np.cumsum([0, *(-(-len(p) // 1024) * 1024 for p in parts)]).tolist()
    data = np.zeros(offsets[-1], np.uint8)
    for part, at in zip(parts, offsets, strict=False):
        data[at : at + len(part)] = part
    idesc = ids[1] << 4 | formats | n >> 3 << 17 | int(scale == "ue8m0") << 23 | 1 << 27 | ids[0] << 29
    body = SETUP.format(size=len(data)) + "    and.b32 %r4, %tid, 31; mad.lo.u32 %r5, %r4, 4, %r1;\n"
    for first, words, at in ((SFA, words_a, offsets[2]), (SFB, words_b, offsets[3])):
        for j in range(len(words)):
            body += f"    ld.shared.b32 %r6, [%r5+{1024 + at + 128 * j}];\n"
            body += "    setp.gt.u32 %p6, %tid, 95; @%p6 add.u32 %r6, %r6, 1;\n" if spoil else ""
            body += f"    tcgen05.st.sync.aligned.32x32b.x1.b32 [%r3+{first + j}], {{%r6}};\n"
    body += f"""    tcgen05.wait::st.sync.aligned; tcgen05.fence::before_thread_sync; bar.sync 0; tcgen05.fence::after_thread_sync;
    or.b64 %rd3, %rd2, {fields}; add.u64 %rd4, %rd2, {offsets[1] >> 4}; or.b64 %rd4, %rd4, {fields}; mov.pred %p4, 0; mov.b32 %r9, {idesc};
    add.u32 %r10, %r2, {SFA}; add.u32 %r11, %r2, {SFB};
    @%p1 tcgen05.mma.cta_group::1.kind::{kind}.block_scale{vector} [%r2], %rd3, %rd4, %r9, [%r10], [%r11], %p4;
"""
    body += COMMIT.format(parity=0) + read_tile(n) + FREE
    out = np.zeros((THREADS, n), np.uint32)
    result = launch(body, out, data, threads=THREADS, shared=1024 + len(data), target="sm_100a", checks="default")
    block = k // count
    return result, out.view(np.float32), (a * np.repeat(fa, block, 1)) @ (b * np.repeat(fb, block, 1)).T


@pytest.mark.parametrize("a_kind", ["e4m3", "e5m2", "e2m1"])
@pytest.mark.parametrize(("vector", "ids"), [("", (0, 0)), (".scale_vec::1X", (1, 3)), (".block32", (2, 1))])
def test_mxf8f6f4(a_kind, vector, ids):
    """ "Block Scaling", "Layout of the Scale Factor A / B Matrix for scale_vec::1X": one factor a row, its byte by SFA_ID and SFB_ID."""
    result, got, truth = scaled("mxf8f6f4", a_kind, 64, vector, 1, ids=ids)
    assert result.ok, result.reports
    assert (got == truth).all(), worst(got, truth)


@pytest.mark.parametrize(
    ("kind", "vector", "count", "scale", "ids"),
    [
        ("mxf4", "", 2, "ue8m0", (0, 2)),
        ("mxf4", ".block32", 2, "ue8m0", (2, 0)),
        ("mxf4nvf4", ".scale_vec::2X", 2, "ue8m0", (0, 0)),
        ("mxf4nvf4", ".scale_vec::4X", 4, "ue4m3", (0, 0)),
        ("mxf4nvf4", ".block16", 4, "ue8m0", (0, 0)),
    ],
)
def test_mxf4(kind, vector, count, scale, ids):
    """ "Block Scaling", 2X and 4X; K = 64, two elements to a byte; factors ue8m0 and ue4m3."""
    result, got, truth = scaled(kind, "", 128, vector, count, scale, ids)
    assert result.ok, result.reports
    np.testing.assert_allclose(got, truth, rtol=1e-6, atol=1e-6, err_msg=worst(got, truth))


def test_scale_factors_must_be_in_all_groups_of_lanes():
    """ "Block Scaling": "need to be duplicated to all 32 lane partitions"; and ids that the vector size does not have."""
    result, _, _ = scaled("mxf8f6f4", "e4m3", 64, "", 1, spoil=True)
    assert kinds(result) == ["undefined"] and "all four groups" in result.reports[0].message
    result, _, _ = scaled("mxf4", "", 64, "", 2, ids=(1, 0))
    assert kinds(result) == ["undefined"] and "scale factor IDs 1, 0" in result.reports[0].message


# ---- descriptors
@pytest.mark.parametrize("row", [1, 3, 6])
def test_base_offset(row):
    """ "Shared memory descriptor", Matrix base offset: the swizzle's pattern begins `row` 128-byte rows behind a 1024-byte boundary."""
    out, truth = multiply("f16", "bf16", "bf16", 128, 64, swizzle=True, base=row)
    assert (out.view(np.float32) == truth).all(), worst(out.view(np.float32), truth)


def test_128_byte_swizzle_with_32_byte_atoms():
    """ "Swizzling Modes", 128 bytes with 32-byte atomicity; MN-major: rows of 128 bytes along MN, four along K to a pattern."""
    n, k = 64, 8
    (a, raw_a), (b, raw_b) = values("tf32", 128, k), values("tf32", n, k)

    def placed(raw: np.ndarray) -> np.ndarray:
        rows = len(raw)
        out = np.zeros(rows // 32 * 1024, np.uint8).view(np.uint32)
        for mn in range(rows):
            for place in range(k):
                at = mn // 32 * 1024 + place // 4 * 512 + place % 4 * 128 + mn % 32 * 4
                out[(at ^ (at >> 7 & 3) << 5) // 4] = raw[mn, place]
        return out.view(np.uint8)

    data = np.concatenate([placed(raw_a), placed(raw_b)])
    fields = (512 >> 4) << 32 | (1024 >> 4) << 16 | 1 << 46 | 1 << 61
    idesc = 1 << 4 | 2 << 7 | 2 << 10 | 3 << 15 | n >> 3 << 17 | 8 << 24
    body = (
        SETUP.format(size=len(data))
        + f"""
    or.b64 %rd3, %rd2, {fields}; add.u64 %rd4, %rd2, {4096 >> 4}; or.b64 %rd4, %rd4, {fields}; mov.pred %p4, 0; mov.b32 %r9, {idesc};
    @%p1 tcgen05.mma.cta_group::1.kind::tf32 [%r2], %rd3, %rd4, %r9, %p4;
"""
    )
    body += COMMIT.format(parity=0) + read_tile(n) + FREE
    out = np.zeros((THREADS, n), np.uint32)
    result = launch(body, out, data, threads=THREADS, shared=1024 + len(data), target="sm_100a")
    assert result.ok, result.reports
    assert (out.view(np.float32) == a @ b.T).all(), worst(out.view(np.float32), a @ b.T)


# ---- .ws, loads that reduce
@pytest.mark.parametrize("m", [32, 64, 128])
def test_ws_folds_the_columns_over_the_lanes(m):
    """tcgen05.mma.ws: "Layout E" (M = 64), "Layout G" (M = 32): columns N p / f .. of part p in lanes M p .. M p + M - 1; D for 128."""
    n = 64
    out, truth = multiply("f16", "bf16", "bf16", m, n, ws=True)
    parts = 128 // m
    got = out.view(np.float32).reshape(parts, m, n)[:, :, : n // parts].transpose(1, 0, 2).reshape(m, n)
    assert (got == truth).all(), worst(got, truth)


@pytest.mark.parametrize(
    ("operation", "kind", "expected"),
    [
        ("min", "u32", lambda x: x.min(1)),
        ("max", "s32", lambda x: x.view(np.int32).max(1).view(np.uint32)),
        ("min.abs", "f32", lambda x: abs(x.view(np.float32)).min(1).view(np.uint32)),
        ("max", "f32", lambda x: x.view(np.float32).max(1).view(np.uint32)),
    ],
)
def test_ld_red(operation, kind, expected):
    """tcgen05.ld.red: the minimum or maximum over the columns of each lane in redval, and the columns themselves."""
    data = RNG.standard_normal((THREADS, 4)).astype(np.float32).view(np.uint32)
    body = "    ld.param.u64 %rd1, [p1];" + ALLOCATE + OWN_LANES + "    mad.wide.u32 %rd2, %tid, 16, %rd1;\n"
    body += "    ld.global.v4.b32 {%r10, %r11, %r12, %r13}, [%rd2];\n"
    body += "    tcgen05.st.sync.aligned.32x32b.x4.b32 [%r3], {%r10, %r11, %r12, %r13}; tcgen05.wait::st.sync.aligned;\n"
    body += f"    tcgen05.ld.red.sync.aligned.32x32b.x4.{operation}.{kind} {{%r20, %r21, %r22, %r23}}, %r24, [%r3];\n"
    body += "    tcgen05.wait::ld.sync.aligned; ld.param.u64 %rd20, [p0]; mad.wide.u32 %rd21, %tid, 32, %rd20;\n"
    body += "    st.global.v4.b32 [%rd21], {%r20, %r21, %r22, %r23}; st.global.b32 [%rd21+16], %r24;\n" + FREE
    out = np.zeros((THREADS, 8), np.uint32)
    result = launch(body, out, data, threads=THREADS, shared=64, target="sm_100a")
    assert result.ok, result.reports
    assert (out[:, :4] == data).all() and (out[:, 4] == expected(data)).all()


def test_ld_red_of_nan():
    """tcgen05.ld.red: without .NaN a NaN loses, with .NaN it wins (as "max")."""
    data = np.full((THREADS, 4), 2.0, np.float32)
    data[5, 2] = np.nan
    for nan, want in (("", 2.0), (".NaN", np.nan)):
        body = "    ld.param.u64 %rd1, [p1];" + ALLOCATE + OWN_LANES + "    mad.wide.u32 %rd2, %tid, 16, %rd1;\n"
        body += "    ld.global.v4.b32 {%r10, %r11, %r12, %r13}, [%rd2];\n"
        body += "    tcgen05.st.sync.aligned.32x32b.x4.b32 [%r3], {%r10, %r11, %r12, %r13}; tcgen05.wait::st.sync.aligned;\n"
        body += f"    tcgen05.ld.red.sync.aligned.32x32b.x4.max{nan}.f32 {{%r20, %r21, %r22, %r23}}, %r24, [%r3];\n"
        body += "    tcgen05.wait::ld.sync.aligned; ld.param.u64 %rd20, [p0]; mad.wide.u32 %rd21, %tid, 4, %rd20;\n"
        body += "    st.global.b32 [%rd21], %r24;\n" + FREE
        out = np.zeros(THREADS, np.float32)
        assert launch(body, out, data, threads=THREADS, shared=64, target="sm_100a").ok
        np.testing.assert_array_equal(out[5], np.float32(want))
        assert (np.delete(out, 5) == 2.0).all()


# ---- copies
COPIES = [
    ("128x256b", 128, 32, [0], ""), ("128x128b", 128, 16, [0], ""), ("32x128b.warpx4", 32, 16, [0, 32, 64, 96], ""),
    ("64x128b.warpx2::01_23", 64, 16, [[0, 64], [32, 96]], ""), ("64x128b.warpx2::02_13", 64, 16, [[0, 32], [64, 96]], ""),
]  # fmt: skip


def run_cp(form: str, rows: int, raw: np.ndarray, columns: int) -> np.ndarray:
    """TMEM columns after a copy of (rows, bytes) into columns of zeros."""
    data, fields = k_major(raw, False) if raw.shape[1] == 32 else (np.ascontiguousarray(raw).reshape(-1), (128 >> 4) << 32 | 1 << 46)
    zeros = ", ".join(["0"] * 8)
    body = SETUP.format(size=len(data)) + f"    or.b64 %rd3, %rd2, {fields};\n"
    body += f"    tcgen05.st.sync.aligned.32x32b.x8.b32 [%r3], {{{zeros}}}; tcgen05.wait::st.sync.aligned; bar.sync 0;\n"
    body += f"    @%p1 tcgen05.cp.cta_group::1.{form} [%r2], %rd3;\n" + COMMIT.format(parity=0) + read_tile(8) + FREE
    out = np.zeros((THREADS, 8), np.uint32)
    result = launch(body, out, data, threads=THREADS, shared=1024 + len(data), target="sm_100a")
    assert result.ok, result.reports
    assert not out[:, columns:].any()
    return out[:, :columns]


@pytest.mark.parametrize("form", ["128x256b", "128x128b", "32x128b.warpx4", "64x128b.warpx2::01_23", "64x128b.warpx2::02_13", "4x256b"])
def test_cp_shapes(form):
    """tcgen05.cp: rows to lanes; .warpx4 to all four warps; .warpx2 gives each warp of a pair (0 1, 2 3 or 0 2, 1 3) half of the rows."""
    rows, bits = (int(x) for x in form.split(".")[0][:-1].split("x"))
    raw = RNG.integers(0, 256, (max(rows, 8), bits // 8), dtype=np.uint8)
    got = run_cp(form, rows, raw, bits // 32)
    words = raw.view(np.uint32)
    want = np.zeros((128, bits // 32), np.uint32)
    if form == "4x256b":
        want[::32] = words[:4]
    elif "warpx4" in form:
        want[:] = np.tile(words, (4, 1))
    elif "01_23" in form:
        want[:] = np.concatenate([words[:32], words[:32], words[32:], words[32:]])
    elif "02_13" in form:
        want[:] = np.concatenate([words[:32], words[32:], words[:32], words[32:]])
    else:
        want[:] = words
    assert (got == want).all(), np.argwhere(got != want)[:3]


@pytest.mark.parametrize(("source", "bits"), [("b6x16_p32", 6), ("b4x16_p64", 4)])
def test_cp_decompresses(source, bits):
    """ "Optional Decompression": 16 elements of 4 or 6 bits in 16 bytes with padding become 16 bytes, the element in the low bits."""
    elements = RNG.integers(0, 1 << bits, (128, 16), dtype=np.uint8)
    stream = (elements[..., None] >> np.arange(bits, dtype=np.uint8) & 1).reshape(128, -1)
    raw = np.zeros((128, 16), np.uint8)
    raw[:, : 2 * bits] = np.packbits(stream, axis=1, bitorder="little")
    got = run_cp(f"128x128b.b8x16.{source}", 128, raw, 4)
    assert (got.view(np.uint8).reshape(128, 16) == elements).all()


# ---- CTA pairs
PAIR = """
    ld.param.u64 %rd1, [p1]; mov.b32 %r1, smem; setp.eq.u32 %p1, %tid, 0; setp.lt.u32 %p2, %tid, 32; mov.u32 %r40, %cluster_ctarank;
    @%p2 tcgen05.alloc.cta_group::2.sync.aligned.shared::cta.b32 [%r1], 256;
    @%p1 mbarrier.init.shared::cta.b64 [%r1+8], 1; @%p1 mbarrier.init.shared::cta.b64 [%r1+16], 1;
    fence.mbarrier_init.release.cluster; barrier.cluster.arrive; barrier.cluster.wait; ld.shared.b32 %r2, [%r1];
    mad.lo.u32 %r41, %r40, {size}, 0; cvt.u64.u32 %rd5, %r41; add.u64 %rd1, %rd1, %rd5;
    @%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r1+8], {size};
    @%p1 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r1+1024], [%rd1], {size}, [%r1+8];
    L: mbarrier.try_wait.parity.shared::cta.b64 %p3, [%r1+8], 0; @!%p3 bra L;
    shr.u32 %r3, %tid, 5; shl.b32 %r3, %r3, 21; add.u32 %r3, %r3, %r2;
    add.u32 %r4, %r1, 1024; shr.u32 %r4, %r4, 4; cvt.u64.u32 %rd2, %r4;
    and.b32 %r10, %tid, {lanes}; shr.u32 %r12, %r10, 3; and.b32 %r10, %r10, 7;
    mad.lo.u32 %r10, %r10, 16, %r1; mad.lo.u32 %r10, %r12, 256, %r10;
    ld.shared.v4.b32 {{%r20, %r21, %r22, %r23}}, [%r10+1024]; ld.shared.v4.b32 {{%r24, %r25, %r26, %r27}}, [%r10+1152];
    tcgen05.st.sync.aligned.32x32b.x8.b32 [%r3+128], {{%r20, %r21, %r22, %r23, %r24, %r25, %r26, %r27}};
    tcgen05.wait::st.sync.aligned; tcgen05.fence::before_thread_sync; barrier.cluster.arrive; barrier.cluster.wait;
    tcgen05.fence::after_thread_sync; setp.eq.u32 %p6, %r40, 0; and.pred %p6, %p6, %p1; mov.pred %p4, 0; mov.b32 %r9, {idesc};
    add.u64 %rd4, %rd2, {first}; or.b64 %rd4, %rd4, {fields}; add.u32 %r11, %r2, 128; mov.b16 %h1, 3;
    @%p6 tcgen05.mma.cta_group::2.kind::f16 [%r2], [%r11], %rd4, %r9, %p4;
    @%p6 tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 [%r1+16], %h1;
    W: mbarrier.try_wait.parity.shared::cta.b64 %p3, [%r1+16], 0; @!%p3 bra W; tcgen05.fence::after_thread_sync;
"""
PAIR_END = """    barrier.cluster.arrive; barrier.cluster.wait;
    @%p2 tcgen05.dealloc.cta_group::2.sync.aligned.b32 %r2, 256;
"""


def pair_of_ctas(lanes: int):
    """M = 128 over two CTAs with A from TMEM: 64 rows in each, in the lanes tid & `lanes` of every thread."""
    n = 64
    (a, raw_a), (b, raw_b) = values("bf16", 128, 16), values("bf16", n, 16)
    parts = []
    for i in range(2):
        bytes_a, _ = k_major(raw_a[64 * i : 64 * i + 64], False)
        bytes_b, fields = k_major(raw_b[n // 2 * i : n // 2 * (i + 1)], False)
        parts.append(np.concatenate([np.pad(bytes_a, (0, 4096 - len(bytes_a))), bytes_b]))
    data = np.concatenate(parts)
    idesc = 1 << 4 | 1 << 7 | 1 << 10 | n >> 3 << 17 | 128 >> 4 << 24
    body = PAIR.format(size=len(parts[0]), lanes=lanes, idesc=idesc, first=4096 >> 4, fields=fields)
    body += read_tile(n // 2).replace("mad.wide.u32 %rd21, %tid,", "mad.lo.u32 %r42, %r40, 128, %tid; mad.wide.u32 %rd21, %r42,") + PAIR_END
    out = np.zeros((2, THREADS, n // 2), np.float32)
    result = launch(body, out, data, grid=2, cluster=2, threads=THREADS, shared=1024 + len(parts[0]), target="sm_100a")
    return result, out, a @ b.T


def test_a_from_tmem_with_m_128_over_two_ctas():
    """ "Layout B": 64 rows in each CTA, columns 0 .. N/2 - 1 in lanes 0-63, the rest in 64-127, whose data paths need A as well."""
    result, out, truth = pair_of_ctas(63)
    assert result.ok, result.reports
    got = out.reshape(2, 2, 64, 32).transpose(0, 2, 1, 3).reshape(128, 64)
    assert (got == truth).all(), worst(got, truth)


def test_a_in_one_half_of_the_lanes_only_is_reported():
    result, _, _ = pair_of_ctas(127)
    assert "undefined" in kinds(result) and "lanes 0-63 and 64-127" in result.reports[-1].message, result.reports
