"""Conversions between every pair of types, with every rounding, saturation and packing form that sm_90 has."""

from collections.abc import Iterator

from tests.emulator.ptx.case import Case
from tests.emulator.ptx.elementwise import elementwise

FAMILY = "cvt"
SECTION = "Data Movement and Conversion Instructions: cvt"
INTEGERS = ("u8", "s8", "u16", "s16", "u32", "s32", "u64", "s64")
FLOATS = ("f16", "bf16", "f32", "f64")
WIDTH = {"f16": 16, "bf16": 16, "f32": 32, "f64": 64, "tf32": 32}


def convert(form: str, kind: str, out: str) -> Case:
    return elementwise(form, FAMILY, SECTION, f"{form} %x, %a;", kind, out)


def unsigned(t: str) -> str:
    """The kind to store a result of integer type t with: a byte result is stored whole, as its 16-bit register."""
    return f"u{max(16, int(t[1:]))}"


def contains(outer: str, inner: str) -> bool:
    """Whether integer type `outer` has every value of `inner`."""
    bits_outer, bits_inner = int(outer[1:]), int(inner[1:])
    if outer[0] == inner[0]:
        return bits_outer >= bits_inner
    return outer[0] == "s" and bits_outer > bits_inner


def has_form(a: str, b: str) -> bool:
    """bf16 does not convert from or to 8-bit integers."""
    return {a, b}.isdisjoint({"u8", "s8"}) or "bf16" not in (a, b)


def integer_to_integer() -> Iterator[Case]:
    for to in INTEGERS:
        for source in INTEGERS:
            if to == source:
                continue
            yield convert(f"cvt.{to}.{source}", source, unsigned(to))
            if not contains(to, source):  # .sat is illegal where nothing can saturate
                yield convert(f"cvt.sat.{to}.{source}", source, unsigned(to))


def integer_to_float() -> Iterator[Case]:
    for to in FLOATS:
        for source in (t for t in INTEGERS if has_form(t, to)):
            for rounding in ("rn", "rz", "rm", "rp"):
                yield convert(f"cvt.{rounding}.{to}.{source}", source, to)
        if to != "bf16":
            yield convert(f"cvt.rn.sat.{to}.s32", "s32", to)


def float_to_integer() -> Iterator[Case]:
    for source in FLOATS:
        for to in (t for t in INTEGERS if has_form(t, source)):
            for rounding in ("rni", "rzi", "rmi", "rpi"):
                yield convert(f"cvt.{rounding}.{to}.{source}", source, unsigned(to))
            if source != "bf16":
                yield convert(f"cvt.rni.sat.{to}.{source}", source, unsigned(to))
            if source == "f32":
                yield convert(f"cvt.rzi.ftz.{to}.{source}", source, unsigned(to))


def float_to_float() -> Iterator[Case]:
    for rounding in ("rn", "rz", "rm", "rp"):
        for mods in ("", ".ftz", ".sat", ".ftz.sat"):
            yield convert(f"cvt.{rounding}{mods}.f32.f64", "f64", "f32")
        for to in ("f16", "bf16"):
            if rounding in ("rn", "rz"):
                yield convert(f"cvt.{rounding}.{to}.f32", "f32", to)
        yield convert(f"cvt.{rounding}.f16.f64", "f64", "f16")
        yield convert(f"cvt.{rounding}.bf16.f64", "f64", "bf16")
    for mods in ("ftz.f64.f32", "f64.f32", "sat.f64.f32", "f64.f16", "f64.bf16", "f32.f16", "ftz.f32.f16", "sat.f32.f16", "f32.bf16"):
        to, source = mods.split(".")[-2:]
        yield convert(f"cvt.{mods}", source, to)
    for t in FLOATS:
        for rounding in ("rni", "rzi", "rmi", "rpi"):
            yield convert(f"cvt.{rounding}.{t}.{t}", t, t)
    for form in ("cvt.sat.f32.f32", "cvt.ftz.f32.f32", "cvt.ftz.sat.f32.f32", "cvt.rni.sat.f32.f32", "cvt.sat.f64.f64", "cvt.sat.f16.f16"):
        t = form.split(".")[-1]
        yield convert(form, t, t)
    for form in ("cvt.rn.ftz.f16.f32", "cvt.rn.sat.f16.f32", "cvt.rn.ftz.sat.f16.f32", "cvt.rn.relu.f16.f32", "cvt.rz.relu.f16.f32"):
        yield convert(form, "f32", "f16")
    for form in ("cvt.rn.relu.bf16.f32", "cvt.rz.relu.bf16.f32", "cvt.rn.bf16.f16", "cvt.rn.f16.bf16", "cvt.rz.bf16.f16"):
        to, source = form.split(".")[-2:]
        yield convert(form, source, to)
    for form in ("cvt.rna.tf32.f32", "cvt.rn.tf32.f32", "cvt.rz.tf32.f32", "cvt.rn.relu.tf32.f32", "cvt.rz.relu.tf32.f32"):
        yield convert(form, "f32", "f32")
    yield convert("cvt.rna.satfinite.tf32.f32", "f32", "f32")


def packed() -> Iterator[Case]:
    for to in ("f16x2", "bf16x2"):
        for rounding in ("rn", "rz"):
            for relu in ("", ".relu"):
                for sat in ("", ".satfinite"):
                    form = f"cvt.{rounding}{relu}{sat}.{to}.f32"
                    yield elementwise(form, FAMILY, SECTION, f"{form} %x, %a, %b;", "f32 f32", "u32")
    for to in ("e4m3x2", "e5m2x2"):
        for relu in ("", ".relu"):
            form = f"cvt.rn.satfinite{relu}.{to}.f32"
            yield elementwise(form, FAMILY, SECTION, f"{form} %x, %a, %b;", "f32 f32", "u16")
            yield convert(f"cvt.rn.satfinite{relu}.{to}.f16x2", "f16x2", "u16")
            yield convert(f"cvt.rn{relu}.f16x2.{to}", "e4m3x2", "u32")
    for to in ("s16", "u16"):
        form = f"cvt.pack.sat.{to}.s32"
        yield elementwise(form, FAMILY, "cvt.pack", f"{form} %x, %a, %b;", "s32 s32", "u32")
    for to in ("s8", "u8"):
        form = f"cvt.pack.sat.{to}.s32.b32"
        yield elementwise(form, FAMILY, "cvt.pack", f"{form} %x, %a, %b, %c;", "s32 s32 u32", "u32")
    # Magnitudes near the fp8 limits (448, 57344) and subnormals are rare among random floats: scale moderate values over the range.
    # %b's 5 low bits become the exponent of a factor 2^-11 .. 2^20.
    scale = "and.b32 %b, %b, 31; shl.b32 %b, %b, 23; add.u32 %b, %b, 0x3a000000; mul.rn.f32 %a, %a, %b; "
    for to in ("e4m3x2", "e5m2x2"):
        form = f"cvt.rn.satfinite.{to}.f32"
        yield elementwise(f"{form} range", FAMILY, SECTION, f"{scale}{form} %x, %a, %a;", "f32n u32", "u16")


def moves() -> Iterator[Case]:
    section = "Data Movement and Conversion Instructions: mov"
    yield elementwise("mov.b32 pack", FAMILY, section, "mov.b32 %x, {%a, %b};", "u16 u16", "u32")
    yield elementwise("mov.b64 pack", FAMILY, section, "mov.b64 %x, {%a, %b};", "u32 u32", "u64")
    yield elementwise("mov.b64 pack 4", FAMILY, section, "mov.b64 %x, {%a, %b, %c, %d};", "u16 u16 u16 u16", "u64")
    yield elementwise("mov.b32 unpack", FAMILY, section, "mov.b32 {%x, %y}, %a;", "u32", "u16 u16")
    yield elementwise("mov.b64 unpack", FAMILY, section, "mov.b64 {%x, %y}, %a;", "u64", "u32 u32")
    yield elementwise("mov.b64 unpack _", FAMILY, section, "mov.b64 {_, %x}, %a;", "u64", "u32")
    yield elementwise("mov.b128", FAMILY, section, ".reg .b128 %q; mov.b128 %q, {%a, %b}; mov.b128 {%y, %x}, %q;", "u64 u64", "u64 u64")
    yield elementwise("mov immediate", FAMILY, section, "mov.f64 %x, 0d400921FB54442D18; mov.f32 %y, 0f3FC00000;", "u32", "u64 u32")
    yield elementwise("mov decimal", FAMILY, section, "mov.f32 %y, 1.5; mov.b64 %x, -3;", "u32", "u64 u32")
    yield elementwise("mov octal and binary", FAMILY, section, "mov.u32 %x, 0755; mov.u32 %y, 0b1011;", "u32", "u32 u32")
    yield elementwise("mov constant expression", FAMILY, section, "mov.u32 %x, (1 << 5) | 3; mov.s32 %y, -(7 - 2) * 3;", "u32", "u32 u32")
    for special in ("tid.x", "ntid.x", "ctaid.x", "nctaid.x", "laneid", "lanemask_eq", "lanemask_le", "lanemask_lt", "lanemask_ge"):
        yield elementwise(f"mov %{special}", FAMILY, "Special Registers", f"mov.u32 %x, %{special};", "u32", "u32")
    for special in ("lanemask_gt", "tid.y", "ntid.y", "ctaid.z", "nctaid.y", "dynamic_smem_size", "cluster_ctarank", "cluster_nctarank"):
        yield elementwise(f"mov %{special}", FAMILY, "Special Registers", f"mov.u32 %x, %{special};", "u32", "u32")
    for special in ("clusterid.x", "nclusterid.x", "cluster_ctaid.x", "cluster_nctaid.x"):
        yield elementwise(f"mov %{special}", FAMILY, "Special Registers", f"mov.u32 %x, %{special};", "u32", "u32")
    body = ".reg .pred %p; mov.pred %p, %is_explicit_cluster; selp.b32 %x, 1, 0, %p;"
    yield elementwise("mov %is_explicit_cluster", FAMILY, "Special Registers", body, "u32", "u32")


def cases() -> Iterator[Case]:
    for group in (integer_to_integer, integer_to_float, float_to_integer, float_to_float, packed, moves):
        yield from group()
