"""Barriers within a CTA: every mbarrier form, named barriers and their reductions, fences, setmaxnreg."""

from collections.abc import Iterator

from tests.emulator.ptx.asynchronous import SHARED, start, wait
from tests.emulator.ptx.case import Case, module
from tests.emulator.ptx.fragments import thread_index
from tests.emulator.ptx.inputs import Input

FAMILY = "barriers"


def case(name: str, body: str, section: str, threads: int = 128, words: int = 1, directives: str = "") -> Case:
    """The body leaves its result in %v (and %w when words is 2) of every thread."""
    body = ".reg .b32 %v, %w; mov.u32 %v, 0; mov.u32 %w, 0; " + body
    stride = 4 * words
    body += f"mad.lo.u64 %at, %thread, {stride}, %out; st.global.b32 [%at], %v; "
    body += "st.global.b32 [%at+4], %w; " if words == 2 else ""
    return Case(
        name=name,
        family=FAMILY,
        ptx=module(body, ["out", "in_a"], prologue=SHARED, directives=directives),
        inputs={"in_a": Input("u32", threads)},
        out=Input("fill", threads * stride),
        section=f"Parallel Synchronization and Communication: {section}",
        threads=threads,
        shared=4096,
    )


def ask(kind: str, operand: str, bit: int) -> str:
    """Add a bit to %v when the phase is complete."""
    return f"mbarrier.{kind}.shared::cta.b64 %done, [%bar], {operand}; @%done or.b32 %v, %v, {1 << bit}; "


def phases() -> Iterator[Case]:
    """Thread 0 alone drives an mbarrier and notes which tests succeed after each step."""
    only = "bar.sync 0; @!%first bra END; .reg .b64 %s0, %s1, %s2; .reg .b32 %n; "
    end = "END: "
    for test in ("test_wait", "try_wait"):
        parity = f"{test}.parity"
        body = start(2) + only + ask(parity, "1", 0) + ask(parity, "0", 1)
        body += "mbarrier.arrive.shared::cta.b64 %s0, [%bar]; " + ask(test, "%s0", 2) + ask(parity, "0", 3)
        body += "mbarrier.arrive.shared::cta.b64 %s1, [%bar]; " + ask(test, "%s0", 4) + ask(parity, "0", 5) + ask(parity, "1", 6)
        body += "mbarrier.arrive.shared::cta.b64 %s2, [%bar], 2; " + ask(test, "%s0", 7) + ask(test, "%s2", 8) + ask(parity, "1", 9)
        yield case(f"mbarrier.{test} phases", body + end, f"mbarrier.{test}")
    body = start(5) + only + "mbarrier.arrive.shared::cta.b64 %s0, [%bar]; mbarrier.pending_count.b64 %v, %s0; "
    body += "mbarrier.arrive.noComplete.shared::cta.b64 %s1, [%bar], 2; mbarrier.pending_count.b64 %n, %s1; "
    body += "shl.b32 %n, %n, 8; or.b32 %v, %v, %n; mbarrier.arrive_drop.shared::cta.b64 %s2, [%bar]; "
    body += "mbarrier.pending_count.b64 %n, %s2; shl.b32 %n, %n, 16; or.b32 %v, %v, %n; "
    yield case("mbarrier.pending_count", body + end, "mbarrier.pending_count")
    body = start(3) + only + "mbarrier.arrive_drop.shared::cta.b64 %s0, [%bar]; mbarrier.arrive.shared::cta.b64 _, [%bar], 2; "
    body += ask("test_wait.parity", "0", 0) + "mbarrier.arrive.shared::cta.b64 _, [%bar]; " + ask("test_wait.parity", "1", 1)
    body += "mbarrier.arrive.shared::cta.b64 _, [%bar]; " + ask("test_wait.parity", "1", 2) + ask("test_wait.parity", "0", 3)
    yield case("mbarrier.arrive_drop", body + end, "mbarrier.arrive_drop")
    body = start(3) + only + "mbarrier.arrive_drop.noComplete.shared::cta.b64 %s0, [%bar], 1; mbarrier.pending_count.b64 %v, %s0; "
    body += "mbarrier.arrive_drop.expect_tx.shared::cta.b64 _, [%bar], 8; mbarrier.arrive.shared::cta.b64 _, [%bar]; "
    body += (
        ask("test_wait.parity", "0", 8) + "mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [%bar], 8; " + ask("test_wait.parity", "0", 9)
    )
    body += "mbarrier.arrive.shared::cta.b64 _, [%bar]; " + ask("test_wait.parity", "1", 10)
    yield case("mbarrier.arrive_drop.expect_tx", body + end, "mbarrier.arrive_drop.expect_tx")
    body = start(1) + only + "mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%bar], 48; mbarrier.arrive.shared::cta.b64 _, [%bar]; "
    body += ask("test_wait.parity", "0", 0) + "mbarrier.complete_tx.shared::cta.b64 [%bar], 32; " + ask("test_wait.parity", "0", 1)
    body += "mbarrier.complete_tx.shared::cta.b64 [%bar], 16; " + ask("test_wait.parity", "0", 2)
    body += "mbarrier.complete_tx.shared::cta.b64 [%bar], 16; mbarrier.arrive.expect_tx.shared::cta.b64 %s0, [%bar], 16; "
    body += ask("test_wait", "%s0", 3) + ask("test_wait.parity", "1", 4)
    yield case("mbarrier.expect_tx complete_tx", body + end, "mbarrier.expect_tx, mbarrier.complete_tx")
    body = start(1) + only + "mbarrier.arrive.shared::cta.b64 _, [%bar]; mbarrier.inval.shared::cta.b64 [%bar]; "
    body += "mbarrier.init.shared::cta.b64 [%bar], 2; mbarrier.arrive.release.cta.shared::cta.b64 _, [%bar]; "
    body += ask("test_wait.parity", "0", 0) + "mbarrier.arrive.relaxed.cta.shared::cta.b64 _, [%bar]; "
    body += ask("test_wait.parity.acquire.cta", "0", 1) + "mbarrier.try_wait.parity.relaxed.cta.shared::cta.b64 %done, [%bar], 0, 100; "
    body += "@%done or.b32 %v, %v, 4; "
    yield case("mbarrier.inval", body + end, "mbarrier.inval")
    loop = start(128) + "bar.sync 0; .reg .pred %more; .reg .b32 %phase, %cell; mov.u32 %phase, 0; mad.lo.u32 %cell, %t, 4, %base; "
    loop += "st.shared.b32 [%cell], %t; bar.sync 0; "
    loop += "TURN: ld.shared.b32 %w, [%cell]; mad.lo.u32 %v, %v, 31, %w; mbarrier.arrive.shared::cta.b64 _, [%bar]; "
    loop += ".reg .b32 %odd, %next; and.b32 %odd, %phase, 1; " + wait().replace("[%bar], 0;", "[%bar], %odd;")
    loop += "add.u32 %next, %t, %phase; add.u32 %next, %next, 1; and.b32 %next, %next, 127; mad.lo.u32 %cell, %next, 4, %base; "
    loop += "add.u32 %phase, %phase, 1; setp.lt.u32 %more, %phase, 9; @%more bra TURN; "
    yield case("mbarrier.arrive 9 phases of 128 threads", loop, "mbarrier.arrive")


def named() -> Iterator[Case]:
    cell = ".reg .b32 %cell, %other; mov.u32 %cell, smem; mad.lo.u32 %other, %t, 4, %cell; "
    cell += "xor.b32 %w, %t, 127; mad.lo.u32 %cell, %w, 4, %cell; "
    exchange = "st.shared.b32 [%other], %t; {form}; ld.shared.b32 %v, [%cell]; "
    forms = (
        "bar.sync 0",
        "bar.sync 3, 128",
        "barrier.sync 5",
        "barrier.sync.aligned 15, 128",
        "barrier.cta.sync.aligned 2",
        "bar.cta.sync 1",
    )
    for form in forms:
        yield case(form, thread_index() + cell + exchange.format(form=form), form.split()[0])
    load = thread_index() + ".reg .pred %p, %q; mad.lo.u64 %at, %thread, 4, %in_a; ld.global.b32 %w, [%at]; "
    some = "and.b32 %w, %w, 7; setp.{test} %p, %w, 0; "
    for test in ("ne.u32", "lt.u32", "ge.u32"):
        for form in ("bar.red.popc.u32 %v, 0, %p", "bar.red.popc.u32 %v, 2, 128, !%p", "barrier.red.popc.aligned.u32 %v, 4, %p"):
            yield case(f"{form} {test}", load + some.format(test=test) + f"{form}; ", "bar.red")
        for op in ("and", "or"):
            form = f"bar.red.{op}.pred %q, 1, %p"
            yield case(f"{form} {test}", load + some.format(test=test) + f"{form}; selp.b32 %v, 1, 0, %q; ", "bar.red")
    # Warps 0-1 produce, warps 2-3 consume: bar.arrive on one barrier, bar.sync on the other.
    body = thread_index() + ".reg .pred %producer, %more; .reg .b32 %cell, %turn, %slot; setp.lt.u32 %producer, %t, 64; mov.u32 %turn, 0; "
    body += "mov.u32 %cell, smem; and.b32 %slot, %t, 63; mad.lo.u32 %cell, %slot, 4, %cell; TURN: @!%producer bra CONSUME; "
    body += "mad.lo.u32 %w, %turn, 100, %t; st.shared.b32 [%cell], %w; bar.arrive 1, 128; bar.sync 2, 128; bra.uni NEXT; "
    body += "CONSUME: bar.sync 1, 128; ld.shared.b32 %w, [%cell]; mad.lo.u32 %v, %v, 7, %w; bar.arrive 2, 128; "
    body += "NEXT: add.u32 %turn, %turn, 1; setp.lt.u32 %more, %turn, 5; @%more bra TURN; "
    yield case("bar.arrive producers and consumers", body, "bar.arrive")
    body = thread_index() + ".reg .b32 %id, %cell; shr.u32 %id, %t, 6; add.u32 %id, %id, 4; mov.u32 %cell, smem; "
    body += "mad.lo.u32 %w, %t, 4, %cell; st.shared.b32 [%w], %t; bar.sync %id, 64; xor.b32 %w, %t, 32; "
    body += "mad.lo.u32 %w, %w, 4, %cell; ld.shared.b32 %v, [%w]; "
    yield case("bar.sync register id, two halves", body, "bar.sync")
    body = thread_index() + ".reg .pred %odd; .reg .b32 %cell; mov.u32 %cell, smem; and.b32 %w, %t, 1; setp.ne.u32 %odd, %w, 0; "
    body += "mad.lo.u32 %w, %t, 4, %cell; st.shared.b32 [%w], %t; @%odd bra ODD; barrier.sync 1, 128; bra.uni JOIN; "
    body += "ODD: barrier.sync 1, 128; JOIN: xor.b32 %w, %t, 65; mad.lo.u32 %w, %w, 4, %cell; ld.shared.b32 %v, [%w]; "
    yield case("barrier.sync from divergent code", body, "barrier.sync")


def fences() -> Iterator[Case]:
    forms = [f"fence.{order}.{scope}" for order in ("sc", "acq_rel", "acquire", "release") for scope in ("cta", "cluster", "gpu", "sys")]
    forms = [f for f in forms if not f.startswith(("fence.acquire", "fence.release"))]  # those two need PTX 8.6 with a sync_restrict
    forms += ["membar.cta", "membar.gl", "membar.sys", "fence.proxy.alias", "fence.proxy.async", "fence.proxy.async.global"]
    forms += ["fence.proxy.async.shared::cta", "fence.proxy.async.shared::cluster", "fence.mbarrier_init.release.cluster"]
    forms += ["fence.proxy.tensormap::generic.release.gpu", "fence.proxy.tensormap::generic.release.cta"]
    for form in forms:
        body = thread_index() + f"st.global.b32 [%in_a], %t; {form}; mov.u32 %v, %t; "
        yield case(form, body, "membar, fence")


def registers() -> Iterator[Case]:
    """setmaxnreg moves registers from one warpgroup to another; the values in use survive."""
    body = thread_index() + ".reg .pred %low; .reg .b32 %r<40>; mad.lo.u64 %at, %thread, 4, %in_a; ld.global.b32 %r0, [%at]; "
    body += "".join(f"mad.lo.u32 %r{i}, %r{i - 1}, {2 * i + 1}, %t; " for i in range(1, 40))
    body += "setp.lt.u32 %low, %t, 128; @%low bra FEW; setmaxnreg.inc.sync.aligned.u32 184; "
    body += "".join(f"add.u32 %v, %v, %r{i}; " for i in range(40)) + "bra.uni JOIN; FEW: setmaxnreg.dec.sync.aligned.u32 72; "
    body += "".join(f"xor.b32 %v, %v, %r{i}; " for i in range(40)) + "JOIN: "
    yield case("setmaxnreg", body, "setmaxnreg", threads=256, directives=" .reqntid 256, 1, 1 .minnctapersm 1 .maxnreg 128")


def cases() -> Iterator[Case]:
    for group in (phases, named, fences, registers):
        yield from group()
