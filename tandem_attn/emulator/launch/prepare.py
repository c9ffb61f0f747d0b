"""Kernel, arguments and grid -> Launch: the front half of `run`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from tandem_attn.emulator.errors import LaunchError
from tandem_attn.emulator.launch import triton_kernel
from tandem_attn.emulator.launch.launch import ARCHITECTURES, REGISTERS_PER_SM, Launch, check, directive, pack_parameters, triple
from tandem_attn.emulator.memory.addresses import RESERVED_SHARED, SHARED_PER_SM
from tandem_attn.emulator.memory.globalmem import GlobalMemory
from tandem_attn.emulator.ops.registry import lookup
from tandem_attn.emulator.ptx.link import Links, link
from tandem_attn.emulator.ptx.parser import parse
from tandem_attn.emulator.ptx.program import Program, build

Dims = Sequence[int] | int | None


@lru_cache(maxsize=16)
def load(ptx: str) -> tuple[Program, Links]:
    """Parse, cut and link a PTX text; every instruction must be known."""
    program = build(parse(ptx))
    links = link(program)
    for ins in program.code:
        if ins.name not in ("bra", "brx", "ret", "exit", "trap", "call"):
            lookup(ins)
    return program, links


def prepare(
    kernel: Any,
    args: Sequence[Any] | Mapping[str, Any],
    grid: Sequence[int] | int,
    *,
    block: Dims,
    cluster: Dims,
    shared: int | None,
    entry: str | None,
) -> tuple[Launch, int]:
    """The launch, and how many CTAs are resident at once."""
    compiled = triton_kernel.is_compiled(kernel)
    text = kernel.asm["ptx"] if compiled else kernel
    if not isinstance(text, str):
        raise LaunchError(f"kernel: a compiled Triton kernel or PTX text is expected, {type(kernel).__name__} given")
    program, links = load(text)
    try:
        function = program.module.entry(entry)
    except KeyError as error:
        raise LaunchError(str(error.args[0])) from None
    memory = GlobalMemory()
    profile = (0, 0)
    if compiled:
        meta = kernel.metadata
        ctas = int(getattr(meta, "num_ctas", 1))
        block = block or 32 * int(meta.num_warps)
        cluster = cluster or (ctas, 1, 1)
        shared = int(meta.shared) if shared is None else shared
        programs = triple(grid, "grid")
        geometry = (programs[0] * ctas, programs[1], programs[2])
        values, names = triton_kernel.expand(kernel, args, memory)
        count = geometry[0] * geometry[1] * geometry[2]
        for name in ("global_scratch", "profile_scratch"):  # ConSan keeps its own books in the second
            size = int(getattr(meta, name + "_size", 0)) * count
            base = memory.allocate(name, size).base if size else 0
            if name == "profile_scratch" and size:
                profile = (base, base + size)
            values.append(base)
            names.append(name)
    else:
        if isinstance(args, Mapping):
            raise LaunchError("arguments of bare PTX go by position, not by name")
        geometry = triple(grid, "grid")
        values, names = list(args), [f"{i}" for i in range(len(args))]
    required = directive(function, "reqntid")
    launch = Launch(
        program, links, function, geometry, triple(block, "block", required),
        triple(cluster, "cluster", directive(function, "reqnctapercluster") or (1, 1, 1)), shared or 0, b"", memory,
        program.module.target,
    )  # fmt: skip
    launch.profile_scratch = profile
    check(launch)
    place_variables(launch)
    launch.parameters = pack_parameters(memory, function, values, names)
    return launch, resident(launch)


def place_variables(launch: Launch) -> None:
    """Give .global and .const variables memory and fill in the addresses of symbols."""
    variables = launch.program.module.variables
    for variable in variables.values():
        if variable.space in ("global", "const") and variable.size:
            held = launch.memory.allocate(variable.name, variable.size, max(16, variable.align))
            if variable.data is not None:
                held.data[: len(variable.data)] = bytearray(variable.data)
            launch.symbols[variable.name] = held.base
    for variable in variables.values():
        for offset, target, addend in variable.links:
            at = launch.memory.bytes_at(launch.symbols[variable.name] + offset, 8)
            at[:] = bytearray((launch.symbols.get(target, 0) + addend).to_bytes(8, "little"))
    for name, value in launch.links.values.items():
        launch.symbols[name] = value


def resident(launch: Launch) -> int:
    """CTAs that fit on the chip at once: by shared memory, registers and threads of an SM (CUDA occupancy rules)."""
    by_shared = SHARED_PER_SM // (launch.shared_bytes + RESERVED_SHARED)
    by_threads = 2048 // launch.threads
    given = launch.entry.directives.get("maxnreg")
    by_registers = REGISTERS_PER_SM // (launch.threads * given[0]) if given else by_threads
    return ARCHITECTURES[launch.arch] * max(1, min(by_shared, by_threads, by_registers, 32))
