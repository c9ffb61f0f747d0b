"""The sum of `ops/tensor_core.py` as machine code: the same numbers as its NumPy form, some ten times as fast."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from tandem_attn.emulator.codegen import native

_F64: TypeAlias = NDArray[np.float64]
_I32: TypeAlias = NDArray[np.int32]
_NAME = "tensor_core"
# Eight columns at a time. Exponents come as i32; a power of two is made by shifting a biased exponent into place. The sum is cut by a mask
# on its bits, below 2^-126 by truncation to a multiple of 2^-149.
_IR = """
declare <8 x i32> @llvm.smax.v8i32(<8 x i32>, <8 x i32>)
declare <8 x double> @llvm.trunc.v8f64(<8 x double>)
declare <8 x double> @llvm.fabs.v8f64(<8 x double>)

define <8 x double> @power(<8 x i32> %e) alwaysinline {
  %biased = add <8 x i32> %e, splat (i32 1023)
  %wide = zext <8 x i32> %biased to <8 x i64>
  %placed = shl <8 x i64> %wide, splat (i64 52)
  %out = bitcast <8 x i64> %placed to <8 x double>
  ret <8 x double> %out
}

define void @rows(ptr %a, ptr %ea, ptr %b, ptr %eb, ptr %c, i64 %m, i64 %n, i64 %k, i32 %fraction, i64 %mask) {
entry:
  %keep0 = insertelement <8 x i64> poison, i64 %mask, i32 0
  %keep = shufflevector <8 x i64> %keep0, <8 x i64> poison, <8 x i32> zeroinitializer
  %f0 = insertelement <8 x i32> poison, i32 %fraction, i32 0
  %f = shufflevector <8 x i32> %f0, <8 x i32> poison, <8 x i32> zeroinitializer
  br label %row
row:
  %i = phi i64 [ 0, %entry ], [ %i1, %rowend ]
  %ik = mul i64 %i, %k
  %in = mul i64 %i, %n
  %arow = getelementptr double, ptr %a, i64 %ik
  %earow = getelementptr i32, ptr %ea, i64 %ik
  %crow = getelementptr double, ptr %c, i64 %in
  br label %column
column:
  %j = phi i64 [ 0, %row ], [ %j1, %columnend ]
  %cp = getelementptr double, ptr %crow, i64 %j
  %cv = load <8 x double>, ptr %cp, align 8
  %cbits = bitcast <8 x double> %cv to <8 x i64>
  %cup = lshr <8 x i64> %cbits, splat (i64 52)
  %cfield64 = and <8 x i64> %cup, splat (i64 2047)
  %cfield = trunc <8 x i64> %cfield64 to <8 x i32>
  %cexp = sub <8 x i32> %cfield, splat (i32 1023)
  %e0 = call <8 x i32> @llvm.smax.v8i32(<8 x i32> %cexp, <8 x i32> splat (i32 -700))
  br label %find
find:
  %k0 = phi i64 [ 0, %column ], [ %k0n, %find ]
  %e = phi <8 x i32> [ %e0, %column ], [ %emax, %find ]
  %eap = getelementptr i32, ptr %earow, i64 %k0
  %ea0 = load i32, ptr %eap, align 4
  %ea1 = insertelement <8 x i32> poison, i32 %ea0, i32 0
  %eav = shufflevector <8 x i32> %ea1, <8 x i32> poison, <8 x i32> zeroinitializer
  %kn0 = mul i64 %k0, %n
  %bj0 = add i64 %kn0, %j
  %ebp = getelementptr i32, ptr %eb, i64 %bj0
  %ebv = load <8 x i32>, ptr %ebp, align 4
  %esum = add <8 x i32> %eav, %ebv
  %emax = call <8 x i32> @llvm.smax.v8i32(<8 x i32> %e, <8 x i32> %esum)
  %k0n = add i64 %k0, 1
  %more0 = icmp ult i64 %k0n, %k
  br i1 %more0, label %find, label %found
found:
  %up = sub <8 x i32> %f, %emax
  %scale = call <8 x double> @power(<8 x i32> %up)
  %cscaled = fmul <8 x double> %cv, %scale
  %ccut = call <8 x double> @llvm.trunc.v8f64(<8 x double> %cscaled)
  br label %add
add:
  %k1 = phi i64 [ 0, %found ], [ %k1n, %add ]
  %total = phi <8 x double> [ %ccut, %found ], [ %more, %add ]
  %ap = getelementptr double, ptr %arow, i64 %k1
  %a0 = load double, ptr %ap, align 8
  %a1 = insertelement <8 x double> poison, double %a0, i32 0
  %av = shufflevector <8 x double> %a1, <8 x double> poison, <8 x i32> zeroinitializer
  %kn1 = mul i64 %k1, %n
  %bj1 = add i64 %kn1, %j
  %bp = getelementptr double, ptr %b, i64 %bj1
  %bv = load <8 x double>, ptr %bp, align 8
  %ascaled = fmul <8 x double> %av, %scale
  %product = fmul <8 x double> %ascaled, %bv
  %cutoff = call <8 x double> @llvm.trunc.v8f64(<8 x double> %product)
  %more = fadd <8 x double> %total, %cutoff
  %k1n = add i64 %k1, 1
  %more1 = icmp ult i64 %k1n, %k
  br i1 %more1, label %add, label %columnend
columnend:
  %down = sub <8 x i32> %emax, %f
  %unscale = call <8 x double> @power(<8 x i32> %down)
  %exact = fmul <8 x double> %more, %unscale
  %bits = bitcast <8 x double> %exact to <8 x i64>
  %kept = and <8 x i64> %bits, %keep
  %normal = bitcast <8 x i64> %kept to <8 x double>
  %size = call <8 x double> @llvm.fabs.v8f64(<8 x double> %exact)
  %tiny = fcmp olt <8 x double> %size, splat (double 0x3810000000000000)
  %grid = fmul <8 x double> %exact, splat (double 0x4940000000000000)
  %steps = call <8 x double> @llvm.trunc.v8f64(<8 x double> %grid)
  %subnormal = fmul <8 x double> %steps, splat (double 0x36A0000000000000)
  %out = select <8 x i1> %tiny, <8 x double> %subnormal, <8 x double> %normal
  store <8 x double> %out, ptr %cp, align 8
  %j1 = add i64 %j, 8
  %morej = icmp ult i64 %j1, %n
  br i1 %morej, label %column, label %rowend
rowend:
  %i1 = add i64 %i, 1
  %morei = icmp ult i64 %i1, %m
  br i1 %morei, label %row, label %done
done:
  ret void
}

define void @tensor_core(ptr %p, i64 %unused) {
  %a = load ptr, ptr %p
  %eap = getelementptr i64, ptr %p, i64 1
  %ea = load ptr, ptr %eap
  %bp = getelementptr i64, ptr %p, i64 2
  %b = load ptr, ptr %bp
  %ebp = getelementptr i64, ptr %p, i64 3
  %eb = load ptr, ptr %ebp
  %cp = getelementptr i64, ptr %p, i64 4
  %c = load ptr, ptr %cp
  %mp = getelementptr i64, ptr %p, i64 5
  %m = load i64, ptr %mp
  %np = getelementptr i64, ptr %p, i64 6
  %n = load i64, ptr %np
  %kp = getelementptr i64, ptr %p, i64 7
  %k = load i64, ptr %kp
  %fp = getelementptr i64, ptr %p, i64 8
  %f64 = load i64, ptr %fp
  %f = trunc i64 %f64 to i32
  %maskp = getelementptr i64, ptr %p, i64 9
  %mask = load i64, ptr %maskp
  call void @rows(ptr %a, ptr %ea, ptr %b, ptr %eb, ptr %c, i64 %m, i64 %n, i64 %k, i32 %f, i64 %mask)
  ret void
}
"""


@cache
def available() -> bool:
    return native.available()


@cache
def _function() -> tuple[Callable[..., None], Any]:
    compiler = native.Compiler(_IR)
    return compiler.function(_NAME, lambda: _IR), compiler  # the compiler owns the code


def sum_terms(a: _F64, a_exponents: _I32, b: _F64, b_exponents: _I32, c: _F64, fraction: int, mantissa: int) -> _F64:
    """a (M, K), b (N, K), c (M, N), N a multiple of 8: the sum of `ops/tensor_core.py`."""
    call, _ = _function()
    out = np.array(c, np.float64, order="C")  # in and out
    m, k = a.shape
    held = (np.ascontiguousarray(a), np.ascontiguousarray(a_exponents), np.ascontiguousarray(b.T), np.ascontiguousarray(b_exponents.T), out)
    block = np.array([*(x.ctypes.data for x in held), m, b.shape[0], k, fraction, -1 << (52 - mantissa)], np.int64)
    call(block.ctypes.data, 0)
    return out
