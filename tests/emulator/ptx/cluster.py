"""Clusters and distributed shared memory: mapa, remote accesses and atomics, st.async, red.async, cluster barriers, remote arrivals."""

from collections.abc import Iterator

from tests.emulator.ptx.asynchronous import SHARED, cluster_barrier, copy_in, copy_out, expect, start, wait
from tests.emulator.ptx.case import Case, module
from tests.emulator.ptx.inputs import Input, width_of

FAMILY = "cluster"
BYTES = 2048
PEER = (
    ".reg .b32 %peer, %mine, %theirs, %peer_bar; add.u32 %peer, %rank, 1; .reg .b32 %size; mov.u32 %size, %cluster_nctarank; "
    "rem.u32 %peer, %peer, %size; mapa.shared::cluster.u32 %peer_bar, %bar, %peer; "
)


def address(bytes_each: int, offset: int = 0) -> str:
    """%mine: this thread's place in its own shared memory; %theirs: the same place in the next CTA of the cluster."""
    return (
        f"mad.lo.u32 %mine, %t, {bytes_each}, %base; add.u32 %theirs, %mine, {offset}; mapa.shared::cluster.u32 %theirs, %theirs, %peer; "
    )


def case(name: str, body: str, out: Input, section: str, cluster: int = 2, kind: str = "u32", size: int = BYTES) -> Case:
    return Case(
        name=name,
        family=FAMILY,
        ptx=module(body, ["out", "in_a"], prologue=SHARED),
        inputs={"in_a": Input(kind, cluster * size * 8 // width_of(kind))},
        out=out,
        section=section,
        grid=cluster,
        cluster=cluster,
        shared=2 * size,
    )


def result(register: str, bits: int = 32) -> str:
    return f"mad.lo.u64 %at, %thread, {bits // 8}, %out; st.global.b{bits} [%at], {register}; "


def loads_and_stores() -> Iterator[Case]:
    for cluster in (2, 4, 8):
        body = start() + copy_in("in_a", BYTES) + PEER + address(16) + cluster_barrier()
        body += ".reg .b32 %v; ld.shared::cluster.b32 %v, [%theirs+4]; " + result("%v") + cluster_barrier()
        yield case(f"ld.shared::cluster.b32 cluster {cluster}", body, Input("fill", 512 * cluster), "ld", cluster)
    for form, registers in (("v4.b32", "{%v0, %v1, %v2, %v3}"), ("v2.b64", "{%w0, %w1}"), ("b64", "%w0"), ("b8", "%h0")):
        body = start() + copy_in("in_a", BYTES) + PEER + address(16, BYTES)
        body += "st.shared.v4.b32 [%mine+2048], {0, 0, 0, 0}; " + cluster_barrier() + ".reg .b32 %v<4>; .reg .b64 %w<2>; .reg .b16 %h<1>; "
        body += f"ld.shared.{form} {registers}, [%mine]; st.shared::cluster.{form} [%theirs], {registers}; " + cluster_barrier()
        yield case(f"st.shared::cluster.{form}", body + copy_out(BYTES, BYTES), Input("fill", 2 * BYTES), "st")
    body = start() + copy_in("in_a", BYTES) + PEER + address(16) + cluster_barrier()
    body += ".reg .b64 %generic; .reg .b32 %v, %owner; cvt.u64.u32 %generic, %mine; cvta.shared.u64 %generic, %generic; "
    body += "mapa.u64 %generic, %generic, %peer; ld.b32 %v, [%generic]; getctarank.u64 %owner, %generic; "
    body += "shl.b32 %owner, %owner, 28; xor.b32 %v, %v, %owner; getctarank.shared::cluster.u32 %owner, %theirs; "
    body += "add.u32 %v, %v, %owner; " + result("%v") + cluster_barrier()
    yield case("mapa.u64 and getctarank", body, Input("fill", 1024), "mapa, getctarank")
    body = start() + PEER + address(4) + ".reg .pred %p, %q; .reg .b64 %generic; .reg .b32 %v, %w; "
    body += "cvt.u64.u32 %generic, %theirs; cvta.shared::cluster.u64 %generic, %generic; isspacep.shared::cluster %p, %generic; "
    body += "isspacep.shared::cta %q, %generic; selp.b32 %v, 1, 0, %p; selp.b32 %w, 2, 0, %q; or.b32 %v, %v, %w; "
    body += "isspacep.global %p, %generic; selp.b32 %w, 4, 0, %p; or.b32 %v, %v, %w; isspacep.global %p, %out; "
    body += "selp.b32 %w, 8, 0, %p; or.b32 %v, %v, %w; " + result("%v") + cluster_barrier()
    yield case("isspacep", body, Input("fill", 1024), "isspacep")


def atomics() -> Iterator[Case]:
    for op, t in (
        ("add", "u32"),
        ("min", "s32"),
        ("max", "u32"),
        ("and", "b32"),
        ("or", "b32"),
        ("xor", "b32"),
        ("exch", "b32"),
        ("inc", "u32"),
    ):
        body = start() + copy_in("in_a", BYTES) + PEER + address(4) + cluster_barrier()
        body += f".reg .b32 %v, %old; ld.shared.b32 %v, [%mine+1024]; atom.relaxed.cluster.shared::cluster.{op}.{t} %old, [%theirs], %v; "
        body += result("%old") + cluster_barrier() + "add.u64 %out, %out, 1024; " + copy_out(512)
        yield case(f"atom.shared::cluster.{op}.{t}", body, Input("fill", 2048), "atom", kind="u32")
    body = start() + copy_in("in_a", BYTES) + PEER + address(0) + cluster_barrier()
    body += "red.relaxed.cluster.shared::cluster.add.u32 [%theirs], %t; " + cluster_barrier() + copy_out(512)
    yield case("red.shared::cluster.add.u32 contended", body, Input("fill", 4096), "red", 8)
    for width in (32, 64):
        body = start() + copy_in("in_a", BYTES) + PEER + address(8) + cluster_barrier()
        body += f".reg .b{width} %v, %old; ld.shared.b{width} %v, [%mine+1024]; "
        body += f"atom.acq_rel.cluster.shared::cluster.cas.b{width} %old, [%theirs], %v, %v; " + result("%old", width) + cluster_barrier()
        yield case(f"atom.shared::cluster.cas.b{width}", body, Input("fill", width * 32), "atom")


def asynchronous_stores() -> Iterator[Case]:
    scalars = (("b32", "%v0", 4), ("u32", "%v0", 4), ("s32", "%v1", 4), ("b64", "%w0", 8), ("u64", "%w0", 8), ("s64", "%w1", 8))
    vectors = (
        ("v2.b32", "{%v0, %v1}", 8),
        ("v4.b32", "{%v0, %v1, %v2, %v3}", 16),
        ("v2.b64", "{%w0, %w1}", 16),
        ("v4.f32", "{%v0, %v1, %v2, %v3}", 16),
    )
    for form, registers, size in (*scalars, *vectors):
        name = f"st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.{form}"
        body = start() + copy_in("in_a", BYTES) + PEER + address(16, BYTES)
        body += ".reg .b32 %v<4>; .reg .b64 %w<2>; st.shared.v4.b32 [%mine+2048], {0, 0, 0, 0}; "
        body += "ld.shared.v4.b32 {%v0, %v1, %v2, %v3}, [%mine]; mov.b64 %w0, {%v0, %v1}; mov.b64 %w1, {%v2, %v3}; "
        body += expect(128 * size) + cluster_barrier()
        body += f"{name} [%theirs], {registers}, [%peer_bar]; " + wait() + copy_out(BYTES, BYTES) + cluster_barrier()
        yield case(name, body, Input("fill", 2 * BYTES), "st.async")
    reductions = [
        ("inc", "u32"),
        ("dec", "u32"),
        ("min", "u32"),
        ("min", "s32"),
        ("max", "u32"),
        ("max", "s32"),
        ("add", "u32"),
        ("add", "s32"),
    ]
    reductions += [("and", "b32"), ("or", "b32"), ("xor", "b32"), ("add", "u64")]
    for op, t in reductions:
        bits = int(t[1:])
        name = f"red.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes.{op}.{t}"
        body = start() + copy_in("in_a", BYTES) + PEER + address(8, 1024)
        body += f".reg .b{bits} %v; ld.shared.b{bits} %v, [%mine]; " + expect(128 * bits // 8) + cluster_barrier()
        body += f"{name} [%theirs], %v, [%peer_bar]; " + wait() + copy_out(1024, 1024) + cluster_barrier()
        yield case(name, body, Input("fill", 2048), "red.async")


def barriers() -> Iterator[Case]:
    for arrive, wait_form in (
        ("barrier.cluster.arrive.release.aligned", "barrier.cluster.wait.acquire.aligned"),
        ("barrier.cluster.arrive", "barrier.cluster.wait"),
        ("barrier.cluster.arrive.relaxed.aligned", "barrier.cluster.wait.aligned"),
    ):
        body = start() + copy_in("in_a", BYTES) + PEER + address(16)
        body += ("fence.acq_rel.cluster; " if "relaxed" in arrive else "") + f"{arrive}; {wait_form}; "
        body += ".reg .b32 %v; ld.shared::cluster.b32 %v, [%theirs]; " + result("%v") + cluster_barrier()
        yield case(f"{arrive} {wait_form}", body, Input("fill", 2048), "barrier.cluster", 4)
    remote = (
        ("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%peer_bar]", 128),
        ("mbarrier.arrive.shared::cluster.b64 _, [%peer_bar], 2", 256),
        ("mbarrier.arrive.relaxed.cluster.shared::cluster.b64 _, [%peer_bar]", 128),
    )
    for form, arrivals in remote:
        body = (
            start(arrivals) + copy_in("in_a", BYTES) + PEER + cluster_barrier() + f"{form}; " + wait() + copy_out(512) + cluster_barrier()
        )
        yield case(form, body, Input("fill", 1024), "mbarrier.arrive on a remote mbarrier")
    body = start(2) + copy_in("in_a", BYTES) + PEER + cluster_barrier()
    body += "@%first mbarrier.arrive.expect_tx.release.cluster.shared::cluster.b64 _, [%peer_bar], 64; "
    body += "@%first mbarrier.complete_tx.relaxed.cluster.shared::cluster.b64 [%peer_bar], 64; "
    body += "@%first mbarrier.arrive.shared::cta.b64 _, [%bar]; " + wait() + copy_out(512) + cluster_barrier()
    yield case("mbarrier.arrive.expect_tx remote", body, Input("fill", 1024), "mbarrier.arrive.expect_tx")
    body = start(1) + copy_in("in_a", BYTES) + PEER + cluster_barrier()
    body += "@%first mbarrier.expect_tx.relaxed.cluster.shared::cluster.b64 [%peer_bar], 32; " + cluster_barrier()
    body += "@%first mbarrier.arrive.shared::cta.b64 _, [%bar]; "
    body += "@%first mbarrier.complete_tx.relaxed.cluster.shared::cluster.b64 [%peer_bar], 32; "
    body += wait().replace("try_wait.parity.", "try_wait.parity.acquire.cluster.") + copy_out(512) + cluster_barrier()
    yield case("mbarrier.expect_tx remote", body, Input("fill", 1024), "mbarrier.expect_tx")


def cases() -> Iterator[Case]:
    for group in (loads_and_stores, atomics, asynchronous_stores, barriers):
        yield from group()
