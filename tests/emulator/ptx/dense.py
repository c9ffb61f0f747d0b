"""The approximate functions of the multifunction unit at 2^18 evenly spaced arguments each: enough to recover their tables.

The unit interpolates quadratically in a table (Oberman and Siu, "A high-performance area-efficient multifunction interpolator", 2005).
"""

from collections.abc import Iterator

from tests.emulator.ptx.case import Case, Tolerance, module
from tests.emulator.ptx.fragments import THREADS, store, thread_index
from tests.emulator.ptx.inputs import Input

FAMILY = "dense"
LOG_POINTS = 18
# Function: first argument's bits and the step in bits. One binade has 2^23 steps; rsqrt and sqrt repeat every two.
SWEEPS = {
    "ex2.approx.ftz.f32": [("[1, 2)", 0x3F800000, 5), ("(-1, -2]", 0xBF800000, 5), ("[64, 128)", 0x42800000, 5)],
    "lg2.approx.ftz.f32": [("[1, 2)", 0x3F800000, 5), ("[0.5, 1)", 0x3F000000, 5)],
    "rcp.approx.ftz.f32": [("[1, 2)", 0x3F800000, 5)],
    "rsqrt.approx.ftz.f32": [("[1, 4)", 0x3F800000, 6)],
    "sqrt.approx.ftz.f32": [("[1, 4)", 0x3F800000, 6)],
    "sin.approx.ftz.f32": [("[1, 2)", 0x3F800000, 5)],
    "cos.approx.ftz.f32": [("[1, 2)", 0x3F800000, 5)],
    "tanh.approx.f32": [("[0.5, 1)", 0x3F000000, 5)],
}


def cases() -> Iterator[Case]:
    for form, sweeps in SWEEPS.items():
        for interval, first, shift in sweeps:
            body = thread_index() + f".reg .b32 %x, %y<1>; shl.b32 %x, %cta, {shift}; add.u32 %x, %x, {first:#x}; {form} %y0, %x; "
            yield Case(
                name=f"{form} dense on {interval}",
                family=FAMILY,
                ptx=module(body + store("y", 1), ["out"]),
                inputs={},
                out=Input("fill", 4 << LOG_POINTS),
                section="Floating Point Instructions",
                grid=(1 << LOG_POINTS) // THREADS,
                threads=THREADS,
                tolerance=Tolerance("f32", 256 if "tanh" in form else 8, 2**-20),
            )
