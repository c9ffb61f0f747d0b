"""Each kind of report from a small kernel that deserves it, with the place named; and its clean twin without one."""

import numpy as np
import pytest

from tandem_attn.emulator import run
from tests.emulator.kernels import kernel, kinds, launch, store_lanes

INIT = "mov.b32 %r1, smem; setp.eq.u32 %p1, %tid, 0; @%p1 mbarrier.init.shared::cta.b64 [%r1], {count}; bar.sync 0;\n"


def test_deadlock_names_the_barrier_and_what_is_missing():
    wait = (
        INIT.format(count=3)
        + """
    @%p1 mbarrier.arrive.shared::cta.b64 _, [%r1];
    W: mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r1], 0;
    @!%p2 bra W;
    """
    )
    result = launch(wait, shared=64)
    assert kinds(result) == ["deadlock"] and not result.finished
    report = result.reports[0]
    assert "1 of 3 arrivals" in report.message and "try_wait" in report.ptx
    assert kernel(wait).splitlines()[report.ptx_line - 1].strip().startswith("W: mbarrier.try_wait")


def test_a_warp_that_counts_its_tries_gives_up_waiting():
    """As on an H200, where the recorded cases "span pitch" do so after 16 tries; what counts without an end is a deadlock still."""
    tries = (
        INIT.format(count=3)
        + """
    mov.u32 %r2, 0;
    W: mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r1], 0;
    @%p2 bra DONE; add.u32 %r2, %r2, 1; setp.lt.u32 %p3, %r2, {tries}; @%p3 bra W;
    DONE:
    """
    )
    count = np.zeros(64, np.uint32)
    assert launch(tries.format(tries=16) + store_lanes("%r2"), count, shared=64, threads=64).ok
    assert (count == 16).all()
    assert kinds(launch(tries.format(tries=1 << 30) + store_lanes("%r2"), count, shared=64, threads=64)) == ["deadlock"]


def test_a_dependency_between_ctas_needs_them_resident_together():
    body = """
    ld.param.u64 %rd1, [p0]; mov.u32 %r1, %ctaid.x; setp.eq.u32 %p1, %tid, 0; setp.eq.u32 %p2, %r1, 0; and.pred %p3, %p1, %p2;
    @!%p1 bra DONE;
    @%p2 bra SPIN;
    atom.global.release.gpu.add.u32 %r2, [%rd1], 1;
    bra DONE;
    SPIN: ld.global.acquire.gpu.b32 %r3, [%rd1];
    setp.lt.u32 %p4, %r3, 3;
    @%p4 bra SPIN;
    DONE:
    """
    flag = np.zeros(1, np.uint32)
    assert launch(body, flag, grid=4).ok and flag[0] == 3
    flag[:] = 0
    result = launch(body, flag, grid=4, resident_ctas=1)
    assert kinds(result) == ["deadlock"] and "wait for room" in result.reports[0].message


def test_spin_locks_between_warps_make_progress():
    body = """
    ld.param.u64 %rd1, [p0]; and.b32 %r1, %tid, 31; setp.ne.u32 %p1, %r1, 0; @%p1 bra DONE;
    LOCK: atom.global.acquire.gpu.cas.b32 %r2, [%rd1], 0, 1; setp.ne.u32 %p2, %r2, 0; @%p2 bra LOCK;
    ld.global.b32 %r3, [%rd1+4]; add.u32 %r3, %r3, 1; st.global.b32 [%rd1+4], %r3;
    atom.global.release.gpu.exch.b32 %r2, [%rd1], 0;
    DONE:
    """
    for schedule in ("at-issue", "random"):
        cells = np.zeros(2, np.uint32)
        assert launch(body, cells, threads=256, grid=3, schedule=schedule).ok
        assert cells.tolist() == [0, 24]


@pytest.mark.parametrize(
    ("kind", "body", "twin"),
    [
        ("out-of-bounds", "st.shared.b32 [%r1+4096], %r2;", "st.shared.b32 [%r1+60], %r2;"),
        ("misaligned", "st.shared.v2.b32 [%r1+4], {%r2, %r3};", "st.shared.v2.b32 [%r1+8], {%r2, %r3};"),
        ("uninitialised", "ld.shared.b32 %r2, [%r1];", "st.shared.b32 [%r1], %r2; ld.shared.b32 %r2, [%r1];"),
        ("trap", "trap;", "setp.eq.u32 %p1, %tid, 99; @%p1 trap;"),
        (
            "mbarrier",
            "mbarrier.arrive.shared::cta.b64 _, [%r1];",
            "mbarrier.init.shared::cta.b64 [%r1], 32; mbarrier.arrive.shared::cta.b64 _, [%r1];",
        ),
        ("register-budget", "setmaxnreg.dec.sync.aligned.u32 20;", "setmaxnreg.dec.sync.aligned.u32 40;"),
        ("barrier", "barrier.cluster.wait.aligned;", "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;"),
        ("barrier", "bar.sync 1, 40;", "bar.sync 1, 32;"),
    ],
)
def test_report_and_its_clean_twin(kind, body, twin):
    start = "mov.b32 %r1, smem; mov.b32 %r2, 5; mov.b32 %r3, 6;\n    "
    result = launch(start + body, shared=64)
    assert kinds(result) == [kind], result.reports
    report = result.reports[0]
    assert report.cta == (0, 0, 0) and report.warp == 0 and report.ptx.rstrip(";") in body
    assert launch(start + twin, shared=64).ok


def test_global_accesses_outside_every_tensor_say_how_far():
    result = launch("ld.param.u64 %rd1, [p0]; ld.global.b32 %r1, [%rd1+128];", np.zeros(32, np.uint32))
    assert kinds(result) == ["out-of-bounds"] and "0 bytes behind the end of 0" in result.reports[0].message


ALLOC = """
    mov.b32 %r1, smem;
    tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r1], {columns};
    bar.sync 0; ld.shared.b32 %r2, [%r1];
"""


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ("tmem-allocation", ALLOC.format(columns=64)),
        ("tmem-allocation", ALLOC.format(columns=48)),
        ("tmem-allocation", ALLOC.format(columns=64) + "tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r2, 32;"),
        ("tmem-allocation", "mov.b32 %r2, 0; tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r3}, [%r2];"),
        (
            "uninitialised",
            ALLOC.format(columns=32)
            + "tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r3}, [%r2]; tcgen05.wait::ld.sync.aligned;"
            + "tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r2, 32;",
        ),
    ],
)
def test_tmem_is_allocated_written_and_freed(kind, body):
    assert kinds(launch(body, shared=64, target="sm_100a")) == [kind]


def test_tmem_that_never_gets_free_is_a_deadlock():
    body = ALLOC.format(columns=512) + "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r1], 32;"
    result = launch(body, shared=64, target="sm_100a")
    assert kinds(result) == ["deadlock"] and "512 of 512 are allocated" in result.reports[0].message


def test_a_result_of_tcgen05_ld_used_before_the_wait_is_reported_on_request():
    body = (
        ALLOC.format(columns=32)
        + """
    tcgen05.st.sync.aligned.32x32b.x1.b32 [%r2], {%tid}; tcgen05.wait::st.sync.aligned;
    tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r3}, [%r2];
    add.u32 %r4, %r3, 1;
    tcgen05.wait::ld.sync.aligned;
    tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r2, 32;
    """
    )
    assert launch(body, shared=64, target="sm_100a").ok
    assert kinds(launch(body, shared=64, target="sm_100a", checks=["tmem-load-use"])) == ["tmem-load-use"]


WGMMA = """
    mov.b32 %r1, smem; mad.lo.u32 %r2, %tid, 16, %r1; mov.b32 %r3, 0;
    st.shared.v4.b32 [%r2], {{%r3, %r3, %r3, %r3}}; st.shared.v4.b32 [%r2+2048], {{%r3, %r3, %r3, %r3}};
    fence.proxy.async.shared::cta; bar.sync 0;
    shr.u32 %r4, %r1, 4; cvt.u64.u32 %rd1, %r4; or.b64 %rd1, %rd1, 0x1000080000;
    mov.f32 %f1, 0f00000000; mov.f32 %f2, %f1; mov.f32 %f3, %f1; mov.f32 %f4, %f1; mov.pred %p1, 1;
    wgmma.fence.sync.aligned;
    wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {{%f1, %f2, %f3, %f4}}, %rd1, %rd1, %p1, 1, 1, 0, 0;
    wgmma.commit_group.sync.aligned;
    {early}
    wgmma.wait_group.sync.aligned 0;
    add.f32 %f5, %f1, %f2;
"""


def test_accumulators_touched_before_wait_group():
    assert launch(WGMMA.format(early=""), threads=128, shared=8192).ok
    result = launch(WGMMA.format(early="add.f32 %f6, %f1, %f1;"), threads=128, shared=8192)
    assert set(kinds(result)) == {"register-in-flight"}
    assert "%f1" in result.reports[0].message and "add.f32 %f6" in result.reports[0].ptx


def test_registers_written_without_a_wgmma_fence():
    """The write is arithmetic: copies are passed over, as compilers put them behind the fence."""
    written = WGMMA.replace("wgmma.fence.sync.aligned;", "wgmma.fence.sync.aligned; add.f32 %f1, %f1, %f2;")
    result = launch(written.format(early=""), threads=128, shared=8192)
    assert kinds(result) == ["register-in-flight"] and "%f1 written without a wgmma.fence" in result.reports[0].message
    fenced = written.replace("add.f32 %f1, %f1, %f2;", "add.f32 %f1, %f1, %f2; wgmma.fence.sync.aligned;")
    assert launch(fenced.format(early=""), threads=128, shared=8192).ok


def test_an_unelected_reduction():
    body = """
    ld.param.u64 %rd1, [p0]; mov.b32 %r1, smem; mad.lo.u32 %r2, %tid, 4, %r1; mov.f32 %f1, 0f3F800000; st.shared.f32 [%r2], %f1;
    setp.eq.u32 %p1, %tid, 0; fence.proxy.async.shared::cta; bar.sync 0;
    {guard}cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%rd1], [%r1], 128;
    {guard}cp.async.bulk.commit_group;
    {guard}cp.async.bulk.wait_group 0;
    """
    out = np.zeros(32, np.float32)
    assert launch(body.format(guard="@%p1 "), out, shared=128).ok and (out == 1).all()
    assert kinds(launch(body.format(guard=""), out, shared=128)) == ["unelected"]


def test_reports_can_be_raised_and_chosen():
    body = "mov.b32 %r1, smem; ld.shared.b32 %r2, [%r1];"
    result = launch(body, shared=64)
    with pytest.raises(Exception, match="never written"):
        result.raise_for_reports()
    assert launch(body, shared=64, checks="none").ok
    assert launch(store_lanes("%tid"), np.zeros(32, np.uint32)).raise_for_reports() is None


def test_a_phase_that_passes_unseen():
    """The consumer waits for phase 0; the producer completes phases 0 and 1 before it looks again."""
    body = """
    mov.b32 %r1, smem; setp.eq.u32 %p1, %tid, 0; setp.lt.u32 %p2, %tid, 32; @%p1 mbarrier.init.shared::cta.b64 [%r1], 1; bar.sync 0;
    @%p2 bra PRODUCER;
    W: mbarrier.try_wait.parity.shared::cta.b64 %p3, [%r1], 0; @!%p3 bra W;
    bra DONE;
    PRODUCER: nanosleep.u32 100; @%p1 mbarrier.arrive.shared::cta.b64 _, [%r1];
    {between} @%p1 mbarrier.arrive.shared::cta.b64 _, [%r1];
    DONE:
    """
    assert "mbarrier" in kinds(launch(body.format(between=""), threads=64, shared=64))
    single = body.replace("{between} @%p1 mbarrier.arrive.shared::cta.b64 _, [%r1];", "")
    assert launch(single, threads=64, shared=64).ok


def test_registers_read_before_any_write_are_reported_on_request():
    body = "{first} add.u32 %r2, %r1, 1;" + store_lanes("%r2")
    out = np.zeros(32, np.uint32)
    assert launch(body.format(first=""), out).ok
    assert launch(body.format(first="mov.b32 %r1, 3;"), out, checks=["uninitialised-register"]).ok
    result = launch(body.format(first=""), out, checks=["uninitialised-register"])
    assert kinds(result) == ["uninitialised-register"] and "%r1 is read" in result.reports[0].message


def test_a_full_register_file_grants_what_it_was_divided_into():
    """256 threads of 255 registers hold all 65,536: they are handed out in eights, so `setmaxnreg.inc` to 256 has nothing to wait for."""
    text = kernel("setmaxnreg.inc.sync.aligned.u32 256;").replace(")\n{", ")\n.maxnreg 256\n{")
    result = run(text, [], (1,), block=(256,))
    assert result.ok, result.reports
