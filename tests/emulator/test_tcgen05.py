"""tcgen05 forms against NumPy. No Blackwell GPU is within reach: each case names the section of the PTX manual (9.x) that it rests on."""

import numpy as np
import pytest

from tests.emulator.kernels import kinds, launch

SECTION = "Tensor Core 5th Generation Family Instructions"
RNG = np.random.default_rng(3)
THREADS, TMEM = 128, 256
FORMATS = {"f16": {"f16": 0, "bf16": 1}, "f8f6f4": {"e4m3": 0, "e5m2": 1, "e2m1": 5}, "tf32": {"tf32": 2}, "i8": {"u8": 0, "s8": 1}}

SETUP = """
    ld.param.u64 %rd1, [p1]; mov.b32 %r1, smem; setp.eq.u32 %p1, %tid, 0; setp.lt.u32 %p2, %tid, 32;
    @%p2 tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r1], 256;
    @%p1 mbarrier.init.shared::cta.b64 [%r1+8], 1; @%p1 mbarrier.init.shared::cta.b64 [%r1+16], 1;
    bar.sync 0; ld.shared.b32 %r2, [%r1];
    @%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r1+8], {size};
    @%p1 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r1+1024], [%rd1], {size}, [%r1+8];
    L: mbarrier.try_wait.parity.shared::cta.b64 %p3, [%r1+8], 0; @!%p3 bra L;
    shr.u32 %r3, %tid, 5; shl.b32 %r3, %r3, 21; add.u32 %r3, %r3, %r2;
    add.u32 %r4, %r1, 1024; shr.u32 %r4, %r4, 4; cvt.u64.u32 %rd2, %r4;
"""
A_TO_TMEM = """
    mad.lo.u32 %r10, %tid, 16, %r1; shr.u32 %r12, %tid, 3; mad.lo.u32 %r10, %r12, 128, %r10; add.u32 %r11, %r2, 128;
    ld.shared.v4.b32 {%r20, %r21, %r22, %r23}, [%r10+1024]; ld.shared.v4.b32 {%r24, %r25, %r26, %r27}, [%r10+1152];
    tcgen05.st.sync.aligned.32x32b.x8.b32 [%r3+128], {%r20, %r21, %r22, %r23, %r24, %r25, %r26, %r27};
    tcgen05.wait::st.sync.aligned; tcgen05.fence::before_thread_sync; bar.sync 0; tcgen05.fence::after_thread_sync;
"""
COMMIT = """
    @%p1 tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r1+16];
    W: mbarrier.try_wait.parity.shared::cta.b64 %p3, [%r1+16], {parity}; @!%p3 bra W;
    tcgen05.fence::after_thread_sync;
"""
FREE = "\n    bar.sync 0; @%p2 tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r2, 256;\n"


def read_tile(columns: int) -> str:
    """Statements that copy TMEM columns 0 .. columns - 1 of the warp's lanes to the array p0, one row of u32 per thread."""
    text = "    ld.param.u64 %rd20, [p0]; mad.wide.u32 %rd21, %tid, " + f"{4 * columns}, %rd20;\n    .reg .b32 %x<8>;\n"
    for first in range(0, columns, 8):
        regs = [f"%x{i}" for i in range(8)]
        text += f"    tcgen05.ld.sync.aligned.32x32b.x8.b32 {{{', '.join(regs)}}}, [%r3+{first}]; tcgen05.wait::ld.sync.aligned;\n"
        for i in (0, 4):
            text += f"    st.global.v4.b32 [%rd21+{4 * (first + i)}], {{{', '.join(regs[i : i + 4])}}};\n"
    return text


# ---- operands: values, their bytes in the canonical layouts
def values(kind: str, rows: int, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Small exact numbers as float64, and their encoding (rows, k) in bytes or halves."""
    x = RNG.integers(-3, 4, (rows, k)).astype(np.float64)
    if kind in ("u8", "s8"):
        x = abs(x) if kind == "u8" else x
        return x, x.astype(np.int8).view(np.uint8)
    if kind == "tf32":
        return x, x.astype(np.float32).view(np.uint32)
    if kind == "f16":
        return x, x.astype(np.float16).view(np.uint16)
    if kind == "bf16":
        return x, (x.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    exponent, mantissa = {"e4m3": (4, 3), "e5m2": (5, 2), "e2m1": (2, 1)}[kind]
    bias = (1 << exponent - 1) - 1
    table = {0.0: 0, 1.0: bias << mantissa, 2.0: bias + 1 << mantissa, 3.0: (bias + 1 << mantissa) | 1 << mantissa - 1}
    sign = 1 << exponent + mantissa
    return x, np.array([[table[abs(v)] | (sign if v < 0 else 0) for v in row] for row in x], np.uint8)


def k_major(raw: np.ndarray, swizzle: bool) -> tuple[np.ndarray, int]:
    """Bytes of a K-major tile of 32 bytes per row, and the descriptor's fields. "Canonical Layouts", K-major."""
    rows = raw.view(np.uint8).reshape(len(raw), -1)
    if swizzle:
        out = np.zeros((len(rows), 8, 16), np.uint8)
        for r in range(len(rows)):
            for chunk in range(2):
                out[r, chunk ^ (r % 8)] = rows[r, 16 * chunk : 16 * chunk + 16]
        return out.reshape(-1), (1024 >> 4) << 32 | 1 << 16 | 2 << 61 | 1 << 46
    out = rows.reshape(-1, 8, 2, 16).transpose(0, 2, 1, 3)  # group of 8 rows, K half, row, byte
    return np.ascontiguousarray(out).reshape(-1), (256 >> 4) << 32 | (128 >> 4) << 16 | 1 << 46


def mn_major(raw: np.ndarray) -> tuple[np.ndarray, int]:
    """A 16-bit tile of 16 K, MN-major without swizzle: 8 x 8 blocks of 128 bytes, K inside. "Canonical Layouts", MN-major."""
    out = raw.reshape(-1, 8, 2, 8).transpose(0, 2, 3, 1)  # group of 8 rows, K half, K, row
    return np.ascontiguousarray(out).view(np.uint8).reshape(-1), (256 >> 4) << 32 | (128 >> 4) << 16 | 1 << 46


def packed_fp4(raw: np.ndarray) -> np.ndarray:
    """16 elements of 4 bits in 8 bytes, then 8 bytes of padding. "Packing formats used by kind::f8f6f4"."""
    out = np.zeros((len(raw), raw.shape[1] // 16, 16), np.uint8)
    nibbles = raw.reshape(len(raw), -1, 8, 2)
    out[:, :, :8] = nibbles[..., 0] | nibbles[..., 1] << 4
    return out.reshape(len(raw), -1)


def multiply(
    kind, a_kind, b_kind, m, n, *, swizzle=False, mn=False, d_format=1, extra="", a_tmem=False, repeat=1, scale="", lane=0, base=0, ws=False
):  # fmt: skip
    """Run one tcgen05.mma (twice with repeat 2, then accumulating) and return the accumulator's 128 x n words and the exact product.

    lane: of D's address. base: A begins that many 128-byte rows behind a 1024-byte boundary, as its descriptor says.
    """
    k = {"f16": 16, "tf32": 8}.get(kind, 32)
    (a, raw_a), (b, raw_b) = values(a_kind, m, k), values(b_kind, n, k)
    raws = [packed_fp4(r) if name == "e2m1" else r for r, name in ((raw_a, a_kind), (raw_b, b_kind))]
    (bytes_a, fields_a), (bytes_b, fields_b) = (mn_major(r) if mn else k_major(r, swizzle) for r in raws)
    bytes_a = np.concatenate([np.zeros(128 * base, np.uint8), bytes_a])
    first = -(-len(bytes_a) // 1024) * 1024
    data = np.zeros(first + len(bytes_b), np.uint8)
    data[: len(bytes_a)], data[first:] = bytes_a, bytes_b
    formats = FORMATS[kind][a_kind] << 7 | FORMATS[kind][b_kind] << 10
    idesc = d_format << 4 | formats | int(mn) * 3 << 15 | n >> 3 << 17 | m >> 4 << 24
    body = (
        SETUP.format(size=len(data))
        + f"""
    add.u64 %rd3, %rd2, {128 * base >> 4}; or.b64 %rd3, %rd3, {fields_a | base << 49};
    add.u64 %rd4, %rd2, {first >> 4}; or.b64 %rd4, %rd4, {fields_b};
    mov.pred %p4, 0; mov.pred %p5, 1; mov.b32 %r9, {idesc}; mov.b32 %r30, -1; mov.b32 %r31, 0;
    """
    )
    body += f"    add.u32 %r28, %r2, {lane << 16};\n"
    operand = "%rd3"
    if a_tmem:  # A row by row into TMEM columns 128 .. 135
        body += A_TO_TMEM
        operand = "[%r11]"
    for i in range(repeat):
        enable = "%p5" + scale if i else "%p4"
        body += f"    @%p1 tcgen05.mma{'.ws' if ws else ''}.cta_group::1.kind::{kind} [%r28], {operand}, %rd4, %r9, {extra}{enable};\n"
    body += COMMIT.format(parity=0) + read_tile(n) + FREE
    out = np.zeros((THREADS, n), np.uint32)
    result = launch(body, out, data, threads=THREADS, shared=1024 + len(data), target="sm_100a", checks=["tmem-allocation"])
    assert result.ok, result.reports
    return out, a @ b.T


def worst(got: np.ndarray, truth: np.ndarray) -> str:
    where = np.unravel_index(np.argmax(abs(got - truth)), got.shape)
    return f"worst at {tuple(int(i) for i in where)}: {got[where]} instead of {truth[where]}"


@pytest.mark.parametrize(
    ("kind", "a_kind", "b_kind"),
    [
        ("f16", "bf16", "bf16"),
        ("f16", "f16", "f16"),
        ("tf32", "tf32", "tf32"),
        ("f8f6f4", "e4m3", "e4m3"),
        ("f8f6f4", "e5m2", "e4m3"),
        ("f8f6f4", "e2m1", "e4m3"),
    ],
)
@pytest.mark.parametrize("swizzle", [False, True])
def test_kinds(kind, a_kind, b_kind, swizzle):
    """SECTION, tcgen05.mma: kinds; "Instruction descriptor"; "Shared memory descriptor"; layout D."""
    out, truth = multiply(kind, a_kind, b_kind, 128, 64, swizzle=swizzle)
    got = out.view(np.float32).astype(np.float64)
    assert (got == truth).all(), worst(got, truth)


@pytest.mark.parametrize("n", [8, 16, 32, 136, 256])
def test_n(n):
    """SECTION, "Matrix Shape": N of kind::f16 from 8 to 256 in steps of 8 with cta_group::1 (PTX 9.0; older texts have 16 for M = 128)."""
    out, truth = multiply("f16", "bf16", "bf16", 128, n)
    assert (out.view(np.float32) == truth).all(), worst(out.view(np.float32), truth)


@pytest.mark.parametrize("lane", [0, 16])
def test_m64_uses_half_of_the_lanes(lane):
    """SECTION, "Data Path Layout F": rows 16 w .. 16 w + 15 lie in the first 16 lanes of warp w, or the last 16 by D's address."""
    out, truth = multiply("f16", "bf16", "bf16", 64, 32, lane=lane)
    got = out.view(np.float32).reshape(4, 32, 32)[:, lane : lane + 16].reshape(64, 32)
    assert (got == truth).all(), worst(got, truth)


def test_other_lanes_of_an_accumulator_are_refused():
    with pytest.raises(AssertionError, match="the lane of the address of D is 16: it must be 0, or 16 with 64 rows"):
        multiply("f16", "bf16", "bf16", 128, 32, lane=16)


def test_mn_major_operands():
    """SECTION, "Instruction descriptor": transpose bits; "Canonical Layouts" without swizzle, MN-major."""
    out, truth = multiply("f16", "bf16", "bf16", 128, 64, mn=True)
    assert (out.view(np.float32) == truth).all(), worst(out.view(np.float32), truth)


def test_a_from_tmem():
    """SECTION, tcgen05.mma with [a-tmem]: row i in lane i, two halves to a column."""
    out, truth = multiply("f16", "bf16", "bf16", 128, 64, a_tmem=True)
    assert (out.view(np.float32) == truth).all(), worst(out.view(np.float32), truth)


def test_accumulation_and_its_scale():
    """SECTION, tcgen05.mma: enable-input-d, scale-input-d divides D by 2^scale."""
    out, truth = multiply("f16", "bf16", "bf16", 128, 32, repeat=2)
    assert (out.view(np.float32) == 2 * truth).all()
    out, truth = multiply("f16", "bf16", "bf16", 128, 32, repeat=2, scale=", 3")
    assert (out.view(np.float32) == truth * 1.125).all()


def test_disabled_lanes_keep_what_they_had():
    """SECTION, tcgen05.mma: disable-output-lane, one bit per lane."""
    out, truth = multiply("f16", "bf16", "bf16", 128, 32, extra="{%r31, %r30, %r31, %r31}, ")
    got = out.view(np.float32)
    assert not got[32:64].any()
    truth[32:64] = 0
    assert (got == truth).all(), worst(got, truth)


def test_integer_and_half_accumulators():
    """SECTION, "Instruction descriptor": D format s32 for kind::i8, f16 (in the low half of a column) for kind::f16."""
    out, truth = multiply("i8", "s8", "u8", 128, 32, d_format=2)
    assert (out.view(np.int32) == truth).all(), worst(out.view(np.int32), truth)
    out, truth = multiply("f16", "f16", "f16", 128, 32, d_format=0)
    assert (out.astype(np.uint16).view(np.float16) == truth).all()


REGISTERS = {"32x32b": 1, "16x64b": 1, "16x128b": 2, "16x256b": 4, "16x32bx2": 1}  # per repetition
ALLOCATE = SETUP[SETUP.index("mov.b32 %r1, smem") : SETUP.index("@%p1 mbarrier.arrive.expect_tx")]
OWN_LANES = "    shr.u32 %r3, %tid, 5; shl.b32 %r3, %r3, 21; add.u32 %r3, %r3, %r2;\n"


@pytest.mark.parametrize("shape", REGISTERS)
@pytest.mark.parametrize("repeat", [1, 4])
def test_ld_undoes_st(shape, repeat):
    """SECTION, tcgen05.ld and tcgen05.st: every shape holds each cell once."""
    count = REGISTERS[shape] * repeat
    split = f"{count}, " if shape == "16x32bx2" else ""
    given, got = [f"%a{i}" for i in range(count)], [f"%b{i}" for i in range(count)]
    body = "    ld.param.u64 %rd1, [p1];" + ALLOCATE + OWN_LANES + f"    .reg .b32 %a<{count}>, %b<{count}>;\n"
    body += "".join(f"    mad.lo.u32 {r}, %tid, 1000, {i};\n" for i, r in enumerate(given))
    body += f"    tcgen05.st.sync.aligned.{shape}.x{repeat}.b32 [%r3], {split}{{{', '.join(given)}}}; tcgen05.wait::st.sync.aligned;\n"
    pieces = f"{{{', '.join(got)}}}, [%r3]" + (f", {count}" if split else "")
    body += f"    tcgen05.ld.sync.aligned.{shape}.x{repeat}.b32 {pieces}; tcgen05.wait::ld.sync.aligned;\n"
    body += f"    ld.param.u64 %rd20, [p0]; mad.wide.u32 %rd21, %tid, {4 * count}, %rd20;\n"
    body += "".join(f"    st.global.b32 [%rd21+{4 * i}], {r};\n" for i, r in enumerate(got)) + FREE
    out = np.zeros((THREADS, count), np.uint32)
    result = launch(body, out, np.zeros(4, np.uint32), threads=THREADS, shared=64, target="sm_100a")
    assert result.ok, result.reports
    assert (out == np.arange(THREADS)[:, None] * 1000 + np.arange(count)).all()


def test_16x256b_is_the_accumulator_fragment():
    """SECTION, "Matrix fragments for shape .16x256b": register pairs hold two columns, rows t / 4 and t / 4 + 8."""
    body = "    ld.param.u64 %rd1, [p1];" + ALLOCATE + OWN_LANES + "    and.b32 %r4, %tid, 31; shl.b32 %r4, %r4, 8;\n"
    body += "".join(f"    add.u32 %r{10 + i}, %r4, {i};\n" for i in range(8))
    regs = ", ".join(f"%r{10 + i}" for i in range(8))
    body += f"    tcgen05.st.sync.aligned.32x32b.x8.b32 [%r3], {{{regs}}}; tcgen05.wait::st.sync.aligned;\n"
    body += "    tcgen05.ld.sync.aligned.16x256b.x1.b32 {%r20, %r21, %r22, %r23}, [%r3]; tcgen05.wait::ld.sync.aligned;\n"
    body += "    ld.param.u64 %rd20, [p0]; mad.wide.u32 %rd21, %tid, 16, %rd20;\n"
    body += "    st.global.v4.b32 [%rd21], {%r20, %r21, %r22, %r23};\n" + FREE
    out = np.zeros((THREADS, 4), np.uint32)
    assert launch(body, out, np.zeros(4, np.uint32), threads=THREADS, shared=64, target="sm_100a").ok
    for t in range(32):
        row, column = t // 4, t % 4 * 2
        assert out[t].tolist() == [row << 8 | column, row << 8 | column + 1, row + 8 << 8 | column, row + 8 << 8 | column + 1], t


def test_cp_and_shift():
    """SECTION, tcgen05.cp .128x256b: rows of 32 bytes to 8 columns; tcgen05.shift .down: rows 0 .. 30 of each quarter one row down."""
    raw = RNG.integers(0, 1 << 32, (128, 8), dtype=np.uint32)
    data, fields = k_major(raw, False)
    body = SETUP.format(size=len(data)) + f"    or.b64 %rd3, %rd2, {fields};\n"
    body += "    @%p1 tcgen05.cp.cta_group::1.128x256b [%r2], %rd3;\n"
    body += COMMIT.format(parity=0) + read_tile(8) + FREE
    out = np.zeros((THREADS, 8), np.uint32)
    result = launch(body, out, data, threads=THREADS, shared=1024 + len(data), target="sm_100a")
    assert result.ok and (out == raw).all()
    shifted = body.replace("%r2], %rd3;\n", "%r2], %rd3;\n    @%p1 tcgen05.shift.cta_group::1.down [%r2];\n", 1)
    assert launch(shifted, out, data, threads=THREADS, shared=1024 + len(data), target="sm_100a").ok
    assert (out[1:32] == raw[:31]).all() and (out[0] == raw[0]).all() and (out[32:] == raw[32:]).all()


def test_a_warp_reaches_its_own_lanes_only():
    """SECTION, "Access restrictions": warp w accesses lanes 32 (w % 4) .. 32 (w % 4) + 31."""
    body = "    ld.param.u64 %rd1, [p1];" + ALLOCATE + "    tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r5}, [%r2];\n"
    result = launch(body, np.zeros(4, np.uint32), np.zeros(4, np.uint32), threads=64, shared=64, target="sm_100a")
    assert "out-of-bounds" in kinds(result)
