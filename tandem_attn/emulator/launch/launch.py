"""A launch: program, geometry, arguments, memory. Made from PTX and values here, from a compiled Triton kernel in `triton_kernel.py`."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from tandem_attn.emulator.errors import LaunchError
from tandem_attn.emulator.launch.tensormap import from_descriptor
from tandem_attn.emulator.launch.tensors import is_tensor, register
from tandem_attn.emulator.memory.addresses import MAX_SHARED_PER_CTA, RANK_SHIFT, RESERVED_SHARED
from tandem_attn.emulator.memory.globalmem import GlobalMemory
from tandem_attn.emulator.ptx.link import Links
from tandem_attn.emulator.ptx.nodes import Function, Variable
from tandem_attn.emulator.ptx.program import Program

if TYPE_CHECKING:
    from tandem_attn.emulator.machine.warp import Warp

Triple = tuple[int, int, int]
ARCHITECTURES = {"sm_90a": 132, "sm_100a": 148, "sm_103a": 148}  # SMs of H100 SXM / H200, B200 and B300 (vendor data sheets)
THREAD = {"%tid": 0, "%tid.x": 0, "%tid.y": 1, "%tid.z": 2, "%tid.w": 3}
REGISTERS_PER_SM = 65536  # CUDA programming guide, technical specifications, compute capability 9.0 and 10.0


@dataclass(slots=True)
class Launch:
    """Everything a machine needs. `grid` is in CTAs; `parameters` are the argument bytes."""

    program: Program
    links: Links
    entry: Function
    grid: Triple
    block: Triple
    cluster: Triple
    dynamic_shared: int
    parameters: bytes
    memory: GlobalMemory
    arch: str
    max_registers: int = 255
    symbols: dict[str, int] = field(default_factory=dict)
    profile_scratch: tuple[int, int] = (0, 0)  # addresses of the scratch that instrumentation keeps its books in

    @property
    def threads(self) -> int:
        return self.block[0] * self.block[1] * self.block[2]

    @property
    def static_shared(self) -> int:
        variables = self.program.module.variables.values()
        return max((v.offset + v.size for v in variables if v.space == "shared" and v.offset >= 0), default=0)

    @property
    def dynamic_base(self) -> int:
        """Offset of dynamic shared memory in the CTA's window: behind the reserved and the static part."""
        align = max((v.align for v in self.program.module.variables.values() if v.space == "shared" and v.offset < 0), default=16)
        start = RESERVED_SHARED + self.static_shared
        return -(-start // max(align, 16)) * max(align, 16)

    @property
    def shared_bytes(self) -> int:
        """Static and dynamic shared memory, from the end of the reserved part."""
        return self.dynamic_base - RESERVED_SHARED + self.dynamic_shared

    @property
    def local_bytes(self) -> int:
        return self.links.local_bytes

    @property
    def slots(self) -> dict[str, int]:
        return self.links.slots

    @property
    def first_segment(self) -> int:
        return self.program.entries[self.entry.name]

    @property
    def registers(self) -> int:
        """Registers per thread at launch: `.maxnreg`, or what the register file leaves, at most 255; handed out in eights (256 a warp)."""
        given = self.entry.directives.get("maxnreg")
        fits = REGISTERS_PER_SM // max(1, self.threads) // 8 * 8
        return -(-min(255, given[0] if given else fits) // 8) * 8

    @property
    def clusters(self) -> list[list[Triple]]:
        """The CTAs of every cluster, ranks in x, y, z order."""
        cx, cy, cz = self.cluster
        found = []
        for z in range(0, self.grid[2], cz):
            for y in range(0, self.grid[1], cy):
                for x in range(0, self.grid[0], cx):
                    found.append([(x + i, y + j, z + k) for k in range(cz) for j in range(cy) for i in range(cx)])
        return found

    def prepare(self, warp: Warp) -> None:
        """Fill the registers that hold special registers and symbols."""
        cta = warp.cta
        for name, reg in self.links.registers.items():
            if name in THREAD:
                value: Any = threads(warp.index, self.block)[THREAD[name]]
            elif name == "%warpid":
                value = warp.index
            elif name in cta.special:
                value = cta.special[name]
            else:
                value = cta.special[name] = self.special(name, warp) if name.startswith("%") else self.symbol(name, cta.rank)
            warp.storage(reg.cls)[reg.slot] = value
        if self.threads % 32 and warp.index == self.threads // 32:
            warp.alive = np.arange(32) < self.threads % 32
            warp.stack[0].mask = warp.alive.copy()

    def symbol(self, name: str, rank: int) -> int:
        if name in self.symbols:
            return self.symbols[name]
        variable = self.program.module.variables[name]
        offset = self.dynamic_base if variable.offset < 0 else RESERVED_SHARED + variable.offset
        return rank << RANK_SHIFT | offset

    def special(self, name: str, warp: Warp) -> Any:
        """The value of a special register that all warps of a CTA share. PTX manual, "Special Registers"."""
        cta = warp.cta
        base, _, axis = name[1:].partition(".")
        i = "xyz".find(axis) if axis else 0
        lanes = np.arange(32)
        in_cluster = [w % c for w, c in zip(cta.where, self.cluster, strict=True)]
        vectors: dict[str, Sequence[Any]] = {
            "ntid": self.block,
            "ctaid": cta.where,
            "nctaid": self.grid,
            "clusterid": [w // c for w, c in zip(cta.where, self.cluster, strict=True)],
            "nclusterid": [g // c for g, c in zip(self.grid, self.cluster, strict=True)],
            "cluster_ctaid": in_cluster,
            "cluster_nctaid": self.cluster,
        }
        if base in vectors:
            return vectors[base][i] if i < 3 else 0
        ones = (1 << (lanes.astype(np.int64) + 1)) - 1
        scalars: dict[str, Any] = {
            "laneid": lanes,
            "nwarpid": -(-self.threads // 32),
            "smid": cta.linear % ARCHITECTURES[self.arch],
            "nsmid": ARCHITECTURES[self.arch],
            "gridid": 0,
            "cluster_ctarank": cta.rank,
            "cluster_nctarank": self.cluster[0] * self.cluster[1] * self.cluster[2],
            "is_explicit_cluster": int(self.cluster != (1, 1, 1)),
            "lanemask_eq": 1 << lanes.astype(np.int64),
            "lanemask_le": ones,
            "lanemask_lt": ones >> 1,
            "lanemask_ge": (~(ones >> 1)) & 0xFFFFFFFF,
            "lanemask_gt": ~ones & 0xFFFFFFFF,
            "total_smem_size": self.shared_bytes + RESERVED_SHARED,
            "dynamic_smem_size": self.dynamic_shared,
            "aggr_smem_size": self.shared_bytes + RESERVED_SHARED,
            "reserved_smem_offset_begin": 0,
            "reserved_smem_offset_end": RESERVED_SHARED,
            "reserved_smem_offset_cap": RESERVED_SHARED,
        }
        return scalars.get(base, 0)  # clocks are read by their own instruction


@lru_cache(maxsize=64)
def threads(warp: int, block: Triple) -> tuple[Any, ...]:
    """%tid of the lanes of a warp: x, y, z, w."""
    thread = np.arange(32) + 32 * warp
    bx, by, _ = block
    return thread % bx, thread // bx % by, thread // (bx * by), 0


_PACK = {1: "B", 2: "H", 4: "I", 8: "Q"}


def pack_value(memory: GlobalMemory, variable: Variable, value: Any, name: str) -> bytes:  # noqa: PLR0911 - one return per kind of value
    """The bytes of one argument. Raises LaunchError when it does not fit the parameter."""
    if isinstance(value, bytes | bytearray):
        if len(value) != variable.size:
            raise LaunchError(f"argument {name}: {len(value)} bytes where the parameter has {variable.size}")
        return bytes(value)
    if is_tensor(value):
        if variable.size != 8:
            raise LaunchError(f"argument {name}: a tensor where the parameter has {variable.size} bytes")
        return struct.pack("<Q", register(memory, name, value))
    if hasattr(value, "block_shape"):
        if variable.size != 128:
            raise LaunchError(f"argument {name}: a tensor descriptor where the parameter has {variable.size} bytes")
        register(memory, name, value.base)
        return from_descriptor(value)
    if value is None and variable.size == 8:
        return bytes(8)
    if not isinstance(value, int | float | np.generic):
        raise LaunchError(f"argument {name}: {type(value).__name__} cannot be passed to a kernel")
    if variable.size not in _PACK:
        raise LaunchError(f"argument {name}: a number where the parameter has {variable.size} bytes")
    if variable.type in ("f32", "f64") or isinstance(value, float | np.floating):
        if variable.size not in (4, 8):
            return np.float16(value).tobytes() if variable.size == 2 else _refuse(name, value, variable)
        return struct.pack("<f" if variable.size == 4 else "<d", float(value))
    number, bits = int(value), 8 * variable.size
    if not -(1 << bits - 1) <= number < 1 << bits:
        raise LaunchError(f"argument {name}: {number} does not fit {bits} bits")
    return struct.pack("<" + _PACK[variable.size], number & ((1 << bits) - 1))


def _refuse(name: str, value: Any, variable: Variable) -> bytes:
    raise LaunchError(f"argument {name}: {value!r} for a parameter of type {variable.type}")


def pack_parameters(memory: GlobalMemory, entry: Function, values: Sequence[Any], names: Sequence[str]) -> bytes:
    """The parameter block. Raises LaunchError when there are too many or too few values."""
    if len(values) != len(entry.params):
        wanted = ", ".join(f"{p.type}[{p.size}]" if p.size > 8 else p.type for p in entry.params)
        raise LaunchError(f"kernel {entry.name} takes {len(entry.params)} arguments ({wanted}), {len(values)} given")
    size = max((p.offset + p.size for p in entry.params), default=0)
    block = bytearray(size)
    for variable, value, name in zip(entry.params, values, names, strict=True):
        block[variable.offset : variable.offset + variable.size] = pack_value(memory, variable, value, name)
    return bytes(block)


def triple(value: Sequence[int] | int | None, name: str, default: Triple | None = None) -> Triple:
    """(x, y, z) from one to three numbers."""
    if value is None:
        if default is None:
            raise LaunchError(f"{name} is needed: it is not known from the kernel")
        return default
    items = [int(v) for v in ((value,) if isinstance(value, int) else value)]
    if not 1 <= len(items) <= 3 or any(v < 1 for v in items):
        raise LaunchError(f"{name} {value!r} is not one to three positive numbers")
    return (*items, 1, 1)[:3]  # type: ignore[return-value]


def directive(entry: Function, name: str) -> Triple | None:
    found = entry.directives.get(name)
    return triple(found, name) if found else None


def check(launch: Launch) -> None:
    """Raise LaunchError for a geometry that the hardware refuses. PTX manual and CUDA programming guide, technical specifications."""
    for name, of, limit in (("block", launch.block, (1024, 1024, 64)), ("grid", launch.grid, (2**31 - 1, 65535, 65535))):
        if any(v > most for v, most in zip(of, limit, strict=True)):
            raise LaunchError(f"{name} {of} is over {limit}")
    if launch.threads > 1024:
        raise LaunchError(f"block {launch.block} has {launch.threads} threads, at most 1024")
    if any(g % c for g, c in zip(launch.grid, launch.cluster, strict=True)):
        raise LaunchError(f"grid {launch.grid} is not a multiple of the cluster {launch.cluster}")
    ctas = launch.cluster[0] * launch.cluster[1] * launch.cluster[2]
    if ctas > 16:
        raise LaunchError(f"cluster {launch.cluster} has {ctas} CTAs, at most 16")
    if launch.arch not in ARCHITECTURES:
        raise LaunchError(f"the kernel is compiled for {launch.arch}; the emulator knows {', '.join(ARCHITECTURES)}")
    needed = directive(launch.entry, "reqntid")
    if needed and needed != launch.block:
        raise LaunchError(f"block {launch.block} where the kernel requires {needed}")


def over_capacity(launch: Launch) -> str | None:
    """Why the kernel does not fit on a chip, if so."""
    if launch.shared_bytes > MAX_SHARED_PER_CTA:
        return f"{launch.shared_bytes} bytes of shared memory, at most {MAX_SHARED_PER_CTA}"
    return None
