"""Candidate plans for Hopper: accumulators live in the registers of two or three consumer warpgroups, one producer warp loads by TMA."""

from __future__ import annotations

from typing import Any

from tandem_attn.spec.arch import Arch
from tandem_attn.spec.plan import Plan
from tandem_attn.spec.planner_rules import (
    ALL_THAT_FIT,
    BARRIER_BYTES,
    SMEM_ALIGN,
    Choice,
    Criterion,
    Grid,
    exp2_remark,
    fewest_idle_tiles,
    forward_smem,
    kv_stages_that_fit,
    page_rows,
    reads_data,
    reads_elements,
    too_large,
)
from tandem_attn.spec.problem import Problem
from tandem_attn.spec.resources import Packer, Role, chunks

# Registers a thread (public FA3 and FA4 kernels); the rest of 65,536 goes to the producer's warpgroup. With one consumer it is what lifts
# the mean, with which a thread starts, over the 158 that ptxas wants for a wgmma of 64 x 256.
_CONSUMER = {1: 240, 2: 240, 3: 160}
_PRODUCER = {1: 96, 2: 24, 3: 32}
_SPARE = 32  # registers a thread besides accumulators and P: row statistics, addresses, loop state
_Q_ROOM = 40  # to be left when Q is in registers too: with 32, ptxas spills in the block loop of (192, 128)
_NARROW = 64  # keys of a narrow block; where scores meet a bias or an element of a table each, ptxas spills with 128
_TWO_CHUNKS = 160  # accumulators a thread when O is two tensors: with 176, ptxas spills in the block loop of head_dim 160
_THREADS = 128  # of a warpgroup
_WGMMA_ROWS = 64  # rows of A in one wgmma (PTX ISA)


def _roles(consumers: int) -> tuple[Role, ...]:
    each = [Role(f"consumer{i}", 4, _CONSUMER[consumers]) for i in range(consumers)]
    return (*each, Role("producer", 1, _PRODUCER[consumers]))


def _fills_wide_tiles(problem: Problem) -> bool:
    """Whether sequences are long enough for 192-row tiles: measured on an H200 at head_dim 64 (docs/ledger.md)."""
    causal = problem.mask.bounds(problem.seqlen_q, problem.seqlen_k).outer.hi is not None
    return problem.seqlen_k >= (4096 if causal and not _fixed_max_pays(problem) else 2048)


def _few_scalars(problem: Problem, mask: str) -> bool:
    """Whether the registers that Q would take are free of other features' scalars."""
    busy = problem.softcap or problem.sink or problem.alibi or problem.bias or problem.seqused or "window(#" in mask
    busy = busy or reads_data(mask) or problem.scale_value <= 0
    return not busy and len(chunks(problem.head_dim)) == 1  # a second chunk of Q has addresses of its own


def _forward(problem: Problem, arch: Arch, base: dict[str, Any], point: dict[str, Any]) -> Plan | None:
    consumers, tile_m, tile_n = point["q_stages"], point["tile_m"], point["tile_n"]
    if consumers not in _CONSUMER:
        raise ValueError(f"q_stages must be 1, 2 or 3 on {arch.name} (consumer warpgroups), got {consumers}")
    d, dv = sum(chunks(problem.head_dim)), sum(chunks(problem.head_dim_v))
    scores, out, p = tile_m * tile_n // _THREADS, tile_m * dv // _THREADS, tile_m * tile_n // _THREADS // 2
    q = tile_m * d // _THREADS // 2 if point["q_registers"] else 0
    if point["q_registers"] and not _few_scalars(problem, base["mask"]):
        return None
    if tile_n > _NARROW and (problem.bias or reads_elements(base["mask"])):
        return None
    live = out + scores + p + q  # S arrives while P of the block before is an operand of P V
    if len(chunks(problem.head_dim_v)) > 1 and (live > _TWO_CHUNKS or consumers > 2):
        raise ValueError(f"registers: {live} for accumulators, O in two parts, leave too few of {_CONSUMER[consumers]} a thread")
    if live > _CONSUMER[consumers] - (_Q_ROOM if q else _SPARE):
        raise ValueError(f"registers: {live} for accumulators leave no {_SPARE} of {_CONSUMER[consumers]} a thread")
    e = problem.element_bytes
    q_bytes, o_bytes, k_bytes, v_bytes = tile_m * d * e, tile_m * dv * e, tile_n * d * e, tile_n * dv * e
    ring = "KV ring" if k_bytes == v_bytes else "V ring"
    o_over = ring if point["o_in_ring"] else ""
    fixed = consumers * (q_bytes + (0 if o_over else o_bytes)) + BARRIER_BYTES
    if point["o_in_ring"] and tile_n % tile_m:
        return None
    stages = point["kv_stages"] or kv_stages_that_fit(arch, fixed, k_bytes, v_bytes)
    if stages < 2:
        raise too_large(arch, fixed + k_bytes + v_bytes)
    smem = forward_smem(consumers, q_bytes, stages, k_bytes, v_bytes, o_bytes, o_over=o_over)
    smem.add("barriers", BARRIER_BYTES)
    fields = dict(point)
    fields |= {
        "kv_stages": stages,
        "rescale_rows": 16,
        "early_turn": consumers == 2 and point["q_registers"],
        "ping_pong": _turns_pay(problem, consumers),
    }
    return Plan(**{**base, **fields, "page_rows": page_rows(problem, tile_n), "roles": _roles(consumers), "smem": smem.regions})


def _backward(problem: Problem, arch: Arch, base: dict[str, Any], point: dict[str, Any]) -> Plan | None:  # noqa: ARG001
    tile_m, tile_n, q_stages, do_stages = point["tile_m"], point["tile_n"], point["q_stages"], point["do_stages"]
    if do_stages > q_stages:
        return None
    d, dv = sum(chunks(problem.head_dim)), sum(chunks(problem.head_dim_v))
    live = (tile_n * (d + dv) + 2 * tile_m * tile_n) // (2 * _THREADS)  # dK, dV, S and dP over two warpgroups
    if live > _CONSUMER[2] - _SPARE:
        raise ValueError(f"registers: {live} for dK, dV, S and dP leave no {_SPARE} of {_CONSUMER[2]} a thread")
    e = problem.element_bytes
    smem = Packer(SMEM_ALIGN)
    smem.add("K", tile_n * d * e)
    smem.add("V", tile_n * dv * e)
    smem.add("Q ring", q_stages * tile_m * d * e)
    smem.add("dO ring", do_stages * tile_m * dv * e)
    if tile_n < 2 * _WGMMA_ROWS:
        smem.add("P", tile_m * tile_n * e)  # both warpgroups need all of it; else each keeps the rows of its own keys in registers
    smem.add("dS", tile_m * tile_n * e)
    smem.add("dQ", tile_m * d * 4)  # fp32, added to global memory by TMA
    smem.add("LSE and delta", (q_stages + do_stages) * tile_m * 4)
    smem.add("barriers", BARRIER_BYTES)
    return Plan(**{**base, **point, "kv_stages": 2, "roles": _roles(2), "smem": smem.regions})


def _smem_over_mma(plan: Plan) -> float:
    """Shared-memory cycles per MMA cycle of S = QK^T: each warpgroup reads its Q and all of K (128 B and 4096 FLOP a clock)."""
    d = sum(plan.head_dim_chunks)
    return max(1.0, (plan.tile_m + plan.tile_n) * d * plan.element_bytes / 128 / (2 * plan.tile_m * plan.tile_n * d / 4096))


def _turns_pay(problem: Problem, consumers: int) -> bool:
    """Measured on an H200 (h200_sweep3): without turns, two consumers of head_dim 64 gain 1 to 2 % at the lengths that have two."""
    return consumers > 2 or (consumers == 2 and max(problem.head_dim, problem.head_dim_v) > 64)


# Shortest lengths from which a form was the faster one, by mask and by the larger head dimension: measured on an H200 (docs/findings.md).
_FIXED_MAX_FROM = {
    "causal": {64: 2048, 128: 2048, 192: 1024},
    "full": {64: 1024, 128: 512, 192: 512, 256: 512},
}
_MULTICAST_FROM = {
    "causal": {64: 4096, 128: 4096, 192: 8192, 256: 4096},
    "full": {64: 4096, 128: 16384, 192: 8192, 256: 2048},
}
_SHORT_TRIANGLE = 512  # keys up to which blocks of 64 are taken at head_dim 64: measured at 512 (h200_sweep28)
_Q_IN_SHARED_FROM = 16384  # at head_dim 128 with fixed maxima
_NEVER = 1 << 62
_MANY_TILES = 4 * 132  # of 128 rows, four for each SM of an H200: with fewer, the last ones leave SMs idle
_MOST_LINKS = (1 << 31) - 1  # rows of all heads: the place of an LSE is a 32-bit number in the list of tiles to compute again
_WASTE = 1.01  # share of rows that tiles of two CTAs may add to those of one


def _kind(problem: Problem) -> str:
    """The mask as the tables have it; empty: in none of them."""
    outer = problem.mask.bounds(problem.seqlen_q, problem.seqlen_k).outer
    if reads_data(problem.mask.code) or outer.lo is not None:
        return ""
    return "full" if outer.hi is None else "causal"


def _long_enough(problem: Problem, from_length: dict[str, dict[int, int]]) -> bool:
    kind = _kind(problem)
    if not kind or problem.page_size:
        return False
    width = -(-max(problem.head_dim, problem.head_dim_v) // 64) * 64
    many = problem.total_q * problem.heads // 128 >= _MANY_TILES
    return many and min(problem.seqlen_q, problem.seqlen_k) >= from_length[kind].get(width, _NEVER)


def _fixed_max_pays(problem: Problem) -> bool:
    busy = problem.softcap or problem.alibi or problem.bias or problem.scale_value <= 0 or problem.dtype != "bfloat16"
    busy = busy or (problem.seqused and not problem.varlen) or problem.total_q * problem.heads > _MOST_LINKS
    return not busy and _long_enough(problem, _FIXED_MAX_FROM)


def _multicast_pays(problem: Problem, rows: int) -> bool:
    """``rows``: of a CTA."""
    if problem.varlen or problem.seqused:
        return False
    alone, together = (-(-problem.seqlen_q // n) * n for n in (rows, 2 * rows))
    return together <= _WASTE * alone and _long_enough(problem, _MULTICAST_FROM)


def _q_registers_pay(problem: Problem) -> bool:
    """Measured on an H200 (docs/findings.md): where shared memory keeps up, reading Q for each block costs less power than registers."""
    causal = _kind(problem) != "full"
    if max(problem.head_dim, problem.head_dim_v) <= 64:
        return True
    if _fixed_max_pays(problem):
        return (0 if causal else 2048) <= problem.seqlen_k < _Q_IN_SHARED_FROM
    return causal


def _narrow_blocks_pay(problem: Problem) -> bool:
    """Whether tiles have so few blocks that it counts what the diagonal cuts off: half of 128 keys, for the first consumer's rows."""
    if problem.varlen or problem.seqused or _kind(problem) != "causal" or max(problem.head_dim, problem.head_dim_v) > 64:
        return False
    return problem.seqlen_q > 2 * _WGMMA_ROWS and problem.seqlen_k <= _SHORT_TRIANGLE


def _q_sentence(plan: Plan) -> str:
    if plan.q_registers:
        return "Q is read once into registers: shared memory feeds the MMAs with K and V only"
    return "Q stays in shared memory: its registers are free, and it measured faster"


def _fixed_max_sentence(plan: Plan) -> str:
    if plan.fixed_max:
        return "whole blocks keep the maxima of the blocks before: a quarter fewer instructions a block, which is what limits it (measured)"
    return "every block renews the rows' maxima: without, the rest of a tile's work would outweigh it, or the weights' range is too small"


def _multicast_sentence(plan: Plan) -> str:
    if plan.kv_multicast == 2:
        return "two CTAs of neighbouring rows load each key block together: half the reads of L2, and the power they cost (measured)"
    return "each CTA loads its own K and V: waiting for another would cost more than the reads (measured, docs/findings.md)"


def _staging_sentence(plan: Plan) -> str:
    if plan.o_in_ring:
        return "O is staged in slots of V's ring: more of them fit, and the next Q loads while the last block is computed and O is stored"
    return "O has its own shared memory: the next Q loads while O is stored"


def _forward_criteria(problem: Problem) -> tuple[Criterion, ...]:
    return (
        fewest_idle_tiles(problem),
        Criterion(
            lambda p: p.q_stages > 2 and not _fills_wide_tiles(problem),
            lambda p: f"{p.q_stages} consumers: at these lengths tiles of more rows are slower (measured, docs/ledger.md)",
        ),
        Criterion(lambda p: -min(p.kv_stages, 4), lambda p: f"{p.kv_stages} K/V slots: the next K and V load while this pair is read"),
        Criterion(lambda p: -min(p.q_stages, 2), lambda p: f"{p.q_stages} consumers: one's softmax runs under another's MMA"),
        Criterion(
            lambda p: p.tile_n > _NARROW and _narrow_blocks_pay(problem),
            lambda p: f"{p.tile_n}-key blocks: the diagonal cuts off half of a wider one, and tiles have few (measured)",
        ),
        Criterion(_smem_over_mma, lambda p: f"{p.tile_n}-key blocks: reading operands hides best under their MMA"),
        Criterion(lambda p: -p.tile_n, lambda p: f"{p.tile_n}-key blocks: fewest row maxima, rescales and barriers a key"),
        Criterion(lambda p: -p.q_stages, lambda p: f"{p.q_stages} consumer warpgroups of {p.tile_m} rows: all that the registers allow"),
        Criterion(lambda p: p.q_registers != _q_registers_pay(problem), _q_sentence),
        Criterion(lambda p: p.fixed_max != _fixed_max_pays(problem), _fixed_max_sentence),
        Criterion(lambda p: (p.kv_multicast == 2) != _multicast_pays(problem, p.rows_per_cta), _multicast_sentence),
        Criterion(lambda p: p.o_in_ring, _staging_sentence),
        Criterion(lambda p: -p.kv_stages, lambda p: f"{p.kv_stages} K/V slots: all that fit"),
    )


def _forward_remarks(plan: Plan) -> list[Choice]:
    return [
        exp2_remark(plan),
        ("intra_overlap", "a consumer's softmax starts when its P V is done: it runs under the others' MMAs (measured, docs/findings.md)"),
        (
            "early_turn",
            "the turn passes " + ("once S is issued" if plan.early_turn else "once S and P V are issued") + " (measured, docs/findings.md)",
        ),
        ("rescale_rows", f"a warp (16 rows) rescales O only when one of its maxima grew by more than 2^{plan.rescale_threshold:g}"),
    ]


def _backward_criteria(problem: Problem) -> tuple[Criterion, ...]:  # noqa: ARG001
    return (
        Criterion(lambda p: -p.tile_m * p.tile_n, lambda p: f"{p.tile_m} x {p.tile_n} tiles: the largest that registers and memory hold"),
        Criterion(lambda p: -p.tile_n, lambda p: f"{p.tile_n} keys a CTA: dQ is added to global memory least often"),
        Criterion(lambda p: -(p.q_stages + p.do_stages), lambda p: f"{p.q_stages} Q and {p.do_stages} dO stages: all that fit"),
    )


def _backward_remarks(plan: Plan) -> list[Choice]:  # noqa: ARG001
    return [("exp2", "exp2 on MUFU only: five products a tile leave it ample time")]


FORWARD = Grid(
    axes={
        "tile_m": (64,),
        "tile_n": (128, 64),
        "q_stages": (3, 2, 1),
        "q_registers": (True, False),
        "intra_overlap": (False,),
        "o_in_ring": (False, True),
        "fixed_max": (False, True),
        "kv_multicast": (1, 2),
        "kv_stages": (ALL_THAT_FIT,),
    },
    build=_forward,
    criteria=_forward_criteria,
    remarks=_forward_remarks,
    nearest="head_dim and head_dim_v up to 256",
)
BACKWARD = Grid(
    axes={"tile_m": (128, 64), "tile_n": (128, 64), "q_stages": (2, 1), "do_stages": (2, 1)},
    build=_backward,
    criteria=_backward_criteria,
    remarks=_backward_remarks,
    nearest="head_dim and head_dim_v up to 256",
)
