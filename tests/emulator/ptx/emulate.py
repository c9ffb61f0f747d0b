"""Runs a case in the emulator, and compares an output with the hardware's."""

import struct
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.emulator.ptx.case import Case, TensorMap, Tolerance
from tests.emulator.ptx.inputs import FLOATS, UNSIGNED

# Element types by the numbers of PTX's tensormap.replace .elemtype, which the emulator's descriptors use.
ELEMENTS = ("u8", "u16", "u32", "s32", "u64", "s64", "f16", "f32", "f32_ftz", "f64", "bf16", "tf32", "tf32_ftz")


def run_case(case: Case, **options: Any) -> tuple[np.ndarray, Any]:
    """The output's bytes after the launch, and the emulator's result. Options go to `tandem_attn.emulator.run`."""
    from tandem_attn.emulator import run  # noqa: PLC0415 (a bare GPU machine has no emulator dependencies)

    buffers = {name: aligned(array) for name, array in case.make_buffers().items()}
    args = [*buffers.values(), *(descriptor(m, buffers[m.buffer]) for m in case.maps)]
    result = run(case.ptx, args, (case.grid,), block=(case.threads,), cluster=(case.cluster,), shared=case.shared, **options)
    return buffers["out"], result


def aligned(array: np.ndarray, alignment: int = 1024) -> np.ndarray:
    """A copy whose address is a multiple of `alignment`, as on the GPU."""
    room = np.empty(array.nbytes + alignment, np.uint8)
    start = -room.ctypes.data % alignment
    room[start : start + array.nbytes] = array
    return room[start : start + array.nbytes]


def descriptor(m: TensorMap, buffer: np.ndarray) -> bytes:
    """The emulator's 128 bytes for a tensor map."""
    from tandem_attn.emulator.launch import tensormap  # noqa: PLC0415

    size = tensormap.ELEMENTS[ELEMENTS.index(m.dtype)][1]
    strides = [*reversed(m.strides), size]
    swizzle = {0: 0, 32: 1, 64: 2, 128: 3}[m.swizzle]
    raw = bytearray(tensormap.encode(buffer.ctypes.data, ELEMENTS.index(m.dtype), m.shape[::-1], strides, m.box[::-1], swizzle, m.nan_fill))
    raw[tensormap.INTERLEAVE] = {0: 0, 16: 1, 32: 2}[m.interleave]
    struct.pack_into(f"<{len(m.steps)}I", raw, tensormap.STEPS, *m.steps)
    return bytes(raw)


@dataclass(frozen=True)
class Difference:
    """verdict: equal, tolerance (differs within the case's), or differs. elements: how many differ, of how many; worst: where and how."""

    verdict: str
    elements: int = 0
    of: int = 0
    worst: str = ""


def compare(case: Case, got: np.ndarray, hardware: np.ndarray) -> Difference:
    """Bit by bit; then, for a case with a tolerance, in units in the last place (a NaN equals a NaN)."""
    width = FLOATS[case.tolerance.fmt] if case.tolerance else None
    dtype = UNSIGNED[1 + sum(width)] if width else np.uint32 if got.nbytes % 4 == 0 else np.uint8
    mine, theirs = got.view(dtype), hardware.view(dtype)
    different = mine != theirs
    count = int(different.sum())
    if not count:
        return Difference("equal", 0, len(mine))
    if case.tolerance is None:
        at = int(np.flatnonzero(different)[0])
        return Difference("differs", count, len(mine), f"[{at}] {int(mine[at]):#x}, hardware {int(theirs[at]):#x}")
    excess, ulps = outside(mine, theirs, case.tolerance)
    at = int(ulps.argmax())
    worst = f"[{at}] {int(mine[at]):#x}, hardware {int(theirs[at]):#x}, {ulps[at]:.1f} ulp"
    return Difference("differs" if excess.any() else "tolerance", int(excess.sum()) if excess.any() else count, len(mine), worst)


def outside(mine: np.ndarray, theirs: np.ndarray, tolerance: Tolerance) -> tuple[np.ndarray, np.ndarray]:
    """Which elements exceed the tolerance, and every element's distance in ulps (0 for two NaNs)."""
    a, b = ordered(mine, tolerance.fmt), ordered(theirs, tolerance.fmt)
    ulps = np.abs(a - b)
    nan_a, nan_b = is_nan(mine, tolerance.fmt), is_nan(theirs, tolerance.fmt)
    ulps = np.where(nan_a & nan_b, 0, np.where(nan_a | nan_b, np.inf, ulps))
    near = np.abs(value(mine, tolerance.fmt) - value(theirs, tolerance.fmt)) <= tolerance.absolute
    return (ulps > tolerance.ulps) & ~near, ulps


def ordered(bits: np.ndarray, fmt: str) -> np.ndarray:
    """Bits -> a number that grows by one from each float to the next."""
    width = 1 + sum(FLOATS[fmt])
    magnitude = (bits & bits.dtype.type((1 << (width - 1)) - 1)).astype(np.float64)
    return np.where(bits >> bits.dtype.type(width - 1), -magnitude, magnitude)


def is_nan(bits: np.ndarray, fmt: str) -> np.ndarray:
    exponent, mantissa = FLOATS[fmt]
    magnitude = bits & bits.dtype.type((1 << (exponent + mantissa)) - 1)
    return magnitude > bits.dtype.type(((1 << exponent) - 1) << mantissa)


def value(bits: np.ndarray, fmt: str) -> np.ndarray:
    """Bits -> fp64; infinities and NaNs become NaN, so that they are near nothing."""
    exponent, mantissa = FLOATS[fmt]
    field = (bits >> bits.dtype.type(mantissa)).astype(np.int64) & ((1 << exponent) - 1)
    fraction = (bits & bits.dtype.type((1 << mantissa) - 1)).astype(np.float64) / (1 << mantissa)
    bias = (1 << (exponent - 1)) - 1
    magnitude = np.ldexp(np.where(field > 0, 1 + fraction, fraction), np.maximum(field, 1) - bias)
    magnitude = np.where(field == (1 << exponent) - 1, np.nan, magnitude)
    return np.where(bits >> bits.dtype.type(exponent + mantissa), -magnitude, magnitude)
