"""Vector clocks of warps and of asynchronous operations.

A clock says what happens before a point of the run: for each *key* how far its owner had come. Keys are
    (warp, lane) and (warp, ALL)   generic accesses, counted in epochs of the warp; ALL covers every lane,
    (warp, INIT)                   mbarrier initialisations, as fence.mbarrier_init orders these alone,
    (family, warp, lane)           asynchronous operations whose completion a wait has seen, counted in issue order,
    BarrierId                      phases of an mbarrier that were seen complete.
Beside the plain clock there is one per proxy: what lies before *and* has a proxy fence of that sort on the way (PTX manual, Memory
Consistency Model, "Proxy-preserved base causality order").
"""

from __future__ import annotations

from collections.abc import Hashable

ALL, INIT = 32, 33
FULL = 0xFFFFFFFF
# Clocks by what they have passed: nothing, fence.proxy.async for shared and for global memory, fence.proxy.tensormap,
# tcgen05.fence::before_thread_sync, and after it tcgen05.fence::after_thread_sync. RELAXED is no fence: what was behind a barrier of its
# CTA before a relaxed arrival at the cluster barrier, which orders data in that CTA's shared memory but is no release.
PLAIN, SHARED, GLOBAL, TENSORMAP, BEFORE, AFTER, RELAXED = SORTS = tuple(range(7))
Key = Hashable
Times = dict[Key, int]


class Clock:
    """What happens before a point; `times[PLAIN]` holds all of it, the others what has passed a fence as well."""

    __slots__ = ("times",)

    def __init__(self, times: list[Times] | None = None) -> None:
        self.times: list[Times] = times if times is not None else [{} for _ in SORTS]

    def copy(self) -> Clock:
        return Clock([dict(t) for t in self.times])

    def join(self, other: Clock) -> None:
        """Everything that `other` knows is known here too."""
        for mine, theirs in zip(self.times, other.times, strict=True):
            raise_to(mine, theirs)

    def fence(self, sort: int, behind: int = PLAIN) -> None:
        """A fence of that sort: all that is before it (and has passed one of sort `behind`) has passed one."""
        raise_to(self.times[sort], self.times[behind])

    def knows(self, key: Key, time: int, sort: int = PLAIN) -> bool:
        return self.times[sort].get(key, -1) >= time

    def for_others(self) -> Clock:
        """This clock as one to publish: a tcgen05.fence::after holds for the thread that executes it alone."""
        self.times[AFTER] = {}
        return self

    def learn(self, key: Key, time: int, sorts: tuple[int, ...] = SORTS) -> None:
        """Something is before this point, and needs no fence of these sorts."""
        for sort in sorts:
            if self.times[sort].get(key, -1) < time:
                self.times[sort][key] = time


def raise_to(mine: Times, theirs: Times) -> None:
    if not mine:
        mine.update(theirs)
        return
    get = mine.get
    for key, time in theirs.items():
        if get(key, -1) < time:
            mine[key] = time


def lanes_in(bits: int) -> list[int]:
    return [lane for lane in range(32) if bits >> lane & 1]


class WarpClock:
    """What the lanes of a warp know. `base` is common to all lanes; `extra` is what single lanes know beyond it.

    `epoch` numbers the stretches of the warp between releases: accesses carry it. `base` has the last epoch that all lanes have
    synchronised behind.
    """

    def __init__(self, warp: int) -> None:
        self.warp = warp
        self.epoch = 1
        self.wgmma_fenced = False  # whether there was a wgmma.fence, as the first wgmma needs
        self.base = Clock()
        self.extra: dict[int, Clock] = {}
        self.released: Clock | None = None  # what the last fence allows a later relaxed operation to release
        self.settled: Clock | None = None  # what was before the last barrier of the CTA
        self.pending: Clock | None = None  # what relaxed reads have seen, to be acquired by the next fence

    def snapshot(self, lanes: int) -> Clock:
        """What is before an event that those lanes make now."""
        clock = self.base.copy()
        if lanes == FULL:
            for extra in self.extra.values():
                clock.join(extra)
            clock.times[PLAIN][self.warp, ALL] = self.epoch
            return clock
        for lane in lanes_in(lanes):
            if lane in self.extra:
                clock.join(self.extra[lane])
            clock.times[PLAIN][self.warp, lane] = self.epoch
        return clock

    def release(self, lanes: int) -> Clock:
        """A snapshot to publish; later accesses of the warp are not in it."""
        clock = self.snapshot(lanes)
        self.epoch += 1
        return clock

    def acquire(self, lanes: int, clock: Clock) -> None:
        if lanes == FULL:
            self.base.join(clock)
            return
        for lane in lanes_in(lanes):
            self.extra.setdefault(lane, Clock()).join(clock)

    def sync(self, lanes: int) -> None:
        """bar.warp.sync: these lanes know what each of them knows."""
        clock = self.release(lanes)
        self.acquire(lanes, clock)
        if lanes == FULL:
            self.extra.clear()

    def fence(self, lanes: int, sort: int, behind: int = PLAIN) -> None:
        """A fence by each of the lanes, which do not synchronise with each other thereby."""
        if lanes == FULL:
            clock = self.release(lanes)
            self._pass(clock, sort, behind)
            raise_to(self.base.times[sort], clock.times[sort])
            return
        clocks = [(lane, self.snapshot(1 << lane)) for lane in lanes_in(lanes)]
        self.epoch += 1
        for lane, clock in clocks:
            self._pass(clock, sort, behind)
            self.extra.setdefault(lane, Clock()).join(clock)

    def _pass(self, clock: Clock, sort: int, behind: int) -> None:
        """tcgen05.fence::before orders the warp's own operations alone, any other fence all that the warp knows of.

        Own are the keys (warp, lane) and (family, warp, lane); a BarrierId is a tuple by inheritance only.
        """
        if sort != BEFORE:
            clock.fence(sort, behind)
            return
        own: Times = {key: time for key, time in clock.times[PLAIN].items() if type(key) is tuple and key[-2] == self.warp}
        raise_to(clock.times[BEFORE], own)

    def learn(self, lanes: int, key: Key, time: int, sorts: tuple[int, ...] = SORTS) -> None:
        """The lanes have seen something complete."""
        if lanes == FULL:
            self.base.learn(key, time, sorts)
            return
        for lane in lanes_in(lanes):
            self.extra.setdefault(lane, Clock()).learn(key, time, sorts)

    def knows(self, lane: int, key: Key, time: int, sort: int = PLAIN) -> bool:
        if self.base.knows(key, time, sort):
            return True
        extra = self.extra.get(lane)
        return extra is not None and extra.knows(key, time, sort)
