"""What attention in 8 bits asks of tcgen05.mma, against NumPy: kind::f8f6f4 with A in tensor memory and a transposed B. PTX manual 9.x.

No Blackwell GPU is within reach; docs/emulator_hardware.md lists what rests on the manual alone.
"""

import numpy as np
import pytest
import torch

from tests.emulator.kernels import kinds, launch
from tests.emulator.test_tcgen05 import A_TO_TMEM, COMMIT, FORMATS, FREE, SETUP, THREADS, k_major, read_tile, values, worst
from tests.emulator.test_tcgen05_forms import PAIR, PAIR_END

TYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
K = 32  # of one instruction
MODES = {0: 0, 32: 6, 64: 4, 128: 2}  # "Shared memory descriptor", swizzling mode


def mn_major(raw: np.ndarray, swizzle: int) -> tuple[np.ndarray, int]:
    """Bytes of an 8-bit tile (rows, K) of which neighbouring rows are neighbours, and the descriptor's fields.

    "Canonical Layouts", MN-major: pieces of ``swizzle`` bytes of rows, eight places of K one behind the other; then more places of K
    (stride), then more rows (leading). Without swizzle pieces of 16 bytes, more places of K by leading, more rows by stride. "Swizzling
    Modes": bits of the address from bit 7 on are xored into the place of 16 bytes.
    """
    rows, piece = len(raw), swizzle or 16
    row, k = np.arange(rows)[:, None], np.arange(K)[None, :]
    at = row // piece * (K * piece) + k // 8 * (8 * piece) + k % 8 * piece + row % piece
    at = at ^ ((at >> 7 & (piece // 16 - 1)) << 4)
    out = np.zeros(rows * K, np.uint8)
    out[at] = raw
    of_rows, of_k = K * piece, 8 * piece
    leading, stride = (of_rows, of_k) if swizzle else (of_k, of_rows)
    return out, (stride >> 4) << 32 | (leading >> 4) << 16 | MODES[swizzle] << 61 | 1 << 46


def descriptor(kind: str, n: int, m: int = 128, transposed: bool = True) -> int:
    """ "Instruction descriptor": D in f32, both operands of one type, B transposed."""
    return 1 << 4 | FORMATS["f8f6f4"][kind] << 7 | FORMATS["f8f6f4"][kind] << 10 | int(transposed) << 16 | n >> 3 << 17 | m >> 4 << 24


def product(kind: str, raw_a: np.ndarray, tile_b: tuple[np.ndarray, int], n: int, transposed: bool = True):
    """D (128, n) of A from tensor memory and B from shared memory, and the emulator's verdict."""
    (bytes_a, _), (bytes_b, fields) = k_major(raw_a, False), tile_b
    data = np.concatenate([bytes_a, bytes_b])
    body = SETUP.format(size=len(data)) + f"    add.u64 %rd4, %rd2, {len(bytes_a) >> 4}; or.b64 %rd4, %rd4, {fields};\n"
    body += f"    mov.pred %p4, 0; mov.b32 %r9, {descriptor(kind, n, transposed=transposed)};\n" + A_TO_TMEM
    body += "    @%p1 tcgen05.mma.cta_group::1.kind::f8f6f4 [%r2], [%r11], %rd4, %r9, %p4;\n"
    body += COMMIT.format(parity=0) + read_tile(n) + FREE
    out = np.zeros((THREADS, n), np.float32)
    return launch(body, out, data, threads=THREADS, shared=1024 + len(data), target="sm_100a", checks="default"), out


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize(("swizzle", "n"), [(0, 16), (0, 80), (32, 32), (32, 96), (64, 64), (64, 128), (128, 128), (128, 256)])
def test_transposed_b(kind, swizzle, n):
    """ "Valid Combinations of Type-Size, Major-ness and Swizzling": 8-bit B in rows, every swizzle of 16-byte atoms."""
    (a, raw_a), (b, raw_b) = values(kind, 128, K), values(kind, n, K)
    result, out = product(kind, raw_a, mn_major(raw_b, swizzle), n)
    assert result.ok, result.reports
    assert (out == a @ b.T).all(), worst(out, a @ b.T)


@pytest.mark.parametrize("kind", TYPES)
def test_every_finite_code(kind):
    """ "Alternate Floating-Point Data Formats", and four elements of A to a 32-bit word of tensor memory: A times the unit matrix is A."""
    codes = np.arange(256, dtype=np.uint8)
    decoded = torch.from_numpy(codes).view(TYPES[kind]).double().numpy()
    codes = np.resize(codes[np.isfinite(decoded)], (128, K))
    truth = torch.from_numpy(codes).view(TYPES[kind]).double().numpy()
    one = torch.eye(K).to(TYPES[kind]).view(torch.uint8).numpy()
    result, out = product(kind, codes, k_major(one, False), K, transposed=False)
    assert result.ok, result.reports
    assert (out == truth).all(), worst(out, truth)


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize(("swizzle", "n"), [(0, 32), (64, 128), (128, 256)])
def test_pair_of_ctas(kind, swizzle, n):
    """ "Data Path Layout A": 128 rows of D in each CTA, all of its columns; half of B's in the shared memory of each."""
    (a, raw_a), (b, raw_b) = values(kind, 256, K), values(kind, n, K)
    parts = []
    for i in range(2):
        bytes_b, fields = mn_major(raw_b[n // 2 * i : n // 2 * (i + 1)], swizzle)
        parts.append(np.concatenate([k_major(raw_a[128 * i : 128 * i + 128], False)[0], bytes_b]))
    body = PAIR.format(size=len(parts[0]), lanes=127, idesc=descriptor(kind, n, m=256), first=128 * K >> 4, fields=fields)
    body = body.replace("kind::f16", "kind::f8f6f4")
    body += read_tile(n).replace("mad.wide.u32 %rd21, %tid,", "mad.lo.u32 %r42, %r40, 128, %tid; mad.wide.u32 %rd21, %r42,") + PAIR_END
    out = np.zeros((2 * THREADS, n), np.float32)
    result = launch(body, out, np.concatenate(parts), grid=2, cluster=2, threads=THREADS, shared=1024 + len(parts[0]), target="sm_100a")
    assert result.ok, result.reports
    assert (out == a @ b.T).all(), worst(out, a @ b.T)


def test_n_of_a_transposed_b():
    """ "Various combinations of N shape with .cta_group qualifier for 8bit transpose B": steps of 16."""
    (_, raw_a), (_, raw_b) = values("e4m3", 128, K), values("e4m3", 24, K)
    padded = np.zeros((32, K), np.uint8)
    padded[:24] = raw_b
    result, _ = product("e4m3", raw_a, mn_major(padded, 0), 24)
    assert "undefined" in kinds(result) and "N 24 of an 8-bit transposed B with cta_group::1" in result.reports[-1].message, result.reports
