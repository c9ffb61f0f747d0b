"""Plan: how an attention kernel is built. It is hashable and is the compile-cache key: all that the code is specialised on, and nothing
else."""

from __future__ import annotations

import enum
import functools
import hashlib
import math
import re
from dataclasses import dataclass, field, fields, replace
from typing import Any

from tandem_attn.spec.arch import Arch, get_arch
from tandem_attn.spec.exp2 import Exp2Split
from tandem_attn.spec.problem import DTYPES as ELEMENT_BYTES
from tandem_attn.spec.problem import FLOAT8, output_dtype
from tandem_attn.spec.resources import MMA_BYTES, Region, Role, check_regions, check_roles, chunks, used

_WARP_ROWS = 32  # rows of a warp where each thread holds one

FORWARD = "forward"
BACKWARD = "backward"
LARGEST_P = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0, "float16": 65504.0}  # largest finite value; the others hold any 2^x of float32


class ScheduleKind(str, enum.Enum):
    """Order in which tiles are worked on."""

    NAIVE = "naive"  # as they come: m_block fastest, then head, then batch
    LPT = "lpt"  # longest processing time first
    SPT = "spt"  # shortest first: the deterministic backward of a causal mask


class Launch(str, enum.Enum):
    """How CTAs find their tiles."""

    NONE = "none"  # one tile a CTA
    STATIC = "static"  # persistent: CTA i takes tiles i, i + grid, ...
    DYNAMIC = "dynamic"  # persistent: an atomic counter hands out tiles
    CLC = "clc"  # cluster launch control (Blackwell): a CTA cancels the launch of another and takes its tile


@dataclass(frozen=True)
class Schedule:
    """Tile order, launch form, and how many heads form a section whose K and V stay in L2 (0: no sections)."""

    kind: ScheduleKind = ScheduleKind.NAIVE
    launch: Launch = Launch.NONE
    section: int = 0

    def __str__(self) -> str:
        return f"{self.kind.value}/{self.launch.value}" + (f"/sections of {self.section} heads" if self.section else "")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How one attention kernel works.

    A query tile is ``tile_m`` rows and belongs to one softmax role; a CTA holds ``q_stages`` of them in ping-pong, so it covers
    ``rows_per_cta = tile_m * q_stages`` rows. On Blackwell the key blocks of a single one go to two softmax roles in turns. With
    ``cta_group=2`` all sizes are still those of one CTA. In the backward a CTA holds one key tile of ``tile_n`` keys and streams query
    tiles of ``tile_m`` rows through ``q_stages`` (Q) and ``do_stages`` (dO) buffers.

    Raises:
        ValueError: from the constructor, naming the field, its value and what is required.
    """

    arch: str
    direction: str
    dtype: str
    head_dim: int
    head_dim_v: int
    tile_m: int = 128
    tile_n: int = 128
    q_stages: int = 2
    kv_stages: int = 2  # slots for one K or V tile each, see k_stages and v_stages (backward: 2, K and V stay)
    do_stages: int = 0  # backward only
    cta_group: int = 1  # CTAs that run an MMA together; the pair shares operand B (tcgen05, cta_group::2)
    kv_multicast: int = 1  # Hopper: CTAs of a cluster that share a head's K and V; each loads a part of every tile for all (TMA multicast)
    roles: tuple[Role, ...] = ()  # in warp order; the launch table
    smem: tuple[Region, ...] = ()  # bytes
    tmem: tuple[Region, ...] = ()  # 32-bit columns
    exp2: Exp2Split = field(default_factory=Exp2Split)
    rescale_threshold: float = 8.0  # tau, log2 units: O is rescaled when a row maximum grew by more; 0: whenever it grew
    fixed_max: bool = (
        False  # Hopper: blocks that the mask leaves whole keep their rows' maxima; where sums overflow the tile is computed again
    )
    rescale_rows: int = 1  # rows that decide together (one exceeds tau: all take their new maximum); 0: always, without a branch
    p_parts: tuple[float, ...] = (1.0,)  # shares of P's columns written when each signal is given; the PV product starts at the first
    p_exponent: int = 0  # P and row sums are kept times 2^p_exponent (8-bit P: small weights then are not subnormal)
    schedule: Schedule = Schedule()
    pack_gqa: int = 1  # query heads of one KV head packed as rows of a tile: row r is query r // pack_rows, head r % pack_rows
    num_splits: int = 1  # parts of the key range, combined afterwards
    page_size: int = 0  # keys a page; 0: not paged
    page_rows: int = 0  # keys of a page that one copy brings; divides page_size, or all pages of a sequence are brought together before
    leftpad: bool = False
    varlen: bool = False
    seqused: bool = False
    deterministic: bool = False
    mask: str = "full()"  # structure, see mask_structure
    softcap: bool = False
    sink: bool = False
    alibi: bool = False
    descale: bool = False
    bias: str = ""  # element type of the bias; empty: none. Logits then stay in natural units, so that the lowest finite bias is no -inf
    scaled_first: bool = False  # logits are scaled before the mask and the maxima, not within the exponent: scale <= 0
    return_lse: bool = False
    intra_overlap: bool = False  # Hopper: the next S = QK is issued before this block's softmax
    o_in_ring: bool = False  # Hopper: O is staged in a slot of V's ring, so that the next Q loads once the last S is computed
    o_over_q: bool = (
        False  # Blackwell: O is staged in the shared memory of its Q tile, which is then read for the last time; else O has its own
    )
    q_registers: bool = False  # Hopper: Q is operand A from registers, and its shared memory is free for the next tile's
    ping_pong: bool = False  # Hopper: the consumers issue their products in turns, so that one's softmax runs under another's MMA
    early_turn: bool = False  # Hopper: the turn passes once S = QK is issued, not P V too

    def __post_init__(self) -> None:
        arch = get_arch(self.arch)
        _check_choices(self, arch)
        _check_tiles(self, arch)
        _check_numerics(self)
        if self.roles:
            check_roles(self.roles, _known(arch.registers, arch), _known(arch.max_warps_cta, arch))
        if self.tmem:
            check_regions("tmem", self.tmem, _known(arch.tmem_columns, arch), "columns")
        if self.smem:
            check_regions("smem", self.smem, _known(arch.smem_bytes_cta, arch), "bytes")

    @property
    def rows_per_cta(self) -> int:
        return self.tile_m * self.q_stages if self.direction == FORWARD else self.tile_m

    @property
    def ctas(self) -> int:
        """CTAs of a cluster, which work on neighbouring rows of one head."""
        return self.cta_group * self.kv_multicast

    @property
    def pack_rows(self) -> int:
        """Rows that one query takes in a tile: a power of two, so that TMA brings whole queries; rows beyond ``pack_gqa`` stay empty."""
        return 1 << (self.pack_gqa - 1).bit_length()

    @property
    def queries_per_tile(self) -> int:
        """Queries of a work item: of a CTA, or of a cluster of them."""
        return self.rows_per_cta * self.ctas // self.pack_rows

    @property
    def uses_part_of_q(self) -> bool:
        """Whether ``seqused`` holds for queries too: all of a cache call's are in use."""
        return self.seqused and (self.varlen or self.page_size == 0)

    @property
    def element_bytes(self) -> int:
        return ELEMENT_BYTES[self.dtype]

    @property
    def out_dtype(self) -> str:
        return output_dtype(self.dtype)

    @property
    def head_dim_chunks(self) -> tuple[int, ...]:
        """Powers of two whose sum covers head_dim, each a whole number of MMA steps."""
        return chunks(self.head_dim, max(16, MMA_BYTES // self.element_bytes))

    @property
    def head_dim_v_chunks(self) -> tuple[int, ...]:
        return chunks(self.head_dim_v, max(16, MMA_BYTES // self.element_bytes))

    @property
    def shared_kv_ring(self) -> bool:
        """Whether K and V tiles have one shape in a CTA, so that all slots form one ring; otherwise K and V have a ring each."""
        return sum(self.head_dim_chunks) == sum(self.head_dim_v_chunks) and self.cta_group == 1

    @property
    def k_stages(self) -> int:
        return self.kv_stages - self.v_stages

    @property
    def v_stages(self) -> int:
        return self.kv_stages // 2

    @property
    def smem_bytes(self) -> int:
        return used(self.smem)

    @property
    def tmem_columns(self) -> int:
        return used(self.tmem)

    @property
    def warps(self) -> int:
        return sum(role.warps for role in self.roles)

    @property
    def digest(self) -> str:
        """Hexadecimal name that is the same in every process (``hash`` is not): file name of a cached kernel."""
        return hashlib.sha256(repr(self).encode()).hexdigest()[:32]

    def with_(self, **changes: Any) -> Plan:
        """A validated copy with some fields changed."""
        return replace(self, **changes)

    def __str__(self) -> str:
        shown = [f"  {f.name} = {_text(getattr(self, f.name))}" for f in fields(self) if _matters(self, f.name, f.default)]
        return "\n".join(["Plan", *shown])


def mask_structure(code: str) -> str:
    """A mask's code with its runtime numbers replaced by ``#``: what a kernel is compiled for.

    An unbounded side and the diagonal itself (0) stay literal; any other window bound is a runtime scalar, in order ``mask_scalars``.
    """
    return re.sub(r"window\(([^,]*),([^,]*),", lambda m: f"window({_literal(m[1])},{_literal(m[2])},", code)


@functools.lru_cache(maxsize=1024)
def mask_scalars(code: str) -> tuple[int, ...]:
    """The window bounds that ``mask_structure`` replaced, in order."""
    bounds = [bound for pair in re.findall(r"window\(([^,]*),([^,]*),", code) for bound in pair]
    return tuple(int(bound) for bound in bounds if _literal(bound) == "#")


def _literal(bound: str) -> str:
    return bound if bound in ("None", "0") else "#"


def _text(value: Any) -> str:
    if isinstance(value, tuple):
        return ", ".join(str(item) for item in value)
    return str(value)


def _matters(plan: Plan, name: str, default: Any) -> bool:
    return getattr(plan, name) != default or name in ("tile_m", "tile_n", "q_stages", "kv_stages", "exp2", "schedule", "rescale_threshold")


def _known(capacity: int | None, arch: Arch) -> int:
    if capacity is None:
        raise ValueError(f"arch {arch.name!r} has no roles, shared memory or tensor memory to plan")
    return capacity


def _check_choices(p: Plan, arch: Arch) -> None:
    for name, kind in (("exp2", Exp2Split), ("schedule", Schedule), ("p_parts", tuple), ("mask", str)):
        if not isinstance(getattr(p, name), kind):
            raise ValueError(f"{name} must be a {kind.__name__}, got {getattr(p, name)!r}")
    if p.direction not in (FORWARD, BACKWARD):
        raise ValueError(f"direction must be {FORWARD!r} or {BACKWARD!r}, got {p.direction!r}")
    if p.dtype not in ELEMENT_BYTES:
        raise ValueError(f"dtype must be one of {', '.join(ELEMENT_BYTES)}, got {p.dtype!r}")
    if p.descale and p.dtype not in FLOAT8:
        raise ValueError(f"descale must be False for dtype {p.dtype} (only {' and '.join(FLOAT8)} have descales)")
    if p.cta_group not in (1, 2) or (p.cta_group == 2 and not arch.tmem_columns):
        raise ValueError(f"cta_group must be 1, or 2 on a chip with tcgen05, got {p.cta_group!r} on {arch.name}")
    if p.kv_multicast not in (1, 2) or (p.kv_multicast == 2 and (arch.tmem_columns or arch.capability is None or p.direction != FORWARD)):
        raise ValueError(f"kv_multicast must be 1, or 2 in a forward on Hopper, got {p.kv_multicast!r} in a {p.direction} on {arch.name}")
    if p.kv_multicast == 2 and p.q_stages < 2:
        raise ValueError(f"kv_multicast must be 1 with one consumer, got {p.kv_multicast} with q_stages={p.q_stages}")
    if p.kv_multicast == 2 and p.page_size:
        raise ValueError(f"kv_multicast must be 1 for pages of {p.page_size} keys: the CTAs of a cluster load whole tiles together")
    if p.fixed_max:
        _check_fixed_max(p, arch)
    if p.schedule.launch is Launch.CLC and not arch.tmem_columns:
        raise ValueError(f"schedule.launch 'clc' needs cluster launch control (Blackwell), got arch {arch.name}")
    if p.schedule.section < 0:
        raise ValueError(f"schedule.section must be >= 0, got {p.schedule.section}")


def _check_fixed_max(p: Plan, arch: Arch) -> None:
    if p.direction != FORWARD or arch.tmem_columns or arch.capability is None:
        raise ValueError(f"fixed_max must be False but in a forward on Hopper, got True in a {p.direction} on {arch.name}")
    if p.dtype != "bfloat16":
        raise ValueError(f"fixed_max must be False for {p.dtype}: weights above 1 need the exponents of bfloat16")
    if p.exp2.fma_pairs:
        raise ValueError(f"fixed_max must be False with exponentials on FMA units, whose polynomial has no infinity, got {p.exp2}")
    logits = p.softcap or p.alibi or bool(p.bias) or p.scaled_first or "document(" in p.mask or "predicate(" in p.mask
    if logits or p.pack_gqa > 1 or p.num_splits > 1:
        raise ValueError(
            "fixed_max must be False with softcap, alibi, bias, scale <= 0, document or predicate masks, packed heads, split keys"
        )


def _check_tiles(p: Plan, arch: Arch) -> None:
    for name in ("head_dim", "head_dim_v", "tile_m", "tile_n", "q_stages", "kv_stages", "pack_gqa", "num_splits"):
        _check_int(p, name, 1)
    for name in ("do_stages", "page_size", "rescale_rows", "p_exponent"):
        _check_int(p, name, 0)
    if p.direction == BACKWARD and p.kv_stages != 2:
        raise ValueError(f"kv_stages must be 2 in the backward (K and V stay), got {p.kv_stages}")
    if arch.capability is None:
        return
    if p.tile_m not in (64, 128):
        raise ValueError(f"tile_m must be 64 or 128 on {arch.name} (rows of one MMA), got {p.tile_m}")
    step = max(16, MMA_BYTES // p.element_bytes)
    if p.tile_n % step or p.tile_n > 256:
        raise ValueError(f"tile_n must be a multiple of {step} up to 256 on {arch.name} (columns of one MMA), got {p.tile_n}")
    hopper = not arch.tmem_columns
    if p.o_in_ring and (p.tile_n % p.tile_m or not hopper):
        raise ValueError(
            f"o_in_ring must be False but on Hopper with tile_n a multiple of tile_m, got tile_n={p.tile_n}, tile_m={p.tile_m} on {p.arch}"
        )
    if p.o_over_q and hopper:
        raise ValueError(f"o_over_q must be False on {p.arch}: O is staged in memory of its own or in V's ring (o_in_ring)")
    if p.o_over_q and p.out_dtype != p.dtype:
        raise ValueError(f"o_over_q must be False for {p.dtype}: O is {p.out_dtype} and no tile of Q")


def _check_int(p: Plan, name: str, minimum: int) -> None:
    value = getattr(p, name)
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise ValueError(f"{name} must be an int >= {minimum}, got {value!r}")


def _check_numerics(p: Plan) -> None:
    if not isinstance(p.rescale_threshold, (int, float)) or not (math.isfinite(p.rescale_threshold) and p.rescale_threshold >= 0):
        raise ValueError(f"rescale_threshold must be finite and >= 0 (log2 units), got {p.rescale_threshold!r}")
    if p.rescale_rows and p.tile_m % p.rescale_rows:
        raise ValueError(f"rescale_rows must be 0 or divide tile_m={p.tile_m}, got {p.rescale_rows}")
    if p.direction == FORWARD and get_arch(p.arch).tmem_columns and p.rescale_rows not in (0, 1, _WARP_ROWS, p.tile_m):
        raise ValueError(f"rescale_rows must be 0, 1, {_WARP_ROWS} (a warp) or {p.tile_m} (a query tile) on {p.arch}, got {p.rescale_rows}")
    ascending = all(a < b for a, b in zip((0.0, *p.p_parts), p.p_parts, strict=False))
    if not 1 <= len(p.p_parts) <= 3 or not ascending or p.p_parts[-1] != 1.0:
        raise ValueError(f"p_parts must ascend within (0, 1] and end at 1.0, in at most three parts, got {p.p_parts}")
    step = max(1, MMA_BYTES // p.element_bytes)
    if len(p.p_parts) > 1 and any((part * p.tile_n) % step for part in p.p_parts):
        raise ValueError(f"p_parts must cut tile_n={p.tile_n} at multiples of {step} columns (one MMA step), got {p.p_parts}")
    if p.exp2.fma_pairs and p.dtype == "float64":
        raise ValueError(f"exp2.fma_pairs must be 0 for float64 (the polynomial is float32), got {p.exp2.fma_pairs}")
    if 2.0 ** (p.rescale_threshold + p.p_exponent) > LARGEST_P.get(p.dtype, math.inf):
        raise ValueError(
            f"rescale_threshold + p_exponent must keep P within {p.dtype} (largest {LARGEST_P[p.dtype]:g}), "
            f"got 2^({p.rescale_threshold:g} + {p.p_exponent})"
        )
