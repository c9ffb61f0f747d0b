"""``tandem check``: any problem from flags, each output's error beside PyTorch's own, and the verdict of the contract."""

from __future__ import annotations

import dataclasses
import json
import sys
import warnings

import click
import torch
from rich.console import Console
from torch import Tensor

from tandem_attn.api.backends import AUTO, NAMES, supports
from tandem_attn.api.functions import Options, attention, attention_varlen
from tandem_attn.cli.comparison import check_size, errors_table, expected, jsonable, outputs
from tandem_attn.cli.problem_flags import problem_flags
from tandem_attn.reference.compare import Comparison, compare_all
from tandem_attn.reference.samples import Sample, sample
from tandem_attn.spec.errors import UnsupportedError
from tandem_attn.spec.inputs import Inputs
from tandem_attn.spec.problem import Problem


@click.command(short_help="Errors of a problem against float64.")
@problem_flags
@click.option("--seed", type=int, default=0, show_default=True, help="Of the random tensors.")
@click.option("--device", default="cpu", show_default=True, help="Where the backend runs: cpu, cuda, cuda:1.")
@click.option("--backend", type=click.Choice(NAMES), default=AUTO, show_default=True, help="What runs the problem.")
@click.option("--json", "as_json", is_flag=True, help="Print the comparison as JSON.")
def check(problem: Problem, seed: int, device: str, backend: str, as_json: bool) -> None:
    """Run a problem on random tensors and compare each output with float64.

    Beside each error stands the error of the same computation done plainly in PyTorch in the same dtype, and the contract's bound: twice
    that, plus what the dtype's rounding allows (tandem_attn.reference.compare). Exits 1 when a bound is broken.

    \b
    Examples:
      tandem check --seqlen-q 1000 --heads-kv 2 --mask causal --backward
      tandem check --varlen 512,0,100:300 --mask window:128,0 --dtype fp16
    """
    try:
        problem = dataclasses.replace(problem, device=_device(device).type)
        check_size(problem)
        taken = sample(problem, seed, device)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the table names the backend that ran
            got = run(problem, taken, backend)
    except (UnsupportedError, ValueError, TypeError) as error:
        raise click.ClickException(str(error)) from error
    found = compare_all(got, *expected(problem, taken, quiet=as_json), getattr(torch, problem.dtype))
    _report(problem, found, {"seed": seed, "device": device, "backend": _ran(problem, backend)}, as_json)
    if not all(comparison.ok for comparison in found):
        sys.exit(1)


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"--device must be cpu or cuda, got {name!r}") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"--device {name} needs a CUDA device, and torch {torch.__version__} finds none; see tandem doctor")
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"--device must be cpu or cuda, got {name!r}")
    return device


def run(problem: Problem, taken: Sample, backend: str) -> dict[str, Tensor]:
    """``out`` and ``lse``, and with ``problem.backward`` the gradients ``dq``, ``dk``, ... through the public functions."""
    with torch.no_grad():
        out, lse = _call(problem, taken.inputs, backend, True)
    got = {"out": out, "lse": lse}
    if problem.backward:
        names = [name for name in ("q", "k", "v", "sink", "alibi_slopes") if getattr(taken.inputs, name) is not None]
        leaves = {name: getattr(taken.inputs, name).detach().requires_grad_() for name in names}
        out, _ = _call(problem, dataclasses.replace(taken.inputs, **leaves), backend, False)
        grads = torch.autograd.grad(out, list(leaves.values()), taken.grad_out)
        got |= {f"d{name}": grad for name, grad in zip(names, grads, strict=True)}
    return got


def _call(problem: Problem, inputs: Inputs, backend: str, return_lse: bool) -> tuple[Tensor, Tensor]:
    keywords: Options = {
        "mask": problem.mask,
        "scale": problem.scale,
        "softcap": problem.softcap,
        "sink": inputs.sink,
        "alibi_slopes": inputs.alibi_slopes,
        "q_descale": inputs.q_descale,
        "k_descale": inputs.k_descale,
        "v_descale": inputs.v_descale,
        "deterministic": problem.deterministic,
        "backend": backend,
    }
    q, k, v = inputs.q, inputs.k, inputs.v
    if inputs.cu_seqlens_q is not None and inputs.cu_seqlens_k is not None:
        sizes = (inputs.cu_seqlens_q, inputs.cu_seqlens_k, problem.seqlen_q, problem.seqlen_k)
        result = attention_varlen(q, k, v, *sizes, return_lse=return_lse, **keywords)
    else:
        result = attention(q, k, v, return_lse=return_lse, **keywords)
    return result if isinstance(result, tuple) else (result, result.new_empty(0))


def _ran(problem: Problem, backend: str) -> str:
    """The backends behind both directions, as ``run`` calls them."""
    forward = supports(dataclasses.replace(problem, backward=False, return_lse=True), backend).backend
    if not problem.backward:
        return forward
    backward = supports(dataclasses.replace(problem, return_lse=False), backend).backend
    return forward if forward == backward else f"{forward} (forward), {backward} (backward)"


def _report(problem: Problem, found: list[Comparison], context: dict[str, object], as_json: bool) -> None:
    if as_json:
        report = {"problem": str(problem), **context, "torch": torch.__version__, "outputs": outputs(found)}
        click.echo(json.dumps(jsonable(report), indent=2, allow_nan=False))
        return
    console = Console()
    console.print(f"{problem}\n" + ", ".join(f"{name} {value}" for name, value in context.items()), highlight=False)
    console.print(errors_table(found))
    for comparison in found:
        if not comparison.ok:
            console.print(str(comparison), highlight=False)
