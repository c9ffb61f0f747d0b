"""Cases that the emulator does not execute, or judges otherwise than the case expects, each with its reason."""

import re

GAPS: dict[str, str] = {
    r"dp2a\..*|fns\.b32": "no semantic yet",
    r"lop3\.(or|and)\.b32": "the form of lop3 with a predicate result",
    r"fma\.r[zmp]\.f64|(rcp|sqrt)\.r[zmp](\.ftz)?\.f(32|64)": "directed rounding of these needs more than fp64 arithmetic",
    r"set\.geu\..*x2": "set of packed halves",
    r"cvt\.r.\.b?f16\.[us]64": "64-bit integers to 16-bit floats (double rounding)",
    r"cvt\.r[zmp]\.(f64\.[us]\d+|f32\.[us]64)|cvt\.r[mp]\.b?f16\.f64": "directed rounding of this conversion",
    r"mov constant expression": "constant expressions with operators",
    r"mov %is_explicit_cluster": "a predicate special register",
    r"mma\.sync\.aligned\.m8n8k16\..*|mma\.sync.*\.[su]4\.[su]4\..*|mma\.sync.*\.b1\..*": "m8n8, 4-bit and one-bit mma.sync",
    r"mma\.sync.*\.f64\..*": "fp64 mma.sync",
    r"wgmma.*\.b1\.b1\..*": "one-bit wgmma",
    r"cp\..* steps .*|cp\..* interleave .*|tensormap\.replace\.tile\.element_stride": "TMA traversal strides and interleaved layouts",
    r"mbarrier\.try_wait phases": "try_wait may give up and return false; the emulator calls the wait a deadlock",
    r"barrier\.sync from divergent code": "halves of a warp arriving at a barrier one after the other",
    r"call (functions|predicated)": "aggregate parameters and predicated calls",
    r"atom\.global\.(exch|cas)\.b128": "128-bit atomics",
}


def gap(name: str) -> str | None:
    """Why the case is left out, or None."""
    return next((reason for pattern, reason in GAPS.items() if re.fullmatch(pattern, name)), None)
