"""Builds the kernel of an elementwise form: every thread loads its operands, executes one body, stores the results."""

from tests.emulator.ptx.case import Case, Tolerance, module
from tests.emulator.ptx.inputs import Input, width_of

THREADS, CTAS = 128, 8
ELEMENTS = THREADS * CTAS

INDEX = """.reg .b32 %t, %cta;
    .reg .b64 %i, %at;
    mov.u32 %t, %tid.x;
    mov.u32 %cta, %ctaid.x;
    mad.lo.u32 %t, %cta, 128, %t;
    cvt.u64.u32 %i, %t;
"""


def register_width(kind: str) -> int:
    """PTX has no 8-bit registers: bytes live in 16-bit ones."""
    return max(16, width_of(kind))


def elementwise(
    name: str,
    family: str,
    section: str,
    body: str,
    ins: str,
    outs: str,
    registers: str = "",
    tolerance: Tolerance | None = None,
) -> Case:
    """body is PTX over operands %a, %b, %c, %d, %e (kinds `ins`, space-separated) and results %x, %y (kinds `outs`).

    A `pred` operand or result is a predicate register.
    """
    in_kinds, out_kinds = ins.split(), outs.split()
    text = INDEX + "".join(_load(operand, kind) for operand, kind in zip("abcde", in_kinds, strict=False))
    for result, kind in zip("xy", out_kinds, strict=False):
        text += f".reg .pred %{result}; " if kind == "pred" else f".reg .b{register_width(kind)} %{result}; "
    text += registers + "".join(f"{line.strip()} " for line in body.strip().splitlines())
    offset = 0
    for result, kind in zip("xy", out_kinds, strict=False):
        text += _store(result, kind, offset)
        offset += ELEMENTS * width_of(kind) // 8
    return Case(
        name=name,
        family=family,
        ptx=module(text, ["out", *(f"in_{operand}" for operand in "abcde"[: len(in_kinds)])]),
        inputs={f"in_{operand}": Input(kind, ELEMENTS) for operand, kind in zip("abcde", in_kinds, strict=False)},
        out=Input("fill", offset),
        section=section,
        grid=CTAS,
        threads=THREADS,
        tolerance=tolerance,
    )


def _load(operand: str, kind: str) -> str:
    width = width_of(kind)
    at = f"mad.lo.u64 %at, %i, {width // 8}, %in_{operand}; "
    if kind == "pred":
        return (
            f".reg .b32 %{operand}_word; .reg .pred %{operand}; {at}"
            f"ld.global.b32 %{operand}_word, [%at]; setp.ne.b32 %{operand}, %{operand}_word, 0; "
        )
    return f".reg .b{register_width(kind)} %{operand}; {at}    ld.global.b{width} %{operand}, [%at]; "


def _store(result: str, kind: str, offset: int) -> str:
    width = width_of(kind)
    at = f"mad.lo.u64 %at, %i, {width // 8}, %out; "
    if kind == "pred":
        return f".reg .b32 %{result}_word; selp.b32 %{result}_word, 1, 0, %{result}; {at}st.global.b32 [%at+{offset}], %{result}_word; "
    return f"{at}    st.global.b{width} [%at+{offset}], %{result}; "
