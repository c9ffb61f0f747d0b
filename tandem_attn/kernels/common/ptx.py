"""Single PTX instructions that Gluon has no call for, one small function each.

Every function names its section of the PTX ISA manual. Where Gluon offers a slower twin, ``Channel`` selects it with ``plain=True``.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

NAMED_BARRIER = gl.constexpr(8)  # first of the hardware barriers 8-15; the compiler hands out ids from 0 up, one a warp partition


@gluon.jit
def arrive_warp(barrier):
    """One arrival a warp, by an elected lane, after what every lane did before (PTX ISA: bar.warp.sync, elect.sync, mbarrier.arrive).

    ``mbarrier.arrive`` of Gluon arrives once a partition, behind a barrier of all its warps.
    """
    gl.inline_asm(
        "{ .reg .pred one; bar.warp.sync 0xffffffff; elect.sync _|one, 0xffffffff; @one mbarrier.arrive.shared::cta.b64 _, [$0]; }",
        "r,~{memory}",
        [barrier],
    )


@gluon.jit
def arrive_warp_after(barrier, value):
    """``arrive_warp`` that ptxas cannot issue before ``value`` (a float32 tensor) is computed.

    What separates the arrival and its predecessors from a later wait for MMAs then stays on this side of that wait; without it ptxas
    moves arithmetic behind the wait, and it overlaps with nothing. The bit pattern compared with is no result of arithmetic (NaNs are
    0x7fffffff: PTX ISA, floating point instructions).
    """
    gl.inline_asm(_arrive_warp_after, ("r", "f"), [barrier, value])


@gluon.constexpr_function
def _arrive_warp_after(outputs, inputs):  # noqa: ARG001
    (barrier,), values = inputs
    lines = ["{ .reg .pred one, known; .reg .b32 bits, all;", "mov.b32 all, 0;"]
    for value in values:
        lines += [f"mov.b32 bits, {value};", "or.b32 all, all, bits;"]
    lines += ["setp.ne.u32 known, all, 0xffffffff;", "elect.sync _|one, 0xffffffff;", "and.pred one, one, known;"]
    return "\n".join([*lines, f"@one mbarrier.arrive.shared::cta.b64 _, [{barrier}];", "}"])


@gluon.jit
def wait_phase(barrier, phase):
    """Waits until the barrier's phase of this parity is complete (PTX ISA: mbarrier.try_wait).

    Gluon's ``mbarrier.wait`` comes with a barrier of all warps of the partition.
    """
    gl.inline_asm(
        "{ .reg .pred done; again${:uid}: mbarrier.try_wait.parity.shared::cta.b64 done, [$0], $1; @!done bra again${:uid}; }",
        "r,r,~{memory}",
        [barrier, phase],
    )


@gluon.jit
def store_four(slot, a, b, c, d):
    """Four int32 into shared memory, the same from every lane (PTX ISA: st.shared)."""
    gl.inline_asm("st.shared.v4.b32 [$0], {$1, $2, $3, $4};", "r,r,r,r,r,~{memory}", [slot, a, b, c, d])


@gluon.jit
def load_four(slot):
    """Four int32 from shared memory, alike in every lane (PTX ISA: ld.shared)."""
    four: gl.constexpr = (gl.int32, gl.int32, gl.int32, gl.int32)
    return gl.inline_asm("ld.shared.v4.b32 {$0, $1, $2, $3}, [$4];", "=r,=r,=r,=r,r,~{memory}", [slot], four)


@gluon.jit
def named_sync(name: gl.constexpr, threads: gl.constexpr):
    """Waits until ``threads`` threads have synced on or arrived at a hardware barrier (PTX ISA: bar.sync)."""
    gl.inline_asm(_named("bar.sync", name, threads), "~{memory}")


@gluon.jit
def named_arrive(name: gl.constexpr, threads: gl.constexpr):
    """Arrives at a hardware barrier without waiting (PTX ISA: bar.arrive)."""
    gl.inline_asm(_named("bar.arrive", name, threads), "~{memory}")


@gluon.constexpr_function
def _named(instruction, name, threads):
    return f"{instruction} {NAMED_BARRIER.value + name}, {threads};"
