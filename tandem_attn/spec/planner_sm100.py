"""Candidate plans for Blackwell: accumulators live in tensor memory, one warp issues all MMAs, softmax and correction are roles of their
own.
"""

from __future__ import annotations

import re
from typing import Any

from tandem_attn.spec.arch import Arch
from tandem_attn.spec.exp2 import Exp2Split
from tandem_attn.spec.masks import Full, Window
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
    p_parts,
    page_rows,
    reads_elements,
    too_large,
    uneven,
)
from tandem_attn.spec.problem import DTYPES, Problem
from tandem_attn.spec.resources import MMA_BYTES, Packer, Region, Role, chunks

_F32 = 4
_SOFTMAX_ROLES = 2  # one an S tile: of two query tiles, or of one whose key blocks they take in turns
_DISPATCH_BYTES = 1024  # what Gluon keeps in shared memory to start its roles with; with the barriers 0.6 to 0.9 KB in the kernels compiled
_NARROW = 64  # keys of a block whose scores meet a bias or a table element each: a row of them must fit a thread beside its scores
_PAIR_HEAD_DIM = 128  # of 16 bits; from here on a CTA pair pays: below, K and V tiles are small and the exponential decides alone
_DQ_COLUMNS, _DQ_STAGES = 32, 2  # dQ leaves tensor memory in slices of 32 columns, one being written while one is added


def _forward(problem: Problem, arch: Arch, base: dict[str, Any], point: dict[str, Any]) -> Plan | None:
    tile_m, tile_n, q_stages, pair = point["tile_m"], point["tile_n"], point["q_stages"], point["cta_group"]
    if q_stages > _SOFTMAX_ROLES:
        raise ValueError(f"q_stages must be at most {_SOFTMAX_ROLES} (a softmax role each), got {q_stages}")
    e = problem.element_bytes
    d, dv = (sum(chunks(n, MMA_BYTES // e)) for n in (problem.head_dim, problem.head_dim_v))
    q_bytes, o_bytes = tile_m * d * e, tile_m * dv * DTYPES[problem.out_dtype]
    k_bytes, v_bytes = tile_n * d * e // pair, tile_n * dv * e // pair  # each CTA of a pair holds half of operand B
    own_o = not point["o_over_q"]
    if not own_o and (o_bytes > q_bytes or problem.out_dtype != problem.dtype):
        return None
    stats = _SOFTMAX_ROLES * tile_m * _F32  # how to scale O, from softmax to correction
    fixed = q_stages * (q_bytes + (o_bytes if own_o else 0)) + stats + BARRIER_BYTES + _DISPATCH_BYTES
    stages = point["kv_stages"] or kv_stages_that_fit(arch, fixed, k_bytes, v_bytes)
    if stages < 2:
        raise too_large(arch, fixed + k_bytes + v_bytes)
    smem = forward_smem(q_stages, q_bytes, stages, k_bytes, v_bytes, o_bytes, o_over="" if own_o else "Q", one_ring=pair == 1)
    smem.add("row stats", stats)
    smem.add("barriers", BARRIER_BYTES)
    smem.add("arguments", _DISPATCH_BYTES)
    if tile_n > _NARROW and (problem.bias or reads_elements(base["mask"]) or _divides(base["mask"])):
        return None
    fields = point | {"page_rows": page_rows(problem, tile_n, pair)}
    technique = {"exp2": _exp2(problem, arch), "rescale_rows": 32, "p_parts": p_parts(tile_n, e)}
    tmem = _forward_tmem(q_stages, tile_n, dv, e)
    return Plan(
        **{
            **base,
            **fields,
            **technique,
            "kv_stages": stages,
            "roles": _roles(q_stages, wide=problem.alibi and not problem.softcap),
            "smem": smem.regions,
            "tmem": tmem,
        }
    )


def _pair_objection(problem: Problem, rows: int, tile_n: int) -> str:
    """Why a CTA pair does not suit the problem; empty when it does. A plan with pairs that is asked for is made all the same."""
    if max(problem.head_dim, problem.head_dim_v) * problem.element_bytes < 2 * _PAIR_HEAD_DIM:
        return "the exponential decides alone"
    if uneven(problem) or problem.seqused:
        return "the two CTAs of a pair would have unlike work"
    if problem.page_size and page_rows(problem, tile_n) < tile_n:
        return "pages would have to be brought together before"
    if problem.bias or any(not isinstance(leaf, Full | Window) for leaf in problem.mask.leaves()):
        return "what scores meet is read from memory, which decides alone"
    return "" if problem.seqlen_q > rows else "one CTA covers all queries"


def _forward_tmem(q_stages: int, tile_n: int, dv: int, element_bytes: int) -> tuple[Region, ...]:
    """Two S tiles and an O tile for each query tile. With one query tile the two S tiles take turns. P lies over the end of its S."""
    tmem = Packer(16)
    for i in range(2):
        tmem.add(f"S{i}", tile_n)
    for i in range(q_stages):
        tmem.add(f"O{i}", dv)
    p_columns = tile_n * element_bytes // _F32
    for i in range(2):
        tmem.over(f"P{i}", p_columns, f"S{i}", tile_n - p_columns)
    return tmem.regions


def _divides(mask: str) -> bool:
    """Whether a predicate computes quotients that are not integers: a dozen instructions and some registers a column."""
    return re.search(r"\bdiv\(", mask) is not None


def _roles(q_stages: int, *, wide: bool) -> tuple[Role, ...]:
    """The launch table. Gluon's first role gets the registers that the others leave.

    With these budgets nothing spills (compiled for sm_100a; what is left: tests/kernels/test_spills.py). With two query tiles and 48 for
    the small roles two chunks of head_dim do, with 192 for softmax a soft cap does, and with 184 ALiBi alone (``wide``): its loop holds two
    numbers a row more. With one query tile the softmax loop reloads a row's number with 184, and correction's with 72.
    """
    correction, softmax, small = (88, 192, 40) if wide or q_stages == 1 else (104, 184, 40)
    tiles = [Role(f"softmax{i}", 4, softmax) for i in range(_SOFTMAX_ROLES)]
    return (Role("correction", 4, correction), *tiles, Role("mma", 1, small), Role("load", 1, small))


def _exp2(problem: Problem, arch: Arch) -> Exp2Split:
    """Pairs of 16 on FMA units. The public kernels take 3 (d128), 2 (d128 causal), 1 (d192 causal), none where MUFU is twice as fast."""
    if (arch.mufu or 0) >= 32:
        return Exp2Split()
    faster = (arch.mma_rate(problem.dtype) or 1) / (arch.mma_rate("bfloat16") or 1)  # 8-bit products: 2
    mean_dim = (problem.head_dim + problem.head_dim_v) / 2 / faster  # exp cycles over MMA cycles are 128 / mean_dim
    if mean_dim >= 256:
        return Exp2Split()
    if mean_dim > 128:
        return Exp2Split(fma_pairs=1)
    if mean_dim < 96:
        return Exp2Split(fma_pairs=4)  # the upper end of the paper's 10-25 %: the MMA waits longest here
    return Exp2Split(fma_pairs=2 if uneven(problem) else 3)


def _backward(problem: Problem, arch: Arch, base: dict[str, Any], point: dict[str, Any]) -> Plan | None:  # noqa: ARG001
    tile_m, pair, tight = point["tile_m"], point["cta_group"], point["tight"]
    d, dv, e = sum(chunks(problem.head_dim)), sum(chunks(problem.head_dim_v)), problem.element_bytes
    if pair == 1 and tight:
        return None
    if pair == 1:
        tmem, smem = _alone_tmem(tile_m, d, dv), _alone_smem(point, d, dv, e)
    else:
        tmem = _tight_pair_tmem(tile_m, d, dv) if tight else _pair_tmem(tile_m, d, dv)
        smem = _pair_smem(point, d, dv, e, tight=tight)
    registers = (152, 136, 88) if pair == 1 else (136, 136, 104)  # public FA4 kernels; each sums to 65,536
    roles = [Role("reduce", 4, registers[0]), Role("compute", 8, registers[1]), Role("mma", 1, registers[2]), Role("load", 1, registers[2])]
    if pair == 2:
        roles.append(Role("relay", 1, registers[2]))
    fields = {name: value for name, value in point.items() if name != "tight"}
    return Plan(**{**base, **fields, "kv_stages": 2, "roles": tuple(roles), "smem": smem, "tmem": tmem})


def _backward_pair_objection(problem: Problem, tile_n: int) -> str:
    if max(problem.head_dim, problem.head_dim_v) < _PAIR_HEAD_DIM:
        return "tiles are small enough for shared memory to keep up"
    if problem.deterministic:
        return "dQ additions are ordered tile by tile"
    if problem.varlen:
        return "sequences may hold an odd number of key tiles"
    return "" if problem.seqlen_k > tile_n else "one CTA covers all keys"


# Tensor memory of the backward. Products are transposed: S^T and dP^T have keys as lanes and queries as columns. P and dS have 16 bits.


def _alone_tmem(tile_m: int, d: int, dv: int) -> tuple[Region, ...]:
    tmem = Packer(16)
    tmem.add("S", tile_m)
    tmem.add("dV", dv)
    tmem.add("dP", max(tile_m, d))
    tmem.add("dK", d)
    tmem.over("P", tile_m // 2, "S")
    tmem.over("dS", tile_m // 2, "dP")
    tmem.over("dQ", d, "dP")  # after the dK product has read dS
    return tmem.regions


def _pair_tmem(tile_m: int, d: int, dv: int) -> tuple[Region, ...]:
    tmem = Packer(16)
    tmem.add("S", tile_m)
    tmem.add("dV", dv)
    tmem.add("dP", tile_m)
    tmem.add("dK", d)
    tmem.over("P", tile_m // 2, "S")
    tmem.over("dS", tile_m // 2, "dP")
    tmem.over("dQ", d // 2, "S", tile_m // 2)  # 64 queries of the pair's 128: half the columns
    return tmem.regions


def _tight_pair_tmem(tile_m: int, d: int, dv: int) -> tuple[Region, ...]:
    """For large head dimensions: dP starts in the second half of S, which must have been read into registers before."""
    tmem = Packer(16)
    tmem.add("dV", dv)
    tmem.add("dK", d)
    tmem.add("S", tile_m)
    tmem.over("P", tile_m // 2, "S")
    tmem.over("dP", tile_m, "S", tile_m // 2)
    tmem.over("dS", tile_m // 2, "dP")
    tmem.over("dQ", d // 2, "dP", tile_m - d // 2)  # after the dK product has read dS
    return tmem.regions


def _alone_smem(point: dict[str, Any], d: int, dv: int, e: int) -> tuple[Region, ...]:
    tile_m, tile_n = point["tile_m"], point["tile_n"]
    smem = Packer(SMEM_ALIGN)
    smem.add("K", tile_n * d * e)
    smem.add("V", tile_n * dv * e)
    smem.add("Q ring", point["q_stages"] * tile_m * d * e)
    smem.add("dO ring", point["do_stages"] * tile_m * dv * e)
    smem.add("dS", tile_m * tile_n * e)
    smem.add("dQ", _DQ_STAGES * tile_m * _DQ_COLUMNS * _F32)
    return _with_statistics(smem, point)


def _pair_smem(point: dict[str, Any], d: int, dv: int, e: int, *, tight: bool) -> tuple[Region, ...]:
    """Each CTA holds half of every operand B. Q and dO are operand B of two products each, halved along queries and along the head
    dimension.
    """
    tile_m, tile_n = point["tile_m"], point["tile_n"]
    smem = Packer(SMEM_ALIGN)
    smem.add("K", tile_n * d * e)
    smem.add("V", tile_n * dv * e)
    smem.add("K of the pair", tile_n * d * e)  # operand B of dQ: the keys of both CTAs, half of the head dimension
    q_bytes, do_bytes, dq_bytes = tile_m * d * e // 2, tile_m * dv * e // 2, _DQ_STAGES * tile_m // 2 * _DQ_COLUMNS * _F32
    smem.add("Q ring", point["q_stages"] * q_bytes)
    smem.add("dO ring", point["do_stages"] * do_bytes)
    smem.add("dS", tile_m * tile_n * e)
    smem.add("dS outgoing", tile_m * tile_n * e // 2)  # to the peer, through distributed shared memory
    if tight:  # loaded one after the other into the same place
        smem.over("Q transposed", q_bytes, "Q ring")
        smem.over("dO transposed", do_bytes, "dO ring")
        smem.over("dQ", dq_bytes, "dS outgoing")
    else:
        smem.add("Q transposed", q_bytes)
        smem.add("dO transposed", do_bytes)
        smem.add("dQ", dq_bytes)
    return _with_statistics(smem, point)


def _with_statistics(smem: Packer, point: dict[str, Any]) -> tuple[Region, ...]:
    smem.add("LSE and delta", (point["q_stages"] + point["do_stages"]) * point["tile_m"] * _F32)
    smem.add("barriers", BARRIER_BYTES)
    return smem.regions


def _tight(plan: Plan) -> bool:
    return any(region.name == "dP" and region.overlaps for region in plan.tmem)


def _forward_criteria(problem: Problem) -> tuple[Criterion, ...]:
    return (
        fewest_idle_tiles(problem),
        Criterion(
            lambda p: -p.q_stages, lambda p: f"{p.q_stages} query tiles of {p.tile_m} rows: one's softmax runs under the other's MMA"
        ),
        Criterion(lambda p: -p.tile_n, lambda p: f"{p.tile_n}-key blocks: fewest row maxima, rescales and barriers a key"),
        Criterion(
            lambda p: p.cta_group == 2 and bool(_pair_objection(problem, p.rows_per_cta, p.tile_n)),
            lambda p: f"one CTA a tile: {_pair_objection(problem, p.rows_per_cta, p.tile_n)}",
        ),
        Criterion(lambda p: -p.cta_group, lambda _: "a CTA pair shares K and V: half the shared memory and traffic for them in each"),
        Criterion(lambda p: -min(p.kv_stages, 3), lambda p: f"{p.kv_stages} K/V slots: K, V and the next K in flight"),
        Criterion(lambda p: p.o_over_q, lambda _: "O has its own shared memory: the next Q loads while O is stored"),
        Criterion(lambda p: -p.kv_stages, lambda p: f"{p.kv_stages} K/V slots: all that fit"),
    )


def _forward_remarks(plan: Plan) -> list[Choice]:
    remarks = [
        exp2_remark(plan),
        ("rescale_rows", f"O is rescaled by a warp only when one of its row maxima grew{_by(plan.rescale_threshold)}"),
    ]
    if plan.p_exponent:
        remarks.append(("p_exponent", f"P is kept times 2^{plan.p_exponent}: small weights in {plan.dtype} would be subnormal or zero"))
    if len(plan.p_parts) > 1:
        remarks.append(("p_parts", f"P is signalled at {plan.p_parts[0]:.0%}: the PV product starts before the row is finished"))
    return remarks


def _by(threshold: float) -> str:
    return f" by more than 2^{threshold:g}" if threshold else ", so that the largest weight is an exact power of two"


def _backward_criteria(problem: Problem) -> tuple[Criterion, ...]:
    return (
        Criterion(
            lambda p: p.cta_group == 2 and bool(_backward_pair_objection(problem, p.tile_n)),
            lambda p: f"one CTA a tile: {_backward_pair_objection(problem, p.tile_n)}",
        ),
        Criterion(lambda p: -p.cta_group, lambda _: "a CTA pair: half of each operand B and half of the dQ additions in each CTA"),
        Criterion(_tight, lambda _: "S and dP lie apart in tensor memory: dP need not wait until S is read"),
        Criterion(lambda p: -p.q_stages, lambda p: f"{p.q_stages} Q stages: all that fit"),
    )


def _backward_remarks(plan: Plan) -> list[Choice]:
    remarks = [("exp2", "exp2 on MUFU only: five products a tile leave it ample time")]
    if _tight(plan):
        remarks.append(("tmem", "a CTA pair whose dP starts in the second half of S: S, dP, dK and dV exceed 512 columns otherwise"))
    return remarks


FORWARD = Grid(
    axes={
        "tile_m": (128,),
        "tile_n": (128, 64),
        "q_stages": (2, 1),
        "cta_group": (2, 1),
        "o_over_q": (False, True),
        "kv_stages": (ALL_THAT_FIT,),
    },
    build=_forward,
    criteria=_forward_criteria,
    remarks=_forward_remarks,
    nearest="head_dim and head_dim_v up to 256",
)
BACKWARD = Grid(
    axes={"tile_m": (128,), "tile_n": (128,), "q_stages": (2, 1), "do_stages": (1,), "cta_group": (2, 1), "tight": (False, True)},
    build=_backward,
    criteria=_backward_criteria,
    remarks=_backward_remarks,
    nearest="head_dim + head_dim_v up to 320 (dK, dV, S and dP share 512 columns), or a Hopper chip",
)
