"""The barrier state machines, without a machine. PTX manual, "mbarrier", "bar, barrier", "barrier.cluster"."""

import pytest

from tandem_attn.emulator.memory.faults import Fault
from tandem_attn.emulator.sync.barrier import ClusterBarrier, NamedBarrier
from tandem_attn.emulator.sync.mbarrier import MAX_COUNT, MBarrier


def test_a_phase_needs_arrivals_and_bytes():
    bar = MBarrier.init(2)
    assert not bar.arrive()
    bar.expect_tx(64)
    assert not bar.arrive()
    assert not bar.done(0) and bar.done(1)
    assert not bar.complete_tx(32)
    assert bar.complete_tx(32)
    assert bar.done(0) and not bar.done(1) and bar.phase == 1 and bar.pending == 2


def test_bytes_may_come_before_they_are_expected():
    bar = MBarrier.init(1)
    assert not bar.complete_tx(16)
    bar.expect_tx(16)
    assert bar.arrive()


def test_states_and_dropped_arrivals():
    bar = MBarrier.init(3)
    state = bar.state()
    assert not bar.drop()
    assert not bar.passed(state)
    assert bar.arrive(2)
    assert bar.passed(state) and bar.pending == 2


@pytest.mark.parametrize("count", [0, -1, MAX_COUNT + 1])
def test_impossible_counts(count):
    with pytest.raises(Fault, match="not in 1"):
        MBarrier.init(count)


def test_more_arrivals_than_pending_and_too_many_bytes():
    bar = MBarrier.init(2)
    with pytest.raises(Fault, match="3 arrivals where 2 of 2 are pending"):
        bar.arrive(3)
    with pytest.raises(Fault, match="out of range"):
        bar.expect_tx(MAX_COUNT + 1)


def test_named_barrier_counts_threads():
    bar = NamedBarrier(1)
    assert not bar.arrive(0, 32, 64)
    with pytest.raises(Fault, match="others with 64"):
        bar.arrive(1, 32, 96)
    assert bar.arrive(1, 32, 64) and bar.phase == 1
    with pytest.raises(Fault, match="positive multiple of 32"):
        bar.arrive(0, 32, 40)


def test_a_warp_that_comes_twice():
    bar = NamedBarrier(1)
    bar.arrive(0, 32, 96)
    with pytest.raises(Fault, match="comes twice"):
        bar.arrive(0, 32, 96)


def test_cluster_barrier_and_exited_threads():
    bar = ClusterBarrier(96)
    assert not bar.arrive(32)
    assert not bar.leave(32)
    assert bar.arrive(32) and bar.phase == 1
