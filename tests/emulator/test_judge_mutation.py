"""The mutation tool: what it changes, that the judge notices it, and what counts as equivalent."""

from functools import partial

import pytest
import torch

from tests.emulator.mutation.equivalence import log_of, reason
from tests.emulator.mutation.mutants import mutants
from tests.emulator.mutation.race_kernels import KERNELS
from tests.emulator.mutation.trial import judge
from tests.emulator.subjects.subject import Subject

REVERSE = """.version 8.7
.target sm_90a
.address_size 64
.shared .align 16 .b8 smem[1024];
.visible .entry reverse(.param .u64 out)
{
.reg .b32 %r<8>; .reg .b64 %rd<4>;
ld.param.u64 %rd0, [out];
mov.u32 %r0, %tid.x;
shl.b32 %r1, %r0, 2;
mov.u32 %r2, smem;
add.u32 %r3, %r2, %r1;
st.shared.b32 [%r3], %r0;
bar.sync 0;
bar.sync 1;
xor.b32 %r4, %r1, 252;
add.u32 %r4, %r4, %r2;
ld.shared.b32 %r5, [%r4];
cvt.u64.u32 %rd1, %r1;
add.u64 %rd1, %rd1, %rd0;
st.global.b32 [%rd1], %r5;
ret;
}
"""
ONE = REVERSE.replace("bar.sync 1;\n", "")


def reverse(ptx):
    out = torch.zeros(64, dtype=torch.int32)
    return Subject("reverse", ptx, (out,), (1, 1, 1), out, torch.arange(63, -1, -1).double(), 0.0, (64, 1, 1))


def test_each_instruction_is_changed_in_each_way():
    text = (
        "mbarrier.init.shared::cta.b64 [%r1], 2;\n@%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r1], 64;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 %p8, [%r1], 0;\ncp.async.bulk.wait_group 1;\nfence.proxy.async;\n"
        "barrier.cluster.arrive.aligned;\natom.acq_rel.gpu.global.add.u32 %r1, [%rd1], 1;\nadd.u32 %r1, %r1, 1; // bar.sync 0;\n"
    )
    made = [(m.line, m.what, m.after) for m in mutants(text)]
    assert made == [
        (1, "count raised", "mbarrier.init.shared::cta.b64 [%r1], 3;"),
        (1, "count lowered", "mbarrier.init.shared::cta.b64 [%r1], 1;"),
        (1, "initialisation deleted", "// deleted"),
        (2, "expect_tx deleted", "// deleted"),
        (2, "expect_tx lowered", "@%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r1], 48;"),
        (3, "wait deleted", "setp.eq.u32 %p8, 0, 0;"),
        (4, "group wait deleted", "// deleted"),
        (4, "group wait weakened", "cp.async.bulk.wait_group 2;"),
        (4, "group wait for reads only", "cp.async.bulk.wait_group.read 1;"),
        (5, "fence deleted", "// deleted"),
        (6, "cluster barrier deleted", "// deleted"),
        (6, "cluster arrival relaxed", "barrier.cluster.arrive.relaxed.aligned;"),
        (7, "made relaxed", "atom.relaxed.gpu.global.add.u32 %r1, [%rd1], 1;"),
        (7, "scope narrowed", "atom.acq_rel.cta.global.add.u32 %r1, [%rd1], 1;"),
    ]
    assert all(m.ptx.count("\n") == text.count("\n") for m in mutants(text))


def test_a_needed_barrier_is_caught_though_the_numbers_are_right():
    found = list(mutants(ONE))
    assert len(found) == 1
    outcome = judge(partial(reverse, ONE), found[0].ptx)
    assert (outcome.how, outcome.schedule) == ("race", "at-issue"), outcome
    assert not reason(found[0], log_of(reverse(ONE)))


def test_one_of_two_barriers_is_equivalent():
    log = log_of(reverse(REVERSE))
    for mutant in mutants(REVERSE):
        assert not judge(partial(reverse, REVERSE), mutant.ptx).how
        assert reason(mutant, log) == "its neighbouring barriers order everything that conflicts"


def mutant_of(ptx, line, what):
    return next(m for m in mutants(ptx) if m.before.startswith(line) and m.what == what)


def test_a_neighbour_at_which_a_warp_only_arrives_is_none():
    """bar.arrive does not hold the warp, so the barrier between it and the access is needed; the judge agrees."""
    ptx = REVERSE.replace("bar.sync 1;\n", "setp.lt.u32 %p1, %r0, 32;\n@%p1 bar.arrive 1, 64;\n@!%p1 bar.sync 1, 64;\n")
    ptx = ptx.replace(".reg .b32 %r<8>;", ".reg .b32 %r<8>; .reg .pred %p1;")
    mutant = mutant_of(ptx, "bar.sync 0", "barrier deleted")
    assert not reason(mutant, log_of(reverse(ptx)))
    assert judge(partial(reverse, ptx), mutant.ptx).how == "race"


def test_a_barrier_that_other_instructions_share_is_not_deleted_alone():
    """The warps come to barrier 0 by two instructions: without one the other waits for ever, whatever its neighbours order."""
    ptx = REVERSE.replace("bar.sync 0;\n", "setp.lt.u32 %p1, %r0, 32;\n@%p1 bar.sync 0, 64;\n@!%p1 bar.sync 0, 64;\n")
    ptx = ptx.replace(".reg .b32 %r<8>;", ".reg .b32 %r<8>; .reg .pred %p1;")
    mutant = mutant_of(ptx, "@%p1 bar.sync 0", "barrier deleted")
    assert not reason(mutant, log_of(reverse(ptx)))
    assert judge(partial(reverse, ptx), mutant.ptx).how in ("deadlock", "state")


def test_an_empty_group_counts_for_a_wait_that_keeps_one():
    """Without the second, empty commit, wait_group.read 1 no longer waits for the copy: the commit was executed, and matters."""
    copy = "st.shared.b32 [%r3], %r0;\nfence.proxy.async;\nbar.sync 0;\nsetp.eq.u32 %p1, %r0, 0;\n"
    copy += "@%p1 cp.async.bulk.global.shared::cta.bulk_group [%rd0], [%r2], 256;\n@%p1 cp.async.bulk.commit_group;\n"
    copy += "@%p1 cp.async.bulk.commit_group; // empty\n@%p1 cp.async.bulk.wait_group.read 1;\nbar.sync 0;\n"
    ptx = REVERSE.replace("st.shared.b32 [%r3], %r0;\n", copy + "st.shared.b32 [%r3], %r0;\n")
    ptx = ptx.replace(".reg .b32 %r<8>;", ".reg .b32 %r<8>; .reg .pred %p1;").replace("smem[1024]", "smem[1024]")
    ptx = ptx.replace("st.global.b32 [%rd1], %r5;\n", "@%p1 cp.async.bulk.wait_group 0;\nbar.sync 0;\nst.global.b32 [%rd1], %r5;\n")
    empty = [m for m in mutants(ptx) if m.what == "commit deleted"][1]
    assert not reason(empty, log_of(reverse(ptx)))
    assert judge(partial(reverse, ptx), empty.ptx).how == "race"


def test_a_warp_that_has_diverged_needs_its_barrier():
    """bar.warp.sync between two barriers orders nothing here, but makes the lanes converge behind a branch."""
    branch = "bar.warp.sync -1;\nsetp.lt.u32 %p1, %r0, 5;\n@%p1 bra skip;\nadd.u32 %r5, %r5, 1;\nskip:\nbar.warp.sync -1; // second\n"
    ptx = REVERSE.replace("bar.sync 1;\n", branch).replace(".reg .b32 %r<8>;", ".reg .b32 %r<8>; .reg .pred %p1;")
    first, second = (m for m in mutants(ptx) if m.before.startswith("bar.warp.sync"))
    log = log_of(reverse(ptx))
    assert reason(first, log) and not reason(second, log)


@pytest.mark.parametrize("name", [k.name for k in KERNELS if k.checks == "all" and k.cluster == 1])
def test_mutants_of_the_repaired_kernels_are_caught_or_equivalent(name):
    kernel = next(k for k in KERNELS if k.name == name)
    ptx, _ = kernel.text(False)

    def make():
        out = torch.from_numpy(kernel.args()[0])
        return Subject(name, ptx, (out,), (kernel.grid, 1, 1), torch.zeros(1), torch.zeros(1).double(), 0.0, (kernel.threads, 1, 1))

    log = log_of(make())
    missed = []
    # Lanes are taken to leave a wait together: an arrival of one of them counts for the warp where phases can be missed.
    allowed = {"a phase that a waiter by parity can miss": "count lowered"}
    for mutant in mutants(ptx):
        if mutant.what != allowed.get(name) and not judge(make, mutant.ptx).how and not reason(mutant, log):
            missed.append(f"{mutant.name}: {mutant.before}")
    assert not missed, missed
