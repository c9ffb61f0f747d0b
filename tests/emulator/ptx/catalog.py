"""All micro kernels, by family."""

from importlib import import_module

from tests.emulator.ptx.case import Case

FAMILIES = (
    "alu_integer",
    "alu_float",
    "cvt",
    "warp",
    "matrix",
    "wgmma",
    "probes",
    "tma",
    "bulk",
    "cluster",
    "barriers",
    "memory",
)
EXTRA = ("dense",)  # recorded on a GPU for study; too large for the tests


def cases(family: str) -> list[Case]:
    """The family's cases in a fixed order; their names are unique in the whole catalog."""
    return list(import_module(f"tests.emulator.ptx.{family}").cases())


def all_cases() -> list[Case]:
    return [case for family in FAMILIES for case in cases(family)]
