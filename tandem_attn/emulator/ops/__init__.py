"""Semantics of instructions, one file per family. Importing this package fills `registry.TABLE`."""

from tandem_attn.emulator.ops import (
    barrier,
    control,
    convert,
    floating,
    groups,
    integer,
    mbarrier,
    memory,
    move,
    shuffle,
    tcgen05_data,
    tcgen05_mma,
    tma,
    wgmma,
)

__all__ = [
    "barrier",
    "control",
    "convert",
    "floating",
    "groups",
    "integer",
    "mbarrier",
    "memory",
    "move",
    "shuffle",
    "tcgen05_data",
    "tcgen05_mma",
    "tma",
    "wgmma",
]
