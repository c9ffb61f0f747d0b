"""Floating-point arithmetic, minima, approximations, comparison: f64, f32, f16, bf16 and their packed pairs."""

from collections.abc import Iterator
from itertools import product

from tests.emulator.ptx.case import Case, Tolerance
from tests.emulator.ptx.elementwise import elementwise

FAMILY = "alu_float"
ROUNDINGS = ("rn", "rz", "rm", "rp")
ORDERED = ("eq", "ne", "lt", "le", "gt", "ge")
UNORDERED = ("equ", "neu", "ltu", "leu", "gtu", "geu", "num", "nan")
HALVES = ("f16", "f16x2", "bf16", "bf16x2")


def simple(form: str, t: str, operands: int, section: str, tolerance: Tolerance | None = None) -> Case:
    names = ", ".join(f"%{x}" for x in "abc"[:operands])
    kinds = " ".join([t] * operands)
    return elementwise(form, FAMILY, f"Floating Point Instructions: {section}", f"{form} %x, {names};", kinds, t, tolerance=tolerance)


def modifiers(*groups: tuple[str, ...]) -> list[str]:
    """Every way to take one member of each group, joined as PTX modifiers; '' leaves the group out."""
    return ["".join(f".{m}" for m in chosen if m) for chosen in product(*groups)]


def single_and_double() -> Iterator[Case]:
    for mods in modifiers(ROUNDINGS, ("", "ftz"), ("", "sat")):
        for op, operands in (("add", 2), ("sub", 2), ("mul", 2), ("fma", 3)):
            yield simple(f"{op}{mods}.f32", "f32", operands, op)
    yield simple("add.f32", "f32", 2, "add")
    yield simple("mad.rn.f32", "f32", 3, "mad")
    for rounding in ROUNDINGS:
        for op, operands in (("add", 2), ("sub", 2), ("mul", 2), ("fma", 3), ("div", 2), ("rcp", 1), ("sqrt", 1)):
            yield simple(f"{op}.{rounding}.f64", "f64", operands, op)
        for ftz in ("", ".ftz"):
            for op, operands in (("div", 2), ("rcp", 1), ("sqrt", 1)):
                yield simple(f"{op}.{rounding}{ftz}.f32", "f32", operands, op)


def underflows() -> Iterator[Case]:
    """Products just below 2^-126, which rounding makes normal or not."""
    operands = "and.b32 %a, %t, 15; add.u32 %a, %a, 0x3f7ffff0; shr.u32 %b, %t, 4; and.b32 %b, %b, 7; add.u32 %b, %b, 0x00800000; "
    for mods in modifiers(ROUNDINGS, ("", "ftz")):
        body = operands + f"mul{mods}.f32 %x, %a, %b; neg.f32 %c, %b; fma{mods}.f32 %y, %c, %a, 0f00000000;"
        yield elementwise(f"mul{mods}.f32 near 2^-126", FAMILY, "mul, fma", body, "f32 f32 f32", "f32 f32")


def signs_and_extremes() -> Iterator[Case]:
    for t in ("f32", "f64", *HALVES):
        for ftz in ("", ".ftz") if t in ("f32", "f16", "f16x2") else ("",):
            for op in ("abs", "neg"):
                yield simple(f"{op}{ftz}.{t}", t, 1, op)
    for op in ("min", "max"):
        for mods in modifiers(("", "ftz"), ("", "NaN"), ("", "xorsign.abs")):
            yield simple(f"{op}{mods}.f32", "f32", 2, op)
            yield simple(f"{op}{mods}.f16", "f16", 2, op)
            yield simple(f"{op}{mods}.f16x2", "f16x2", 2, op)
        for mods in modifiers(("", "NaN"), ("", "xorsign.abs")):
            yield simple(f"{op}{mods}.bf16", "bf16", 2, op)
            yield simple(f"{op}{mods}.bf16x2", "bf16x2", 2, op)
        yield simple(f"{op}.f64", "f64", 2, op)
    for t in ("f32", "f64"):
        yield simple(f"copysign.{t}", t, 2, "copysign")
        for test in ("finite", "infinite", "number", "notanumber", "normal", "subnormal"):
            form = f"testp.{test}.{t}"
            yield elementwise(form, FAMILY, "testp", f"{form} %x, %a;", t, "pred")


def halves() -> Iterator[Case]:
    for t in ("f16", "f16x2"):
        for mods in modifiers(("", "rn"), ("", "ftz"), ("", "sat")):
            for op in ("add", "sub", "mul"):
                yield simple(f"{op}{mods}.{t}", t, 2, op)
        for mods in modifiers(("rn",), ("", "ftz"), ("", "sat", "relu")):
            yield simple(f"fma{mods}.{t}", t, 3, "fma")
    for t in ("bf16", "bf16x2"):
        for op in ("add", "sub", "mul"):
            yield simple(f"{op}.{t}", t, 2, op)
            yield simple(f"{op}.rn.{t}", t, 2, op)
        for relu in ("", ".relu"):
            yield simple(f"fma.rn{relu}.{t}", t, 3, "fma")
    for t in HALVES:
        for relu in ("", ".relu"):
            yield simple(f"fma.rn.oob{relu}.{t}", t, 3, "fma")


def approximations() -> Iterator[Case]:
    """The manual bounds these errors and leaves the bits open: compared with a tolerance."""
    for ftz in ("", ".ftz"):
        yield simple(f"div.approx{ftz}.f32", "f32", 2, "div", Tolerance("f32", 2))
        yield simple(f"div.full{ftz}.f32", "f32", 2, "div", Tolerance("f32", 2))
        for op, ulps in (("rcp", 1), ("sqrt", 2), ("rsqrt", 2), ("ex2", 2)):
            yield simple(f"{op}.approx{ftz}.f32", "f32", 1, op, Tolerance("f32", ulps))
        yield simple(f"lg2.approx{ftz}.f32", "f32", 1, "lg2", Tolerance("f32", 2, 2**-22))
        for op in ("sin", "cos"):
            yield simple(f"{op}.approx{ftz}.f32", "f32", 1, op, Tolerance("f32", 2, 2**-20.5))
    yield simple("tanh.approx.f32", "f32", 1, "tanh", Tolerance("f32", 2**13))
    yield simple("rcp.approx.ftz.f64", "f64", 1, "rcp", Tolerance("f64", 2**33))
    yield simple("rsqrt.approx.f64", "f64", 1, "rsqrt", Tolerance("f64", 2**33))
    yield simple("rsqrt.approx.ftz.f64", "f64", 1, "rsqrt", Tolerance("f64", 2**33))
    for t in ("f16", "f16x2"):
        yield simple(f"ex2.approx.{t}", t, 1, "ex2", Tolerance("f16", 1))
        yield simple(f"tanh.approx.{t}", t, 1, "tanh", Tolerance("f16", 2))
    for t in ("bf16", "bf16x2"):
        yield simple(f"ex2.approx.ftz.{t}", t, 1, "ex2", Tolerance("bf16", 1))
        yield simple(f"tanh.approx.{t}", t, 1, "tanh", Tolerance("bf16", 1))
    sweep = "shl.b32 %a, %t, 17; add.u32 %a, %a, 0x3c000000; "  # evenly spaced bit patterns from 2^-7 up to 2^24
    for op, ulps in (("ex2", 2), ("lg2", 2), ("rcp", 1), ("rsqrt", 2), ("sqrt", 2), ("sin", 8), ("cos", 8), ("tanh", 2**13)):
        body = f"{sweep}{op}.approx.f32 %x, %a;"
        yield elementwise(f"{op}.approx.f32 sweep", FAMILY, op, body, "f32", "f32", tolerance=Tolerance("f32", ulps, 2**-20.5))


def comparison() -> Iterator[Case]:
    for t in ("f32", "f64", "f16", "bf16"):
        for compare in (*ORDERED, *UNORDERED):
            for ftz in ("", ".ftz") if t in ("f32", "f16") else ("",):
                form = f"setp.{compare}{ftz}.{t}"
                body = f"{form} %x, %a, %b; {form} %y, %a, %a;"
                yield elementwise(form, FAMILY, "setp", body, f"{t} {t}", "pred pred")
    for t in ("f16x2", "bf16x2"):
        for compare in (*ORDERED, *UNORDERED):
            form = f"setp.{compare}.{t}"
            yield elementwise(form, FAMILY, "Half Precision Comparison: setp", f"{form} %x|%y, %a, %b;", f"{t} {t}", "pred pred")
    for boolean in ("and", "or", "xor"):
        form = f"setp.gtu.{boolean}.f32"
        yield elementwise(form, FAMILY, "setp", f"{form} %x|%y, %a, %b, %c;", "f32 f32 pred", "pred pred")
    for out, kind in (("u32", "u32"), ("s32", "u32"), ("f32", "u32")):
        for t in ("f32", "f64"):
            form = f"set.leu.{out}.{t}"
            yield elementwise(form, FAMILY, "set", f"{form} %x, %a, %b;", f"{t} {t}", kind)
    for t in ("f16", "bf16"):
        for out in (t, "u16", "s16", "u32", "s32"):
            form = f"set.lt.{out}.{t}"
            kind = out.replace("s", "u") if out != t else t
            yield elementwise(form, FAMILY, "Half Precision Comparison: set", f"{form} %x, %a, %b;", f"{t} {t}", kind)
        for out in (f"{t}x2", "u32"):
            form = f"set.geu.{out}.{t}x2"
            yield elementwise(form, FAMILY, "Half Precision Comparison: set", f"{form} %x, %a, %b;", f"{t}x2 {t}x2", "u32")


def cases() -> Iterator[Case]:
    for group in (single_and_double, underflows, signs_and_extremes, halves, approximations, comparison):
        yield from group()
