"""``ptx`` for clusters: instructions that reach shared memory of other CTAs, of programs of one CTA launched as a cluster or of a pair.

An arrival with ``.release.cluster`` is a fence of the whole GPU in machine code: only ``publish_warp`` has it.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def in_own_cta(slot):
    """A shared-memory descriptor's address in this CTA, of programs launched as a cluster: ``inline_asm`` passes that of the first CTA.

    An H200 has the CTA's rank in bits 24 and up of such addresses, also of those that ``mapa`` gives (seen there).
    """
    asm: gl.constexpr = "{ .reg .b32 own; mov.u32 own, global_smem; and.b32 own, own, 0xff000000; or.b32 $0, $1, own; }"
    return gl.inline_asm(asm, "=r,r", [slot], gl.int32, is_pure=False)


@gluon.jit
def cluster_barrier():
    """Every thread of the cluster waits for all others, which then see the mbarriers that each has initialised (PTX ISA: fence,
    barrier.cluster)."""
    gl.inline_asm(
        "fence.mbarrier_init.release.cluster; barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;", "~{memory}"
    )


@gluon.jit
def arrive_warp_both(barrier):
    """``arrive_warp`` at a barrier and at that of the other CTA of a cluster of two (PTX ISA: mbarrier.arrive, .shared::cluster).

    For slots that were read, as nothing written is passed on: an arrival with ``.release.cluster`` costs a fence of the whole GPU
    (MEMBAR.ALL.GPU in the machine code), which took 40 % of the speed on an H200. Bit 24 tells the two CTAs apart, as in the addresses that
    ``mapa`` gives there.
    """
    gl.inline_asm(
        "{ .reg .pred one; .reg .b32 there; xor.b32 there, $0, 0x1000000; bar.warp.sync 0xffffffff; elect.sync _|one, 0xffffffff; "
        "@one mbarrier.arrive.shared::cta.b64 _, [$0]; @one mbarrier.arrive.shared::cluster.b64 _, [there]; }",
        "r,~{memory}",
        [barrier],
    )


@gluon.jit
def load_for_cluster(map: gl.constexpr, coords, slot, barrier, mine, ctas: gl.constexpr):
    """A box by TMA into the same place of every CTA of the cluster, each told by its own barrier (PTX ISA: cp.async.bulk.tensor).

    Nothing where ``mine`` is 0. ``map``: number of the kernel parameter that is the descriptor. ``coords``: outermost first, as in Gluon.
    """
    rank: gl.constexpr = len(coords)
    asm: gl.constexpr = _load_for_cluster(map, rank, ctas)
    gl.inline_asm(asm, "r,r,r,r,r,r,r,~{memory}" if rank == 4 else "r,r,r,r,r,r,r,r,~{memory}", [slot, barrier, mine] + coords)


@gluon.constexpr_function
def _load_for_cluster(map, rank, ctas):
    at = ", ".join(f"${3 + i}" for i in reversed(range(rank)))
    kind = f"cp.async.bulk.tensor.{rank}d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster"
    lines = ["{ .reg .pred one; .reg .b64 map; .reg .b16 all;", "elect.sync _|one, 0xffffffff;", "setp.ne.and.u32 one, $2, 0, one;"]
    lines += [f"mov.b64 map, forward_param_{map};", "cvta.param.u64 map, map;", f"mov.b16 all, {(1 << ctas) - 1};"]
    return "\n".join([*lines, f"@one {kind} [$0], [map, {{{at}}}], [$1], all;", "}"])


@gluon.jit
def load_global(pointer):
    """The 32 bits at ``pointer``, which another CTA of the cluster may have written (PTX ISA: ld.relaxed)."""
    return gl.inline_asm("ld.relaxed.cluster.global.b32 $0, [$1];", "=r,l,~{memory}", [pointer], gl.int32)


@gluon.jit
def push(ctas: gl.constexpr, head, node, link):
    """Puts ``node`` before the list whose head lies in shared memory of the cluster's first CTA; ``link`` gets the one before. By the first
    thread of a consumer (PTX ISA: mapa, atom, st)."""
    gl.inline_asm(_push(ctas), "r,r,l,~{memory}", [head, node, link])


@gluon.constexpr_function
def _push(ctas):
    lines = ["{ .reg .pred one; .reg .b32 thread, before, at;", "mov.u32 thread, %tid.x;", "and.b32 thread, thread, 127;"]
    lines += ["setp.eq.u32 one, thread, 0;", "mov.u32 at, $0;" if ctas == 1 else "mapa.shared::cluster.u32 at, $0, 0;"]
    space = "cta.shared::cta" if ctas == 1 else "cluster.shared::cluster"
    lines += ["mov.b32 before, 0;", f"@one atom.relaxed.{space}.exch.b32 before, [at], $1;", "@one st.global.b32 [$2], before;", "}"]
    return "\n".join(lines)


@gluon.jit
def arrive_warp_first(barrier):
    """``arrive_warp`` at the barrier of the cluster's first CTA (PTX ISA: mapa, mbarrier.arrive), after what this warp read."""
    gl.inline_asm(_arrive_warp_at(0, "mbarrier.arrive"), "r,~{memory}", [barrier])


@gluon.jit
def publish_warp(rank: gl.constexpr, barrier):
    """``arrive_warp`` at the barrier of the cluster's CTA ``rank``, which then sees what this warp wrote to memory: for that this is a
    fence of the whole GPU."""
    gl.inline_asm(_arrive_warp_at(rank, "mbarrier.arrive.release.cluster"), "r,~{memory}", [barrier])


@gluon.constexpr_function
def _arrive_warp_at(rank, instruction):
    return (
        "{ .reg .pred one; .reg .b32 at; bar.warp.sync 0xffffffff; elect.sync _|one, 0xffffffff; "
        f"mapa.shared::cluster.u32 at, $0, {rank}; @one {instruction}.shared::cluster.b64 _, [at]; }}"
    )


@gluon.jit
def wait_phase_of_cluster(barrier, phase):
    """``wait_phase`` for what other CTAs of the cluster wrote before they arrived (PTX ISA: mbarrier.try_wait, .acquire.cluster)."""
    gl.inline_asm(
        "{ .reg .pred done; again${:uid}: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [$0], $1; "
        "@!done bra again${:uid}; }",
        "r,r,~{memory}",
        [barrier, phase],
    )


@gluon.jit
def tell_pair(number, slot, barrier):
    """``number`` of the first CTA of a cluster of two to ``slot`` of each, whose ``barrier`` counts its 4 bytes (PTX ISA: mapa,
    st.async)."""
    gl.inline_asm(_tell_pair(), "r,r,r,~{memory}", [number, slot, barrier])


@gluon.constexpr_function
def _tell_pair():
    lines = ["{ .reg .pred one; .reg .b32 rank, at, done;", "elect.sync _|one, 0xffffffff;"]
    lines += ["mov.u32 rank, %cluster_ctarank;", "setp.eq.and.u32 one, rank, 0, one;"]
    return "\n".join([*lines, *_to_both("$0", "$1", "$2"), "}"])


@gluon.jit
def take_for_pair(counter, num_tiles, clusters, slot, barrier):
    """The number that ``scheduler.following_tile`` takes from ``counter``, by the first CTA of a pair for both.

    It goes to ``slot`` of each, whose ``barrier`` counts its 4 bytes (PTX ISA: atom, mapa, st.async). Gluon's atomics take one a CTA.
    """
    gl.inline_asm(_take_for_pair(), "l,r,r,r,r,~{memory}", [counter, num_tiles, clusters, slot, barrier])


@gluon.constexpr_function
def _take_for_pair():
    counter, tiles, clusters, slot, barrier = (f"${i}" for i in range(5))
    lines = ["{ .reg .pred one, last; .reg .b32 rank, number, left, at, done;", "elect.sync _|one, 0xffffffff;"]
    lines += ["mov.u32 rank, %cluster_ctarank;", "setp.eq.and.u32 one, rank, 0, one;"]
    lines += ["mov.b32 number, 0;", f"@one atom.relaxed.gpu.global.add.u32 number, [{counter}], 1;", f"sub.u32 left, {tiles}, 1;"]
    lines += ["setp.eq.and.u32 last, number, left, one;", f"@last st.relaxed.gpu.global.u32 [{counter}], 0;"]
    lines += [f"add.u32 number, number, {clusters};"]
    return "\n".join([*lines, *_to_both("number", slot, barrier), "}"])


@gluon.constexpr_function
def _to_both(number, slot, barrier):
    lines = []
    for rank in range(2):
        lines += [f"mapa.shared::cluster.u32 at, {slot}, {rank};", f"mapa.shared::cluster.u32 done, {barrier}, {rank};"]
        lines += [f"@one st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [at], {number}, [done];"]
    return lines
