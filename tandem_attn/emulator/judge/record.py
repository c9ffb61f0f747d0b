"""What the race tracker remembers of an access and of an asynchronous operation."""

from __future__ import annotations

from dataclasses import dataclass, field

from tandem_attn.emulator.events import AccessKind, AsyncAgent, Proxy, Site, Space, WarpAgent
from tandem_attn.emulator.judge.clock import ALL, Clock, Key

WARPS = 64  # of a CTA, at most

# Operations whose completion a later wait covers in issue order, by the wait that does so. The others complete through an mbarrier alone.
FAMILIES = {
    "tma-store": "bulk", "tma-reduce": "bulk", "bulk-copy": "bulk", "bulk-reduce": "bulk", "wgmma": "wgmma", "cp.async": "cp.async",
    "tcgen05.mma": "tcgen05", "tcgen05.cp": "tcgen05", "tcgen05.shift": "tcgen05", "tcgen05.commit": "tcgen05",
    "tcgen05.ld": "tcgen05.ld", "tcgen05.st": "tcgen05.st",
}  # fmt: skip
OF_A_LANE = ("bulk", "tcgen05")  # families that belong to the issuing thread; the others to the whole warp
GENERIC_OPERATIONS = ("st.async", "cp.async")  # asynchronous, yet not of the async proxy (PTX manual, "Async proxy")


def warp_number(agent: WarpAgent) -> int:
    return agent.cta * WARPS + agent.warp


def completion_key(agent: AsyncAgent, read: bool = False) -> Key:
    """The clock key that a wait for the operation raises; `read`: a wait for its sources only."""
    family = FAMILIES.get(agent.kind)
    if family is None:
        return None
    lane = (agent.lanes & -agent.lanes).bit_length() - 1 if family in OF_A_LANE else ALL
    return (family + ".read" if read and family == "bulk" else family, warp_number(agent.issuer), lane)


@dataclass(slots=True, eq=False)
class Operation:
    """An asynchronous operation: what was before its issue, and the accesses that its next arrival will complete."""

    agent: AsyncAgent
    before: Clock
    epoch: int
    open: list[Record] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Record:
    """One access event. It is known to a clock that has (`warp`, lane) at `epoch`, or for an operation one of `done`."""

    warp: int
    agent: WarpAgent | AsyncAgent
    site: Site
    kind: AccessKind
    space: Space
    cta: int
    proxy: Proxy
    strong: bool
    scope: str
    lanes: int
    epoch: int
    operation: Operation | None = None
    done: list[tuple[Key, int]] = field(default_factory=list)

    @property
    def writes(self) -> bool:
        return self.kind is not AccessKind.READ

    @property
    def generic(self) -> bool:
        """Whether the access needs a proxy fence before the async proxy may touch the same bytes."""
        return self.proxy is Proxy.GENERIC or (self.operation is not None and self.operation.agent.kind in GENERIC_OPERATIONS)
