"""Integer arithmetic, logic, shifts, bit fields, comparison and selection."""

from collections.abc import Iterator

from tests.emulator.ptx.case import Case
from tests.emulator.ptx.elementwise import elementwise

FAMILY = "alu_integer"
S16, S32, S64 = ("s16", "u16"), ("s32", "u32"), ("s64", "u64")
ALL = S16 + S32 + S64
WIDE = {"s16": "s32", "u16": "u32", "s32": "s64", "u32": "u64"}
COMPARE_SIGNED = ("eq", "ne", "lt", "le", "gt", "ge")
COMPARE_UNSIGNED = (*COMPARE_SIGNED, "lo", "ls", "hi", "hs")


def simple(form: str, ins: str, out: str, section: str) -> Case:
    """An instruction whose operands are its inputs in order."""
    operands = ", ".join(f"%{x}" for x in "abcde"[: len(ins.split())])
    return elementwise(form, FAMILY, f"Integer Arithmetic Instructions: {section}", f"{form} %x, {operands};", ins, out)


def arithmetic() -> Iterator[Case]:
    for t in ALL:
        for op in ("add", "sub", "mul.lo", "mul.hi", "min", "max"):
            yield simple(f"{op}.{t}", f"{t} {t}", t, op.split(".")[0])
        for op in ("mad.lo", "mad.hi", "sad"):
            yield simple(f"{op}.{t}", f"{t} {t} {t}", t, op.split(".")[0])
        for op in ("div", "rem"):
            yield simple(f"{op}.{t}", f"{t} divisor.{t}", t, op)


def packed_and_wide() -> Iterator[Case]:
    for t in ("s16x2", "u16x2"):
        for op in ("add", "min", "max"):
            yield simple(f"{op}.{t}", f"{t} {t}", t, op)
    for t in ("s16x2", "s32"):
        yield simple(f"min.relu.{t}", f"{t} {t}", t, "min")
        yield simple(f"max.relu.{t}", f"{t} {t}", t, "max")
    for t in ("s16", "s32", "s64"):
        yield simple(f"abs.{t}", t, t, "abs")
        yield simple(f"neg.{t}", t, t, "neg")
    for t, wide in WIDE.items():
        yield simple(f"mul.wide.{t}", f"{t} {t}", wide, "mul")
        yield simple(f"mad.wide.{t}", f"{t} {t} {wide}", wide, "mad")
    for form in ("add.sat.s32", "sub.sat.s32"):
        yield simple(form, "s32 s32", "s32", form[:3])
    yield simple("mad.hi.sat.s32", "s32 s32 s32", "s32", "mad")
    yield simple("mad24.hi.sat.s32", "s32 s32 s32", "s32", "mad24")
    for t in S32:
        for half in ("lo", "hi"):
            yield simple(f"mul24.{half}.{t}", f"{t} {t}", t, "mul24")
            yield simple(f"mad24.{half}.{t}", f"{t} {t} {t}", t, "mad24")
    for a in S32:
        for b in S32:
            yield simple(f"dp4a.{a}.{b}", "u32 u32 u32", "u32", "dp4a")
            for half in ("lo", "hi"):
                yield simple(f"dp2a.{half}.{a}.{b}", "u32 u32 u32", "u32", "dp2a")


def bits() -> Iterator[Case]:
    for width in (32, 64):
        yield simple(f"popc.b{width}", f"u{width}", "u32", "popc")
        yield simple(f"clz.b{width}", f"u{width}", "u32", "clz")
        yield simple(f"brev.b{width}", f"u{width}", f"u{width}", "brev")
        yield simple(f"bfi.b{width}", f"u{width} u{width} u32 u32", f"u{width}", "bfi")
        for sign in "su":
            t = f"{sign}{width}"
            yield simple(f"bfe.{t}", f"{t} u32 u32", t, "bfe")
            yield simple(f"bfind.{t}", t, "u32", "bfind")
            yield simple(f"bfind.shiftamt.{t}", t, "u32", "bfind")
        small = f"and.b32 %b, %b, {2 * width - 1}; and.b32 %c, %c, 63; "  # most random fields would be clipped away
        for sign in "su":
            form = f"bfe.{sign}{width}"
            yield elementwise(f"{form} small", FAMILY, "bfe", f"{small}{form} %x, %a, %b, %c;", f"u{width} u32 u32", f"u{width}")
        text = small.replace("%c", "%d").replace("%b", "%c")
        yield elementwise(
            f"bfi.b{width} small", FAMILY, "bfi", f"{text}bfi.b{width} %x, %a, %b, %c, %d;", f"u{width} u{width} u32 u32", f"u{width}"
        )
    for mode in ("clamp", "wrap"):
        yield simple(f"bmsk.{mode}.b32", "lane u32", "u32", "bmsk")
        for t in S32:
            yield simple(f"szext.{mode}.{t}", f"{t} u32", t, "szext")
    yield elementwise("fns.b32", FAMILY, "fns", "and.b32 %b, %b, 31; shr.s32 %c, %c, 28; fns.b32 %x, %a, %b, %c;", "u32 u32 s32", "u32")


def logic() -> Iterator[Case]:
    for width in (16, 32, 64):
        t = f"u{width}"
        for op in ("and", "or", "xor"):
            yield simple(f"{op}.b{width}", f"{t} {t}", t, op)
        yield simple(f"not.b{width}", t, t, "not")
        yield simple(f"cnot.b{width}", t, t, "cnot")
        yield simple(f"shl.b{width}", f"{t} u32", t, "shl")
        yield elementwise(f"shl.b{width} small", FAMILY, "shl", f"and.b32 %b, %b, 127; shl.b{width} %x, %a, %b;", f"{t} u32", t)
        for shift in (f"b{width}", f"u{width}", f"s{width}"):
            yield elementwise(f"shr.{shift} small", FAMILY, "shr", f"and.b32 %b, %b, 127; shr.{shift} %x, %a, %b;", f"{t} u32", t)
            yield simple(f"shr.{shift}", f"{t} u32", t, "shr")
    for op in ("and", "or", "xor"):
        yield simple(f"{op}.pred", "pred pred", "pred", op)
    yield simple("not.pred", "pred", "pred", "not")
    for side in ("l", "r"):
        for mode in ("clamp", "wrap"):
            form = f"shf.{side}.{mode}.b32"
            yield elementwise(form, FAMILY, "shf", f"and.b32 %c, %c, 63; {form} %x, %a, %b, %c;", "u32 u32 u32", "u32")
    for table in (0x00, 0xFF, 0x80, 0x96, 0xE8, 0xCA, 0x1B, 0x35, 0x7E, 0xD2):
        yield elementwise(f"lop3.b32 {table:#04x}", FAMILY, "lop3", f"lop3.b32 %x, %a, %b, %c, {table};", "u32 u32 u32", "u32")
    for boolean in ("or", "and"):
        yield elementwise(
            f"lop3.{boolean}.b32", FAMILY, "lop3", f"lop3.{boolean}.b32 %x|%y, %a, %b, %c, 0x80, %d;", "u32 u32 u32 pred", "u32 pred"
        )
    yield simple("prmt.b32", "u32 u32 u32", "u32", "prmt")
    for mode in ("f4e", "b4e", "rc8", "ecl", "ecr", "rc16"):
        yield simple(f"prmt.b32.{mode}", "u32 u32 u32", "u32", "prmt")


def carries() -> Iterator[Case]:
    for t in (*S32, *S64):
        for first, second in (("add", "addc"), ("sub", "subc")):
            body = f"{first}.cc.{t} %x, %a, %b; {second}.{t} %y, %c, %d;"
            yield elementwise(f"{first}.cc.{t}", FAMILY, "Extended-Precision Integer Arithmetic", body, f"{t} {t} {t} {t}", f"{t} {t}")
        chain = f"add.cc.{t} %x, %a, %b; addc.cc.{t} %x, %b, %c; addc.{t} %y, %c, %d;"
        yield elementwise(f"addc.cc.{t}", FAMILY, "addc", chain, f"{t} {t} {t} {t}", f"{t} {t}")
        chain = f"mad.lo.cc.{t} %x, %a, %b, %c; madc.hi.{t} %y, %a, %b, %d;"
        yield elementwise(f"mad.lo.cc.{t}", FAMILY, "mad.cc, madc", chain, f"{t} {t} {t} {t}", f"{t} {t}")
        chain = f"mad.hi.cc.{t} %x, %a, %b, %c; madc.lo.cc.{t} %x, %b, %c, %x; addc.{t} %y, %a, %d;"
        yield elementwise(f"mad.hi.cc.{t}", FAMILY, "mad.cc, madc", chain, f"{t} {t} {t} {t}", f"{t} {t}")


def comparison() -> Iterator[Case]:
    types: list[tuple[str, tuple[str, ...]]] = [(t, COMPARE_SIGNED if t[0] == "s" else COMPARE_UNSIGNED) for t in ALL]
    types += [(f"b{width}", ("eq", "ne")) for width in (16, 32, 64)]
    for t, compares in types:
        kind = t.replace("b", "u")
        for compare in compares:
            # Random operands are hardly ever equal: the second result compares b with itself xor one bit in four.
            body = f"setp.{compare}.{t} %x, %a, %b; selp.b{kind[1:]} %b, %a, %b, %c; setp.{compare}.{t} %y, %a, %b;"
            yield elementwise(f"setp.{compare}.{t}", FAMILY, "setp", body, f"{kind} {kind} pred", "pred pred")
    for boolean in ("and", "or", "xor"):
        body = f"setp.lt.{boolean}.s32 %x|%y, %a, %b, %c;"
        yield elementwise(f"setp.lt.{boolean}.s32", FAMILY, "setp", body, "s32 s32 pred", "pred pred")
        body = f"setp.ge.{boolean}.u64 %x|%y, %a, %b, !%c;"
        yield elementwise(f"setp.ge.{boolean}.u64 negated", FAMILY, "setp", body, "u64 u64 pred", "pred pred")
    for out in ("u32", "s32", "f32"):
        for t in (*S32, *S64, "u16", "s16"):
            yield simple(f"set.lt.{out}.{t}", f"{t} {t}", "u32", "set")
        yield elementwise(f"set.ge.and.{out}.s32", FAMILY, "set", f"set.ge.and.{out}.s32 %x, %a, %b, %c;", "s32 s32 pred", "u32")
    for width in (16, 32, 64):
        yield simple(f"selp.b{width}", f"u{width} u{width} pred", f"u{width}", "selp")
        yield simple(f"slct.b{width}.s32", f"u{width} u{width} s32", f"u{width}", "slct")
        yield simple(f"slct.u{width}.f32", f"u{width} u{width} f32", f"u{width}", "slct")
    yield simple("slct.ftz.u32.f32", "u32 u32 f32", "u32", "slct")


def cases() -> Iterator[Case]:
    for group in (arithmetic, packed_and_wide, bits, logic, carries, comparison):
        yield from group()
