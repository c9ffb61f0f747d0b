"""One minimal kernel per sort of race, with its repaired twin.

In a body, a line with `//+` is only in the repaired kernel and one with `//-` only in the broken one; `//1` and `//2` mark
the two sides that the report must name (either may be the one that it is filed under).
"""

from dataclasses import dataclass, field

import numpy as np

HEAD = """.version 8.7
.target {target}
.address_size 64
.shared .align 1024 .b8 smem[16384];
.visible .entry kernel(.param .u64 out){directives}
{{
.reg .b32 %r<64>; .reg .b64 %rd<32>; .reg .pred %p<16>; .reg .f32 %f<16>; .reg .b32 %t<16>;
ld.param.u64 %rd0, [out];
mov.u32 %r0, %tid.x;
setp.eq.u32 %p0, %r0, 0;
shr.u32 %r1, %r0, 5;
and.b32 %r2, %r0, 31;
setp.eq.u32 %p1, %r1, 0;
mov.u32 %r3, smem;
shl.b32 %r4, %r0, 2;
add.u32 %r4, %r4, %r3;
xor.b32 %r5, %r0, 33;
shl.b32 %r5, %r5, 2;
add.u32 %r5, %r5, %r3;
add.u32 %r6, %r3, 8192;
mov.u32 %r7, %ctaid.x;
setp.eq.u32 %p2, %r7, 0;
cvt.u64.u32 %rd1, %r0;
shl.b64 %rd1, %rd1, 2;
add.u64 %rd1, %rd1, %rd0;
"""
# Operands in 16-byte chunks, no swizzle: 8-row groups 256 bytes apart, the two chunks of K 128 bytes.
FILL = """shl.b32 %r10, %r0, 4; add.u32 %r10, %r10, %r3;
st.shared.v4.b32 [%r10], {%r0, %r0, %r0, %r0}; //2
st.shared.v4.b32 [%r10+2048], {%r0, %r0, %r0, %r0};
st.shared.v4.b32 [%r10+4096], {%r0, %r0, %r0, %r0};
shr.u32 %r11, %r3, 4; cvt.u64.u32 %rd10, %r11; or.b64 %rd10, %rd10, DESC;
add.u64 %rd11, %rd10, 256;
"""
WGMMA_FILL = FILL.replace("DESC", str(8 << 16 | 16 << 32))
TC_FILL = FILL.replace("DESC", str(8 << 16 | 16 << 32 | 1 << 46))
WGMMA = """setp.ne.u32 %p9, %r0, 999;
mov.f32 %f0, 0f00000000; add.f32 %f0, %f0, %f0; add.f32 %f1, %f0, %f0; add.f32 %f2, %f0, %f0; add.f32 %f3, %f0, %f0;
wgmma.fence.sync.aligned;
wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%f0, %f1, %f2, %f3}, %rd10, %rd11, %p9, 1, 1, 0, 0; //1
wgmma.commit_group.sync.aligned;
"""
INIT = """@%p0 mbarrier.init.shared::cta.b64 [%r6], 1;
bar.sync 0;
"""
TMEM = """@%p1 tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r6+64], 32;
@%p1 tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;
@%p0 mbarrier.init.shared::cta.b64 [%r6], 1;
bar.sync 0;
ld.shared.b32 %r20, [%r6+64];
shl.b32 %r21, %r1, 21; add.u32 %r21, %r21, %r20;
tcgen05.st.sync.aligned.32x32b.x16.b32 [%r21], {%r0, %r0, %r0, %r0, %r0, %r0, %r0, %r0, %r0, %r0, %r0, %r0, %r0, %r0, %r0, %r0};
tcgen05.wait::st.sync.aligned;
"""
IDESC = 1 << 4 | 2 << 17 | 8 << 24  # f32 += f16 f16, N 16, M 128
TMEM_END = """bar.sync 0;
@%p1 tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r20, 32;
"""


def mma(mark: str = "", commit: str = "") -> str:
    return f"""setp.ne.u32 %p9, %r0, 999;
@%p0 tcgen05.mma.cta_group::1.kind::f16 [%r20], %rd10, %rd11, {IDESC}, %p9; {mark}
@%p0 tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r6]; {commit}
"""


def wait(name: str, mark: str = "", parity: int = 0, address: str = "%r6") -> str:
    return f"{name}: mbarrier.try_wait.parity.shared::cta.b64 %p8, [{address}], {parity}; {mark}\n@!%p8 bra {name}; {mark}\n"


@dataclass(frozen=True)
class RaceKernel:
    """`kind` is what the broken kernel must be reported as; `checks` are those to run with."""

    name: str
    body: str
    kind: str = "race"
    target: str = "sm_90a"
    threads: int = 64
    grid: int = 1
    cluster: int = 1
    directives: str = ""
    checks: tuple[str, ...] | str = "all"
    words: str = ""  # must be in the message
    out: int = field(default=4096)

    def text(self, broken: bool) -> tuple[str, list[int]]:
        """PTX, and the lines of the two sides."""
        lines = (HEAD.format(target=self.target, directives=self.directives) + self.body + "ret;\n}\n").splitlines()
        drop = "//+" if broken else "//-"
        kept = [line for line in lines if drop not in line]
        sides = [i + 1 for i, line in enumerate(kept) if "//1" in line or "//2" in line]
        return "\n".join(kept) + "\n", sides

    def args(self) -> list[np.ndarray]:
        return [np.zeros(self.out, np.uint8)]


BULK = """@%p0 cp.async.bulk.global.shared::cta.bulk_group [%rd0], [%r3], 256; //{}
@%p0 cp.async.bulk.commit_group;
"""
BULK_END = "@%p0 cp.async.bulk.wait_group 0;\n"
LOAD = """@%p0 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r6], 256;
@%p0 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r3], [%rd0], 256, [%r6]; //2
"""
FLAG = """@!%p2 bra reader;
st.global.b32 [%rd1], %r0; //2
bar.sync 0;
{publish}
bra done;
reader:
{poll}
bar.sync 0;
ld.global.b32 %r9, [%rd1]; //1
done:
"""
SPIN = "spin: {load} %r8, [%rd0+2048]; setp.ne.u32 %p3, %r8, 1;\n@%p3 bra spin;\n{after}"

KERNELS = (
    RaceKernel("shared memory without a barrier", "st.shared.b32 [%r4], %r0; //2\nbar.sync 0; //+\nld.shared.b32 %r9, [%r5]; //1\n"),
    RaceKernel(
        "lanes of a warp without bar.warp.sync",
        "xor.b32 %r10, %r4, 4;\nst.shared.b32 [%r4], %r0; //2\nbar.warp.sync -1; //+\nld.shared.b32 %r9, [%r10]; //1\n",
        words="bar.warp.sync",
    ),
    RaceKernel("different values to one place", "st.shared.b32 [%r3], %r1; //-\nst.shared.b32 [%r3], 7; //+\n"),
    RaceKernel(
        "a plain store against an atomic",
        "@%p2 red.global.add.u32 [%rd0], 1; //2\n@!%p2 st.global.b32 [%rd0], %r7; //1 //-\n@!%p2 red.global.add.u32 [%rd0], %r7; //+\n",
        grid=2, threads=32,
    ),
    RaceKernel(
        "generic write, bulk store without proxy fence",
        "st.shared.b32 [%r4], %r0; //2\nfence.proxy.async.shared::cta; //+\nbar.sync 0;\n" + BULK.format(1) + BULK_END,
        "missing-proxy-fence",
    ),
    RaceKernel(
        "source of a bulk store reused before it is read",
        "st.shared.b32 [%r4], %r0;\nfence.proxy.async;\nbar.sync 0;\n" + BULK.format(2)
        + "@%p0 cp.async.bulk.wait_group.read 0; //+\nbar.sync 0;\nst.shared.b32 [%r4], %r1; //1\n" + BULK_END,
        words="wait_group",
    ),
    RaceKernel(
        "a bulk store still reads when the CTA ends",
        "st.shared.b32 [%r4], %r0;\nfence.proxy.async;\nbar.sync 0;\n" + BULK.format(1) + "@%p0 cp.async.bulk.wait_group.read 0; //+\n",
        words="may have exited",
    ),
    RaceKernel(
        "global result of a bulk store read while only its source is free",
        "st.shared.b32 [%r4], %r0;\nfence.proxy.async;\nbar.sync 0;\n" + BULK.format(2)
        + "@%p0 cp.async.bulk.wait_group.read 0; //-\n@%p0 cp.async.bulk.wait_group 0; //+\n"
        "@%p0 ld.global.b32 %r9, [%rd0]; //1\n" + BULK_END,
    ),
    RaceKernel("bulk load read without waiting", INIT + LOAD + wait("w", "//+") + "ld.shared.b32 %r9, [%r4]; //1\n" + wait("x")),
    RaceKernel(
        "missing expect_tx",
        INIT + LOAD.replace("@%p0 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r6], 256;",
            "@%p0 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r6], 256; //+\n@%p0 mbarrier.arrive.shared::cta.b64 _, [%r6]; //-")
        + wait("w") + "ld.shared.b32 %r9, [%r4]; //1\n",
    ),
    RaceKernel(
        "cp.async read without wait_group",
        "cp.async.ca.shared.global [%r4], [%rd1], 4; //2\ncp.async.commit_group;\ncp.async.wait_group 0; //+\nbar.sync 0;\n"
        "ld.shared.b32 %r9, [%r5]; //1\ncp.async.wait_all;\n",
        words="cp.async.wait_group",
    ),
    RaceKernel(
        "mbarrier wait missing",
        INIT + "@!%p1 bra consumer;\nst.shared.b32 [%r4], %r0; //2\nbar.warp.sync -1;\n@%p0 mbarrier.arrive.shared::cta.b64 _, [%r6];\n"
        "bra done;\nconsumer:\n" + wait("w", "//+") + "ld.shared.b32 %r9, [%r5]; //1\ndone:\n",
    ),
    RaceKernel(
        "mbarrier arrival before the other lanes are known to have written",
        INIT + "@!%p1 bra consumer;\nst.shared.b32 [%r4], %r0; //2\nbar.warp.sync -1; //+\n@%p0 mbarrier.arrive.shared::cta.b64 _, [%r6];\n"
        "bra done;\nconsumer:\n" + wait("w") + "ld.shared.b32 %r9, [%r5]; //1\ndone:\n",
    ),
    RaceKernel(
        "mbarrier arrival missing", INIT + "@%p0 mbarrier.arrive.shared::cta.b64 _, [%r6]; //+\n" + wait("w"), "deadlock", words="phase 0"
    ),
    RaceKernel(
        "mbarrier used before its initialisation is ordered",
        "@%p0 mbarrier.init.shared::cta.b64 [%r6], 1; //2\nbar.sync 0; //+\n@%p0 mbarrier.arrive.shared::cta.b64 _, [%r6];\n"
        "mov.u32 %r8, 0;\nslow: add.u32 %r8, %r8, 1; setp.lt.u32 %p3, %r8, 400;\n@%p3 bra slow;\n"
        + wait("w", "//1").replace("bra w; //1", "bra w;"),
        words="initialisation",
    ),
    RaceKernel(
        "a phase that a waiter by parity can miss",
        INIT.replace("bar.sync", "@%p0 mbarrier.init.shared::cta.b64 [%r6+8], 32;\nbar.sync")
        + "@!%p1 bra consumer;\n@%p0 mbarrier.arrive.shared::cta.b64 _, [%r6];\n" + wait("e", "//+", address="%r6+8")
        + "bar.warp.sync -1;\n@%p0 mbarrier.arrive.shared::cta.b64 _, [%r6];\nbra done;\nconsumer:\n" + wait("w")
        + "mbarrier.arrive.shared::cta.b64 _, [%r6+8];\n" + wait("x", parity=1) + "done:\n",
        "race|deadlock",
    ),
    RaceKernel(
        "global memory, flag without release",
        FLAG.format(publish="@%p0 st.relaxed.gpu.global.b32 [%rd0+2048], 1; //-\n@%p0 st.release.gpu.global.b32 [%rd0+2048], 1; //+",
            poll=SPIN.format(load="ld.acquire.gpu.global.b32", after="")),
        grid=2,
    ),
    RaceKernel(
        "global memory, flag without acquire",
        FLAG.format(publish="@%p0 st.release.gpu.global.b32 [%rd0+2048], 1;",
            poll=SPIN.format(load="ld.relaxed.gpu.global.b32", after="fence.acq_rel.gpu; //+")),
        grid=2,
    ),
    RaceKernel(
        "global memory, release of too narrow a scope",
        FLAG.format(publish="@%p0 atom.release.cta.global.exch.b32 %r9, [%rd0+2048], 1; //-\n"
            "@%p0 atom.release.gpu.global.exch.b32 %r9, [%rd0+2048], 1; //+", poll=SPIN.format(load="ld.acquire.gpu.global.b32", after="")),
        grid=2,
    ),
    RaceKernel(
        "global memory, membar missing",
        FLAG.format(publish="membar.gl; //+\n@%p0 st.volatile.global.b32 [%rd0+2048], 1;",
            poll=SPIN.format(load="ld.volatile.global.b32", after="membar.gl;")),
        grid=2,
    ),
    RaceKernel(
        "float additions in no fixed order", "@%p0 red.global.add.f32 [%rd0], 0f3F800000; //-\n@%p0 red.global.add.u32 [%rd0], 1; //+\n",
        "nondeterministic", grid=2, checks=("race", "nondeterministic"),
    ),
    RaceKernel(
        "distributed shared memory without a cluster barrier",
        "mov.u32 %r30, %cluster_ctarank; xor.b32 %r30, %r30, 1; mapa.shared::cluster.u32 %r31, %r4, %r30;\n"
        "barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;\nst.shared::cluster.b32 [%r31], %r0; //2\n"
        "barrier.cluster.arrive.aligned; //+\nbarrier.cluster.wait.aligned; //+\nld.shared.b32 %r9, [%r4]; //1\n"
        "barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;\n",
        grid=2, cluster=2,
    ),
    RaceKernel(
        "distributed shared memory of a CTA that may have ended",
        "mov.u32 %r30, %cluster_ctarank; xor.b32 %r30, %r30, 1; mapa.shared::cluster.u32 %r31, %r4, %r30;\n"
        "barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;\nst.shared::cluster.b32 [%r31], %r0; //1\n"
        "barrier.cluster.arrive.aligned; //+\nbarrier.cluster.wait.aligned; //+\n",
        grid=2, cluster=2, words="may have exited",
    ),
    RaceKernel(
        "wgmma operand written without proxy fence",
        WGMMA_FILL + "fence.proxy.async; //+\nbar.sync 0;\n" + WGMMA + "wgmma.wait_group.sync.aligned 0;\n",
        "missing-proxy-fence", threads=128,
    ),
    RaceKernel(
        "wgmma operand in shared memory overwritten before wait_group",
        WGMMA_FILL.replace("//2", "") + "fence.proxy.async;\nbar.sync 0;\n" + WGMMA + "wgmma.wait_group.sync.aligned 0; //+\nbar.sync 0;\n"
        "st.shared.b32 [%r4], %r0; //2\nwgmma.wait_group.sync.aligned 0;\n",
        threads=128, words="wgmma.commit_group and wait_group",
    ),
    RaceKernel(
        "first wgmma without wgmma.fence",
        WGMMA_FILL.replace("//2", "") + "fence.proxy.async;\nbar.sync 0;\n"
        + WGMMA.replace("wgmma.fence.sync.aligned;", "wgmma.fence.sync.aligned; //+")
        + "wgmma.wait_group.sync.aligned 0;\n",
        threads=128, words="wgmma.fence",
    ),
    RaceKernel(
        "wgmma accumulator read before wait_group",
        WGMMA_FILL.replace("//2", "") + "fence.proxy.async;\nbar.sync 0;\n" + WGMMA.replace("//1", "")
        + "wgmma.wait_group.sync.aligned 0; //+\nadd.f32 %f5, %f0, %f1; //1\nwgmma.wait_group.sync.aligned 0;\n",
        "register-in-flight", threads=128,
    ),
    RaceKernel(
        "accumulator read before the MMA is complete",
        TC_FILL.replace("//2", "") + "fence.proxy.async;\n" + TMEM + "bar.sync 0;\n" + mma("//2") + wait("w", "//+")
        + "tcgen05.ld.sync.aligned.32x32b.x1.b32 {%t0}, [%r21]; //1\ntcgen05.wait::ld.sync.aligned;\n" + wait("x") + TMEM_END,
        target="sm_100a", threads=128, words="tcgen05.commit",
    ),
    RaceKernel(
        "MMA overwrites what is still being loaded",
        TC_FILL.replace("//2", "") + "fence.proxy.async;\n" + TMEM + "tcgen05.ld.sync.aligned.32x32b.x1.b32 {%t0}, [%r21]; //2\n"
        "tcgen05.wait::ld.sync.aligned; //+\nbar.sync 0;\n" + mma("//1") + wait("w") + "tcgen05.wait::ld.sync.aligned;\n" + TMEM_END,
        target="sm_100a", threads=128, words="tcgen05.wait::ld",
    ),
    RaceKernel(
        "MMA adds to what is still being stored",
        TC_FILL.replace("//2", "") + "fence.proxy.async;\n" + TMEM.replace("%r0};", "%r0}; //2").replace("wait::st.sync.aligned;",
            "wait::st.sync.aligned; //+") + "bar.sync 0;\n" + mma("//1") + wait("w") + "tcgen05.wait::st.sync.aligned;\n" + TMEM_END,
        target="sm_100a", threads=128, words="tcgen05.wait::st",
    ),
    RaceKernel(
        "MMA operand written without proxy fence",
        TC_FILL + "fence.proxy.async; //+\n" + TMEM + "bar.sync 0;\n" + mma("//1") + wait("w") + TMEM_END,
        "missing-proxy-fence", target="sm_100a", threads=128,
    ),
    RaceKernel(
        "MMA operand overwritten before the MMA has read it",
        TC_FILL.replace("//2", "") + "fence.proxy.async;\n" + TMEM + "bar.sync 0;\n" + mma("//2") + wait("w", "//+")
        + "st.shared.b32 [%r4], %r0; //1\n" + wait("x") + TMEM_END,
        target="sm_100a", threads=128,
    ),
    RaceKernel(
        "TMEM freed while it is loaded",
        TMEM + "tcgen05.ld.sync.aligned.32x32b.x1.b32 {%t0}, [%r21]; //2\ntcgen05.wait::ld.sync.aligned; //+\n"
        + TMEM_END.replace("%r20, 32;", "%r20, 32; //1"),
        target="sm_100a", threads=128,
    ),
    RaceKernel(
        "result of tcgen05.ld used before wait::ld",
        TMEM + "tcgen05.ld.sync.aligned.32x32b.x1.b32 {%t0}, [%r21];\ntcgen05.wait::ld.sync.aligned; //+\nadd.u32 %t1, %t0, 1; //1\n"
        "tcgen05.wait::ld.sync.aligned;\n" + TMEM_END,
        "tmem-load-use", target="sm_100a", threads=128, checks=("tmem-load-use", "race"),
    ),
    RaceKernel(
        "TMEM rows shifted while they are loaded",
        TMEM + "@%p0 tcgen05.shift.cta_group::1.down [%r20]; //2\n"
        "@%p0 tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r6];\n" + wait("w", "//+")
        + "tcgen05.ld.sync.aligned.32x32b.x1.b32 {%t0}, [%r21]; //1\ntcgen05.wait::ld.sync.aligned;\n" + wait("x") + TMEM_END,
        target="sm_100a", threads=128, words="tcgen05.shift",
    ),
    RaceKernel(
        "TMEM stored before a shift without a barrier between",
        TMEM.replace("%r0};", "%r0}; //2") + "add.u32 %r22, %r20, 2097152;\nbar.sync 0; //+\n"
        "@%p0 tcgen05.shift.cta_group::1.down [%r22]; //1\n"
        "@%p0 tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r6];\n" + wait("w") + TMEM_END,
        target="sm_100a", threads=128,
    ),
    RaceKernel(
        "response of cluster launch control read without waiting",
        INIT + "@%p0 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r6], 16;\n"
        "@%p0 clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes.b128 [%r3], [%r6]; //2\n"
        + wait("w", "//+") + "ld.shared.b32 %r9, [%r3]; //1\n" + wait("x"),
        target="sm_100a", words="try_cancel",
    ),
    RaceKernel(
        "tcgen05 without fence::after_thread_sync",
        TC_FILL.replace("//2", "") + "fence.proxy.async;\n" + TMEM + "tcgen05.fence::before_thread_sync;\nbar.sync 0;\n"
        + "tcgen05.fence::after_thread_sync;\n" + mma("//2") + wait("w") + "tcgen05.fence::after_thread_sync; //+\n"
        "tcgen05.ld.sync.aligned.32x32b.x1.b32 {%t0}, [%r21]; //1\n"
        "tcgen05.wait::ld.sync.aligned;\ntcgen05.fence::before_thread_sync;\nbar.sync 0;\ntcgen05.fence::after_thread_sync;\n" + TMEM_END,
        "missing-tcgen05-fence", target="sm_100a", threads=128, checks=("race", "missing-tcgen05-fence"),
    ),
    RaceKernel(
        "tcgen05.fence::after_thread_sync of another warp",
        TC_FILL.replace("//2", "") + "fence.proxy.async;\n" + TMEM + "tcgen05.fence::before_thread_sync;\nbar.sync 0;\n"
        + "tcgen05.fence::after_thread_sync;\n" + mma("//2") + wait("w") + "@%p1 tcgen05.fence::after_thread_sync;\nbar.sync 0;\n"
        + "tcgen05.fence::after_thread_sync; //+\ntcgen05.ld.sync.aligned.32x32b.x1.b32 {%t0}, [%r21]; //1\n"
        "tcgen05.wait::ld.sync.aligned;\n" + TMEM_END,
        "missing-tcgen05-fence", target="sm_100a", threads=128, checks=("race", "missing-tcgen05-fence"),
    ),
    RaceKernel(
        "tcgen05.fence::before_thread_sync of another warp",
        TC_FILL.replace("//2", "") + "fence.proxy.async;\n" + TMEM.replace("%r0};", "%r0}; //2")
        + "tcgen05.fence::before_thread_sync; //+\nbar.sync 0;\n@%p1 tcgen05.fence::before_thread_sync;\nbar.sync 0;\n"
        "tcgen05.fence::after_thread_sync;\n" + mma("//1") + wait("w") + TMEM_END,
        "missing-tcgen05-fence", target="sm_100a", threads=128, checks=("race", "missing-tcgen05-fence"),
    ),
    RaceKernel(
        "arrival of a commit that nobody waits for",
        TC_FILL.replace("//2", "") + "fence.proxy.async;\nadd.u32 %r23, %r6, 8;\n@%p0 mbarrier.init.shared::cta.b64 [%r23], 1;\n" + TMEM
        + "bar.sync 0;\n" + mma() + wait("w")
        + "@%p0 tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r23]; //1\n"
        + wait("x", "//+", address="%r23") + TMEM_END,
        target="sm_100a", threads=128, words="may have exited",
    ),
)  # fmt: skip
