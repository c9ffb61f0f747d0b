"""What a plan hands out on chip: memory regions with named overlaps, warp roles with their registers, and tile chunks."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

WARP = 32  # threads
WARPGROUP = 4  # warps; setmaxnreg acts on a whole warpgroup (PTX ISA, setmaxnreg)
REGISTER_STEP, REGISTER_MIN, REGISTER_MAX = 8, 24, 256  # operand range of setmaxnreg (PTX ISA)
MMA_BYTES = 32  # an MMA step along K reads 32 bytes of each row: 16 elements of 16 bits (PTX ISA, wgmma and tcgen05 shapes)


@dataclass(frozen=True)
class Region:
    """A named piece of shared memory (bytes) or tensor memory (32-bit columns of all 128 lanes).

    ``overlaps`` names the regions whose space it shares on purpose; the reuse must be safe by the kernel's order of events.
    """

    name: str
    offset: int
    size: int
    overlaps: tuple[str, ...] = ()

    @property
    def stop(self) -> int:
        return self.offset + self.size

    def meets(self, other: Region) -> bool:
        return self.offset < other.stop and other.offset < self.stop

    def __str__(self) -> str:
        over = f" over {', '.join(self.overlaps)}" if self.overlaps else ""
        return f"{self.name}[{self.offset}:{self.stop}]{over}"


@dataclass(frozen=True)
class Role:
    """A warp role: how many warps run it and how many registers each of their threads holds."""

    name: str
    warps: int
    registers: int

    def __str__(self) -> str:
        return f"{self.name} {self.warps}x{self.registers}"


class Packer:
    """Lays regions one behind the other."""

    def __init__(self, align: int) -> None:
        self._align = align
        self._regions: list[Region] = []

    def add(self, name: str, size: int) -> None:
        """A region in free space; size 0 adds none."""
        if size:
            start = -(-used(self.regions) // self._align) * self._align
            self._regions.append(Region(name, start, size))

    def over(self, name: str, size: int, base: str, shift: int = 0) -> None:
        """A region that reuses the space from ``shift`` within ``base`` on."""
        start = next(region.offset for region in self._regions if region.name == base) + shift
        new = Region(name, start, size)
        shared = tuple(region.name for region in self._regions if region.meets(new))
        self._regions.append(Region(name, start, size, shared))

    @property
    def regions(self) -> tuple[Region, ...]:
        return tuple(self._regions)


def used(regions: tuple[Region, ...]) -> int:
    """Bytes or columns from 0 to the end of the last region."""
    return max((region.stop for region in regions), default=0)


def check_regions(argument: str, regions: tuple[Region, ...], capacity: int, unit: str) -> None:
    """Regions are distinct, fit the capacity, and share space exactly where they say so.

    Raises:
        ValueError: naming ``argument``, the region and what is required.
    """
    names = [region.name for region in regions]
    if len(set(names)) != len(names):
        raise ValueError(f"{argument}: region names must differ, got {names}")
    for region in regions:
        if region.offset < 0 or region.size <= 0:
            raise ValueError(f"{argument}: {region.name} must have offset >= 0 and size > 0, got {region}")
        if region.stop > capacity:
            raise ValueError(f"{argument}: {region.name} ends at {region.stop} {unit}, the capacity is {capacity}")
        unknown = set(region.overlaps) - set(names)
        if unknown:
            raise ValueError(f"{argument}: {region.name} overlaps unknown region {', '.join(sorted(unknown))}")
    for a, b in itertools.combinations(regions, 2):
        named = b.name in a.overlaps or a.name in b.overlaps
        if a.meets(b) and not named:
            raise ValueError(f"{argument}: {a} and {b} share space without naming it in overlaps")
        if named and not a.meets(b):
            raise ValueError(f"{argument}: {a} and {b} name an overlap but share no space")


def warpgroup_registers(roles: tuple[Role, ...]) -> tuple[int, ...]:
    """Registers a thread in each warpgroup, roles laid out in order.

    Raises:
        ValueError: a role's numbers are illegal, or roles in one warpgroup want different budgets.
    """
    budgets: list[int] = []
    room = 0  # warps left in the last warpgroup
    for role in roles:
        legal = REGISTER_MIN <= role.registers <= REGISTER_MAX and role.registers % REGISTER_STEP == 0
        if role.warps < 1 or not legal:
            raise ValueError(
                f"roles: {role.name} needs warps >= 1 and registers a multiple of {REGISTER_STEP} in "
                f"{REGISTER_MIN}..{REGISTER_MAX}, got {role.warps} warps of {role.registers} registers"
            )
        if role.warps >= WARPGROUP:
            if role.warps % WARPGROUP:
                raise ValueError(f"roles: {role.name} needs fewer than {WARPGROUP} warps or whole warpgroups, got {role.warps} warps")
            budgets += [role.registers] * (role.warps // WARPGROUP)
            room = 0
            continue
        if role.warps > room:
            budgets.append(role.registers)
            room = WARPGROUP
        elif budgets[-1] != role.registers:
            raise ValueError(f"roles: {role.name} shares a warpgroup of {budgets[-1]} registers, so it cannot have {role.registers}")
        room -= role.warps
    return tuple(budgets)


def check_roles(roles: tuple[Role, ...], registers: int, max_warps: int) -> None:
    """The roles' warps and registers fit one CTA.

    Raises:
        ValueError: naming the sum and the capacity.
    """
    names = [role.name for role in roles]
    if len(set(names)) != len(names):
        raise ValueError(f"roles: names must differ, got {names}")
    budgets = warpgroup_registers(roles)
    warps = len(budgets) * WARPGROUP
    if warps > max_warps:
        raise ValueError(f"roles: {warps} warps with partial warpgroups filled, a CTA holds {max_warps}")
    total = sum(budgets) * WARPGROUP * WARP
    if total > registers:
        raise ValueError(f"roles: {total} registers for {', '.join(map(str, roles))}, an SM has {registers}")


def chunks(extent: int, step: int = 16) -> tuple[int, ...]:
    """One or two powers of two, descending and each at least ``step``, that cover ``extent`` most tightly.

    Gluon shapes are powers of two; what lies beyond ``extent`` is filled with zeros by TMA. More than two chunks cost more instructions
    and barriers than the columns they save.
    """
    powers = [step << i for i in range(8) if step << i <= max(step, 2 * extent)]
    single = [(p,) for p in powers if p >= extent]
    double = [(p, q) for p, q in itertools.product(powers, powers) if p > q and p + q >= extent]
    return min([*single, *double], key=lambda parts: (sum(parts), len(parts)))
