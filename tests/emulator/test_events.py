"""What an observer is told of a producer-consumer exchange, and what the trace makes of it."""

import numpy as np

from tandem_attn.emulator.events import AccessKind, Proxy, Space
from tests.emulator.kernels import launch

EXCHANGE = """
    ld.param.u64 %rd1, [p1]; mov.b32 %r1, smem; setp.eq.u32 %p1, %tid, 0; setp.lt.u32 %p2, %tid, 32;
    @%p1 mbarrier.init.shared::cta.b64 [%r1], 1;
    bar.sync 0;
    @%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r1], 256;
    @%p1 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r1+128], [%rd1], 256, [%r1];
    @%p2 bra DONE;
    W: mbarrier.try_wait.parity.shared::cta.b64 %p3, [%r1], 0; @!%p3 bra W;
    mad.lo.u32 %r2, %tid, 4, %r1; ld.shared.b32 %r3, [%r2+128];
    add.u32 %r4, %r3, 1;
    ld.param.u64 %rd2, [p0]; mad.wide.u32 %rd3, %tid, 4, %rd2; st.global.b32 [%rd3], %r4;
    DONE:
"""


class Recorder:
    def __init__(self):
        self.events = []

    def event(self, event):
        self.events.append(event)
        return []

    def finish(self):
        return []


def exchange(**options):
    out, data = np.zeros(64, np.uint32), np.arange(64, dtype=np.uint32)
    result = launch(EXCHANGE, out, data, threads=64, shared=512, **options)
    assert result.ok and (out[32:] == np.arange(33, 65)).all()
    return result


def test_an_exchange_is_told_in_order():
    recorder = Recorder()
    exchange(observers=[recorder], schedule="latest")
    names = [type(e).__name__ for e in recorder.events]
    accesses = [e for e in recorder.events if type(e).__name__ == "Access"]
    issue, complete = names.index("Issue"), names.index("Complete")
    assert issue < complete
    copy = next(e for e in accesses if e.proxy is Proxy.ASYNC and e.space is Space.SHARED)
    assert (copy.kind, copy.starts.tolist(), copy.size, copy.agent.kind) == (AccessKind.WRITE, [1024 + 128], 256, "bulk-copy")
    arrivals = [e for e in recorder.events if type(e).__name__ == "Arrival" and e.barrier.kind == "mbarrier"]
    assert [(a.count, a.tx) for a in arrivals] == [(1, 256), (0, -256)]
    waits = [e for e in recorder.events if type(e).__name__ == "Wait" and e.barrier.kind == "mbarrier"]
    assert [(w.agent.warp, w.phase, w.semantics) for w in waits] == [(1, 0, "acquire")]
    load = next(e for e in accesses if e.proxy is Proxy.GENERIC and e.space is Space.SHARED and e.kind is AccessKind.READ)
    assert load.agent.warp == 1 and load.lane_ids.tolist() == list(range(32)) and load.size == 4
    assert recorder.events.index(arrivals[1]) < recorder.events.index(waits[0]) < recorder.events.index(load)
    assert "ld.shared.b32" in load.site.text


def test_the_trace_names_producers_bytes_and_releasers():
    records = list(exchange(trace=True).trace.instructions(0, 1))
    wait = next(r for r in records if r.barrier is not None and r.barrier.kind == "mbarrier")
    assert wait.unit == "sync" and wait.released_by.kind == "bulk-copy"
    load = next(r for r in records if r.unit == "lsu" and r.bytes == 128 and r.position > wait.position)
    add = next(r for r in records if load.position in r.producers)
    assert add.unit == "alu" and add.position == load.position + 1
    store = next(r for r in records if add.position in r.producers and r.unit == "lsu")
    assert store.bytes == 128
    producer = list(exchange(trace=True).trace.instructions(0, 0))
    copy = next(r for r in producer if r.unit == "tma")
    assert copy.serial and copy.bytes == 512, "256 bytes read from global and 256 written to shared memory"


def test_tracing_changes_no_values():
    assert exchange(trace=True).trace.warps.keys() == {(0, 0), (0, 1)}
    assert exchange().trace is None
