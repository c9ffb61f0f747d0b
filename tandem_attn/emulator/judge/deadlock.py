"""The report of a run that cannot go on: who waits for what, and which arrival is missing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tandem_attn.emulator.report import Report

if TYPE_CHECKING:
    from tandem_attn.emulator.machine.machine import Machine
    from tandem_attn.emulator.machine.warp import Warp


def explain(machine: Machine) -> Report:
    """A report that lists every warp that has not ended."""
    stuck = [warp for cluster in machine.resident for cta in cluster.ctas for warp in cta.warps if not warp.done]
    lines = [_line(machine, warp) for warp in stuck[:40]]
    if len(stuck) > 40:
        lines.append(f"and {len(stuck) - 40} more warps")
    if machine.waiting_clusters:
        count = len(machine.waiting_clusters)
        lines.append(f"{count} clusters wait for room: {machine.resident_limit} CTAs fit at once, and none of the resident ones can end")
    for op in machine.engine.pending():
        lines.append(f"in flight: {op.kind} of CTA {op.warp.cta.where} warp {op.warp.index}, PTX line {machine.site(op.index).ptx_line}")
    first = stuck[0] if stuck else None
    site = machine.site(_where(machine, first)) if first is not None else None
    return Report(
        "deadlock",
        "no warp can make progress:\n  " + "\n  ".join(lines),
        first.cta.where if first else None,
        first.index if first else None,
        ptx_line=site.ptx_line if site else None,
        ptx=site.text if site else "",
        source=site.source if site else None,
        details={"waiting": lines},
    )


def _where(machine: Machine, warp: Warp) -> int:
    segment = warp.stack[-1].segment if warp.stack else -1
    return warp.current if segment < 0 or warp.blocked is not None else machine.program.segments[segment].start


def _line(machine: Machine, warp: Warp) -> str:
    site = machine.site(max(0, _where(machine, warp)))
    source = f" ({site.source})" if site.source else ""
    why = warp.blocked.reason if warp.blocked is not None else "spins"
    if warp.blocked is not None and "barrier" in warp.blocked.detail:
        barrier = warp.blocked.detail["barrier"]
        why += f"; it is in {barrier}" if hasattr(barrier, "tx") else ""
    return f"CTA {warp.cta.where} warp {warp.index} at PTX line {site.ptx_line}{source}: {why}"
