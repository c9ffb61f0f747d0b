"""Choices the planner makes alike on every GPU: schedule, GQA packing, key splits, and what a plan takes over from its problem."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tandem_attn.spec.arch import Arch, get_arch
from tandem_attn.spec.errors import UnsupportedError
from tandem_attn.spec.mask_tree import lower
from tandem_attn.spec.plan import BACKWARD, FORWARD, Launch, Plan, Schedule, ScheduleKind, mask_structure
from tandem_attn.spec.predicates import UntraceableError
from tandem_attn.spec.problem import FLOAT8, Problem
from tandem_attn.spec.resources import MMA_BYTES, Packer
from tandem_attn.spec.schedule import l2_heads, l2_section

GPU_DTYPES = ("float16", "bfloat16")
CPU_DTYPES = ("float16", "bfloat16", "float32", "float64", *FLOAT8)
SMEM_ALIGN = 1024  # bytes; the 128-byte swizzle of TMA repeats every 1024 (PTX ISA, tensor swizzling)
BARRIER_BYTES = 512  # 64 mbarriers of 8 bytes: more than any of our pipelines has
ALL_THAT_FIT = 0  # as a number of K/V slots
MAX_KV_STAGES = 10  # as many as the public kernels use; further slots hide no more latency

_FEWEST_PAGE_ROWS = 8  # the pattern of a swizzled tile repeats every 8 rows of 128 bytes (PTX ISA, tensor swizzling modes)
# 8-bit P: with its row's maximum at 2^8, weights down to 2^-14 of it are normal in e4m3 (2^-22 in e5m2), and with tau = 0 the largest is an
# exact power of two. Measured (docs/ledger.md): errors of peaked rows 2 to 3 times those of tau = 8 or of no exponent at all are avoided.
_FLOAT8_P = {"p_exponent": 8, "rescale_threshold": 0.0}
_MIN_SPLIT_BLOCKS = 4  # key blocks a split must keep: fewer do not pay for writing and combining a partial result
_MAX_SPLITS = 128

Choice = tuple[str, str]  # Plan field and the sentence that explains it


@dataclass(frozen=True)
class Criterion:
    """One step of the comparison: lower cost is better; ``says`` explains the winner."""

    cost: Callable[[Plan], float]
    says: Callable[[Plan], str]


@dataclass(frozen=True)
class Grid:
    """What a chip family tries: axes, the function that builds a plan at one point, how plans compare, and what to name when none fits."""

    axes: dict[str, tuple[Any, ...]]
    build: Callable[..., Plan | None]
    criteria: Callable[[Problem], tuple[Criterion, ...]]
    remarks: Callable[[Plan], list[Choice]]  # reasons of fields that ``build`` sets without alternatives
    nearest: str


def fixed_fields(problem: Problem, arch: Arch, direction: str) -> dict[str, Any]:
    """Plan fields that the problem decides. What only one direction reads is left at its default in the other."""
    forward = direction == FORWARD
    return {
        "arch": arch.name,
        "direction": direction,
        "dtype": problem.dtype,
        "head_dim": problem.head_dim,
        "head_dim_v": problem.head_dim_v,
        "page_size": problem.page_size,
        "leftpad": problem.leftpad,
        "varlen": problem.varlen,
        "seqused": problem.seqused,
        "deterministic": problem.deterministic and not forward,
        "mask": _structure(problem, arch),
        "scaled_first": forward and problem.scale_value <= 0,
        "softcap": problem.softcap > 0,
        "sink": problem.sink,
        "alibi": problem.alibi,
        "bias": problem.bias_type if problem.bias_type in ("", "float16", "bfloat16") else "float32",  # others are converted
        "return_lse": problem.return_lse and forward,
        "descale": problem.descale,
        **(_FLOAT8_P if problem.dtype in FLOAT8 else {}),
    }


def row_step(problem: Problem) -> int:
    """What head dimensions are multiples of on a GPU: TMA reads rows in units of 16 bytes (PTX ISA, tensors)."""
    return max(8, 16 // problem.element_bytes)


def gpu_dtypes(arch: Arch) -> tuple[str, ...]:
    """Element types of q, k and v that the kernels for a chip take: 8 bits where P can stay in tensor memory."""
    return (*GPU_DTYPES, *FLOAT8) if arch.tmem_columns else GPU_DTYPES


def _structure(problem: Problem, arch: Arch) -> str:
    """A GPU's kernel compiles in what predicates compute; a CPU calls them."""
    try:
        mask = problem.mask if arch.capability is None else lower(problem.mask)[0]
    except UntraceableError as error:
        raise UnsupportedError(
            backend="tandem",
            missing=f"a mask with {error}",
            nearest="the operations of tandem_attn.spec.predicates, or backend 'reference'",
        ) from error
    return mask_structure(mask.code)


def reads_data(mask: str) -> bool:
    """Whether a mask's structure has more than windows."""
    return "document(" in mask or "predicate(" in mask


def reads_elements(mask: str) -> bool:
    """Whether a mask holds values for single scores, before they meet: a table's elements, or the two sides of an ``or``."""
    return ("predicate(" in mask and "#0:" in mask) or ("or(" in mask and reads_data(mask))


def kv_stages_that_fit(arch: Arch, fixed_bytes: int, k_bytes: int, v_bytes: int) -> int:
    """K and V slots, alternating from K on, that fit beside ``fixed_bytes`` of shared memory."""
    room = (arch.smem_bytes_cta or 0) - fixed_bytes
    pairs, rest = divmod(max(room, 0), k_bytes + v_bytes)
    return min(MAX_KV_STAGES, 2 * pairs + (rest >= k_bytes))


def forward_smem(
    q_tiles: int, q_bytes: int, stages: int, k_bytes: int, v_bytes: int, o_bytes: int, *, o_over: str = "", one_ring: bool = True
) -> Packer:
    """Q tiles, K/V slots and O tiles. ``o_over``: O tiles are staged in other memory, each where its Q lay (``"Q"``, which was read for the
    last time), or in slots of V's ring.

    K and V tiles of one size share a ring if ``one_ring``.
    """
    smem = Packer(SMEM_ALIGN)
    for i in range(q_tiles):
        smem.add(f"Q{i}", q_bytes)
    if one_ring and k_bytes == v_bytes:
        smem.add("KV ring", stages * k_bytes)
    else:
        smem.add("K ring", (stages - stages // 2) * k_bytes)
        smem.add("V ring", stages // 2 * v_bytes)
    for i in range(q_tiles):
        if not o_over:
            smem.add(f"O{i}", o_bytes)
        elif o_over == "Q":
            smem.over(f"O{i}", o_bytes, f"Q{i}")
        else:
            smem.over(f"O{i}", o_bytes, o_over, i * o_bytes)
    return smem


def too_large(arch: Arch, needed: int) -> ValueError:
    """No two K/V slots fit beside Q and O."""
    return ValueError(f"smem: Q, O, one K and one V tile need {needed} bytes, the capacity is {arch.smem_bytes_cta} bytes")


def uneven(problem: Problem) -> str:
    """Why tiles differ in work, or an empty string when they don't."""
    outer = problem.mask.bounds(problem.seqlen_q, problem.seqlen_k).outer
    if problem.varlen:
        return "sequences differ in length"
    if (outer.lo is None) != (outer.hi is None):
        return "the mask's triangle gives tiles unlike work"
    return ""


def rules(problem: Problem, arch: Arch, plan: Plan, fixed: frozenset[str]) -> tuple[Plan, list[str]]:
    """Completes a plan whose tiling is chosen; fields in ``fixed`` stay as they are. Returns it with the reasons."""
    steps = {"pack_gqa": _pack_gqa, "num_splits": _num_splits, "schedule": _schedule}
    if plan.direction == BACKWARD:
        steps = {"schedule": _schedule}
    reasons = []
    for field, step in steps.items():
        if field not in fixed:
            value, reason = step(problem, arch, plan)
            plan = plan.with_(**{field: value})
            reasons += [reason] if reason else []
    return plan, reasons


def page_rows(problem: Problem, tile_n: int, cta_group: int = 1) -> int:
    """Keys of a page that one copy brings, so that no copy crosses a page: tiles start at a sequence's first key.

    Where that is fewer than ``_FEWEST_PAGE_ROWS``, pages are brought together before, as one page a sequence; also where a CTA pair would
    put a tile together from pages, of which each CTA holds other keys of K and other columns of V.
    """
    if problem.page_size == 0:
        return 0
    rows = 1 if problem.leftpad else math.gcd(problem.page_size, tile_n)
    whole = problem.page_size >= problem.seqlen_k or rows < _FEWEST_PAGE_ROWS or cta_group == 2
    return tile_n if whole else rows


def _tiles(problem: Problem, plan: Plan, pack: int) -> int:
    rows = plan.rows_per_cta * plan.ctas
    queries = problem.seqlen_q
    if problem.varlen and problem.batch:  # the bound may be a poor one
        queries = min(queries, -(-problem.total_q // problem.batch))
    return problem.batch * (problem.heads // pack) * -(-queries * (1 << (pack - 1).bit_length()) // rows)


def _pack_gqa(problem: Problem, arch: Arch, plan: Plan) -> tuple[int, str]:  # noqa: ARG001
    if plan.ctas > 1 or plan.fixed_max:
        return 1, ""
    ratio = max(n for n in range(1, plan.tile_m + 1) if problem.heads_per_kv % n == 0)  # a query's heads lie in one tile
    packed, apart = _tiles(problem, plan, ratio), _tiles(problem, plan, 1)
    if ratio == 1 or 2 * packed > apart:
        return 1, ""
    return (
        ratio,
        f"{ratio} query heads of a KV head packed into the rows of a tile: {packed} tiles instead of {apart}, K and V read once for all",
    )


def _num_splits(problem: Problem, arch: Arch, plan: Plan) -> tuple[int, str]:
    tiles = _tiles(problem, plan, plan.pack_gqa)
    n_blocks = -(-problem.seqlen_k // plan.tile_n)
    if arch.sms is None or not tiles or plan.fixed_max:
        return 1, ""
    splits = min(arch.sms // tiles, n_blocks // _MIN_SPLIT_BLOCKS, _MAX_SPLITS)
    if splits < 2:
        return 1, ""
    return (
        splits,
        f"keys in {splits} splits, combined afterwards: {tiles} tiles alone would leave {arch.sms - tiles} of {arch.sms} SMs idle",
    )


def _schedule(problem: Problem, arch: Arch, plan: Plan) -> tuple[Schedule, str]:
    reason = uneven(problem)
    if plan.direction == BACKWARD:
        return _backward_schedule(plan, reason)
    if plan.num_splits > 1:
        return Schedule(), "one split a CTA, in the order they come: all run at once"
    if not arch.tmem_columns:
        return _hopper_schedule(problem, arch, plan, reason)
    heads = l2_section(problem, arch)
    section = max(1, heads // plan.pack_gqa) if heads else 0
    l2 = f"; sections of {section} heads, whose K and V fit half of L2" if section else "; K and V of all heads fit half of L2"
    if not reason:
        return Schedule(ScheduleKind.NAIVE, Launch.STATIC, section), f"all tiles alike: static persistent, in plain order{l2}"
    how = "the hardware hands out tiles (cluster launch control)"
    return Schedule(ScheduleKind.LPT, Launch.CLC, section), f"{reason}: longest first, and {how}{l2}"


# Of KV heads, of tiles, and of query heads in a section on Hopper: measured on an H200 (docs/findings.md).
_LEAST_SECTION, _MOST_SECTION, _MOST_SECTION_TILES, _MOST_SECTION_HEADS = 2, 16, 256, 32


def _hopper_schedule(problem: Problem, arch: Arch, plan: Plan, reason: str) -> tuple[Schedule, str]:
    """As measured on an H200 (docs/findings.md): head after head where tiles are alike; else sections of a power of two of heads, the first
    of which half of L2 does not hold more, unless they become too many at once."""
    if not reason:
        narrow = max(problem.head_dim, problem.head_dim_v) <= 64
        launch = Launch.DYNAMIC if narrow else Launch.STATIC
        return Schedule(ScheduleKind.NAIVE, launch, 0), f"all tiles alike: {launch.value} persistent, in plain order, head after head"
    how = f"{reason}: longest first, and an atomic counter hands out tiles"
    fitting = 2 ** math.ceil(math.log2(max(1.0, l2_heads(problem, arch))))
    tiles = -(-problem.seqlen_q * plan.pack_rows // plan.rows_per_cta) * problem.heads_per_kv // plan.pack_gqa  # of a CTA and KV head
    most = max(_MOST_SECTION, 2 ** int(math.log2(max(1, _MOST_SECTION_TILES // max(1, tiles)))))
    section = max(min(fitting, most), _LEAST_SECTION) * problem.heads_per_kv // plan.pack_gqa
    if problem.heads_per_kv > 1:
        section = min(section, _MOST_SECTION_HEADS)
    heads = max(1, section)
    if heads >= problem.heads * problem.batch // plan.pack_gqa:
        return Schedule(ScheduleKind.LPT, Launch.DYNAMIC, 0), how
    return Schedule(ScheduleKind.LPT, Launch.DYNAMIC, heads), f"{how}; sections of {heads} heads, whose K and V about fill L2, or fewer"


def _backward_schedule(plan: Plan, reason: str) -> tuple[Schedule, str]:
    if plan.deterministic and reason:
        return Schedule(ScheduleKind.SPT), f"deterministic and {reason}: shortest first, so that dQ additions, made in order, wait least"
    if reason:
        return Schedule(ScheduleKind.LPT), f"{reason}: longest first"
    return Schedule(), "all tiles alike: plain order"


def exp2_remark(plan: Plan) -> Choice:
    """How the exponentials of a forward tile compare with its MMA, were all of them on MUFU."""
    arch = get_arch(plan.arch)
    mma_cycles = 2 * (plan.head_dim + plan.head_dim_v) / (arch.mma_rate(plan.dtype) or 1)  # of one score
    share = 1 / (arch.mufu or 1) / mma_cycles
    return "exp2", f"exp2 {plan.exp2}: all on MUFU they would take {share:.0%} of the MMA's cycles"


def fewest_idle_tiles(problem: Problem) -> Criterion:
    """Query tiles of a CTA that no row would fill; packing counts the heads of a group as rows."""
    rows = problem.seqlen_q * problem.heads_per_kv

    def idle(plan: Plan) -> int:
        return max(0, plan.q_stages - max(1, -(-rows // plan.tile_m)))

    return Criterion(idle, lambda p: f"{p.q_stages} query tile{'s' * (p.q_stages > 1)} of {p.tile_m} rows: all that {rows} rows fill")


def p_parts(tile_n: int, element_bytes: int) -> tuple[float, ...]:
    """P in two parts, the first as near 3/4 as whole MMA steps allow: the PV product starts before the row is finished."""
    step = MMA_BYTES // element_bytes
    first = math.floor(0.75 * tile_n / step) * step
    return (first / tile_n, 1.0) if 0 < first < tile_n else (1.0,)
