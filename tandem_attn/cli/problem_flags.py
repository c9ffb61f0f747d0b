"""Flags that describe an attention problem, shared by every subcommand that takes one."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import click

from tandem_attn.spec.masks import Causal, Full, Mask, Window
from tandem_attn.spec.problem import DTYPES, Problem

Lengths = tuple[tuple[int, int], ...]
_SHORT_DTYPES = {
    "fp16": "float16", "bf16": "bfloat16", "fp32": "float32", "fp64": "float64", "e4m3": "float8_e4m3fn", "e5m2": "float8_e5m2",
}  # fmt: skip


class MaskType(click.ParamType):
    """``full``, ``causal`` or ``window:L,R``; an empty or ``none`` side is unbounded."""

    name = "full|causal|window:L,R"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Mask:
        if isinstance(value, Mask):
            return value
        kind, _, sides = str(value).partition(":")
        if kind in ("full", "causal") and not sides:
            return Full() if kind == "full" else Causal()
        bounds = sides.split(",")
        if kind != "window" or len(bounds) != 2:
            self.fail(f"{value!r} is not full, causal or window:L,R (for example window:128,0)", param, ctx)
        try:
            left, right = (None if bound.strip().lower() in ("", "none") else int(bound) for bound in bounds)
        except ValueError:
            self.fail(f"{value!r}: L and R must be integers, or none for unbounded", param, ctx)
        return Window(left, right)


class LengthsType(click.ParamType):
    """Comma-separated sequence lengths; ``q:k`` where queries and keys differ."""

    name = "lengths"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Lengths:
        if isinstance(value, tuple):
            return value
        return tuple(self._pair(item.strip(), param, ctx) for item in str(value).split(","))

    def _pair(self, item: str, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, int]:
        seqlen_q, colon, seqlen_k = item.partition(":")
        try:
            pair = int(seqlen_q), int(seqlen_k if colon else seqlen_q)
        except ValueError:
            self.fail(f"{item!r} is not a length or q:k (for example 512,0,100:300)", param, ctx)
        if min(pair) < 0:
            self.fail(f"{item!r}: lengths must be >= 0", param, ctx)
        return pair


class DtypeType(click.ParamType):
    """A dtype by its torch name or its short form."""

    name = "dtype"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        found = _SHORT_DTYPES.get(str(value), str(value))
        if found not in DTYPES:
            self.fail(f"{value!r} is not one of {', '.join((*DTYPES, *_SHORT_DTYPES))}", param, ctx)
        return found


_POSITIVE, _COUNT = click.IntRange(min=1), click.IntRange(min=0)
_OPTIONS = (
    click.option("--batch", type=_COUNT, default=1, show_default=True, help="Sequences."),
    click.option("--seqlen-q", type=_COUNT, default=1024, show_default=True, help="Queries of each sequence."),
    click.option("--seqlen-k", type=_COUNT, help="Keys of each sequence.  [default: --seqlen-q]"),
    click.option("--heads", type=_POSITIVE, default=8, show_default=True, help="Query heads."),
    click.option("--heads-kv", type=_POSITIVE, help="Key/value heads; must divide --heads.  [default: --heads]"),
    click.option("--head-dim", type=_POSITIVE, default=128, show_default=True, help="Head dimension of Q and K."),
    click.option("--head-dim-v", type=_POSITIVE, help="Head dimension of V.  [default: --head-dim]"),
    click.option("--dtype", type=DtypeType(), default="bfloat16", show_default=True, help=f"One of {', '.join(DTYPES)}."),
    click.option(
        "--mask",
        type=MaskType(),
        default="full",
        show_default=True,
        metavar="full|causal|window:L,R",
        help="L and R: keys before and after the diagonal, or none for unbounded (not -1). Aligned bottom-right.",
    ),
    click.option("--backward", is_flag=True, help="The backward pass: check runs it too, plan plans it instead."),
    click.option("--deterministic", is_flag=True, help="A backward that is bitwise repeatable."),
    click.option("--softcap", type=float, default=0.0, show_default=True, help="Caps logits at +-softcap by tanh; 0 is off."),
    click.option("--sink", is_flag=True, help="With a learnable sink logit a head."),
    click.option("--alibi", is_flag=True, help="With ALiBi slopes."),
    click.option("--descale", is_flag=True, help="With descales of 8-bit q, k and v."),
    click.option(
        "--varlen", type=LengthsType(), help="Packed sequences, q:k where they differ: 512,0,100:300. Not with --batch, --seqlen."
    ),
)


_NAMES = frozenset(
    "batch seqlen_q seqlen_k heads heads_kv head_dim head_dim_v dtype mask backward deterministic softcap sink alibi descale varlen".split()  # noqa: SIM905
)


def problem_flags(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds the flags and calls the command with ``problem=Problem(...)`` in their place."""

    @functools.wraps(command)
    def with_problem(**arguments: Any) -> Any:
        names = [option.name for option in click.get_current_context().command.params if option.name in _NAMES]
        flags = {name: arguments.pop(name) for name in names}
        return command(problem=_problem(flags), **arguments)

    for option in reversed(_OPTIONS):
        with_problem = option(with_problem)
    return with_problem


def problem_of(values: dict[str, Any]) -> Problem:
    """The problem of values under the names of the flags, written with underscores, as a file gives them; true turns a flag on.

    Raises:
        click.UsageError: a name is unknown or a value wrong.
    """
    given = {f"--{name.replace('_', '-')}": value for name, value in values.items() if value is not None and value is not False}
    arguments = [text for flag, value in given.items() for text in ((flag,) if value is True else (flag, str(value)))]
    with _only_flags().make_context("file", arguments) as context:
        return _problem(dict(context.params))


def _only_flags() -> click.Command:
    """A command with these flags and nothing else."""

    def command() -> None: ...

    for option in reversed(_OPTIONS):
        option(command)
    return click.command("file")(command)


def _problem(flags: dict[str, Any]) -> Problem:
    lengths = flags.pop("varlen") or ()
    if lengths:
        _forbid_sizes()
        flags["batch"] = len(lengths)
        flags["seqlen_q"], flags["seqlen_k"] = (max(side) for side in zip(*lengths, strict=True))
        flags["total_q"], flags["total_k"] = (sum(side) for side in zip(*lengths, strict=True))
    defaults = {"seqlen_k": flags["seqlen_q"], "heads_kv": flags["heads"], "head_dim_v": flags["head_dim"]}
    chosen: dict[str, Any] = {name: defaults.get(name) if value is None else value for name, value in flags.items()}
    try:
        return Problem(**chosen, varlen=bool(lengths), lengths=lengths)
    except (ValueError, TypeError) as error:
        raise click.UsageError(str(error)) from error


def _forbid_sizes() -> None:
    context = click.get_current_context()
    for name in ("batch", "seqlen_q", "seqlen_k"):
        if context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE:
            raise click.UsageError(f"--{name.replace('_', '-')} cannot be combined with --varlen, which gives all lengths")
