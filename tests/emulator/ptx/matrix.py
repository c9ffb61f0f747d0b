"""Warp-wide matrices: mma.sync of every shape and type, ldmatrix, stmatrix, movmatrix.

Fragments are read from global memory as they lie in the registers, so the case checks the fragment layouts too.
"""

from collections.abc import Iterator

from tests.emulator.ptx.case import Case, module
from tests.emulator.ptx.fragments import THREADS, braces, elements, load, store, thread_index
from tests.emulator.ptx.inputs import Input

FAMILY = "matrix"
CTAS = 4
MODERATE = {"f16": "f16n", "bf16": "bf16n", "tf32": "f32n", "e4m3": "e4m3n", "e5m2": "e5m2n", "f64": "f64n", "f32": "f32n"}
WIDE = {t: kind[:-1] + "w" for t, kind in MODERATE.items()}
SPECIAL = {"f16": "f16", "bf16": "bf16", "tf32": "f32", "e4m3": "e4m3", "e5m2": "e5m2", "f64": "f64", "f32": "f32"}
INTEGER = {"s8": "u8", "u8": "u8", "s4": "b4", "u4": "b4", "b1": "b1", "s32": "s32"}


def mma(
    form: str,
    types: tuple[str, str, str],
    registers: tuple[int, int, int],
    name: str = "",
    kinds: dict[str, str] = MODERATE,
    bits: int = 32,
) -> Case:
    """types and registers are those of A, B and of C = D."""
    (a, b, c), (na, nb, nc) = types, registers
    kind = {t: (kinds | INTEGER)[t] for t in types}
    body = (
        thread_index()
        + load("a", na, "in_a", bits)
        + load("b", nb, "in_b", bits)
        + load("c", nc, "in_c", bits)
        + f".reg .b{bits} %d<{nc}>; "
        + f"{form} {braces('d', nc)}, {braces('a', na)}, {braces('b', nb)}, {braces('c', nc)}; "
        + store("d", nc, bits)
    )
    threads = THREADS * CTAS
    return Case(
        name=f"{form}{name}",
        family=FAMILY,
        ptx=module(body, ["out", "in_a", "in_b", "in_c"]),
        inputs={
            "in_a": Input(kind[a], elements(kind[a], threads * na, bits)),
            "in_b": Input(kind[b], elements(kind[b], threads * nb, bits)),
            "in_c": Input(kind[c], elements(kind[c], threads * nc, bits)),
        },
        out=Input("fill", threads * nc * bits // 8),
        section="Warp Level Matrix Instructions: mma",
        grid=CTAS,
        threads=THREADS,
    )


def float_forms() -> Iterator[tuple[str, tuple[str, str, str], tuple[int, int, int]]]:
    sync = "mma.sync.aligned"
    for t, accumulators in (("f16", ("f32", "f16")), ("bf16", ("f32",))):
        for shape, na, nb in (("m16n8k8", 2, 1), ("m16n8k16", 4, 2)):
            for acc in accumulators:
                yield f"{sync}.{shape}.row.col.{acc}.{t}.{t}.{acc}", (t, t, acc), (na, nb, 4 if acc == "f32" else 2)
    for shape, na, nb in (("m16n8k4", 2, 1), ("m16n8k8", 4, 2)):
        yield f"{sync}.{shape}.row.col.f32.tf32.tf32.f32", ("tf32", "tf32", "f32"), (na, nb, 4)
    for a in ("e4m3", "e5m2"):
        for b in ("e4m3", "e5m2"):
            for shape, na, nb in (("m16n8k16", 2, 1), ("m16n8k32", 4, 2)):
                for acc in ("f32", "f16"):
                    yield f"{sync}.{shape}.row.col.{acc}.{a}.{b}.{acc}", (a, b, acc), (na, nb, 4 if acc == "f32" else 2)


def integer_forms() -> Iterator[tuple[str, tuple[str, str, str], tuple[int, int, int]]]:
    sync = "mma.sync.aligned"
    for bits, shapes in ((8, ("m8n8k16", "m16n8k16", "m16n8k32")), (4, ("m8n8k32", "m16n8k32", "m16n8k64"))):
        for shape, registers in zip(shapes, ((1, 1, 2), (2, 1, 4), (4, 2, 4)), strict=True):
            for a in (f"s{bits}", f"u{bits}"):
                for b in (f"s{bits}", f"u{bits}"):
                    for sat in ("", ".satfinite"):
                        yield f"{sync}.{shape}.row.col{sat}.s32.{a}.{b}.s32", (a, b, "s32"), registers
    for shape, registers in (("m8n8k128", (1, 1, 2)), ("m16n8k128", (2, 1, 4)), ("m16n8k256", (4, 2, 4))):
        for op in ("xor", "and"):
            yield f"{sync}.{shape}.row.col.s32.b1.b1.s32.{op}.popc", ("b1", "b1", "s32"), registers


def mma_cases() -> Iterator[Case]:
    for form, types, registers in float_forms():
        yield mma(form, types, registers)
        yield mma(form, types, registers, " special values", SPECIAL)
        yield mma(form, types, registers, " wide", WIDE)
    for form, types, registers in integer_forms():
        yield mma(form, types, registers)
    for shape, registers in (("m8n8k4", (1, 1, 2)), ("m16n8k4", (2, 1, 4)), ("m16n8k8", (4, 2, 4)), ("m16n8k16", (8, 4, 4))):
        form = f"mma.sync.aligned.{shape}.row.col.f64.f64.f64.f64"
        yield mma(form, ("f64", "f64", "f64"), registers, bits=64)


def shared_matrices() -> Iterator[Case]:
    """128 threads fill 2 KB of shared memory per warp, then move 8x8 matrices whose row addresses are permuted by an input."""
    head = (
        thread_index()
        + load("a", 16, "in_a")
        + load("row", 1, "in_row")
        + ".shared .align 128 .b8 tile[8192]; .reg .b32 %base, %mine, %address; mov.u32 %base, tile; "
        + "mad.lo.u32 %mine, %t, 64, %base; "
        + "and.b32 %address, %row0, 127; mad.lo.u32 %address, %address, 16, %base; "
        + "and.b32 %mine, %t, 96; mad.lo.u32 %address, %mine, 64, %address; mad.lo.u32 %mine, %t, 64, %base; "
    )
    fill = "".join(f"st.shared.b32 [%mine+{4 * i}], %a{i}; " for i in range(16)) + "bar.sync 0; "
    for count in (1, 2, 4):
        for transposed in ("", ".trans"):
            form = f"ldmatrix.sync.aligned.m8n8.x{count}{transposed}.shared.b16"
            body = head + fill + f".reg .b32 %d<{count}>; {form} {braces('d', count)}, [%address]; " + store("d", count)
            yield shared_case(form, body, THREADS * 4 * count)
    for count in (1, 2, 4):
        for transposed in ("", ".trans"):
            form = f"stmatrix.sync.aligned.m8n8.x{count}{transposed}.shared.b16"
            # Row addresses must differ: lane l writes row 3 l + 1 mod 32 of its warp's 2 KB.
            place = (
                "and.b32 %mine, %t, 31; mad.lo.u32 %mine, %mine, 3, 1; and.b32 %mine, %mine, 31; shl.b32 %mine, %mine, 4; "
                "and.b32 %address, %t, 96; mad.lo.u32 %address, %address, 64, %mine; add.u32 %address, %address, %base; "
            )
            read = "bar.sync 0; mad.lo.u32 %mine, %t, 64, %base; .reg .b32 %d<16>; "
            read += "".join(f"ld.shared.b32 %d{i}, [%mine+{4 * i}]; " for i in range(16))
            body = head + fill + place + f"{form} [%address], {braces('a', count)}; " + read + store("d", 16)
            yield shared_case(form, body, THREADS * 64)
    body = thread_index() + load("a", 1, "in_a") + ".reg .b32 %d<1>; movmatrix.sync.aligned.m8n8.trans.b16 %d0, %a0; " + store("d", 1)
    yield Case(
        name="movmatrix.sync.aligned.m8n8.trans.b16",
        family=FAMILY,
        ptx=module(body, ["out", "in_a"]),
        inputs={"in_a": Input("u32", THREADS)},
        out=Input("fill", THREADS * 4),
        section="Warp Level Matrix Instructions: movmatrix",
    )


def shared_case(form: str, body: str, out_bytes: int) -> Case:
    return Case(
        name=form,
        family=FAMILY,
        ptx=module(body, ["out", "in_a", "in_row"]),
        inputs={"in_a": Input("u32", THREADS * 16), "in_row": Input("u32", THREADS)},
        out=Input("fill", out_bytes),
        section=f"Warp Level Matrix Instructions: {form.split('.', maxsplit=1)[0]}",
    )


def cases() -> Iterator[Case]:
    yield from mma_cases()
    yield from shared_matrices()
