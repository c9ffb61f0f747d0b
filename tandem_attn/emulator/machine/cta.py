"""A CTA: its shared memory, tensor memory, barriers and warps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tandem_attn.emulator.machine.team import Team
from tandem_attn.emulator.machine.warp import Warp
from tandem_attn.emulator.memory.addresses import RESERVED_SHARED
from tandem_attn.emulator.memory.faults import Fault
from tandem_attn.emulator.memory.registers import WARPS, RegisterFile
from tandem_attn.emulator.memory.shared import SharedMemory
from tandem_attn.emulator.memory.tmem import TensorMemory
from tandem_attn.emulator.sync.barrier import NAMED_BARRIERS, ClusterBarrier, NamedBarrier
from tandem_attn.emulator.sync.mbarrier import MBarrier

if TYPE_CHECKING:
    from tandem_attn.emulator.machine.machine import Machine


class Cluster:
    """CTAs that run together."""

    def __init__(self, machine: Machine, index: int, coordinates: list[tuple[int, int, int]]) -> None:
        launch = machine.launch
        self.index = index
        self.barrier = ClusterBarrier(len(coordinates) * launch.threads)
        self.ctas = [CTA(machine, self, rank, where) for rank, where in enumerate(coordinates)]
        self.cancelled = False

    @property
    def done(self) -> bool:
        return all(cta.done for cta in self.ctas)


class CTA:
    """One CTA. `rank` is its rank in the cluster, `where` its (x, y, z), `linear` its index in the grid."""

    def __init__(self, machine: Machine, cluster: Cluster, rank: int, where: tuple[int, int, int]) -> None:
        launch = machine.launch
        self.machine, self.launch, self.cluster, self.rank, self.where = machine, launch, cluster, rank, where
        self.linear = where[0] + launch.grid[0] * (where[1] + launch.grid[1] * where[2])
        self.shared = SharedMemory(RESERVED_SHARED, launch.shared_bytes)
        self._tmem: TensorMemory | None = None
        self.mbarriers: dict[int, MBarrier] = {}
        self.named: dict[int, NamedBarrier] = {}
        self.tmem_waiters: list[Warp] = []
        self.register_waiters: list[Warp] = []  # at a setmaxnreg.inc
        self.special: dict[str, Any] = {}  # values of special registers and symbols that all warps share
        self.tiles: dict[Any, Any] = {}  # matrix operands read from shared memory, converted
        count = -(-launch.threads // 32)
        spare = machine.spare_files
        self.files = [spare.pop().clear() if spare else RegisterFile(launch.slots) for _ in range(0, count, WARPS)]
        self.warps = [Warp(self, i, self.files[i // WARPS], launch.first_segment) for i in range(count)]
        for warp in self.warps:
            launch.prepare(warp)
        for number, file in enumerate(self.files if machine.teams else ()):
            members = self.warps[number * WARPS : number * WARPS + WARPS]
            if len(members) > 1:
                team = Team(members, file)
                for warp in members:
                    warp.team = team

    @property
    def tmem(self) -> TensorMemory:
        if self._tmem is None:
            self._tmem = TensorMemory()
            self._tmem.track = self.machine.check_uninitialised
        return self._tmem

    @property
    def has_tmem(self) -> bool:
        return self._tmem is not None

    @property
    def done(self) -> bool:
        return all(warp.done for warp in self.warps)

    def peer(self, rank: int) -> CTA:
        """The CTA of that rank in the cluster. Raises Fault where there is none."""
        if rank == self.rank:
            return self
        if not 0 <= rank < len(self.cluster.ctas):
            raise Fault("out-of-bounds", f"shared address names CTA {rank} of a cluster of {len(self.cluster.ctas)}")
        return self.cluster.ctas[rank]

    def mbarrier(self, offset: int) -> MBarrier:
        """The mbarrier object at an offset. Raises Fault where none was initialised."""
        found = self.mbarriers.get(offset)
        if found is None:
            if offset % 8:
                raise Fault("misaligned", f"mbarrier address {offset:#x} is not a multiple of 8")
            raise Fault("mbarrier", f"no mbarrier is initialised at shared offset {offset:#x} of CTA {self.where}")
        return found

    def barrier(self, number: int) -> NamedBarrier:
        if not 0 <= number < NAMED_BARRIERS:
            raise Fault("barrier", f"barrier {number} is not in 0 .. {NAMED_BARRIERS - 1}")
        return self.named.setdefault(number, NamedBarrier(number))

    def live_threads(self) -> int:
        """Threads that have not exited."""
        total = 0
        for warp in self.warps:
            if not warp.done:
                total += 32 if warp.alive is None else int(warp.alive.sum())
        return total
