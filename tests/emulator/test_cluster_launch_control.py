"""Cluster launch control. PTX manual, "clusterlaunchcontrol.try_cancel" and ".query_cancel"; it rests on the manual alone."""

import numpy as np
import pytest

from tests.emulator.kernels import launch

# Every CTA works on its own tile, then on those of clusters that it cancels, until a request fails; each tile counts its visits.
LOOP = """
    .reg .b128 %q; mov.b32 %r1, smem; setp.eq.u32 %p1, %tid, 0; ld.param.u64 %rd1, [p0];
    mov.u32 %r2, %ctaid.x; mov.u32 %r9, %ctaid.y; mov.u32 %r20, %nctaid.x; mad.lo.u32 %r2, %r9, %r20, %r2; mov.b32 %r3, 0;
    @%p1 mbarrier.init.shared::cta.b64 [%r1+16], 1; bar.sync 0;
    NEXT: mad.wide.u32 %rd2, %r2, 4, %rd1; @%p1 red.global.add.u32 [%rd2], 1;
    @%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r1+16], 16;
    @%p1 clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes.b128 [%r1], [%r1+16];
    W: mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r1+16], %r3; @!%p2 bra W;
    ld.shared.b128 %q, [%r1]; xor.b32 %r3, %r3, 1; bar.sync 0;
    clusterlaunchcontrol.query_cancel.is_canceled.pred.b128 %p3, %q;
    @!%p3 bra DONE;
    {query}
    mad.lo.u32 %r2, %r5, %r20, %r4; fence.proxy.async; bra NEXT;
    DONE:
"""
QUERIES = {
    "vector": "clusterlaunchcontrol.query_cancel.get_first_ctaid.v4.b32.b128 {%r4, %r5, %r6, _}, %q;",
    "single": "clusterlaunchcontrol.query_cancel.get_first_ctaid::x.b32.b128 %r4, %q; "
    "clusterlaunchcontrol.query_cancel.get_first_ctaid::y.b32.b128 %r5, %q;",
}


@pytest.mark.parametrize("query", QUERIES)
@pytest.mark.parametrize("schedule", ["at-issue", "latest", "random"])
@pytest.mark.parametrize("resident", [1, 3, 12])
def test_every_tile_is_worked_on_once(query, schedule, resident):
    out = np.zeros(12, np.uint32)
    body = LOOP.replace("{query}", QUERIES[query])
    result = launch(
        body, out, grid=(4, 3), threads=64, shared=32, target="sm_100a", schedule=schedule, resident_ctas=resident, checks="all"
    )
    assert result.ok, result.reports
    assert (out == 1).all(), out
    assert result.statistics.ctas <= 12 and (result.statistics.ctas < 12 or resident == 12)


def test_multicast_answers_every_cta_of_the_cluster():
    """ ".multicast::cluster::all": the response and its complete-tx arrive in each CTA."""
    body = """
    .reg .b128 %q; mov.b32 %r1, smem; setp.eq.u32 %p1, %tid, 0; ld.param.u64 %rd1, [p0];
    mov.u32 %r2, %cluster_ctarank; mov.u32 %r7, %ctaid.x;
    @%p1 mbarrier.init.shared::cta.b64 [%r1+16], 1; fence.mbarrier_init.release.cluster;
    @%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r1+16], 16; barrier.cluster.arrive; barrier.cluster.wait;
    setp.eq.u32 %p4, %r2, 0; and.pred %p4, %p4, %p1;
    @%p4 clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes.multicast::cluster::all.b128 [%r1], [%r1+16];
    W: mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r1+16], 0; @!%p2 bra W;
    ld.shared.b128 %q, [%r1]; clusterlaunchcontrol.query_cancel.is_canceled.pred.b128 %p3, %q; mov.b32 %r4, 99;
    @%p3 clusterlaunchcontrol.query_cancel.get_first_ctaid::x.b32.b128 %r4, %q;
    mad.wide.u32 %rd2, %r7, 4, %rd1; @%p1 st.global.b32 [%rd2], %r4; barrier.cluster.arrive; barrier.cluster.wait;
"""
    out = np.zeros(4, np.uint32)
    result = launch(body, out, grid=4, cluster=2, threads=32, shared=32, target="sm_100a", resident_ctas=2, checks="all")
    assert result.ok, result.reports
    assert out.tolist() == [2, 2, 0, 0], out
