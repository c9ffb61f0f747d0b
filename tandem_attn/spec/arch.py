"""Arch: what a chip has, each number with its source. A number without a public source is None; so is what a chip lacks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Arch:
    """Capacities and rates of one chip. Rates are per SM and clock cycle."""

    name: str
    capability: tuple[int, int] | None = None  # CUDA compute capability; None: no GPU
    sms: int | None = None  # enabled on the product
    clock_mhz: int | None = None  # at which the data sheet's tensor-core rate holds; under load, power decides
    mma_flops: tuple[tuple[str, int], ...] = ()  # dense, multiply and add counted apart, fp32 accumulation
    mma_rows: int | None = None  # rows of A that one read of operand B from shared memory serves
    mufu: int | None = None  # MUFU.EX2 results
    fma: int | None = None  # fp32 FMA results
    smem_bytes_clk: int | None = None
    smem_bytes_sm: int | None = None
    smem_bytes_cta: int | None = None  # 1 KB less: reserved by CUDA in each CTA
    tmem_columns: int | None = None  # 32-bit columns of 128 lanes
    registers: int | None = None  # 32-bit, an SM
    max_warps_sm: int | None = None
    max_warps_cta: int | None = None
    cluster_ctas: int | None = None  # largest cluster without an opt-in; its CTAs share DSMEM
    l2_bytes: int | None = None
    hbm_bytes: int | None = None
    hbm_bytes_s: int | None = None
    sources: tuple[tuple[str, str], ...] = field(default=(), repr=False)

    def source(self, fact: str) -> str:
        """Where the number of this field comes from.

        Raises:
            KeyError: the field has no number.
        """
        return dict(self.sources)[fact]

    def mma_rate(self, dtype: str) -> int | None:
        """Tensor-core FLOP per SM and clock for operands of this dtype; None when the tensor cores don't take it."""
        return dict(self.mma_flops).get(dtype)

    @property
    def tmem_bytes(self) -> int | None:
        return None if self.tmem_columns is None else self.tmem_columns * 128 * 4

    @property
    def peak_flops(self) -> float | None:
        """bfloat16 FLOP/s of the whole chip at ``clock_mhz``."""
        rate = self.mma_rate("bfloat16")
        if rate is None or self.sms is None or self.clock_mhz is None:
            return None
        return rate * self.sms * self.clock_mhz * 1e6


def _record(name: str, *groups: dict[str, tuple[Any, str]]) -> Arch:
    facts = {key: fact for group in groups for key, fact in group.items()}
    values = {key: value for key, (value, _) in facts.items()}
    return Arch(name=name, **values, sources=tuple((key, source) for key, (_, source) in facts.items()))


_KB, _MB, _GB = 1 << 10, 1 << 20, 10**9

_GUIDE = "CUDA C++ Programming Guide, table of technical specifications per compute capability"
_PAPER = "FlashAttention-4, arXiv 2603.05451"
_H100 = "NVIDIA H100 Tensor Core GPU Architecture (whitepaper) and H100 data sheet, SXM5"
_H200 = "NVIDIA H200 data sheet, SXM"
_BLACKWELL_TUNING = "NVIDIA Blackwell Tuning Guide, memory system"
_ULTRA = "NVIDIA technical blog 'Inside NVIDIA Blackwell Ultra' (2025)"

# Compute capability 9.0 and 10.x alike.
_COMMON: dict[str, tuple[Any, str]] = {
    "fma": (128, _PAPER),
    "smem_bytes_clk": (128, _PAPER),
    "smem_bytes_sm": (228 * _KB, f"{_GUIDE}; {_BLACKWELL_TUNING}"),
    "smem_bytes_cta": (227 * _KB, f"{_GUIDE}: 232,448 bytes"),
    "registers": (65_536, _GUIDE),
    "max_warps_sm": (64, _GUIDE),
    "max_warps_cta": (32, f"{_GUIDE}: 1024 threads a block"),
    "cluster_ctas": (8, "CUDA C++ Programming Guide, thread block clusters: 8 is the portable size"),
}
_HOPPER: dict[str, tuple[Any, str]] = {
    **_COMMON,
    "capability": ((9, 0), _GUIDE),
    "mma_flops": (
        (("float16", 4096), ("bfloat16", 4096), ("tfloat32", 2048), ("float8_e4m3fn", 8192), ("float8_e5m2", 8192)),
        f"{_PAPER} (bfloat16); {_H100}: TF32 half, FP8 twice that rate",
    ),
    "mma_rows": (64, "PTX ISA, wgmma.mma_async: M is 64, so each of several warpgroups reads B again"),
    "mufu": (16, _PAPER),
}
_BLACKWELL: dict[str, tuple[Any, str]] = {
    **_COMMON,
    "mma_flops": (
        (("float16", 8192), ("bfloat16", 8192), ("tfloat32", 4096), ("float8_e4m3fn", 16384), ("float8_e5m2", 16384)),
        f"{_PAPER} (bfloat16); NVIDIA HGX B200 data sheet: TF32 half, FP8 twice that rate",
    ),
    "mma_rows": (128, "PTX ISA, tcgen05.mma: M is 128 a CTA"),
    "tmem_columns": (512, f"PTX ISA, tensor memory: 128 lanes of 512 32-bit columns; {_PAPER}: 256 KB"),
    "l2_bytes": (126 * _MB, _BLACKWELL_TUNING),
}

CPU = _record("CPU")
H100 = _record(
    "H100",
    _HOPPER,
    {
        "sms": (132, _H100),
        "clock_mhz": (1830, f"{_H100}: 989.4 TFLOP/s dense bfloat16 = 132 SMs x 4096 FLOP x 1830 MHz"),
        "l2_bytes": (50 * _MB, _H100),
        "hbm_bytes": (80 * _GB, _H100),
        "hbm_bytes_s": (3350 * _GB, _H100),
    },
)
H200 = _record(
    "H200",
    _HOPPER,
    {
        "sms": (132, f"{_H200}: the compute figures of H100 SXM5"),
        "clock_mhz": (1830, f"{_H200}: 989 TFLOP/s dense bfloat16 = 132 SMs x 4096 FLOP x 1830 MHz"),
        "l2_bytes": (50 * _MB, f"{_H200} gives none; same GH100 die as {_H100}"),
        "hbm_bytes": (141 * _GB, _H200),
        "hbm_bytes_s": (4800 * _GB, f"{_H200}; device copy measured here 2026-11-29: 4.27-4.30 TB/s"),
    },
)
B100 = _record(
    "B100",
    _BLACKWELL,
    {
        "capability": ((10, 0), _GUIDE),
        "sms": (148, "hmc-tech.com, NVIDIA B100 (NVIDIA publishes no count)"),
        "clock_mhz": (1443, "1.75 PFLOP/s dense bfloat16 (HGX B100, as given by hmc-tech.com) = 148 SMs x 8192 FLOP x 1443 MHz"),
        "mufu": (16, _PAPER),
        "hbm_bytes": (192 * _GB, "hmc-tech.com, NVIDIA B100"),
        "hbm_bytes_s": (7700 * _GB, "hmc-tech.com, NVIDIA B100: 7.7 TB/s"),
    },
)
B200 = _record(
    "B200",
    _BLACKWELL,
    {
        "capability": ((10, 0), _GUIDE),
        "sms": (148, _PAPER),
        "clock_mhz": (1850, f"{_PAPER}: 2.24 PFLOP/s = 148 SMs x 8192 FLOP x 1850 MHz"),
        "mufu": (16, _PAPER),
        "hbm_bytes": (180 * _GB, "verda.com, Blackwell specifications per GPU"),
        "hbm_bytes_s": (7672 * _GB, "driver query, pytorch/ao pull request 4002: 7680 bits x 3996 MHz x 2; data sheet 'up to 8 TB/s'"),
    },
)
# The 160 SMs that NVIDIA names for Blackwell Ultra are those of the full die; how many a B300 has enabled, and hence the clock behind its
# data sheet's rate, has no public source of NVIDIA's.
B300 = _record(
    "B300",
    _BLACKWELL,
    {
        "capability": ((10, 3), _GUIDE),
        "mufu": (32, f"{_PAPER}; NVIDIA technical blog 'Making Softmax More Efficient with NVIDIA Blackwell Ultra': twice B200's"),
        "hbm_bytes": (288 * _GB, _ULTRA),
        "hbm_bytes_s": (8000 * _GB, f"{_ULTRA}: 8 TB/s"),
    },
)
ARCHS = {arch.name: arch for arch in (H100, H200, B100, B200, B300, CPU)}


def get_arch(name: str) -> Arch:
    """The record of a chip; the case of the name does not matter.

    Raises:
        ValueError: no record of that name.
    """
    found = ARCHS.get(str(name).upper())
    if found is None:
        raise ValueError(f"arch must be one of {', '.join(ARCHS)}, got {name!r}")
    return found
