"""Several steps along K of `ops/tensor_core.py` as machine code in single precision, for factors of moderate size.

A product of two bf16, f16 or tf32 numbers is exact in an f32, and so is its multiple by a power of two; cut to an integer it is a term of
the sum. This holds while the scale is a normal number that overflows with no factor: the largest exponents of A and of B are at most
`MOST_A` and `MOST_B`, and the largest term of a sum is at least 2^`LEAST`. The code says when a sum was smaller or an accumulator not
finite; the caller then takes the way in double precision, which has no such bounds.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from tandem_attn.emulator.codegen import native

_F32: TypeAlias = NDArray[np.float32]
_I16: TypeAlias = NDArray[np.int16]
LANES = 16  # columns at a time
ROWS = ("p", "q")  # letters of the rows that are computed side by side
MOST_A, MOST_B, LEAST = 40, 100, -60
_NAME = "tensor_core_chain"
_ARGUMENTS = ("a", "ea", "b", "eb", "c", "m", "n", "length", "step", "fraction", "keep", "outside")
_POINTERS = ("a", "ea", "b", "eb", "c", "outside")


def _splat(name: str, value: str, t: str) -> str:
    """A scalar in all lanes."""
    return f"""  %{name}_one = insertelement <16 x {t}> poison, {t} {value}, i32 0
  %{name} = shufflevector <16 x {t}> %{name}_one, <16 x {t}> poison, <16 x i32> zeroinitializer
"""


def _head() -> str:
    """The arguments out of their block."""
    lines = []
    for i, name in enumerate(_ARGUMENTS):
        t = "ptr" if name in _POINTERS else "i64"
        lines += [f"  %{name}_at = getelementptr i64, ptr %p, i64 {i}", f"  %{name} = load {t}, ptr %{name}_at"]
    return "\n".join(lines) + "\n"


def _term(k: str, out: str, total: str) -> str:
    """One place along K: a and b times the scale, cut, added to the `total` of each row."""
    lines = f"""  %bo{out} = shl i64 {k}, 4
  %bp{out} = getelementptr float, ptr %bcol, i64 %bo{out}
  %b{out} = load <16 x float>, ptr %bp{out}, align 4
"""
    for r in ROWS:
        lines += f"""  %ap{out}{r} = getelementptr float, ptr %arow{r}, i64 {k}
  %a{out}{r}_ = load float, ptr %ap{out}{r}
{_splat(f"a{out}{r}", f"%a{out}{r}_", "float")}  %as{out}{r} = fmul <16 x float> %a{out}{r}, %scale{r}
  %t{out}{r} = fmul <16 x float> %as{out}{r}, %b{out}
  %i{out}{r} = fptosi <16 x float> %t{out}{r} to <16 x i32>
  %{out}{r} = add <16 x i32> {total}{r}, %i{out}{r}
"""
    return lines


def _exponent(k: str, out: str, largest: str) -> str:
    lines = f"""  %ebo{out} = shl i64 {k}, 4
  %ebp{out} = getelementptr i16, ptr %ebcol, i64 %ebo{out}
  %eb{out} = load <16 x i16>, ptr %ebp{out}, align 2
"""
    for r in ROWS:
        lines += f"""  %eap{out}{r} = getelementptr i16, ptr %earow{r}, i64 {k}
  %ea{out}{r}_ = load i16, ptr %eap{out}{r}
{_splat(f"ea{out}{r}", f"%ea{out}{r}_", "i16")}  %es{out}{r} = add <16 x i16> %ea{out}{r}, %eb{out}
  %{out}{r} = call <16 x i16> @llvm.smax.v16i16(<16 x i16> {largest}{r}, <16 x i16> %es{out}{r})
"""
    return lines


def _each(text: str) -> str:
    """The lines once for each row, `#` being its letter."""
    return "".join(text.replace("#", r) for r in ROWS)


_ROW = """  %ik# = mul i64 %i#, %length
  %arow# = getelementptr float, ptr %a, i64 %ik#
  %earow# = getelementptr i16, ptr %ea, i64 %ik#
  %in# = mul i64 %i#, %n
  %place# = add i64 %in#, %j
  %cp# = getelementptr float, ptr %c, i64 %place#
  %first# = load <16 x float>, ptr %cp#, align 4
"""
_ADDEND = """  %cbits# = bitcast <16 x float> %cv# to <16 x i32>
  %size# = and <16 x i32> %cbits#, splat (i32 2147483647)
  %field# = lshr <16 x i32> %size#, splat (i32 23)
  %cexp# = sub <16 x i32> %field#, splat (i32 127)
  %zero# = icmp eq <16 x i32> %size#, zeroinitializer
  %c0# = select <16 x i1> %zero#, <16 x i32> splat (i32 -700), <16 x i32> %cexp#
"""
_SCALE = f"""  %products# = sext <16 x i16> %e2# to <16 x i32>
  %e# = call <16 x i32> @llvm.smax.v16i32(<16 x i32> %products#, <16 x i32> %c0#)
  %small# = icmp slt <16 x i32> %e#, splat (i32 {LEAST})
  %some# = icmp sgt <16 x i32> %e#, splat (i32 -600)
  %low# = and <16 x i1> %small#, %some#
  %high# = icmp sgt <16 x i32> %cexp#, splat (i32 127)
  %wrong# = or <16 x i1> %low#, %high#
  %wrong32# = zext <16 x i1> %wrong# to <16 x i32>
  %held# = call <16 x i32> @llvm.smax.v16i32(<16 x i32> %e#, <16 x i32> splat (i32 {LEAST}))
  %up# = sub <16 x i32> %fractions, %held#
  %biased# = add <16 x i32> %up#, splat (i32 127)
  %sbits# = shl <16 x i32> %biased#, splat (i32 23)
  %scale# = bitcast <16 x i32> %sbits# to <16 x float>
  %cs# = fmul <16 x float> %cv#, %scale#
  %ci# = fptosi <16 x float> %cs# to <16 x i32>
"""
_STEP = "  %cv# = phi <16 x float> [ %first#, %row ], [ %new#, %step_end ]\n"
_LARGEST = "  %e0# = phi <16 x i16> [ splat (i16 -700), %step_ ], [ %e2#, %find ]\n"
_STORE = "  store <16 x float> %new#, ptr %cp#, align 4\n"
_SUMS = """  %x0# = phi <16 x i32> [ %ci#, %found ], [ %x1#, %add_ ]
  %y0# = phi <16 x i32> [ zeroinitializer, %found ], [ %y1#, %add_ ]
"""
_TOTAL = """  %xd# = sitofp <16 x i32> %x1# to <16 x double>
  %yd# = sitofp <16 x i32> %y1# to <16 x double>
  %sum# = fadd <16 x double> %xd#, %yd#
  %down# = sub <16 x i32> %held#, %fractions
  %dbias# = add <16 x i32> %down#, splat (i32 1023)
  %dwide# = zext <16 x i32> %dbias# to <16 x i64>
  %dbits# = shl <16 x i64> %dwide#, splat (i64 52)
  %unscale# = bitcast <16 x i64> %dbits# to <16 x double>
  %exact# = fmul <16 x double> %sum#, %unscale#
  %raw# = bitcast <16 x double> %exact# to <16 x i64>
  %cut# = and <16 x i64> %raw#, %mask
  %kept# = bitcast <16 x i64> %cut# to <16 x double>
  %new# = fptrunc <16 x double> %kept# to <16 x float>
"""
# For each 16 columns, two rows and step: the largest exponent; the terms in two sums of half of K each, which no i32 can overflow; their
# total in double precision, cut by a mask on its bits. Two rows at once, since a step has to wait for the one before it.
_IR = f"""
declare <16 x i16> @llvm.smax.v16i16(<16 x i16>, <16 x i16>)
declare <16 x i32> @llvm.smax.v16i32(<16 x i32>, <16 x i32>)

define void @{_NAME}(ptr %p, i64 %unused) {{
entry:
{_head()}{_splat("mask", "%keep", "i64")}  %f = trunc i64 %fraction to i32
{_splat("fractions", "%f", "i32")}  br label %columns
columns:
  %j = phi i64 [ 0, %entry ], [ %j_next, %columns_end ]
  %bad0 = phi <16 x i32> [ zeroinitializer, %entry ], [ %bad1, %columns_end ]
  %block = mul i64 %j, %length
  %bcol = getelementptr float, ptr %b, i64 %block
  %ebcol = getelementptr i16, ptr %eb, i64 %block
  br label %row
row:
  %ip = phi i64 [ 0, %columns ], [ %i_next, %row_end ]
  %bad = phi <16 x i32> [ %bad0, %columns ], [ %bad1, %row_end ]
  %iq = add i64 %ip, 1
{_each(_ROW)}  br label %step_
step_:
  %k0 = phi i64 [ 0, %row ], [ %k_next, %step_end ]
{_each(_STEP)}  %flags = phi <16 x i32> [ %bad, %row ], [ %bad1, %step_end ]
  %end = add i64 %k0, %step
{_each(_ADDEND)}  br label %find
find:
  %kf = phi i64 [ %k0, %step_ ], [ %kf2, %find ]
{_each(_LARGEST)}  %kf1 = add i64 %kf, 1
{_exponent("%kf", "e1", "%e0")}{_exponent("%kf1", "e2", "%e1")}  %kf2 = add i64 %kf, 2
  %more_f = icmp ult i64 %kf2, %end
  br i1 %more_f, label %find, label %found
found:
{_each(_SCALE)}  %wrong = or <16 x i32> %wrong32p, %wrong32q
  %bad1 = or <16 x i32> %flags, %wrong
  br label %add_
add_:
  %ka = phi i64 [ %k0, %found ], [ %ka2, %add_ ]
{_each(_SUMS)}  %ka1 = add i64 %ka, 1
{_term("%ka", "x1", "%x0")}{_term("%ka1", "y1", "%y0")}  %ka2 = add i64 %ka, 2
  %more_a = icmp ult i64 %ka2, %end
  br i1 %more_a, label %add_, label %step_end
step_end:
{_each(_TOTAL)}  %k_next = add i64 %k0, %step
  %more_s = icmp ult i64 %k_next, %length
  br i1 %more_s, label %step_, label %row_end
row_end:
{_each(_STORE)}  %i_next = add i64 %ip, 2
  %more_r = icmp ult i64 %i_next, %m
  br i1 %more_r, label %row, label %columns_end
columns_end:
  %j_next = add i64 %j, 16
  %more_c = icmp ult i64 %j_next, %n
  br i1 %more_c, label %columns, label %done
done:
  store <16 x i32> %bad1, ptr %outside, align 4
  ret void
}}
"""


@cache
def available() -> bool:
    return native.available()


@cache
def _function() -> tuple[Callable[..., None], Any]:
    compiler = native.Compiler(_IR, opt=3)
    return compiler.function(_NAME, lambda: _IR), compiler  # the compiler owns the code


def packed(values: _F32, exponents: _I16) -> tuple[_F32, _I16]:
    """(N, K) as blocks of 16 columns: (N / 16, K, 16), filled up with zeros."""
    n, k = values.shape
    blocks = -(-n // LANES)
    out, exp = np.zeros((blocks * LANES, k), np.float32), np.full((blocks * LANES, k), -700, np.int16)
    out[:n], exp[:n] = values, exponents
    shape = (blocks, LANES, k)
    return np.ascontiguousarray(out.reshape(shape).transpose(0, 2, 1)), np.ascontiguousarray(exp.reshape(shape).transpose(0, 2, 1))


def accumulate(a: _F32, a_exponents: _I16, b: tuple[_F32, _I16], c: _F32, step: int, fraction: int, mantissa: int) -> _F32 | None:
    """a (M, K), M even, b packed, c (M, N): K / step instructions one after the other; None where the bounds do not hold."""
    call, _ = _function()
    m, k = a.shape
    n = c.shape[1]
    room = np.zeros((m, b[0].shape[0] * LANES), np.float32) if n % LANES else np.array(c, np.float32, order="C")
    if n % LANES:
        room[:, :n] = c
    outside = np.zeros(LANES, np.int32)
    held = (np.ascontiguousarray(a), np.ascontiguousarray(a_exponents), b[0], b[1], room)
    block = np.array(
        [*(x.ctypes.data for x in held), m, room.shape[1], k, step, fraction, -1 << (52 - mantissa), outside.ctypes.data], np.int64
    )
    call(block.ctypes.data, 0)
    if outside.any():
        return None
    return room[:, :n] if n % LANES else room
