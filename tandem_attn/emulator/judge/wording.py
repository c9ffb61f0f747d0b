"""What the race tracker's reports say: both sides, and the order that is missing."""

from __future__ import annotations

import re

from tandem_attn.emulator.events import AccessKind, AsyncAgent, BarrierId, PhaseComplete, Proxy, Site, Space, WarpAgent
from tandem_attn.emulator.judge.clock import ALL
from tandem_attn.emulator.judge.record import FAMILIES, WARPS, Record

Grid = tuple[int, int, int]

_WAITS = {
    "bulk": "cp.async.bulk.commit_group and wait_group", "wgmma": "wgmma.commit_group and wait_group",
    "cp.async": "cp.async.wait_group, wait_all or cp.async.mbarrier.arrive", "tcgen05": "tcgen05.commit and a wait on its mbarrier",
    "tcgen05.ld": "tcgen05.wait::ld", "tcgen05.st": "tcgen05.wait::st",
}  # fmt: skip


def where(cta: int, grid: Grid) -> Grid:
    """(x, y, z) of a linear CTA index."""
    return cta % grid[0], cta // grid[0] % grid[1], cta // (grid[0] * grid[1])


def agent_of(number: int) -> WarpAgent:
    return WarpAgent(number // WARPS, 0, number % WARPS)


def at(site: Site) -> str:
    return f"PTX line {site.ptx_line}" + (f" ({site.source})" if site.source else "")


def who(agent: WarpAgent | AsyncAgent, code: int, grid: Grid) -> str:
    """ "CTA (0, 0, 0) warp 3 lane 7", or "the tma-store that CTA ... issued"."""
    warp = agent.issuer if isinstance(agent, AsyncAgent) else agent
    text = f"CTA {where(warp.cta, grid)} warp {warp.warp}"
    if isinstance(agent, AsyncAgent):
        return f"the {agent.kind} issued by {text}"
    return text + (f" lane {code}" if code < ALL else "")


def place(record: Record, start: int, size: int, grid: Grid) -> str:
    if record.space is Space.GLOBAL:
        return f"global address {start:#x} ({size} bytes)"
    if record.space is Space.TMEM:
        return f"TMEM column {start // 512} from lane {start // 4 % 128} of CTA {where(record.cta, grid)}"
    return f"shared offset {start:#x} ({size} bytes) of CTA {where(record.cta, grid)}"


def race(kind: str, record: Record, other: Record, lane: int, code: int, start: int, size: int, grid: Grid) -> str:
    """The message of a pair of accesses."""
    verb = {AccessKind.READ: "reads", AccessKind.WRITE: "writes", AccessKind.ATOMIC: "adds to"}
    mine = f"{who(record.agent, lane, grid)} {verb[record.kind]} {place(record, start, size, grid)}"
    done = {AccessKind.READ: "read", AccessKind.WRITE: "written", AccessKind.ATOMIC: "updated"}[other.kind]
    theirs = f"{done} by {who(other.agent, code, grid)} at {at(other.site)} `{other.site.text}`"
    return f"{mine}, which is {theirs}; {missing(kind, record, other, code == lane)}"


def missing(kind: str, record: Record, other: Record, same_lane: bool) -> str:
    """The ordering that is not there."""
    fence = "fence.proxy.tensormap" if record.proxy is Proxy.TENSORMAP else "fence.proxy.async"
    words = {
        "missing-proxy-fence": f"ordered, but without {fence} between the generic write and the access through the other proxy",
        "missing-tcgen05-fence": "ordered, but without tcgen05.fence::before_thread_sync and ::after_thread_sync around it",
        "nondeterministic": "nothing fixes the order of the two floating-point additions",
    }
    if kind in words:
        return words[kind]
    if other.operation is not None or record.operation is not None:
        return _in_flight(record, other)
    if other.warp == record.warp and not same_lane:
        return "no bar.warp.sync or barrier orders the two lanes"
    if other.strong or record.strong:
        return "no release and acquire of sufficient scope, and no barrier, orders them"
    return "no barrier, mbarrier arrival and wait, or release and acquire orders them"


def _in_flight(record: Record, other: Record) -> str:
    """Of two accesses at least one is made by an operation: either may be the later one."""
    waits = []
    for each in (other, record):
        if each.operation is not None:
            kind = each.operation.agent.kind
            wait = _WAITS.get(FAMILIES.get(kind, ""), "a wait on the mbarrier that it completes on")
            if each.kind is AccessKind.READ and wait == _WAITS["bulk"]:
                wait += " (or wait_group.read)"
            waits.append(f"the completion of the {kind} ({wait})")
    return f"{'no wait for ' + ' and no wait for '.join(waits)} lies between: the operation may still be in flight"


def visitor(record: Record, cta: int, grid: Grid) -> str:
    """The message about an access to a CTA that may have ended."""
    wait = "no cluster barrier or mbarrier wait of that CTA lies behind the access"
    if record.operation is not None:
        family = FAMILIES.get(record.operation.agent.kind, "")
        wait = f"no {_WAITS.get(family, 'wait for its mbarrier')} that the CTA knows of lies behind it"
    return f"{who(record.agent, ALL, grid)} accesses the shared memory of CTA {where(cta, grid)}, which may have exited by then: {wait}"


def uninitialised_barrier(barrier: BarrierId, agent: WarpAgent | AsyncAgent, site: Site, owner: int, grid: Grid) -> str:
    return (
        f"{who(agent, ALL, grid)} uses {_mbarrier(barrier, grid)}, but nothing orders this behind its initialisation by "
        f"{who(agent_of(owner), ALL, grid)} at {at(site)}"
    )


def _mbarrier(barrier: BarrierId, grid: Grid) -> str:
    return f"the mbarrier at shared offset {barrier.key:#x} of CTA {where(barrier.cta, grid)}"


def missed_phase(event: PhaseComplete, number: int, site: Site, grid: Grid) -> str:
    return (
        f"{who(agent_of(number), ALL, grid)} waits for phase {event.phase - 1} of {_mbarrier(event.barrier, grid)} by parity at "
        f"{at(site)}, but phase {event.phase} can complete before the wait has returned: no arrival of it is ordered behind the wait"
    )


_FLOAT = re.compile(r"\.(f16|f16x2|bf16|bf16x2|f32|f64)\b")


def inexact_sum(record: Record) -> bool:
    """Whether the access adds floating-point numbers, so that the order of two changes the result."""
    text = record.site.text
    if record.kind is not AccessKind.ATOMIC or ".add" not in text:
        return False
    return "tensor" in text or _FLOAT.search(text) is not None
