"""Tensor copies by TMA: loads, stores, reductions, multicast, prefetch and device-made descriptors; ranks 1-5, all types and swizzles."""

from collections.abc import Iterator
from dataclasses import replace
from math import prod

from tests.emulator.ptx.asynchronous import (
    SHARED,
    cluster_barrier,
    coordinates,
    copy_in,
    copy_out,
    drain,
    expect,
    fill_shared,
    map_address,
    start,
    wait,
)
from tests.emulator.ptx.case import Case, TensorMap, module
from tests.emulator.ptx.inputs import Input

FAMILY = "tma"
LOAD = "cp.async.bulk.tensor.{rank}d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
SIZES = {"u8": 1, "u16": 2, "u32": 4, "s32": 4, "u64": 8, "s64": 8, "f16": 2, "f32": 4, "f64": 8, "bf16": 2}
SIZES |= {"f32_ftz": 4, "tf32": 4, "tf32_ftz": 4}
KINDS = {"u8": "u8", "u16": "u16", "u32": "u32", "s32": "s32", "u64": "u64", "s64": "s64", "f16": "f16", "bf16": "bf16"}
KINDS |= {"f32": "f32", "f64": "f64", "f32_ftz": "f32", "tf32": "f32", "tf32_ftz": "f32"}
Coordinates = tuple[int, ...]


def tensor(dtype: str, shape: tuple[int, ...], box: tuple[int, ...], buffer: str = "in_a", **options: object) -> TensorMap:
    """A map with rows padded to 16 bytes (32 when interleaved by 32) and no other gaps."""
    align = 32 if options.get("interleave") == 32 else 16
    pitch = -(-shape[0] * SIZES[dtype] // align) * align
    strides = [pitch]
    for extent in shape[1:-1]:
        strides.append(strides[-1] * extent)
    return TensorMap(buffer, dtype, shape, tuple(strides[: len(shape) - 1]), box, **options)  # type: ignore[arg-type]


def buffer_bytes(m: TensorMap) -> int:
    if len(m.shape) == 1:
        return -(-m.shape[0] * SIZES[m.dtype] // 16) * 16
    return m.strides[-1] * m.shape[-1]


def box_bytes(m: TensorMap) -> int:
    """Bytes in shared memory: a traversal stride s takes every s-th element of the box, except along the innermost dimension."""
    elements = m.box[0] * prod(-(-extent // step) for extent, step in zip(m.box[1:], m.steps[1:], strict=True))
    return elements * SIZES[m.dtype]


def label(m: TensorMap, at: Coordinates) -> str:
    marks = [f"{m.dtype} {'x'.join(map(str, m.shape))} box {'x'.join(map(str, m.box))} at {','.join(map(str, at))}"]
    marks += [f"swizzle {m.swizzle}"] if m.swizzle else []
    marks += ["nan"] if m.nan_fill else []
    marks += [f"interleave {m.interleave}"] if m.interleave else []
    marks += [f"steps {','.join(map(str, m.element_strides))}"] if m.element_strides else []
    return " ".join(marks)


def load_case(m: TensorMap, at: Coordinates, hint: str = "", extra: str = "", name: str = "") -> Case:
    size = box_bytes(m)
    form = LOAD.format(rank=len(at)) + (".L2::cache_hint" if hint else "")
    body = start() + map_address() + fill_shared(-(-size // 512) * 512) + extra + expect(size)
    body += f"@%first {form} [%base], [%map0, {coordinates(at)}], [%bar]{hint}; " + wait() + copy_out(-(-size // 4) * 4)
    kind = KINDS[m.dtype]
    return Case(
        name=f"{form} {label(m, at)}{name}",
        family=FAMILY,
        ptx=module(body, ["out", "in_a"], maps=1, prologue=SHARED),
        inputs={"in_a": Input(kind, buffer_bytes(m) // SIZES[m.dtype])},
        out=Input("fill", -(-size // 4) * 4),
        section="Data Movement: cp.async.bulk.tensor",
        shared=-(-size // 512) * 512,
        maps=(m,),
        faults=illegal(m, at, False),
    )


def narrow_case(m: TensorMap, at: Coordinates, expected: int) -> Case:
    """Rows narrower than the span, with room for a span each. The mbarrier may wait for the wrong count: the tries are limited and the
    last word of the output says whether the phase was completed.
    """
    size = m.swizzle * m.box[1]
    form = LOAD.format(rank=len(at))
    body = start() + map_address() + fill_shared(size) + expect(expected) + f"@%first {form} [%base], [%map0, {coordinates(at)}], [%bar]; "
    body += ".reg .b32 %n, %yes; .reg .pred %late; mov.u32 %n, 0; TRY: mbarrier.try_wait.parity.shared::cta.b64 %done, [%bar], 0; "
    body += "@%done bra TRIED; add.u32 %n, %n, 1; setp.lt.u32 %late, %n, 16; @%late bra TRY; TRIED: selp.b32 %yes, 1, 0, %done; "
    body += copy_out(size) + f"@%first st.global.b32 [%out+{size}], %yes; "
    return Case(
        name=f"{form} {label(m, at)} span pitch, {expected} bytes expected",
        family=FAMILY,
        ptx=module(body, ["out", "in_a"], maps=1, prologue=SHARED),
        inputs={"in_a": Input(KINDS[m.dtype], buffer_bytes(m) // SIZES[m.dtype])},
        out=Input("fill", size + 4),
        section="Data Movement: cp.async.bulk.tensor; Tensors: Swizzling Modes",
        shared=size,
        maps=(m,),
    )


def narrow() -> Iterator[Case]:
    for dtype in ("u8", "f32"):
        for swizzle, inner in ((32, 16), (64, 16), (64, 32), (128, 16), (128, 64)):
            size = SIZES[dtype]
            m = tensor(dtype, (256 // size, 40), (inner // size, 24), swizzle=swizzle)
            for expected in (inner * 24, swizzle * 24):
                yield narrow_case(m, (inner // size, 3), expected)


def store_case(m: TensorMap, at: Coordinates, operation: str = "") -> Case:
    size = box_bytes(m)
    copy, op = ("cp.reduce.async.bulk.tensor", f".{operation}") if operation else ("cp.async.bulk.tensor", "")
    form = f"{copy}.{len(at)}d.global.shared::cta{op}.tile.bulk_group"
    body = start() + map_address() + copy_in("in_a", size)
    body += f"@%first {form} [%map0, {coordinates(at)}], [%base]; " + drain()
    kind = KINDS[m.dtype]
    if operation and kind[0] in "bf":
        kind += "n"
    count = buffer_bytes(m) // SIZES[m.dtype]
    return Case(
        name=f"{form} {label(m, at)}",
        family=FAMILY,
        ptx=module(body, ["out", "in_a"], maps=1, prologue=SHARED),
        inputs={"in_a": Input(kind, size // SIZES[m.dtype])},
        out=Input(kind, count) if operation else Input("fill", buffer_bytes(m)),
        section=f"Data Movement: {copy}",
        shared=-(-size // 512) * 512,
        maps=(replace(m, buffer="out"),),
        faults=illegal(m, at, True),
    )


def geometries() -> Iterator[tuple[TensorMap, Coordinates]]:
    """Inside, across every edge, wholly outside, negative; ranks 1 to 5. Some are not allowed: see `illegal`."""
    at: Coordinates
    for at in ((0,), (64,), (80,), (-16,), (200,)):
        yield tensor("f32", (100,), (32,)), at
    for at in ((0, 0), (8, 4), (32, 20), (-4, -3), (0, 24), (0, -100), (3, 7)):
        yield tensor("f16", (40, 24), (32, 8)), at
    for at in ((0, 0, 0), (8, 6, 2), (-8, 1, -1)):
        yield tensor("u8", (48, 10, 5), (32, 4, 3)), at
    for at in ((0, 0, 0, 0), (4, 2, 1, 1), (-4, -1, 3, 2)):
        yield tensor("u32", (12, 5, 4, 3), (8, 3, 2, 2)), at
    for at in ((0, 0, 0, 0, 0), (4, 2, 1, 1, 1), (-4, -1, 3, 2, -1)):
        yield tensor("bf16", (16, 4, 4, 3, 3), (16, 2, 2, 2, 2)), at


def legal_geometries() -> Iterator[tuple[TensorMap, Coordinates]]:
    """The same edges with innermost coordinates of whole 16 bytes."""
    at: Coordinates
    for at in ((-8, -3), (16, 7), (32, -3)):
        yield tensor("f16", (40, 24), (32, 8)), at
    for at in ((16, 6, 2), (-16, 1, -1), (32, 9, 4)):
        yield tensor("u8", (48, 10, 5), (32, 4, 3)), at
    for at in ((8, 2, 1, 1, 1), (-8, -1, 3, 2, -1), (8, 3, 3, 2, 2)):
        yield tensor("bf16", (16, 4, 4, 3, 3), (16, 2, 2, 2, 2)), at


def illegal(m: TensorMap, at: Coordinates, writes: bool) -> bool:
    """An innermost coordinate that is no multiple of 16 bytes; a negative one of a write; rows narrower than the swizzle's span.

    (The last are no fault in themselves: these cases give them the memory of packed rows, and the chip uses a span for each.)
    """
    narrow = m.box[0] * SIZES[m.dtype] < m.swizzle
    return at[0] * SIZES[m.dtype] % 16 != 0 or (writes and min(at) < 0) or narrow


def swizzles() -> Iterator[tuple[TensorMap, Coordinates]]:
    for dtype in ("u8", "bf16", "f32", "u64"):
        size = SIZES[dtype]
        for swizzle in (32, 64, 128):
            for inner in sorted({16, 32, swizzle // 2, swizzle}):
                if inner <= swizzle:
                    yield tensor(dtype, (256 // size, 40), (inner // size, 24), swizzle=swizzle), (inner // size, 3)
    for swizzle in (32, 64, 128):
        yield tensor("bf16", (96, 6, 5), (swizzle // 2, 3, 4), swizzle=swizzle), (16, 2, 2)
        yield tensor("bf16", (96, 5, 4, 3), (swizzle // 2, 3, 2, 2), swizzle=swizzle), (-8, 1, 1, 1)


def options() -> Iterator[tuple[TensorMap, Coordinates]]:
    for dtype, size in SIZES.items():
        yield tensor(dtype, (160 // size, 12), (64 // size, 8)), (112 // size, 6)
    for dtype in ("f16", "bf16", "f32", "f64", "f32_ftz", "tf32", "tf32_ftz"):
        size = SIZES[dtype]
        yield tensor(dtype, (160 // size, 12), (64 // size, 8), nan_fill=True), (112 // size, 6)
    for steps in ((1, 2), (1, 3), (2, 1), (2, 2), (4, 5)):
        yield tensor("f32", (64, 40), (32, 16), element_strides=steps), (8, 4)


def loads() -> Iterator[Case]:
    seen = set()
    for group in (geometries, swizzles, options, legal_geometries):
        for m, at in group():
            if (m, at) not in seen:
                seen.add((m, at))
                yield load_case(m, at)
    m = tensor("f16", (40, 24), (32, 8))
    policy = ".reg .b64 %policy; createpolicy.fractional.L2::evict_first.b64 %policy, 1.0; "
    yield load_case(m, (8, 4), ", %policy", policy)
    prefetch = "@%first prefetch.tensormap [%map0]; @%first cp.async.bulk.prefetch.tensor.2d.L2.global.tile [%map0, {8, 4}]; "
    yield load_case(m, (8, 4), "", prefetch, " after prefetch")


def stores() -> Iterator[Case]:
    for m, at in (*geometries(), *(pair for pair in legal_geometries() if not illegal(*pair, True))):
        yield store_case(m, at)
    for m, at in swizzles():
        if m.dtype in ("bf16", "f32"):
            yield store_case(m, at)
    for dtype, size in SIZES.items():
        yield store_case(tensor(dtype, (160 // size, 12), (64 // size, 8)), (112 // size, 6))
    for steps in ((1, 2), (2, 1), (2, 3)):
        yield store_case(tensor("f32", (64, 40), (32, 16), element_strides=steps), (8, 4))


REDUCTIONS = {
    "add": ("u32", "s32", "u64", "f16", "bf16", "f32"),
    "min": ("u32", "s32", "u64", "s64", "f16", "bf16"),
    "max": ("u32", "s32", "u64", "s64", "f16", "bf16"),
    "inc": ("u32",),
    "dec": ("u32",),
    "and": ("u32", "u64"),
    "or": ("u32", "u64"),
    "xor": ("u32", "u64"),
}


def reductions() -> Iterator[Case]:
    for operation, dtypes in REDUCTIONS.items():
        for dtype in dtypes:
            size = SIZES[dtype]
            yield store_case(tensor(dtype, (160 // size, 12), (64 // size, 8)), (112 // size, 6), operation)
    for rank in (1, 3, 4, 5):
        shape, box = (32, 5, 4, 3, 3)[:rank], (16, 3, 2, 2, 2)[:rank]
        yield store_case(tensor("f32", shape, box), (20, 3, 3, 2, 2)[:rank], "add")
    yield store_case(tensor("bf16", (96, 40), (64, 24), swizzle=128), (32, 3), "add")


def multicast(cluster: int, mask: int, issuers: tuple[int, ...]) -> Case:
    """CTAs `issuers` of a cluster each load one row block of their own into all CTAs of `mask`."""
    m = tensor("f16", (64, 32), (64, 4), swizzle=128)
    part, size = box_bytes(m), 4096
    form = LOAD.format(rank=2) + ".multicast::cluster"
    body = start() + map_address() + fill_shared(size) + expect(part * len(issuers)) + cluster_barrier()
    body += ".reg .pred %mine; .reg .b32 %slot, %row; .reg .b16 %mask; "
    for issuer in issuers:
        body += (
            f"setp.eq.and.u32 %mine, %rank, {issuer}, %first; add.u32 %slot, %base, {issuer * 1024}; "
            f"mov.b16 %mask, {mask}; mov.u32 %row, {4 * issuer + 2}; "
            f"@%mine {form} [%slot], [%map0, {{0, %row}}], [%bar], %mask; "
        )
    body += f".reg .b32 %bit; .reg .pred %gets; shr.u32 %bit, {mask}, %rank; and.b32 %bit, %bit, 1; "
    body += "setp.ne.u32 %gets, %bit, 0; @!%gets bra SKIP; " + wait() + "SKIP: " + copy_out(size) + cluster_barrier()
    return Case(
        name=f"{form} cluster {cluster} mask {mask:#x} from {issuers}",
        family=FAMILY,
        ptx=module(body, ["out", "in_a"], maps=1, prologue=SHARED),
        inputs={"in_a": Input("f16", buffer_bytes(m) // 2)},
        out=Input("fill", size * cluster * 2),
        section="Data Movement: cp.async.bulk.tensor, .multicast::cluster",
        grid=cluster * 2,
        cluster=cluster,
        shared=size,
        maps=(m,),
    )


def remade() -> Iterator[Case]:
    """A descriptor copied to shared memory, edited by tensormap.replace, published to global memory and used."""
    m = tensor("f16", (40, 24), (32, 8))
    edits = {
        "global_address": ("global_address.shared::cta.b1024.b64 [%base], %in_b", (8, 4), box_bytes(m)),
        "global_dim": ("global_dim.shared::cta.b1024.b32 [%base], 1, 9", (8, 4), box_bytes(m)),
        "global_stride": ("global_stride.shared::cta.b1024.b64 [%base], 0, 160", (8, 4), box_bytes(m)),
        "global_stride /16": ("global_stride.shared::cta.b1024.b64 [%base], 0, 10", (8, 4), box_bytes(m)),
        "box_dim": ("box_dim.shared::cta.b1024.b32 [%base], 1, 4", (8, 4), box_bytes(m) // 2),
        "element_stride": ("element_stride.shared::cta.b1024.b32 [%base], 1, 2", (8, 4), box_bytes(m) // 2),
        "swizzle_mode": ("swizzle_mode.shared::cta.b1024.b32 [%base], 2", (8, 4), box_bytes(m)),
        "elemtype": ("elemtype.shared::cta.b1024.b32 [%base], 10", (8, 4), box_bytes(m)),
        "fill_mode": ("fill_mode.shared::cta.b1024.b32 [%base], 1", (24, 20), box_bytes(m)),
    }
    for field, (edit, at, size) in edits.items():
        yield remade_case(m, field, edit, at, size)


def remade_case(m: TensorMap, field: str, edit: str, at: Coordinates, size: int) -> Case:
    form = LOAD.format(rank=2)
    body = start() + map_address() + fill_shared(1024)
    body += ".reg .b32 %word, %to; .reg .pred %head; setp.lt.u32 %head, %t, 32; @!%head bra MADE; "
    body += "mad.lo.u32 %to, %t, 4, %base; mad.wide.u32 %at, %t, 4, %map0; ld.b32 %word, [%at]; st.shared.b32 [%to], %word; "
    body += f"bar.warp.sync 0xffffffff; @%first tensormap.replace.tile.{edit}; bar.warp.sync 0xffffffff; "
    body += "tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned [%in_scratch], [%base], 128; "
    body += "fence.proxy.tensormap::generic.acquire.gpu [%in_scratch], 128; MADE: bar.sync 0; add.u32 %base, %base, 1024; "
    body += expect(size) + f"@%first {form} [%base], [%in_scratch, {coordinates(at)}], [%bar]; " + wait() + copy_out(size)
    return Case(
        name=f"tensormap.replace.tile.{field}",
        family=FAMILY,
        ptx=module(body, ["out", "in_a", "in_b", "in_scratch"], maps=1, prologue=SHARED),
        inputs={"in_a": Input("f16", 3200), "in_b": Input("f16", 3200), "in_scratch": Input("zero", 128)},
        out=Input("fill", size),
        section="Parallel Synchronization and Communication: tensormap.replace, tensormap.cp_fenceproxy",
        shared=4096,
        maps=(m,),
    )


def cases() -> Iterator[Case]:
    for group in (loads, stores, reductions, remade, narrow):
        yield from group()
    yield multicast(2, 0b11, (0,))
    yield multicast(2, 0b11, (0, 1))
    yield multicast(4, 0b1011, (1,))
    yield multicast(4, 0b1111, (0, 1, 2, 3))
    yield multicast(2, 0b10, (0,))
