"""Bulk copies without a tensor map, bulk reductions, and the older cp.async."""

from collections.abc import Iterator

from tests.emulator.ptx.asynchronous import SHARED, cluster_barrier, copy_in, copy_out, drain, expect, fill_shared, start, wait
from tests.emulator.ptx.case import Case, module
from tests.emulator.ptx.inputs import FLOATS, Input, width_of

FAMILY = "bulk"
BYTES = 2048


def case(name: str, body: str, inputs: dict[str, Input], out: Input, section: str, cluster: int = 1, shared: int = 4 * BYTES) -> Case:
    return Case(
        name=name,
        family=FAMILY,
        ptx=module(body, ["out", *inputs], prologue=SHARED),
        inputs=inputs,
        out=out,
        section=f"Data Movement: {section}",
        grid=cluster,
        cluster=cluster,
        shared=shared,
    )


def global_to_shared() -> Iterator[Case]:
    for destination in ("shared::cluster", "shared::cta"):
        form = f"cp.async.bulk.{destination}.global.mbarrier::complete_tx::bytes"
        for size, source, target in ((16, 0, 0), (2048, 0, 0), (1008, 16, 48), (144, 1904, 16)):
            body = start() + fill_shared(BYTES) + expect(size)
            body += f".reg .b32 %to; .reg .b64 %from; add.u32 %to, %base, {target}; add.u64 %from, %in_a, {source}; "
            body += f"@%first {form} [%to], [%from], {size}, [%bar]; " + wait() + copy_out(BYTES)
            yield case(
                f"{form} {size} from {source} to {target}", body, {"in_a": Input("u8", BYTES)}, Input("fill", BYTES), "cp.async.bulk"
            )
    form = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
    body = start() + fill_shared(BYTES) + expect(512)
    body += ".reg .b64 %policy; createpolicy.fractional.L2::evict_last.b64 %policy; "
    body += "@%first cp.async.bulk.prefetch.L2.global [%in_a], 512; "
    body += f"@%first {form} [%base], [%in_a], 512, [%bar], %policy; " + wait() + copy_out(BYTES)
    yield case(form, body, {"in_a": Input("u8", BYTES)}, Input("fill", BYTES), "cp.async.bulk.prefetch")


def multicast() -> Iterator[Case]:
    form = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
    for cluster, mask in ((2, 0b11), (4, 0b0101)):
        body = start() + fill_shared(BYTES) + expect(768) + cluster_barrier()
        body += f".reg .pred %issuer, %gets; .reg .b32 %bit; .reg .b16 %mask; mov.b16 %mask, {mask}; "
        body += "setp.eq.and.u32 %issuer, %rank, 1, %first; "
        body += f"@%issuer {form} [%base], [%in_a], 768, [%bar], %mask; "
        body += f"shr.u32 %bit, {mask}, %rank; and.b32 %bit, %bit, 1; setp.ne.u32 %gets, %bit, 0; @!%gets bra SKIP; "
        body += wait() + "SKIP: " + copy_out(BYTES) + cluster_barrier()
        yield case(f"{form} {mask:#x}", body, {"in_a": Input("u8", BYTES)}, Input("fill", BYTES * cluster), "cp.async.bulk", cluster)


def shared_to_elsewhere() -> Iterator[Case]:
    form = "cp.async.bulk.global.shared::cta.bulk_group"
    for size, source, target in ((2048, 0, 0), (1008, 32, 16)):
        body = start() + copy_in("in_a", BYTES)
        body += f".reg .b32 %from; .reg .b64 %to; add.u32 %from, %base, {source}; add.u64 %to, %out, {target}; "
        body += f"@%first {form} [%to], [%from], {size}; " + drain()
        yield case(f"{form} {size} from {source} to {target}", body, {"in_a": Input("u8", BYTES)}, Input("fill", BYTES), "cp.async.bulk")
    body = start() + copy_in("in_a", BYTES)
    body += ".reg .b64 %to; add.u64 %to, %out, 1024; "
    body += f"@%first {form} [%out], [%base], 1024; @%first cp.async.bulk.commit_group; "
    body += f".reg .b32 %from; add.u32 %from, %base, 1024; @%first {form} [%to], [%from], 1024; "
    body += "@%first cp.async.bulk.commit_group; @%first cp.async.bulk.wait_group.read 1; @%first cp.async.bulk.wait_group 0; "
    yield case(f"{form} two groups", body, {"in_a": Input("u8", BYTES)}, Input("fill", BYTES), "cp.async.bulk.wait_group")
    form = "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes"
    body = start() + copy_in("in_a", BYTES) + expect(1024) + cluster_barrier()
    body += ".reg .b32 %peer, %to, %peer_bar; xor.b32 %peer, %rank, 1; add.u32 %to, %base, 4096; mapa.shared::cluster.u32 %to, %to, %peer; "
    body += "mapa.shared::cluster.u32 %peer_bar, %bar, %peer; "
    body += f"@%first {form} [%to], [%base], 1024, [%peer_bar]; " + wait() + copy_out(1024, 4096) + cluster_barrier()
    yield case(form, body, {"in_a": Input("u8", 2 * BYTES)}, Input("fill", 2048), "cp.async.bulk", 2)


GLOBAL = {
    "add": ("u32", "s32", "u64", "f32", "f64"),
    "add.noftz": ("f16", "bf16"),
    "min": ("u32", "s32", "u64", "s64", "f16", "bf16"),
    "max": ("u32", "s32", "u64", "s64", "f16", "bf16"),
    "inc": ("u32",),
    "dec": ("u32",),
    "and": ("b32", "b64"),
    "or": ("b32", "b64"),
    "xor": ("b32", "b64"),
}
REMOTE = {
    "add": ("u32", "s32", "u64"),
    "min": ("u32", "s32"),
    "max": ("u32", "s32"),
    "inc": ("u32",),
    "dec": ("u32",),
    "and": ("b32",),
    "or": ("b32",),
    "xor": ("b32",),
}


def reductions() -> Iterator[Case]:
    for operation, types in GLOBAL.items():
        for t in types:
            is_float = t in FLOATS
            for special in ("", " special values") if is_float else ("",):
                kind = t.replace("b32", "u32").replace("b64", "u64") if special or not is_float else f"{t}n"
                form = f"cp.reduce.async.bulk.global.shared::cta.bulk_group.{operation}.{t}"
                count = 1024 * 8 // width_of(kind)
                body = start() + copy_in("in_a", 1024) + f"@%first {form} [%out], [%base], 1024; " + drain()
                yield case(f"{form}{special}", body, {"in_a": Input(kind, count)}, Input(kind, count), "cp.reduce.async.bulk")
    for operation, types in REMOTE.items():
        for t in types:
            kind = t.replace("b", "u")
            form = f"cp.reduce.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes.{operation}.{t}"
            body = start() + copy_in("in_a", 2 * BYTES) + expect(1024) + cluster_barrier()
            body += ".reg .b32 %peer, %to, %peer_bar; xor.b32 %peer, %rank, 1; add.u32 %to, %base, 2048; "
            body += "mapa.shared::cluster.u32 %to, %to, %peer; mapa.shared::cluster.u32 %peer_bar, %bar, %peer; "
            body += f"@%first {form} [%to], [%base], 1024, [%peer_bar]; " + wait() + copy_out(1024, 2048) + cluster_barrier()
            count = 4 * BYTES * 8 // width_of(kind)
            yield case(form, body, {"in_a": Input(kind, count)}, Input("fill", 2048), "cp.reduce.async.bulk", 2)


def cp_async() -> Iterator[Case]:
    """Every thread copies its own 16 bytes."""
    place = ".reg .b32 %to, %size; .reg .b64 %from; mad.lo.u32 %to, %t, 16, %base; mad.wide.u32 %from, %t, 16, %in_a; "
    done = "cp.async.commit_group; cp.async.wait_group 0; "
    forms = [("ca", 4, ""), ("ca", 8, ""), ("ca", 16, ""), ("cg", 16, ""), ("cg", 16, ", 4"), ("ca", 8, ", 0"), ("ca", 4, ", %size")]
    for cache, size, source in forms:
        form = f"cp.async.{cache}.shared.global"
        body = start() + fill_shared(BYTES) + place + "and.b32 %size, %t, 3; "
        body += f"{form} [%to], [%from], {size}{source}; " + done + copy_out(BYTES)
        yield case(f"{form} {size}{source}", body, {"in_a": Input("u8", BYTES)}, Input("fill", BYTES), "cp.async")
    body = start() + fill_shared(BYTES) + place + ".reg .pred %skip; and.b32 %size, %t, 1; setp.ne.u32 %skip, %size, 0; "
    body += "cp.async.cg.shared.global [%to], [%from], 16, %skip; cp.async.wait_all; " + copy_out(BYTES)
    yield case("cp.async.cg.shared.global ignore-src", body, {"in_a": Input("u8", BYTES)}, Input("fill", BYTES), "cp.async")
    for noinc, arrivals in ((".noinc", 128), ("", 1)):
        body = start(arrivals) + fill_shared(BYTES) + place + "cp.async.ca.shared.global [%to], [%from], 16; "
        body += f"cp.async.mbarrier.arrive{noinc}.shared.b64 [%bar]; "
        if not noinc:  # the phase's one arrival comes after every pending count was added
            body += "bar.sync 0; @%first mbarrier.arrive.shared.b64 _, [%bar]; "
        body += wait() + copy_out(BYTES)
        yield case(f"cp.async.mbarrier.arrive{noinc}", body, {"in_a": Input("u8", BYTES)}, Input("fill", BYTES), "cp.async.mbarrier.arrive")
    body = start() + fill_shared(BYTES) + place + "cp.async.ca.shared.global [%to], [%from], 8; cp.async.commit_group; "
    body += "add.u32 %to, %to, 8; cp.async.ca.shared.global [%to], [%from], 8; cp.async.commit_group; "
    body += "cp.async.wait_group 1; cp.async.wait_group 0; " + copy_out(BYTES)
    yield case("cp.async two groups", body, {"in_a": Input("u8", BYTES)}, Input("fill", BYTES), "cp.async.wait_group")


def cases() -> Iterator[Case]:
    for group in (global_to_shared, multicast, shared_to_elsewhere, reductions, cp_async):
        yield from group()
