"""Single PTX instructions that Gluon has no call for, one small function each.

Every function names its section of the PTX ISA manual. Where Gluon offers a slower twin, ``Channel`` selects it with ``plain=True``.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

LOAD_COLUMNS = gl.constexpr(64)  # of one load from tensor memory: ptxas needs 146 registers at launch for 128
_FIRST_LANE = gl.constexpr("{ .reg .pred one; .reg .b32 lane; mov.u32 lane, %laneid; setp.eq.u32 one, lane, 0; ")
NAMED_BARRIER = gl.constexpr(8)  # first of the hardware barriers 8-15; the compiler hands out ids from 0 up, one a warp partition


@gluon.jit
def here(slot):
    """A shared-memory descriptor as it is, or, in a cluster, the address of this CTA's own (PTX ISA: mapa): ``inline_asm`` passes that of
    the first CTA."""
    if gl.num_ctas() == 1:
        return slot
    else:
        asm: gl.constexpr = "{ .reg .b32 rank; mov.u32 rank, %cluster_ctarank; mapa.shared::cluster.u32 $0, $1, rank; }"
        return gl.inline_asm(asm, "=r,r", [slot], gl.int32)


@gluon.jit
def cta_rank():
    """Of this CTA in its cluster (PTX ISA: %cluster_ctarank)."""
    return gl.inline_asm("mov.u32 $0, %cluster_ctarank;", "=r", [], gl.int32)


@gluon.jit
def arrive_warp(barrier):
    """One arrival a warp, by an elected lane, after what every lane did before (PTX ISA: bar.warp.sync, elect.sync, mbarrier.arrive).

    ``mbarrier.arrive`` of Gluon arrives once a partition, behind a barrier of all its warps.
    """
    gl.inline_asm(
        "{ .reg .pred one; bar.warp.sync 0xffffffff; elect.sync _|one, 0xffffffff; @one mbarrier.arrive.shared::cta.b64 _, [$0]; }",
        "r,~{memory}",
        [here(barrier)],
    )


@gluon.jit
def arrive_warp_after(barrier, value):
    """``arrive_warp`` that ptxas cannot issue before ``value`` (a float32 tensor) is computed.

    What separates the arrival and its predecessors from a later wait for MMAs then stays on this side of that wait; without it ptxas
    moves arithmetic behind the wait, and it overlaps with nothing. The bit pattern compared with is no result of arithmetic (NaNs are
    0x7fffffff: PTX ISA, floating point instructions).
    """
    gl.inline_asm(_arrive_warp_after, ("r", "f"), [here(barrier), value])


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
        [here(barrier), phase],
    )


@gluon.jit
def announce(barrier, nbytes: gl.constexpr, pair: gl.constexpr):
    """One arrival of a role of one warp, and ``nbytes`` of TMA to wait for; with ``pair`` at the first CTA's barrier (PTX ISA:
    mbarrier.arrive).

    Gluon's own takes thread 0 by a thread number that is read before the roles are dispatched and lives in a register through all of them.
    """
    if pair:
        gl.inline_asm(_announce("shared::cluster", nbytes), "r,~{memory}", [barrier])
    else:
        gl.inline_asm(_announce("shared::cta", nbytes), "r,~{memory}", [here(barrier)])


@gluon.constexpr_function
def _announce(space, nbytes):
    return f"{_FIRST_LANE.value}@one mbarrier.arrive.expect_tx.{space}.b64 _, [$0], {nbytes}; }}"


@gluon.jit
def arrive_warp_tmem(barrier):
    """``arrive_warp`` after this warp's tensor-memory loads and stores (PTX ISA: tcgen05.wait, tcgen05.fence)."""
    gl.inline_asm(
        "{ .reg .pred one; tcgen05.wait::st.sync.aligned; tcgen05.fence::before_thread_sync; bar.warp.sync 0xffffffff; "
        "elect.sync _|one, 0xffffffff; @one mbarrier.arrive.shared::cta.b64 _, [$0]; }",
        "r,~{memory}",
        [here(barrier)],
    )


@gluon.jit
def arrive_warp_tmem_pair(barrier):
    """``arrive_warp_tmem`` at the barrier of the first CTA of the pair (PTX ISA: mbarrier.arrive).

    Without ``.release.cluster``, which would be a fence of the whole GPU: what is passed on lies in tensor memory, and the tcgen05 fence
    orders that.
    """
    gl.inline_asm(
        "{ .reg .pred one; tcgen05.wait::st.sync.aligned; tcgen05.fence::before_thread_sync; bar.warp.sync 0xffffffff; "
        "elect.sync _|one, 0xffffffff; @one mbarrier.arrive.shared::cluster.b64 _, [$0]; }",
        "r,~{memory}",
        [barrier],
    )


@gluon.jit
def arrive_warp_pair(barrier):
    """``arrive_warp`` at the barrier of the first CTA of the pair (PTX ISA: mbarrier.arrive)."""
    gl.inline_asm(
        "{ .reg .pred one; bar.warp.sync 0xffffffff; elect.sync _|one, 0xffffffff; @one mbarrier.arrive.shared::cluster.b64 _, [$0]; }",
        "r,~{memory}",
        [barrier],
    )


@gluon.jit
def tmem_done():
    """Completes this warp's stores to tensor memory, before it tells others of them (PTX ISA: tcgen05.wait, tcgen05.fence)."""
    gl.inline_asm("tcgen05.wait::st.sync.aligned; tcgen05.fence::before_thread_sync;", "~{memory}")


@gluon.jit
def tmem_after():
    """Keeps tensor-memory operations behind the wait before it (PTX ISA: tcgen05.fence)."""
    gl.inline_asm("tcgen05.fence::after_thread_sync;", "~{memory}")


@gluon.jit
def tmem_lanes(tmem, row):
    """Address of a tensor-memory tile for each thread, of which ``row`` is the row: a warp reaches the 32 lanes of its place in the
    warpgroup (PTX ISA: tensor memory access restrictions)."""
    asm: gl.constexpr = "{ .reg .b32 lane; and.b32 lane, $2, 96; shl.b32 lane, lane, 16; add.s32 $0, lane, $1; }"
    return gl.inline_asm(asm, "=r,r,r", [tmem, row], row.type)


@gluon.jit
def load_row(address, type: gl.constexpr):
    """A row of float32 of every thread from tensor memory, complete (PTX ISA: tcgen05.ld, tcgen05.wait).

    Gluon's load leaves its wait behind the last use of what it loads.
    """
    return gl.inline_asm(_load_row, ("=&f", "r"), [address], type)


@gluon.constexpr_function
def _load_row(outputs, inputs):
    (out,), ((address,),) = outputs, inputs
    lines = []
    for first in range(0, len(out), LOAD_COLUMNS.value):
        part = out[first : first + LOAD_COLUMNS.value]
        lines.append(f"tcgen05.ld.sync.aligned.32x32b.x{len(part)}.b32 {{{', '.join(part)}}}, [{address} + {first}];")
    return "\n".join([*lines, "tcgen05.wait::ld.sync.aligned;"])


@gluon.jit
def put_row(slot, x, row):
    """x of every thread into a row vector of float32 in shared memory (PTX ISA: st.shared)."""
    asm: gl.constexpr = "{ .reg .b32 at; and.b32 at, $2, 127; shl.b32 at, at, 2; add.s32 at, at, $0; st.shared.f32 [at], $1; }"
    gl.inline_asm(asm, "r,f,r,~{memory}", [here(slot), x, row])


@gluon.jit
def get_row(slot, row):
    """The thread's element of a row vector of float32 in shared memory (PTX ISA: ld.shared)."""
    type: gl.constexpr = gl.distributed_type(gl.float32, row.type.shape, row.type.layout)
    asm: gl.constexpr = "{ .reg .b32 at; and.b32 at, $2, 127; shl.b32 at, at, 2; add.s32 at, at, $1; ld.shared.f32 $0, [at]; }"
    return gl.inline_asm(asm, "=f,r,r,~{memory}", [here(slot), row], type)


@gluon.jit
def uniform(x):
    """A number that every lane holds, as one that ptxas knows to be alike in all of them (PTX ISA: shfl.sync).

    Loop bounds that came from memory otherwise cost the role its uniform registers, which MMA descriptors live in.
    """
    return gl.inline_asm("shfl.sync.idx.b32 $0, $1, 0, 31, 0xffffffff;", "=r,r", [x], gl.int32)


@gluon.jit
def lane_row(rows: gl.constexpr, layout: gl.constexpr):
    """The row of a tile of ``rows`` rows that this thread holds, 128 threads of a warpgroup a CTA (PTX ISA: %tid).

    Read anew in each role: a thread number that is read before the dispatch of roles lives through all of them, as a register or two.
    """
    type: gl.constexpr = gl.distributed_type(gl.int32, [rows], layout)
    row = gl.inline_asm("{ .reg .b32 thread; mov.u32 thread, %tid.x; and.b32 $0, thread, 127; }", "=r", [], type)
    return row if gl.num_ctas() == 1 else row + cta_rank() * 128


@gluon.jit
def warp_row(row):
    """The first row of the warp, of ``lane_row``; uniform for ptxas, and so is what is computed from it (PTX ISA: shfl.sync)."""
    return gl.inline_asm("shfl.sync.idx.b32 $0, $1, 0, 31, 0xffffffff;", "=r,r", [row], row.type)


@gluon.jit
def pinned(x):
    """x (int32), not computed before this point: LLVM otherwise moves what depends on it above the dispatch of roles, where it lives
    through all of them."""
    return gl.inline_asm(_pinned, ("=&r", "r"), [x], x.type)


@gluon.constexpr_function
def _pinned(outputs, inputs):
    (new,), (old,) = outputs, inputs
    return "\n".join(f"mov.b32 {to}, {value};" for to, value in zip(new, old, strict=True))


@gluon.jit
def in_order(x, never, number: gl.constexpr):
    """x (float32); what uses it stays behind this point and stores stay before it, as ptxas sees a loop here.

    The loop never turns: ``never`` is not negative. ptxas otherwise moves stores and arrivals behind the last exponential of a row.
    Neighbours need different numbers.
    """
    return gl.inline_asm(_in_order(number), "=&f,f,r", [x, never], x.type)


@gluon.constexpr_function
def _in_order(number):
    return (
        f"{{ .reg .pred p; mov.f32 $0, $1; again${{:uid}}: setp.ne.s32 p, $2, -{number}; @p bra out${{:uid}}; "
        "nanosleep.u32 99; add.f32 $0, $0, 0f3F800000; bra again${:uid}; out${:uid}: }"
    )


@gluon.jit
def apart(done, start, never, number: gl.constexpr):
    """Two int32; what ``done`` is computed from stays before this point, what is computed from ``start`` behind it. See ``in_order``."""
    return gl.inline_asm(_apart(number), "=&r,=&r,r,r,r", [done, start, never], (done.type, start.type))


@gluon.constexpr_function
def _apart(number):
    return (
        f"{{ .reg .pred p; mov.b32 $0, $2; mov.b32 $1, $3; again${{:uid}}: setp.ne.s32 p, $4, -{number}; @p bra out${{:uid}}; "
        "nanosleep.u32 99; add.s32 $0, $0, 1; add.s32 $1, $1, 1; bra again${:uid}; out${:uid}: }"
    )


@gluon.jit
def store_four(slot, a, b, c, d):
    """Four int32 into shared memory, the same from every lane (PTX ISA: st.shared)."""
    gl.inline_asm("st.shared.v4.b32 [$0], {$1, $2, $3, $4};", "r,r,r,r,r,~{memory}", [here(slot), a, b, c, d])


@gluon.jit
def load_four(slot):
    """Four int32 from shared memory, alike in every lane (PTX ISA: ld.shared)."""
    four: gl.constexpr = (gl.int32, gl.int32, gl.int32, gl.int32)
    return gl.inline_asm("ld.shared.v4.b32 {$0, $1, $2, $3}, [$4];", "=r,=r,=r,=r,r,~{memory}", [here(slot)], four)


@gluon.jit
def load_word(slot):
    """An int32 from shared memory, alike in every lane (PTX ISA: ld.shared)."""
    return gl.inline_asm("ld.shared.b32 $0, [$1];", "=r,r,~{memory}", [here(slot)], gl.int32)


@gluon.jit
def stores_done():
    """This thread's stores by TMA have been written; Gluon's wait is for their reading only (PTX ISA: cp.async.bulk.wait_group)."""
    gl.inline_asm("cp.async.bulk.wait_group 0;", "~{memory}")


@gluon.jit
def named_sync(name: gl.constexpr, threads: gl.constexpr):
    """Waits until ``threads`` threads have synced on or arrived at a hardware barrier (PTX ISA: bar.sync)."""
    gl.inline_asm(_named("bar.sync", name, threads), "~{memory}")


@gluon.jit
def named_arrive(name: gl.constexpr, threads: gl.constexpr):
    """Arrives at a hardware barrier without waiting (PTX ISA: bar.arrive)."""
    gl.inline_asm(_named("bar.arrive", name, threads), "~{memory}")


@gluon.jit
def any_row(name: gl.constexpr, x, threads: gl.constexpr):
    """1 in all of ``threads`` threads if x (int32, (64,) of a warpgroup's rows, two a thread) has an element that is not 0, else 0; all
    threads wait for each other (PTX ISA: barrier.red)."""
    return gl.inline_asm(_any_row(name, threads), ("=r", "r"), [x], gl.int32)


@gluon.constexpr_function
def _any_row(name, threads):
    return (
        "{ .reg .pred any; .reg .b32 all; or.b32 all, $1, $2; setp.ne.u32 any, all, 0; "
        f"barrier.red.or.pred any, {NAMED_BARRIER.value + name}, {threads}, any; selp.u32 $0, 1, 0, any; }}"
    )


@gluon.constexpr_function
def _named(instruction, name, threads):
    return f"{instruction} {NAMED_BARRIER.value + name}, {threads};"
