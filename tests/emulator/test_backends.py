"""NumPy and LLVM code come from the same semantics and give the same bits; a few semantics against plain Python."""

import math
import struct
from fractions import Fraction

import numpy as np
import pytest

from tandem_attn.emulator.codegen import native
from tests.emulator.kernels import launch

SPECIAL = [
    0.0,
    -0.0,
    1.0,
    -1.5,
    1e-40,
    -3e-39,
    1.17549435e-38,
    3.4e38,
    -3.4e38,
    math.inf,
    -math.inf,
    math.nan,
    448.0,
    465.0,
    57344.0,
    61440.0,
]
RNG = np.random.default_rng(7)


def inputs(kind: str) -> np.ndarray:
    """3 x 256 words: special values, small integers, random bits."""
    if kind == "f32":
        special = np.array(SPECIAL * 16, np.float32).view(np.uint32)
        near = (RNG.standard_normal(256) * 10.0 ** RNG.integers(-6, 7, 256)).astype(np.float32).view(np.uint32)
    else:
        special = np.array(
            [0, 1, 2, 31, 32, 33, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 255, 256, 0xFFFF, 0x10000, 7, 100, 0xFFFFFFF9] * 16, np.uint32
        )
        near = RNG.integers(0, 300, 256, dtype=np.uint32)
    columns = [special, near, RNG.integers(0, 2**32, 256, dtype=np.uint32)]
    return np.stack([RNG.permutation(np.concatenate(columns))[:256] for _ in range(3)])


LOAD = """
    ld.param.u64 %rd1, [p1]; mad.wide.u32 %rd2, %tid, 4, %rd1;
    ld.global.b32 %r1, [%rd2]; ld.global.b32 %r2, [%rd2+1024]; ld.global.b32 %r3, [%rd2+2048];
    mov.b32 %f1, %r1; mov.b32 %f2, %r2; mov.b32 %f3, %r3; mov.b64 %rd3, {%r1, %r2}; mov.b64 %rd4, {%r2, %r3};
    cvt.u16.u32 %h1, %r1; cvt.u16.u32 %h2, %r2; cvt.u16.u32 %h3, %r3; and.b32 %r4, %r2, 63; setp.lt.s32 %p1, %r1, %r2;
"""
STORE = """
    ld.param.u64 %rd30, [p0]; mad.wide.u32 %rd31, %tid, 8, %rd30; st.global.v2.b32 [%rd31], {%r60, %r61};
"""
TO_PAIR = {"r": "mov.b32 %r60, %r10; mov.b32 %r61, 0;", "f": "mov.b32 %r60, %f10; mov.b32 %r61, 0;", "d": "mov.b64 {%r60, %r61}, %rd10;"}
TO_PAIR |= {"h": "cvt.u32.u16 %r60, %h10; mov.b32 %r61, 0;", "p": "selp.b32 %r60, 1, 0, %p5; mov.b32 %r61, 0;"}

INTEGER = {
    "r": """
add.s32 %r10, %r1, %r2|sub.s32 %r10, %r1, %r2|mul.lo.s32 %r10, %r1, %r2|mul.hi.u32 %r10, %r1, %r2
mul.hi.s32 %r10, %r1, %r2|add.sat.s32 %r10, %r1, %r2|mad.lo.s32 %r10, %r1, %r2, %r3|div.s32 %r10, %r1, %r2
div.u32 %r10, %r1, %r2|rem.s32 %r10, %r1, %r2|rem.u32 %r10, %r1, %r2|min.s32 %r10, %r1, %r2|max.u32 %r10, %r1, %r2
abs.s32 %r10, %r1|neg.s32 %r10, %r1|sad.u32 %r10, %r1, %r2, %r3|mul24.lo.s32 %r10, %r1, %r2|and.b32 %r10, %r1, %r2
xor.b32 %r10, %r1, %r2|not.b32 %r10, %r1|cnot.b32 %r10, %r1|lop3.b32 %r10, %r1, %r2, %r3, 0xCA|shl.b32 %r10, %r1, %r4
shr.u32 %r10, %r1, %r4|shr.s32 %r10, %r1, %r4|shf.l.wrap.b32 %r10, %r1, %r2, %r4|shf.r.clamp.b32 %r10, %r1, %r2, %r4
bfe.u32 %r10, %r1, %r4, %r3|bfe.s32 %r10, %r1, %r4, 8|bfi.b32 %r10, %r1, %r2, %r4, 9|popc.b32 %r10, %r1
clz.b32 %r10, %r1|brev.b32 %r10, %r1|bfind.s32 %r10, %r1|bfind.u32 %r10, %r1|prmt.b32 %r10, %r1, %r2, %r3
prmt.b32.f4e %r10, %r1, %r2, %r3|dp4a.s32.s32 %r10, %r1, %r2, %r3|selp.b32 %r10, %r1, %r2, %p1
add.s16x2 %r10, %r1, %r2|shfl.sync.bfly.b32 %r10, %r1, 5, 31, -1|shfl.sync.down.b32 %r10, %r1, 3, 31, -1
redux.sync.add.u32 %r10, %r1, -1|redux.sync.min.s32 %r10, %r1, -1|vote.sync.ballot.b32 %r10, %p1, -1
match.any.sync.b32 %r10, %r4, -1|set.lt.u32.s32 %r10, %r1, %r2|cvt.sat.s8.s32 %r10, %r1
""",
    "d": """
mul.wide.s32 %rd10, %r1, %r2|mul.wide.u32 %rd10, %r1, %r2|add.s64 %rd10, %rd3, %rd4|mul.lo.s64 %rd10, %rd3, %rd4
mul.hi.u64 %rd10, %rd3, %rd4|shl.b64 %rd10, %rd3, %r4|shr.s64 %rd10, %rd3, %r4|cvt.s64.s32 %rd10, %r1
popc.b64 %r60, %rd3; mov.b64 %rd10, {%r60, %r60}
""",
    "p": """
setp.gt.u32 %p5, %r1, %r2|setp.le.s32 %p5, %r1, %r2|setp.eq.and.s32 %p5, %r1, %r2, %p1|vote.sync.any.pred %p5, %p1, -1
""",
    "h": """
add.s16 %h10, %h1, %h2|mul.hi.s16 %h10, %h1, %h2|max.u16 %h10, %h1, %h2|shr.s16 %h10, %h1, %r4
""",
}
FLOATING = {
    "f": """
add.f32 %f10, %f1, %f2|add.ftz.f32 %f10, %f1, %f2|add.rm.f32 %f10, %f1, %f2|add.rz.f32 %f10, %f1, %f2
sub.rp.f32 %f10, %f1, %f2|mul.f32 %f10, %f1, %f2|mul.rz.f32 %f10, %f1, %f2|mul.ftz.f32 %f10, %f1, %f2
fma.rn.f32 %f10, %f1, %f2, %f3|fma.rn.ftz.f32 %f10, %f1, %f2, %f3|fma.rm.f32 %f10, %f1, %f2, %f3
fma.rn.sat.f32 %f10, %f1, %f2, %f3|div.rn.f32 %f10, %f1, %f2|rcp.rn.f32 %f10, %f1|sqrt.rn.f32 %f10, %f1
min.f32 %f10, %f1, %f2|max.f32 %f10, %f1, %f2|max.NaN.f32 %f10, %f1, %f2|min.ftz.f32 %f10, %f1, %f2, %f3
max.xorsign.abs.f32 %f10, %f1, %f2|abs.f32 %f10, %f1|neg.ftz.f32 %f10, %f1|copysign.f32 %f10, %f1, %f2
cvt.rni.f32.f32 %f10, %f1|cvt.rn.f32.s32 %f10, %r1|cvt.rz.f32.u32 %f10, %r1|cvt.f32.f16 %f10, %h1
cvt.f32.bf16 %f10, %h1|add.f32.bf16 %f10, %h1, %f2
""",
    "r": """
cvt.rn.bf16x2.f32 %r10, %f1, %f2|cvt.rn.relu.f16x2.f32 %r10, %f1, %f2|cvt.rz.bf16x2.f32 %r10, %f1, %f2
cvt.rna.tf32.f32 %r10, %f1|cvt.rni.s32.f32 %r10, %f1|cvt.rzi.u32.f32 %r10, %f1|cvt.rmi.ftz.s32.f32 %r10, %f1
fma.rn.f16x2 %r10, %r1, %r2, %r3|add.bf16x2 %r10, %r1, %r2|max.f16x2 %r10, %r1, %r2|cvt.rn.f16x2.e4m3x2 %r10, %h1
cvt.rn.f16x2.e5m2x2 %r10, %h1
""",
    "h": """
cvt.rn.satfinite.e4m3x2.f32 %h10, %f1, %f2|cvt.rn.satfinite.e5m2x2.f32 %h10, %f1, %f2
cvt.rn.satfinite.relu.e4m3x2.f32 %h10, %f1, %f2|cvt.rn.f16.f32 %h10, %f1|cvt.rn.bf16.f32 %h10, %f1
fma.rn.bf16 %h10, %h1, %h2, %h3|mul.f16 %h10, %h1, %h2
""",
    "d": """
add.rn.f32x2 %rd10, %rd3, %rd4|fma.rn.f32x2 %rd10, %rd3, %rd4, %rd3|mul.rn.ftz.f32x2 %rd10, %rd3, %rd4
add.rm.f32x2 %rd10, %rd3, %rd4|cvt.f64.f32 %rd10, %f1
""",
    "p": """
setp.lt.f32 %p5, %f1, %f2|setp.geu.f32 %p5, %f1, %f2|setp.num.f32 %p5, %f1, %f2|setp.ne.ftz.f32 %p5, %f1, %f2
testp.subnormal.f32 %p5, %f1
""",
}


def cases():
    for kind, table in (("u32", INTEGER), ("f32", FLOATING)):
        for target, text in table.items():
            for instruction in text.strip().replace("\n", "|").split("|"):
                yield pytest.param(kind, target, instruction, id=instruction.split(";")[0])


def evaluate(target: str, instruction: str, data: np.ndarray, backend: str, schedule: str = "at-issue") -> np.ndarray:
    out = np.zeros((256, 2), np.uint32)
    body = LOAD + f"    {instruction};\n    {TO_PAIR[target]}\n" + STORE
    body = body.replace("cvt.f64.f32 %rd10", "{ .reg .f64 %d; cvt.f64.f32 %d").replace("%d, %f1;", "%d, %f1; mov.b64 %rd10, %d; }")
    result = launch(body, out, data, threads=256, backend=backend, schedule=schedule, target="sm_100a")
    assert result.ok, result.reports
    return out


def one_nan(bits: np.ndarray) -> np.ndarray:
    """float32 bits with every NaN the same."""
    return np.where((bits & 0x7FFFFFFF) > 0x7F800000, np.uint32(0x7FFFFFFF), bits)


@pytest.mark.skipif(not native.available(), reason="llvmlite is not installed: there is one backend only")
@pytest.mark.parametrize(("kind", "target", "instruction"), list(cases()))
def test_backends_agree_bit_by_bit(kind, target, instruction):
    """NumPy and LLVM, each for four warps at once and (in the random schedule) for one."""
    data = inputs(kind)
    forms = [(backend, schedule) for backend in ("numpy", "llvm") for schedule in ("at-issue", "random")]
    first, *others = (evaluate(target, instruction, data, *form) for form in forms)
    for form, other in zip(forms[1:], others, strict=True):
        a, b = first, other
        if "f32x2" in instruction:  # which bits its NaN has is not known: each backend leaves what its arithmetic gives
            a, b = one_nan(a), one_nan(b)
        wrong = np.flatnonzero((a != b).any(axis=1))
        at = wrong[0] if len(wrong) else 0
        assert not len(wrong), f"{form}: {len(wrong)} lanes differ, the first {at}: inputs {data[:, at]}, {a[at]} and {b[at]}"


def float_of(bits: int) -> float:
    return struct.unpack("<f", struct.pack("<I", int(bits)))[0]


def test_exp2_is_within_the_manual_bound():
    """ex2.approx.f32: a relative error of at most 2^-22 (PTX manual, "ex2"), and the same bits from both backends."""
    data = np.linspace(-125, 20, 768, dtype=np.float32).reshape(3, 256).view(np.uint32)
    truth = np.exp2(data[0].view(np.float32).astype(np.float64))
    outs = [
        evaluate("f", "ex2.approx.f32 %f10, %f1", data, backend)[:, 0].view(np.float32)
        for backend in (("numpy", "llvm") if native.available() else ("numpy",))
    ]
    np.testing.assert_allclose(outs[0].astype(np.float64), truth, rtol=2**-22)
    assert all((out == outs[0]).all() for out in outs)


def test_integer_semantics_against_python():
    data = inputs("u32")
    a, b, c = (data[i].astype(object) for i in range(3))
    signed = [[x - (1 << 32) if x >> 31 else x for x in column] for column in (a, b)]
    expected = {
        "mul.hi.s32 %r10, %r1, %r2": [(x * y >> 32) & 0xFFFFFFFF for x, y in zip(*signed, strict=True)],
        "sad.u32 %r10, %r1, %r2, %r3": [(z + abs(x - y)) & 0xFFFFFFFF for x, y, z in zip(a, b, c, strict=True)],
        "bfe.s32 %r10, %r1, 5, 7": [(((x >> 5 & 127) ^ 64) - 64) & 0xFFFFFFFF for x in a],
        "shr.s32 %r10, %r1, %r2": [(x >> min(y, 31)) & 0xFFFFFFFF for x, y in zip(signed[0], b, strict=True)],
        "brev.b32 %r10, %r1": [int(f"{x:032b}"[::-1], 2) for x in a],
        "popc.b32 %r10, %r1": [bin(x).count("1") for x in a],
    }
    for instruction, values in expected.items():
        got = evaluate("r", instruction, data, "numpy")[:, 0]
        wrong = [i for i in range(256) if got[i] != values[i]]
        assert not wrong, f"{instruction}: lane {wrong[0]} gives {got[wrong[0]]:#x}, not {values[wrong[0]]:#x}"


def test_fma_rounds_once():
    data = RNG.integers(0x3F000000, 0x40000000, (3, 256), dtype=np.uint32)
    data[2] |= 0x80000000
    got = evaluate("f", "fma.rn.f32 %f10, %f1, %f2, %f3", data, "numpy")[:, 0]
    for i in range(256):
        a, b, c = (Fraction(float_of(data[j, i])) for j in range(3))
        exact, value = a * b + c, Fraction(float_of(got[i]))
        step = abs(Fraction(float(np.spacing(np.float32(float(value)))))) if value else Fraction(1, 2**149)
        assert abs(exact - value) * 2 <= step, f"lane {i}: {float(value)} is not the nearest to {float(exact)}"


def rounded(exact: Fraction, mode: str) -> Fraction:
    """To 24 bits with an unbounded exponent."""
    if not exact:
        return exact
    power = Fraction(2) ** (math.frexp(float(exact))[1] - 1)
    power = power / 2 if abs(exact) < power else power  # float() may have rounded up to it
    unit = power / 2**23
    return {"rn": round, "rz": math.trunc, "rm": math.floor, "rp": math.ceil}[mode](exact / unit) * unit


@pytest.mark.parametrize("backend", ["numpy", *(["llvm"] if native.available() else [])])
@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
def test_flushing_looks_at_the_result_rounded_without_a_limit_to_its_exponent(mode, backend):
    """mul and fma .ftz around 2^-126 (docs/emulator_hardware.md); fma with addend 0 (as recorded) and with one that cancels."""
    smallest = Fraction(1, 2**126)
    lanes = np.arange(256, dtype=np.uint32)
    sign = lanes // 64 % 2 << 31
    first = lanes % 16 + np.where(lanes < 128, 0x3F7FFFF0, 0x3FFFFFF0)  # the numbers below 1, or 2
    second = (lanes // 16 % 4 + 0x00800000) | sign  # 2^-126 and the next
    third = np.where(lanes < 128, 0, 0x80800001 ^ sign)  # the second number from 2^-126, against the product's sign
    data = np.stack([first, second, third]).astype(np.uint32)
    for form in (f"mul.{mode}.ftz.f32 %f10, %f1, %f2", f"fma.{mode}.ftz.f32 %f10, %f1, %f2, %f3"):
        kept = [0, 0]
        got = evaluate("f", form, data, backend)[:, 0]
        for i in range(256):
            a, b, c = (Fraction(float_of(data[j, i])) for j in range(3))
            exact = a * b + (c if "fma" in form else 0)
            value = rounded(exact, mode)
            normal = abs(value) >= smallest
            kept[i >= 128] += normal and abs(exact) < smallest
            assert Fraction(float_of(got[i])) == (value if normal else 0), f"{form}: {float(exact)} gives {got[i]:#x}"
        assert mode == "rz" or (kept[0] and ("mul" in form or kept[1]))
