"""``tandem emulate --timeline``: a run's trace, replayed with the roofline's rates and drawn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from tandem_attn.kernels import emulated
from tandem_attn.perfmodel.drawing import draw
from tandem_attn.perfmodel.replay import replay
from tandem_attn.perfmodel.timeline import timeline
from tandem_attn.spec.arch import get_arch
from tandem_attn.spec.plan import Plan


def check_timeline(arch: str) -> None:
    """Raises a usage error where the kernel has other roles than those that are drawn."""
    if get_arch(emulated.CHIPS[arch]).tmem_columns is None:
        drawn = ", ".join(name for name, chip in emulated.CHIPS.items() if get_arch(chip).tmem_columns is not None)
        raise click.UsageError(f"--timeline draws the roles of the Blackwell forward: --arch must be one of {drawn}, got {arch}")


def write_timeline(path: Path, plan: Plan, trace: Any) -> None:
    """The picture of a forward's trace; a Click error when it cannot be drawn."""
    try:
        draw(timeline(trace, replay(trace, plan.arch, plan.dtype), plan), _title(plan), path)
    except ImportError as error:
        raise click.ClickException(f"--timeline needs matplotlib: pip install 'tandem-attn[plot]' ({error})") from error
    except ValueError as error:
        raise click.ClickException(f"--timeline: {error}") from error


def _title(plan: Plan) -> str:
    dims = f"{plan.head_dim}" if plan.head_dim == plan.head_dim_v else f"({plan.head_dim}, {plan.head_dim_v})"
    form = "a CTA pair" if plan.cta_group == 2 else "one CTA"
    kernel = f"forward, head_dim {dims}, {plan.mask}, {form}"
    return f"{kernel}: executed in the emulator, replayed with {plan.arch}'s roofline rates and the kernel's own signals; not measured"
