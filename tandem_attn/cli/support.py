"""``tandem support``: what each backend covers, asked of ``supports`` itself."""

from __future__ import annotations

import dataclasses
import json

import click
import torch
from rich.console import Console
from rich.table import Table

from tandem_attn.api.backends import AUTO, BACKENDS, supports
from tandem_attn.kernels.emulated import PREFIX
from tandem_attn.spec.masks import Causal, Document, Predicate, Window
from tandem_attn.spec.problem import Problem

_BASE = Problem(batch=2, seqlen_q=1024, seqlen_k=1024, heads=8, heads_kv=2, head_dim=128)


def _even_keys(b: object, h: object, q_idx: object, kv_idx: int) -> bool:  # noqa: ARG001
    return kv_idx % 2 == 0


FEATURES: dict[str, Problem] = {
    "full, causal": dataclasses.replace(_BASE, mask=Causal()),
    "causal, seqlen_q != seqlen_k": dataclasses.replace(_BASE, mask=Causal(), seqlen_q=100, total_q=0),
    "top-left causal": dataclasses.replace(_BASE, mask=Causal("top-left"), seqlen_q=100, total_q=0),
    "window": dataclasses.replace(_BASE, mask=Window(256, 0)),
    "document": dataclasses.replace(_BASE, mask=Document([0] * 1024)),
    "predicate, masks combined": dataclasses.replace(_BASE, mask=Causal() & Predicate(_even_keys)),
    "float32": dataclasses.replace(_BASE, dtype="float32"),
    "float64": dataclasses.replace(_BASE, dtype="float64"),
    "float8_e4m3fn, float8_e5m2, descales": dataclasses.replace(_BASE, dtype="float8_e4m3fn", descale=True),
    "head_dim 40": dataclasses.replace(_BASE, head_dim=40, head_dim_v=40, scale=None),
    "head_dim 192, head_dim_v 128": dataclasses.replace(_BASE, head_dim=192, head_dim_v=128, scale=None),
    "softcap": dataclasses.replace(_BASE, softcap=30.0),
    "sink": dataclasses.replace(_BASE, sink=True),
    "ALiBi": dataclasses.replace(_BASE, alibi=True),
    "bias": dataclasses.replace(_BASE, bias=True),
    "variable length (packed)": dataclasses.replace(_BASE, varlen=True),
    "seqused": dataclasses.replace(_BASE, seqused=True),
    "KV cache, contiguous or paged": dataclasses.replace(_BASE, cache=True, page_size=16),
    "LSE": dataclasses.replace(_BASE, return_lse=True),
    "LSE with gradient": dataclasses.replace(_BASE, return_lse=True, backward=True),
    "deterministic backward": dataclasses.replace(_BASE, backward=True, deterministic=True),
}
_FORWARD_ONLY = ("KV cache, contiguous or paged",)


def cell(problem: Problem, backend: str, forward_only: bool = False) -> str:
    """``yes``, ``forward`` (no backward) or ``-`` for one feature on one backend; with ``auto`` the backend's name is added."""
    forward = supports(problem, backend)
    if not forward:
        return "-"
    forward_only = forward_only or backend.startswith(PREFIX)  # the kernel's forward; gradients there are the reference's
    both = not forward_only and bool(supports(dataclasses.replace(problem, backward=True), backend))
    word = "yes" if both else "forward"
    return f"{word} ({forward.backend})" if backend == AUTO else word


def columns(device: str) -> tuple[str, ...]:
    """``auto`` and the backends that run on such a device."""
    elsewhere = {"cuda": PREFIX, "cpu": "tandem"}[device]
    return (AUTO, *(name for name in BACKENDS if not name.startswith(elsewhere)))


def rows(device: str) -> list[list[str]]:
    """Feature, then one cell for each of ``columns``."""
    return [
        [feature, *(cell(dataclasses.replace(problem, device=device), name, feature in _FORWARD_ONLY) for name in columns(device))]
        for feature, problem in FEATURES.items()
    ]


def markdown(device: str) -> str:
    header = ["", *columns(device)]
    lines = [header, ["---"] * len(header), *rows(device)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


@click.command(short_help="What each backend covers.")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), help="Kind of device.  [default: cuda where there is one]")
@click.option("--markdown", "as_markdown", is_flag=True, help="Print a Markdown table.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def support(device: str | None, as_markdown: bool, as_json: bool) -> None:
    """Show what each backend covers; yes: forward and backward.

    The table asks tandem_attn.supports, which any program can ask about its own Problem.

    \b
    Example:
      tandem support --device cpu --markdown
    """
    where = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if as_json:
        click.echo(json.dumps({row[0]: dict(zip(columns(where), row[1:], strict=True)) for row in rows(where)}, indent=2))
    elif as_markdown:
        click.echo(markdown(where))
    else:
        table = Table("", *columns(where), title=f"on {where}; yes: forward and backward")
        for row in rows(where):
            table.add_row(*row)
        Console().print(table)
