"""``tandem bench``: attention timed beside its peers, in one process and by one protocol."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from tandem_attn.api.backends import NAMES, supports
from tandem_attn.bench import peers, presets, protocol, report, run
from tandem_attn.bench.cases import BACKWARD, FORWARD, Case
from tandem_attn.bench.plot import plot as draw

_DEFAULTS = {"cuda": ("grid", "gqa", "varlen"), "cpu": ("cpu",)}


class DimsType(click.ParamType):
    """A head dimension, or head_dim,head_dim_v."""

    name = "D[,DV]"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, int]:
        if isinstance(value, tuple):
            return value
        try:
            d, *dv = (int(part) for part in str(value).split(","))
        except ValueError:
            self.fail(f"{value!r} is not a head dimension or head_dim,head_dim_v (for example 192,128)", param, ctx)
        return d, dv[0] if dv else d


@click.command(short_help="Speed beside other libraries, every output checked.")
@click.option(
    "--preset",
    "names",
    type=click.Choice([*presets.PRESETS]),
    multiple=True,
    help="Cases; may be repeated.  [default: grid, gqa and varlen on a GPU, cpu elsewhere]",
)
@click.option("--head-dim", "dims", type=DimsType(), multiple=True, help="Only these head dimensions (192,128: head_dim_v differs).")
@click.option("--seqlen", type=int, multiple=True, help="Only these sequence lengths.")
@click.option("--mask", type=click.Choice(presets.MASKS), help="Only this mask.")
@click.option("--direction", type=click.Choice([FORWARD, BACKWARD, "both"]), default=FORWARD, show_default=True, help="What is timed.")
@click.option("--peers", "peer_names", help="Comma-separated names.  [default: all that this kind of device has]")
@click.option("--backend", type=click.Choice(NAMES), help="What tandem stands for.  [default: tandem where it runs, else auto]")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), help="Where to measure.  [default: cuda where there is one]")
@click.option("--rounds", type=click.IntRange(1), default=protocol.ROUNDS, show_default=True, help="Interleaved rounds; medians count.")
@click.option(
    "--round-ms",
    type=click.FloatRange(0, min_open=True),
    default=protocol.ROUND_MS,
    show_default=True,
    help="Milliseconds of each in a round.",
)
@click.option(
    "--settle-ms",
    type=click.FloatRange(0),
    default=protocol.SETTLE_MS,
    show_default=True,
    help="Before that, untimed, on a GPU: until the clock is its own.",
)
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="File for the results as JSON, written after every case.")
@click.option("--plot", type=click.Path(dir_okay=False, path_type=Path), help="File for a plot (png, svg, pdf); needs tandem-attn[plot].")
@click.option("--show", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="Measure nothing: show a results file.")
@click.option("--list", "only_list", is_flag=True, help="Measure nothing: list the cases and the peers.")
@click.option("--json", "as_json", is_flag=True, help="Print the results as JSON.")
def bench(
    names: tuple[str, ...],
    dims: tuple[tuple[int, int], ...],
    seqlen: tuple[int, ...],
    mask: str | None,
    direction: str,
    peer_names: str | None,
    backend: str | None,
    device: str | None,
    rounds: int,
    round_ms: float,
    settle_ms: float,
    out: Path | None,
    plot: Path | None,
    show: Path | None,
    only_list: bool,
    as_json: bool,
) -> None:
    """Time attention beside other libraries, interleaved in one process on random data.

    Every output is compared with float64 before it is timed; what is wrong, missing or fails is named with its reason. Figures are
    medians of rounds. The results carry commit, versions, clocks, power and temperature.

    \b
    Examples:
      tandem bench --preset quick
      tandem bench --preset grid --head-dim 192,128 --mask causal --out results.json --plot results.svg
      tandem bench --show results.json
    """
    if show is not None:
        _finish(json.loads(show.read_text()), plot, as_json)
        return
    where = _device(device)
    settings = run.Settings(where, _backend(backend, where), _peers(peer_names, where), rounds, round_ms, settle_ms)
    chosen = _cases(names or _DEFAULTS[where], dims, seqlen, mask, direction)
    results = run.start(settings)
    console = Console(stderr=as_json, highlight=False)
    _announce(console, chosen, settings, results, only_list)
    if only_list:
        return
    began = time.monotonic()
    with Progress(TextColumn("{task.description}"), MofNCompleteColumn(), TimeElapsedColumn(), console=Console(stderr=True)) as progress:
        task = progress.add_task("", total=len(chosen))
        for case, found in zip(chosen, run.measure(chosen, settings, results), strict=True):
            progress.update(task, advance=1, description=str(case))
            for name, reason in found["failed"].items():
                progress.console.print(f"{case}: {name} {reason}", markup=False, highlight=False)
            if out is not None:
                results.write(out)
    results.settings["seconds"] = round(time.monotonic() - began, 1)
    if out is not None:
        results.write(out)
    _finish(results.__dict__, plot, as_json)


def _device(name: str | None) -> str:
    if name == "cuda" and not torch.cuda.is_available():
        raise click.ClickException(f"--device cuda needs a CUDA device, and torch {torch.__version__} finds none; see tandem doctor")
    return name or ("cuda" if torch.cuda.is_available() else "cpu")


def _backend(name: str | None, device: str) -> str:
    if name is not None:
        return name
    quick = presets.quick()[0].problem(device)
    return "tandem" if supports(quick, "tandem") else "auto"


def _peers(names: str | None, device: str) -> tuple[str, ...]:
    if names is None:
        return tuple(name for name, peer in peers.PEERS.items() if device in peer.devices)
    found = tuple(name.strip() for name in names.split(",") if name.strip())
    for name in found:
        if name not in peers.PEERS:
            raise click.UsageError(f"--peers: {name!r} is not one of {', '.join(peers.PEERS)}")
    return found


def _cases(
    names: tuple[str, ...], dims: tuple[tuple[int, int], ...], seqlens: tuple[int, ...], mask: str | None, direction: str
) -> list[Case]:
    found = [
        case
        for case in presets.cases(names, (FORWARD, BACKWARD) if direction == "both" else (direction,))
        if (not dims or (case.head_dim, case.head_dim_v) in dims)
        and (not seqlens or case.seqlen in seqlens)
        and (mask is None or case.mask == mask)
    ]
    if not found:
        raise click.UsageError(f"no case of {', '.join(names)} is left by --head-dim, --seqlen, --mask and --direction")
    return found


def _announce(console: Console, cases: list[Case], settings: run.Settings, results: run.Results, in_full: bool) -> None:
    environment = results.environment
    console.print(
        f"{environment.get('gpu', environment['processor'])}, torch {environment['torch']}, commit {environment['commit'] or 'unknown'}"
    )
    console.print(f"{len(cases)} cases; tandem is backend {settings.backend!r}", markup=False)
    for name in settings.peers:
        reason = results.missing.get(name)
        console.print(f"  {name:6} {peers.PEERS[name].title}{f': missing, {reason}' if reason else ''}", markup=False)
    for case in cases if in_full else ():
        console.print(f"  {case}", markup=False)


def _finish(results: dict[str, Any], plot: Path | None, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(results, indent=1))
    else:
        console = Console()
        console.print(report.table(results["cells"], results["environment"]))
        for name, reason in results["missing"].items():
            console.print(f"{name}: missing, {reason}", markup=False, highlight=False)
    if plot is not None:
        try:
            draw(results["cells"], results["environment"], plot)
        except ImportError as error:
            raise click.ClickException(f"--plot needs matplotlib: pip install 'tandem-attn[plot]' ({error})") from error
        except ValueError as error:
            raise click.ClickException(f"--plot: {error}") from error
