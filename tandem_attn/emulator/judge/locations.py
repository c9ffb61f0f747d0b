"""Synchronisation through memory: release and acquire patterns on single locations.

PTX manual, Memory Consistency Model, "Release and Acquire Patterns" and "Synchronizes-with". A relaxed operation releases what a fence
before it has made releasable, and what it reads is acquired by the next fence.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tandem_attn.emulator.events import Access, AccessKind, Space
from tandem_attn.emulator.judge.clock import ALL, FULL, Clock
from tandem_attn.emulator.judge.record import WARPS, Record

if TYPE_CHECKING:
    from tandem_attn.emulator.judge.races import RaceTracker

RELEASING, ACQUIRING = ("release", "acq_rel", "sc"), ("acquire", "acq_rel", "sc")


@dataclass(slots=True)
class Released:
    """What has been released at one location: to everybody, to a cluster, to a CTA."""

    wide: Clock = field(default_factory=Clock)
    cluster: dict[int, Clock] = field(default_factory=dict)
    cta: dict[int, Clock] = field(default_factory=dict)


class Locations:
    """Locations that strong operations have written."""

    def __init__(self, tracker: RaceTracker) -> None:
        self.tracker = tracker
        self.known: dict[tuple[Space, int, int], Released] = {}

    def touch(self, event: Access, record: Record) -> None:
        """A strong access: acquire, then release."""
        if record.operation is not None:
            return
        warp = self.tracker.warp(record.warp)
        for start, lane in zip(event.starts.tolist(), event.lane_ids.tolist(), strict=True):
            bits = 1 << lane if 0 <= lane < ALL else FULL
            place = (event.space, event.cta, start)
            found = self.known.get(place)
            if found is not None and event.kind is not AccessKind.WRITE:
                for clock in self.visible(found, record):
                    if event.semantics in ACQUIRING:
                        warp.acquire(bits, clock)
                    if warp.pending is None:
                        warp.pending = Clock()
                    warp.pending.join(clock)
            if event.kind is AccessKind.READ:
                continue
            released = warp.snapshot(bits).for_others() if event.semantics in RELEASING else warp.released
            if event.kind is AccessKind.WRITE:  # a store ends the release sequences of others
                self.known.pop(place, None)
                found = None
            if released is None:
                continue
            if found is None:
                found = self.known[place] = Released()
            self.publish(found, record, released)
        if event.semantics in RELEASING:
            warp.epoch += 1

    def publish(self, found: Released, record: Record, clock: Clock) -> None:
        cta = record.warp // WARPS
        if record.scope == "cta":
            found.cta.setdefault(cta, Clock()).join(clock)
        elif record.scope == "cluster":
            found.cluster.setdefault(self.leader(cta), Clock()).join(clock)
        else:
            found.wide.join(clock)

    def visible(self, found: Released, record: Record) -> list[Clock]:
        """What an acquire of the record's scope may see."""
        cta = record.warp // WARPS
        clocks = [found.cta.get(cta)]
        if record.scope == "cta":
            return [clock for clock in clocks if clock is not None]
        clocks.append(found.cluster.get(self.leader(cta)))
        if record.scope != "cluster":
            clocks.append(found.wide)
        return [clock for clock in clocks if clock is not None]

    def leader(self, cta: int) -> int:
        return self.tracker.clusters.get(cta, (cta,))[0]
