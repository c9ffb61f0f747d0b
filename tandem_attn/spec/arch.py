"""Arch: what a chip has, each number with its source. What could not be sourced is None."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Arch:
    """Capacities and rates of one chip. Rates are per SM and clock; ``None`` is unknown, or absent on this chip."""

    name: str
    capability: tuple[int, int] | None = None
    sms: int | None = None
    clock_mhz: int | None = None
    mma_flops: tuple[tuple[str, int], ...] = ()
    mufu: int | None = None
    fma: int | None = None
    smem_bytes_clk: int | None = None
    smem_bytes_cta: int | None = None
    tmem_columns: int | None = None
    registers: int | None = None
    max_warps_cta: int | None = None
    sources: tuple[tuple[str, str], ...] = ()

    def source(self, field: str) -> str:
        """Where the number of this field comes from."""
        return dict(self.sources)[field]


def _record(name: str, **facts: tuple[Any, str]) -> Arch:
    return Arch(
        name=name, **{key: value for key, (value, _) in facts.items()}, sources=tuple((key, source) for key, (_, source) in facts.items())
    )


CPU = _record("CPU")
H100 = _record(
    "H100",
    capability=((9, 0), "CUDA Programming Guide, compute capabilities"),
    smem_bytes_cta=(232_448, "CUDA Programming Guide, compute capabilities: 227 KB a block"),
    registers=(65_536, "CUDA Programming Guide, compute capabilities: 64 K registers an SM"),
    max_warps_cta=(32, "CUDA Programming Guide, compute capabilities: 1024 threads a block"),
)
ARCHS = {arch.name: arch for arch in (CPU, H100)}


def get_arch(name: str) -> Arch:
    """The record of a chip.

    Raises:
        ValueError: no record of that name.
    """
    found = ARCHS.get(name.upper())
    if found is None:
        raise ValueError(f"arch must be one of {', '.join(ARCHS)}, got {name!r}")
    return found
