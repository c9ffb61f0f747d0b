"""What the machine tells an observer: the interface between execution and the judge.

An observer (`tandem_attn.emulator.run(..., observers=[...])`) gets one call per event, in the order of execution. Without an
observer no event is built. All times are implicit: the order of calls is one legal interleaving of the run.

Who: an `Agent` is a thread of control: a warp (the lanes are in the event), or an asynchronous operation after its issue.
Where: `Site` is the instruction (its PTX line, text and source line).
Addresses: shared memory is given as byte offsets in the window of its `cta`, TMEM as byte offsets `(column * 128 + lane) * 4`,
global memory as absolute addresses.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from tandem_attn.emulator.report import Report, Source


class Space(Enum):
    GLOBAL = "global"
    SHARED = "shared"
    TMEM = "tmem"


class Proxy(Enum):
    """PTX manual, Memory Consistency Model, Proxies."""

    GENERIC = "generic"
    ASYNC = "async"  # cp.async.bulk*, TMA, wgmma and tcgen05 reads of shared memory
    TENSORMAP = "tensormap"  # a descriptor read by TMA
    TENSOR = "tensor"  # TMEM accesses of the tensor core (tcgen05 asynchronous order, not a PTX proxy)


class AccessKind(Enum):
    READ = "read"
    WRITE = "write"
    ATOMIC = "atomic"  # atom, red and the additions of cp.reduce.async


@dataclass(frozen=True, slots=True)
class Site:
    """An instruction of the program."""

    index: int
    ptx_line: int
    text: str
    source: Source | None


@dataclass(frozen=True, slots=True)
class WarpAgent:
    """A warp. `cta` is the linear index of the CTA in the grid, `rank` its rank in the cluster."""

    cta: int
    rank: int
    warp: int


@dataclass(frozen=True, slots=True)
class AsyncAgent:
    """An asynchronous operation, numbered in issue order; `issuer` issued it at `site` with `lanes`."""

    serial: int
    kind: str  # "tma-load", "tma-store", "tma-reduce", "bulk-copy", "bulk-reduce", "st.async", "cp.async", "wgmma", "tcgen05.mma",
    # "tcgen05.cp", "tcgen05.shift", "tcgen05.ld", "tcgen05.st", "tcgen05.commit"
    issuer: WarpAgent
    lanes: int
    site: Site


Agent: TypeAlias = WarpAgent | AsyncAgent


@dataclass(frozen=True, slots=True)
class Access:
    """A memory access. `starts` are the first bytes and `size` the bytes of each piece; one piece per lane or per row.

    `lane_ids[i]` is the lane that makes piece i (-1 for asynchronous operations). `cta` owns the memory (linear index; -1 for
    global memory). `semantics` is "weak", "relaxed", "acquire", "release", "acq_rel" or "volatile"; `scope` "cta", "cluster",
    "gpu" or "sys" for the strong ones, else "".
    """

    agent: Agent
    site: Site
    space: Space
    cta: int
    kind: AccessKind
    proxy: Proxy
    starts: NDArray[np.int64]
    size: int
    lane_ids: NDArray[np.int64]
    semantics: str = "weak"
    scope: str = ""
    silent: NDArray[np.bool_] | None = None  # of plain stores: which pieces leave memory as it was


@dataclass(frozen=True, slots=True)
class Issue:
    """An asynchronous operation starts: everything the issuer did before it in program order happens before it."""

    agent: AsyncAgent
    site: Site
    order: str = ""  # operations of one CTA (pair) with the same non-empty key take effect in issue order (tcgen05, wgmma)


@dataclass(frozen=True, slots=True)
class Complete:
    """An asynchronous operation has had its whole effect (its accesses precede this event).

    `via` says how completion becomes visible: "mbarrier" (the Arrival with this agent follows), "bulk-group", "wgmma-group",
    "cp.async-group", "tcgen05-order" (a later commit or wait in the same order covers it).
    `stage` is "read" when only its sources are free (cp.async.bulk.wait_group.read), else "done".
    """

    agent: AsyncAgent
    via: str
    stage: str = "done"


class BarrierId(NamedTuple):
    """`kind` is "mbarrier" (key: byte offset in the owner's shared memory), "named" (key: barrier number) or "cluster" (key 0)."""

    kind: str
    cta: int
    key: int


@dataclass(frozen=True, slots=True)
class BarrierInit:
    """mbarrier.init (`count` arrivals per phase) or mbarrier.inval (`count` 0)."""

    agent: WarpAgent
    site: Site
    barrier: BarrierId
    count: int
    lanes: int = 0


@dataclass(frozen=True, slots=True)
class Arrival:
    """An arrival, before its effect. `phase` counts from 0 per barrier; `tx` is the expected (+) or completed (-) transaction bytes."""

    agent: Agent
    site: Site
    barrier: BarrierId
    lanes: int
    phase: int
    count: int
    tx: int = 0
    semantics: str = "release"
    scope: str = "cta"


@dataclass(frozen=True, slots=True)
class PhaseComplete:
    """The barrier's `phase` is complete: all its arrivals came and its transaction count is zero."""

    barrier: BarrierId
    phase: int


@dataclass(frozen=True, slots=True)
class Wait:
    """A wait (or successful test) of `phase` returned."""

    agent: WarpAgent
    site: Site
    barrier: BarrierId
    lanes: int
    phase: int
    semantics: str = "acquire"
    scope: str = "cta"


@dataclass(frozen=True, slots=True)
class Fence:
    """A fence or an ordering instruction of the warp. `kind` is the instruction's qualifiers:

    "membar.<scope>", "fence.<sem>.<scope>", "fence.proxy.async[.global|.shared::cta|...]", "fence.proxy.alias",
    "fence.proxy.tensormap...", "fence.mbarrier_init.release.cluster", "wgmma.fence", "tcgen05.fence::before_thread_sync",
    "tcgen05.fence::after_thread_sync", "bar.warp.sync", "griddepcontrol.wait", "griddepcontrol.launch_dependents".
    """

    agent: WarpAgent
    site: Site
    kind: str
    lanes: int


@dataclass(frozen=True, slots=True)
class GroupCommit:
    """cp.async.bulk.commit_group, wgmma.commit_group or cp.async.commit_group: `agents` form group number `group` of the lane or warp."""

    agent: WarpAgent
    site: Site
    kind: str  # "bulk", "wgmma", "cp.async"
    lanes: int
    group: int
    members: tuple[AsyncAgent, ...]


@dataclass(frozen=True, slots=True)
class GroupWait:
    """A wait on groups returned: every group up to and including `group` is complete (`read`: only its sources are read)."""

    agent: WarpAgent
    site: Site
    kind: str  # "bulk", "wgmma", "cp.async", "tcgen05.ld", "tcgen05.st"
    lanes: int
    group: int
    read: bool
    members: tuple[AsyncAgent, ...]


@dataclass(frozen=True, slots=True)
class TmemAllocation:
    """tcgen05.alloc (columns > 0) or dealloc (columns < 0) in the TMEM of `cta`."""

    agent: WarpAgent
    site: Site
    cta: int
    column: int
    columns: int


@dataclass(frozen=True, slots=True)
class WarpExit:
    """The warp has ended."""

    agent: WarpAgent


@dataclass(frozen=True, slots=True)
class ClusterStart:
    """The CTAs of a cluster become resident; `ctas` are their linear indices."""

    cluster: int
    ctas: tuple[int, ...]
    warps: int  # per CTA


Event: TypeAlias = (
    Access
    | Issue
    | Complete
    | BarrierInit
    | Arrival
    | PhaseComplete
    | Wait
    | Fence
    | GroupCommit
    | GroupWait
    | TmemAllocation
    | WarpExit
    | ClusterStart
)


class Observer(Protocol):
    """Gets every event; returns reports (usually none), and the last ones at the end of the run."""

    def event(self, event: Event) -> list[Report]: ...

    def finish(self) -> list[Report]: ...
