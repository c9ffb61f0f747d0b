"""A progress line for long runs."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tandem_attn.emulator.machine.machine import Machine

QUIET_S = 2.0  # runs shorter than this show nothing
EVERY_S = 0.5


class Bar:
    """Writes one line to stderr: share of clusters done, instructions per second, time left."""

    def __init__(self, clusters: int) -> None:
        self.clusters, self.began, self.shown = clusters, time.perf_counter(), False

    def tick(self, machine: Machine) -> None:
        now = time.perf_counter()
        machine.tick_at = now + EVERY_S
        spent = now - self.began
        if spent < QUIET_S:
            return
        left = len(machine.waiting_clusters) + len(machine.resident)
        done = max(0, self.clusters - left)
        running = sum(w.instructions for c in machine.resident for cta in c.ctas for w in cta.warps if not w.done)
        rate = (machine.statistics.instructions + running) / spent
        eta = f", {spent / done * left:.0f} s left" if done else ""
        self.shown = True
        sys.stderr.write(f"\remulating: {done}/{self.clusters} clusters, {rate / 1e6:.2f} M warp-instructions/s{eta}   ")
        sys.stderr.flush()

    def close(self) -> None:
        if self.shown:
            sys.stderr.write("\n")
