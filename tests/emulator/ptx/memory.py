"""Loads, stores, atomics and reductions in every space, with their types, vectors, orders, scopes and cache hints."""

from collections.abc import Iterator

from tests.emulator.ptx.case import Case, module
from tests.emulator.ptx.fragments import THREADS, thread_index
from tests.emulator.ptx.inputs import FLOATS, Input, width_of

FAMILY = "memory"
CTAS = 4
TOTAL = THREADS * CTAS
ORDERS = ("weak", "volatile", "relaxed.cta", "relaxed.cluster", "relaxed.gpu", "relaxed.sys", "acquire.cta", "acquire.gpu", "acquire.sys")
CACHES = ("ca", "cg", "cs", "lu", "cv", "nc", "L1::evict_first", "L1::no_allocate", "nc.L1::evict_last", "L2::128B", "nc.L2::64B")
TYPES = ("b8", "u8", "s8", "b16", "u16", "s16", "b32", "u32", "s32", "f32", "b64", "u64", "s64", "f64")


def case(name: str, body: str, section: str, out: Input, in_a: Input | None = None, prologue: str = "", grid: int = CTAS) -> Case:
    head = thread_index() + ".reg .b64 %from, %to; "
    return Case(
        name=name,
        family=FAMILY,
        ptx=module(head + body, ["out", "in_a"], prologue=prologue),
        inputs={"in_a": in_a or Input("u8", TOTAL * 16)},
        out=out,
        section=f"Data Movement: {section}",
        grid=grid,
        threads=THREADS,
    )


def place(bytes_in: int, bytes_out: int) -> str:
    return f"mad.lo.u64 %from, %thread, {bytes_in}, %in_a; mad.lo.u64 %to, %thread, {bytes_out}, %out; "


def loads() -> Iterator[Case]:
    for order in ORDERS:
        body = place(4, 4) + f".reg .b32 %v; ld.{order}.global.b32 %v, [%from]; st.global.b32 [%to], %v; "
        yield case(f"ld.{order}.global.b32", body, "ld", Input("fill", TOTAL * 4))
    for cache in CACHES:
        form = f"ld.global.{cache}.b32"
        body = place(4, 4) + f".reg .b32 %v; {form} %v, [%from]; st.global.b32 [%to], %v; "
        yield case(form, body, "ld", Input("fill", TOTAL * 4))
    for t in TYPES:  # a narrow load extends into a wider register as its type says
        bits = width_of(t.replace("b", "u")) if t[0] != "f" else int(t[1:])
        wide = max(32, bits)
        body = place(bits // 8, wide // 8) + f".reg .b{wide} %v; ld.global.{t} %v, [%from]; st.global.b{wide} [%to], %v; "
        yield case(f"ld.global.{t}", body, "ld", Input("fill", TOTAL * wide // 8))
        body = place(16, 8) + f".reg .b64 %v; ld.global.b64 %v, [%from+8]; st.global.{t} [%to], %v; "
        yield (
            case(f"st.global.{t}", body, "st", Input("fill", TOTAL * 8))
            if t[0] != "f"
            else case(
                f"st.global.{t}",
                body.replace(".b64 %v;", f".b{bits} %v;").replace("ld.global.b64", f"ld.global.b{bits}"),
                "st",
                Input("fill", TOTAL * 8),
            )
        )
    for vector, t, names in vectors():
        bits = int(t[1:])
        size = bits // 8 * int(vector[1])
        body = place(16, 16) + f".reg .b{max(16, bits)} %v<4>; ld.global.{vector}.{t} {names}, [%from]; "
        body += f"st.global.{vector}.{t} [%to], {names}; "
        yield case(f"ld.global.{vector}.{t}", body, "ld", Input("fill", TOTAL * 16))
        assert size <= 16
    body = place(16, 16) + ".reg .b128 %v; ld.global.b128 %v, [%from]; st.global.b128 [%to], %v; "
    yield case("ld.global.b128", body, "ld", Input("fill", TOTAL * 16))
    body = place(4, 4) + ".reg .b32 %v; .reg .b64 %policy; createpolicy.fractional.L2::evict_last.L2::evict_unchanged.b64 %policy, 0.5; "
    body += "ld.global.L2::cache_hint.b32 %v, [%from], %policy; st.global.L2::cache_hint.b32 [%to], %v, %policy; "
    body += "prefetch.global.L2 [%from]; prefetch.global.L1 [%from]; prefetchu.L1 [%from]; "
    yield case("ld.global.L2::cache_hint", body, "ld, createpolicy, prefetch", Input("fill", TOTAL * 4))


def vectors() -> Iterator[tuple[str, str, str]]:
    for t in ("b8", "b16", "b32", "b64", "f32", "f64"):
        yield "v2", t, "{%v0, %v1}"
        if t[1:] != "64":
            yield "v4", t, "{%v0, %v1, %v2, %v3}"


def stores() -> Iterator[Case]:
    orders = (
        "weak",
        "volatile",
        "relaxed.cta",
        "relaxed.cluster",
        "relaxed.gpu",
        "relaxed.sys",
        "release.cta",
        "release.gpu",
        "release.sys",
    )
    for order in orders:
        body = place(4, 4) + f".reg .b32 %v; ld.global.b32 %v, [%from]; st.{order}.global.b32 [%to], %v; "
        yield case(f"st.{order}.global.b32", body, "st", Input("fill", TOTAL * 4))
    for cache in ("wb", "cg", "cs", "wt", "L1::evict_first", "L1::no_allocate"):
        body = place(4, 4) + f".reg .b32 %v; ld.global.b32 %v, [%from]; st.global.{cache}.b32 [%to], %v; "
        yield case(f"st.global.{cache}.b32", body, "st", Input("fill", TOTAL * 4))


def spaces() -> Iterator[Case]:
    """Shared, local, constant, parameter and generic addresses; initialised variables."""
    store = "st.global.b32 [%to], %v; "
    get = place(4, 4) + ".reg .b32 %v, %cell; .reg .b64 %generic; ld.global.b32 %v, [%from]; "
    own = "mov.u32 %cell, room; mad.lo.u32 %cell, %t, 4, %cell; "
    shared = ".shared .align 16 .b8 room[512]; " + get + own
    body = shared + "st.shared.b32 [%cell], %v; bar.sync 0; xor.b32 %t, %t, 127; " + own + "ld.shared.b32 %v, [%cell]; " + store
    yield case("ld.shared.b32", body, "ld", Input("fill", TOTAL * 4))
    body = shared + "st.volatile.shared.b32 [%cell], %v; cvt.u64.u32 %generic, %cell; cvta.shared.u64 %generic, %generic; "
    yield case("ld generic shared", body + "ld.b32 %v, [%generic]; " + store, "cvta", Input("fill", TOTAL * 4))
    body = get + ".local .align 8 .b8 stack[64]; mov.b64 %generic, stack; st.local.b32 [%generic+12], %v; ld.local.b8 %v, [%generic+13]; "
    yield case("ld.local.b8", body + store, "ld", Input("fill", TOTAL * 4))
    body = get + ".local .align 8 .b8 stack[64]; mov.b64 %generic, stack; cvta.local.u64 %generic, %generic; st.b32 [%generic+8], %v; "
    body += ".reg .b64 %back; cvta.to.local.u64 %back, %generic; ld.local.s16 %v, [%back+10]; "
    yield case("ld generic local", body + store, "cvta", Input("fill", TOTAL * 4))
    table = ".const .align 4 .b32 primes[8] = {2, 3, 5, 7, 11, 13, 17, 0x13}; "
    body = get + "and.b32 %v, %v, 7; mov.b64 %generic, primes; mad.wide.u32 %generic, %v, 4, %generic; ld.const.b32 %v, [%generic]; "
    yield case("ld.const.b32", body + store, "ld", Input("fill", TOTAL * 4), prologue=table)
    table = ".global .align 8 .f32 halves[4] = {0.5, 1.5, 0f40200000, -3.5}; "
    table += ".global .align 4 .b8 text[8] = {104, 101, 108, 108, 111, 0, 0, 33}; "
    body = get + "and.b32 %cell, %v, 3; mov.b64 %generic, halves; mad.wide.u32 %generic, %cell, 4, %generic; .reg .b32 %w; "
    body += "ld.global.f32 %w, [%generic]; mov.b64 %generic, text; cvt.u64.u32 %from, %cell; add.u64 %generic, %generic, %from; "
    body += "ld.global.s8 %v, [%generic+4]; add.u32 %v, %v, %w; "
    yield case(".global initialised", body + store, "ld", Input("fill", TOTAL * 4), prologue=table)
    body = (
        get
        + "mov.b64 %generic, p_in_a; ld.param.u64 %from, [%generic]; mad.lo.u64 %from, %thread, 4, %from; ld.global.b32 %v, [%from+16]; "
    )
    yield case("ld.param by address", body + store, "ld", Input("fill", TOTAL * 4))
    body = get + "cvta.global.u64 %generic, %from; cvta.to.global.u64 %generic, %generic; ld.b32 %v, [%generic]; st.b32 [%to], %v; "
    yield case("ld generic global", body, "cvta", Input("fill", TOTAL * 4))
    function = (
        ".func (.reg .b32 result) mix(.reg .b32 a, .reg .b32 b)\n{ .reg .b32 %h; shl.b32 %h, b, 3; xor.b32 result, a, %h; ret; } "
        ".func (.param .b32 result) fold(.param .b32 a, .param .align 8 .b8 pair[8])\n{ .reg .b32 %h, %x, %y; ld.param.b32 %h, [a]; "
        "ld.param.b32 %x, [pair]; ld.param.b32 %y, [pair+4]; mad.lo.u32 %h, %x, %y, %h; st.param.b32 [result], %h; ret; } "
    )
    body = get + ".reg .b32 %w; call.uni (%w), mix, (%v, %t); { .param .b32 in0; .param .align 8 .b8 in1[8]; .param .b32 back; "
    body += "st.param.b32 [in0], %w; st.param.b32 [in1], %v; st.param.b32 [in1+4], %t; call.uni (back), fold, (in0, in1); "
    body += "ld.param.b32 %v, [back]; } "
    yield case("call functions", body + store, "call", Input("fill", TOTAL * 4), prologue=function)
    body = get + ".reg .pred %p; .reg .b32 %w; and.b32 %w, %v, 1; setp.eq.u32 %p, %w, 0; mov.b32 %w, 9; @%p call.uni (%w), mix, (%v, %t); "
    yield case(
        "call predicated",
        body.replace("call.uni", "call") + "mov.b32 %v, %w; " + store,
        "call",
        Input("fill", TOTAL * 4),
        prologue=function,
    )


ATOMICS = {
    "add": ("u32", "s32", "u64", "f32", "f64"),
    "add.noftz": ("f16", "f16x2", "bf16", "bf16x2"),
    "min": ("u32", "s32", "u64", "s64"),
    "max": ("u32", "s32", "u64", "s64"),
    "inc": ("u32",),
    "dec": ("u32",),
    "and": ("b32", "b64"),
    "or": ("b32", "b64"),
    "xor": ("b32", "b64"),
    "exch": ("b32", "b64"),
    "cas": ("b16", "b32", "b64"),
}


def kind_of(t: str) -> str:
    """b32 -> u32; a float keeps its name."""
    return t if t.removesuffix("x2") in FLOATS else t.replace("b", "u")


def atomics() -> Iterator[Case]:
    for op, types in ATOMICS.items():
        for t in types:
            kind = kind_of(t)
            width = width_of(kind)
            size = width // 8
            # Thread i owns element i of the output's first half; what the atomic returns goes to the second half.
            ends = place(size, size) + f".reg .b{width} %v, %old, %test; ld.global.b{width} %v, [%from]; "
            operands = "%v"
            if op == "cas":  # one thread in two compares with what is there
                ends += f"ld.global.b{width} %test, [%to]; .reg .pred %p; .reg .b32 %odd; and.b32 %odd, %t, 1; "
                ends += f"setp.eq.u32 %p, %odd, 0; @%p mov.b{width} %test, %v; "
                operands = "%test, %v"
            body = ends + f"atom.global.{op}.{t} %old, [%to], {operands}; st.global.b{width} [%to+{TOTAL * size}], %old; "
            yield case(f"atom.global.{op}.{t}", body, "atom", Input(kind, 2 * TOTAL), Input(kind, TOTAL))
            body = f".shared .align 8 .b8 room[{THREADS * size}]; .reg .b32 %cell; " + ends + "mov.u32 %cell, room; "
            body += f"mad.lo.u32 %cell, %t, {size}, %cell; .reg .b{width} %was; ld.global.b{width} %was, [%to]; "
            body += f"st.shared.b{width} [%cell], %was; atom.shared.{op}.{t} %old, [%cell], {operands}; "
            body += f"st.global.b{width} [%to+{TOTAL * size}], %old; ld.shared.b{width} %was, [%cell]; st.global.b{width} [%to], %was; "
            yield case(f"atom.shared.{op}.{t}", body, "atom", Input(kind, 2 * TOTAL), Input(kind, TOTAL))
            if op not in ("exch", "cas"):
                body = ends + f"red.global.{op}.{t} [%to], %v; "
                yield case(f"red.global.{op}.{t}", body, "red", Input(kind, TOTAL), Input(kind, TOTAL))
    for order in ("relaxed", "acquire", "release", "acq_rel"):
        for scope in ("cta", "cluster", "gpu", "sys"):
            body = place(4, 4) + ".reg .b32 %v, %old; ld.global.b32 %v, [%from]; "
            body += f"atom.{order}.{scope}.global.add.u32 %old, [%to], %v; st.global.b32 [%to+{TOTAL * 4}], %old; "
            yield case(f"atom.{order}.{scope}.global.add.u32", body, "atom", Input("u32", 2 * TOTAL), Input("u32", TOTAL))
            if order in ("relaxed", "release"):
                body = place(4, 4) + ".reg .b32 %v; ld.global.b32 %v, [%from]; "
                body += f"red.{order}.{scope}.global.max.s32 [%to], %v; "
                yield case(f"red.{order}.{scope}.global.max.s32", body, "red", Input("u32", TOTAL), Input("u32", TOTAL))


def wide_atomics() -> Iterator[Case]:
    body = place(16, 16) + ".reg .b128 %v, %old; ld.global.b128 %v, [%from]; atom.global.exch.b128 %old, [%to], %v; "
    body += f"st.global.b128 [%to+{TOTAL * 16}], %old; "
    yield case("atom.global.exch.b128", body, "atom", Input("u8", 2 * TOTAL * 16))
    body = place(16, 16) + ".reg .b128 %v, %old, %test; ld.global.b128 %v, [%from]; ld.global.b128 %test, [%to]; "
    body += f"atom.global.cas.b128 %old, [%to], %test, %v; st.global.b128 [%to+{TOTAL * 16}], %old; "
    yield case("atom.global.cas.b128", body, "atom", Input("u8", 2 * TOTAL * 16))
    forms = [("v2.f32.add", "f32", 2, 32), ("v4.f32.add", "f32", 4, 32)]
    for t in ("f16", "bf16"):
        forms += [(f"v{n}.{t}.{op}.noftz", t, n, 16) for n in (2, 4, 8) for op in ("add", "min", "max")]
        forms += [(f"v{n}.{t}x2.{op}.noftz", f"{t}x2", n, 32) for n in (2, 4) for op in ("add", "min", "max")]
    for form, kind, count, bits in forms:
        parts = form.split(".")
        operation = ".".join([*parts[2:], parts[1]])
        names = "{" + ", ".join(f"%v{i}" for i in range(count)) + "}"
        old = names.replace("%v", "%old")
        body = place(16, 16) + f".reg .b{bits} %v<8>, %old<8>; "
        body += "".join(f"ld.global.b{bits} %v{i}, [%from+{i * bits // 8}]; " for i in range(count))
        body += f"atom.global.{parts[0]}.{operation} {old}, [%to], {names}; "
        body += "".join(f"st.global.b{bits} [%to+{TOTAL * 16 + i * bits // 8}], %old{i}; " for i in range(count))
        elements = TOTAL * 128 // width_of(kind)
        yield case(f"atom.global.{parts[0]}.{operation}", body, "atom", Input(kind, 2 * elements), Input(kind, elements))
        body = body.split("atom.")[0] + f"red.global.{parts[0]}.{operation} [%to], {names}; "
        yield case(f"red.global.{parts[0]}.{operation}", body, "red", Input(kind, elements), Input(kind, elements))


def contention() -> Iterator[Case]:
    """Results that do not depend on the order: sums of integers, a histogram, a lock, a chain of flags between CTAs."""
    for op, t in (("add", "u32"), ("max", "s32"), ("or", "b32"), ("xor", "b64")):
        width = int(t[1:])
        body = place(width // 8, 0) + f".reg .b{width} %v; ld.global.b{width} %v, [%from]; red.relaxed.gpu.global.{op}.{t} [%out], %v; "
        yield case(f"red.global.{op}.{t} contended", body, "red", Input("zero", width // 8), Input(f"u{width}", TOTAL))
    body = place(4, 4) + ".reg .b32 %v; ld.global.b32 %v, [%from]; and.b32 %v, %v, 15; mad.wide.u32 %to, %v, 4, %out; "
    yield case("atom histogram", body + "atom.global.add.u32 %v, [%to], 1; ", "atom", Input("zero", 64), Input("u32", TOTAL))
    lock = ".reg .b32 %old, %n; .reg .pred %p, %first; setp.eq.u32 %first, %t, 0; @!%first bra DONE; TAKE: "
    lock += "atom.acquire.gpu.global.cas.b32 %old, [%out], 0, 1; setp.ne.u32 %p, %old, 0; @%p bra TAKE; "
    lock += "ld.global.b32 %n, [%out+4]; add.u32 %n, %n, 5; st.global.b32 [%out+4], %n; "
    lock += "atom.release.gpu.global.exch.b32 %old, [%out], 0; DONE: "
    yield case("spin lock", lock, "atom", Input("zero", 8), grid=16)
    chain = ".reg .b32 %flag, %n, %id; .reg .pred %p, %first; mov.u32 %id, %ctaid.x; setp.eq.u32 %first, %t, 0; @!%first bra DONE; WAIT: "
    chain += "ld.acquire.gpu.global.b32 %flag, [%out]; setp.ne.u32 %p, %flag, %id; @%p bra WAIT; "
    chain += "ld.global.b32 %n, [%out+4]; mad.lo.u32 %n, %n, 3, %id; st.global.b32 [%out+4], %n; add.u32 %flag, %flag, 1; "
    chain += "st.release.gpu.global.b32 [%out], %flag; DONE: "
    yield case("flag chain between CTAs", chain, "ld, st", Input("zero", 8), grid=16)
    last = ".reg .b32 %old, %n; .reg .pred %p; bar.sync 0; membar.gl; atom.global.inc.u32 %old, [%out], 15; "
    last += "red.global.add.u32 [%out+4], %old; "
    yield case("atom.inc wraps", last, "atom", Input("zero", 8), grid=8)


def cases() -> Iterator[Case]:
    for group in (loads, stores, spaces, atomics, wide_atomics, contention):
        yield from group()
