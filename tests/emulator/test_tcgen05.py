"""tcgen05 forms against NumPy. No Blackwell GPU is within reach: each case names the section of the PTX manual (9.x) that it rests on."""

import numpy as np

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


def multiply(kind, a_kind, b_kind, m, n, *, swizzle=False, mn=False, d_format=1, extra="", a_tmem=False, repeat=1, scale=""):
    """Run one tcgen05.mma (twice with repeat 2, then accumulating) and return the accumulator's 128 x n words and the exact product."""
    k = {"f16": 16, "tf32": 8}.get(kind, 32)
    (a, raw_a), (b, raw_b) = values(a_kind, m, k), values(b_kind, n, k)
    raws = [packed_fp4(r) if name == "e2m1" else r for r, name in ((raw_a, a_kind), (raw_b, b_kind))]
    (bytes_a, fields_a), (bytes_b, fields_b) = (mn_major(r) if mn else k_major(r, swizzle) for r in raws)
    first = -(-len(bytes_a) // 1024) * 1024
    data = np.zeros(first + len(bytes_b), np.uint8)
    data[: len(bytes_a)], data[first:] = bytes_a, bytes_b
    formats = FORMATS[kind][a_kind] << 7 | FORMATS[kind][b_kind] << 10
    idesc = d_format << 4 | formats | int(mn) * 3 << 15 | n >> 3 << 17 | m >> 4 << 24
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
    body = SETUP[: SETUP.index("@%p1 mbarrier.arrive.expect_tx")] + "    tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r5}, [%r2];\n"
    result = launch(body, np.zeros(4, np.uint32), np.zeros(4, np.uint32), threads=64, shared=64, target="sm_100a")
    assert "out-of-bounds" in kinds(result)
