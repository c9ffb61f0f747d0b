"""Roofline: cycles of each unit of an SM for one tile, from formulas and the chip's rates (FlashAttention-4, arXiv 2603.05451, roofline
analysis).

A tile is ``tile_m`` query rows and ``tile_n`` keys of one CTA. With ``cta_group=2`` the pair computes twice that, and each CTA reads half
of every operand B. Counted are MMA, exponentials and shared-memory traffic of one steady-state step; loads from global memory, which
arrive once a tile and are shared by many steps, are not. Head dimensions count as the kernel computes them, rounded up to their
power-of-two chunks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from tandem_attn.spec.arch import Arch, get_arch
from tandem_attn.spec.plan import BACKWARD, ELEMENT_BYTES, FORWARD, Plan
from tandem_attn.spec.resources import MMA_BYTES, chunks

MMA, SMEM, EXP = "MMA", "shared memory", "exp"

_F32_BYTES = 4
_DQ_PASSES = 2  # dQ is written by threads and read by TMA, which adds it to global memory
# The paper counts 384 cycles where half a dS tile is 128: three passes. We read them as staging it, reading it out, and the peer's half
# arriving.
_EXCHANGE_PASSES = 3


@dataclass(frozen=True)
class Term:
    """Cycles of one unit for one purpose."""

    unit: str
    name: str
    cycles: float


@dataclass(frozen=True)
class Roofline:
    """Cycles per tile of one SM, term by term."""

    arch: str
    direction: str
    dtype: str
    tile_m: int
    tile_n: int
    head_dim: int
    head_dim_v: int
    cta_group: int
    terms: tuple[Term, ...]
    flops: float  # useful floating-point operations of the tile, by the unpadded head dimensions

    def cycles(self, unit: str) -> float:
        """Sum of a unit's terms."""
        return math.fsum(term.cycles for term in self.terms if term.unit == unit)

    @property
    def units(self) -> dict[str, float]:
        return {unit: self.cycles(unit) for unit in (MMA, SMEM, EXP)}

    @property
    def bound(self) -> float:
        """Cycles of the busiest unit: no kernel that overlaps everything is faster."""
        return max(self.units.values())

    @property
    def bottleneck(self) -> str:
        """The busiest unit; all of them when they tie."""
        return " and ".join(unit for unit, cycles in self.units.items() if math.isclose(cycles, self.bound, rel_tol=1e-9))

    @property
    def tflops(self) -> float | None:
        """TFLOP/s of the whole chip at this bound and the record's clock; None where SMs or clock are unknown."""
        arch = get_arch(self.arch)
        if arch.sms is None or arch.clock_mhz is None:
            return None
        return self.flops / self.bound * arch.sms * arch.clock_mhz * 1e-6

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        shape = ("arch", "direction", "dtype", "tile_m", "tile_n", "head_dim", "head_dim_v", "cta_group")
        terms = [{"unit": term.unit, "name": term.name, "cycles": term.cycles} for term in self.terms]
        summary = {"units": self.units, "bound": self.bound, "bottleneck": self.bottleneck, "tflops": self.tflops}
        return {**{name: getattr(self, name) for name in shape}, "terms": terms, **summary}


@dataclass(frozen=True)
class _Product:
    """C (m x n) += A (m x k) B (k x n)."""

    name: str
    m: int
    n: int
    k: int
    a_in_smem: bool = True


def roofline(
    arch: Arch | str,
    direction: str = FORWARD,
    *,
    tile_m: int = 128,
    tile_n: int = 128,
    head_dim: int = 128,
    head_dim_v: int = 0,
    dtype: str = "bfloat16",
    cta_group: int = 1,
    exp_fraction: float = 0.0,
) -> Roofline:
    """Cycles per tile and unit.

    Args:
        arch: record or name of the chip.
        direction: "forward" or "backward".
        tile_m: query rows of one CTA; two query tiles in ping-pong are ``tile_m=256``.
        tile_n: keys of one CTA.
        head_dim: of Q and K.
        head_dim_v: of V; 0: head_dim.
        dtype: of the operands.
        cta_group: CTAs that share an MMA.
        exp_fraction: share of the exponentials on FMA units.

    Raises:
        ValueError: naming the argument.
    """
    chip = get_arch(arch) if isinstance(arch, str) else arch
    dims = (head_dim, head_dim_v or head_dim)
    _check(chip, direction, dtype, cta_group, exp_fraction, tile_m, tile_n, *dims)
    d, dv = (sum(chunks(dim, max(16, MMA_BYTES // ELEMENT_BYTES[dtype]))) for dim in dims)
    unit = _Rates(chip, ELEMENT_BYTES[dtype], _rate(chip.mma_rate(dtype)), cta_group)
    if direction == FORWARD:
        terms = unit.products(_forward_products(tile_m, tile_n, d, dv))
        flops = 2 * tile_m * tile_n * sum(dims)
    else:
        on_chip = chip.tmem_columns is not None or tile_n >= 2 * _rate(chip.mma_rows)  # else two warpgroups share P and dS through memory
        terms = unit.products(_backward_products(tile_m, tile_n, d, dv, cta_group, on_chip=on_chip))
        terms += _backward_traffic(unit, tile_m, tile_n, d)
        flops = 2 * tile_m * tile_n * (3 * dims[0] + 2 * dims[1])
    terms.append(
        Term(EXP, f"exponentials on MUFU ({100 * (1 - exp_fraction):.4g}%)", tile_m * tile_n * (1 - exp_fraction) / _rate(chip.mufu))
    )
    return Roofline(chip.name, direction, dtype, tile_m, tile_n, *dims, cta_group, tuple(terms), flops)


def roofline_of(plan: Plan) -> Roofline:
    """The roofline of a plan's steady state: all query tiles that a CTA has in flight against one key block."""
    return roofline(
        plan.arch,
        plan.direction,
        tile_m=plan.rows_per_cta,
        tile_n=plan.tile_n,
        head_dim=plan.head_dim,
        head_dim_v=plan.head_dim_v,
        dtype=plan.dtype,
        cta_group=plan.cta_group,
        exp_fraction=plan.exp2.fraction,
    )


@dataclass(frozen=True)
class _Rates:
    arch: Arch
    element_bytes: int
    mma_flops: int
    cta_group: int

    def traffic(self, name: str, num_bytes: float) -> Term:
        return Term(SMEM, name, num_bytes / _rate(self.arch.smem_bytes_clk))

    def products(self, products: list[_Product]) -> list[Term]:
        mma = [Term(MMA, p.name, 2 * p.m * p.n * p.k / self.mma_flops) for p in products]
        return mma + [self._operands(p) for p in products]

    def _operands(self, p: _Product) -> Term:
        """A is read once (unless it comes from TMEM or registers); B once by each MMA's rows, and half by each CTA of a pair."""
        a = p.m * p.k if p.a_in_smem else 0
        b = p.k * p.n * -(-p.m // _rate(self.arch.mma_rows)) / self.cta_group
        return self.traffic(f"operands of {p.name}", (a + b) * self.element_bytes)


def _forward_products(tile_m: int, tile_n: int, d: int, dv: int) -> list[_Product]:
    return [_Product("S = Q K^T", tile_m, tile_n, d), _Product("O = P V", tile_m, dv, tile_n, a_in_smem=False)]


def _backward_products(tile_m: int, tile_n: int, d: int, dv: int, cta_group: int, *, on_chip: bool) -> list[_Product]:
    """S and dP transposed, so that P^T and dS^T are operands A where they arise. For dQ a pair splits the queries and joins its keys."""
    return [
        _Product("S^T = K Q^T", tile_n, tile_m, d),
        _Product("dP^T = V dO^T", tile_n, tile_m, dv),
        _Product("dV = P^T dO", tile_n, dv, tile_m, a_in_smem=not on_chip),
        _Product("dK = dS^T Q", tile_n, d, tile_m, a_in_smem=not on_chip),
        _Product("dQ = dS K", tile_m // cta_group, d, tile_n * cta_group),
    ]


def _backward_traffic(unit: _Rates, tile_m: int, tile_n: int, d: int) -> list[Term]:
    ds_bytes = tile_m * tile_n * unit.element_bytes
    terms = [unit.traffic("dS written", ds_bytes)]
    if unit.cta_group == 2:
        terms.append(unit.traffic("dS exchanged through DSMEM", _EXCHANGE_PASSES * ds_bytes / 2))
    return [*terms, unit.traffic("dQ written and read", _DQ_PASSES * tile_m // unit.cta_group * d * _F32_BYTES)]


def _rate(value: int | None) -> int:
    if value is None:  # _check let through only chips that have all rates
        raise ValueError("arch lacks a rate that the roofline needs")
    return value


def _check(chip: Arch, direction: str, dtype: str, cta_group: int, exp_fraction: float, *sizes: int) -> None:
    if None in (chip.mma_rows, chip.mufu, chip.smem_bytes_clk):
        raise ValueError(f"arch must be a GPU with known rates, got {chip.name}")
    if direction not in (FORWARD, BACKWARD):
        raise ValueError(f"direction must be {FORWARD!r} or {BACKWARD!r}, got {direction!r}")
    if chip.mma_rate(dtype) is None or dtype not in ELEMENT_BYTES:
        offered = ", ".join(name for name, _ in chip.mma_flops if name in ELEMENT_BYTES)
        raise ValueError(f"dtype must be one that {chip.name}'s tensor cores take ({offered}), got {dtype!r}")
    if cta_group not in (1, 2) or (cta_group == 2 and chip.tmem_columns is None):
        raise ValueError(f"cta_group must be 1, or 2 on Blackwell, got {cta_group} on {chip.name}")
    if not 0.0 <= exp_fraction <= 1.0:
        raise ValueError(f"exp_fraction must be in [0, 1], got {exp_fraction}")
    for name, size in zip(("tile_m", "tile_n", "head_dim", "head_dim_v"), sizes, strict=True):
        if size < 1:
            raise ValueError(f"{name} must be >= 1, got {size}")
