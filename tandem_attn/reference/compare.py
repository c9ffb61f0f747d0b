"""The accuracy rule: how far a result may be from the truth, and which element is worst when it is too far.

A result in some dtype is compared with the float64 truth and with the same computation done plainly in PyTorch in that dtype. Its error
may be twice the plain one (line 13 of the contract), both for the largest element and for the relative Frobenius norm. A floor is added,
because the plain computation is sometimes exact by luck (one key, V = 1): one unit in the last place of the largest element, and a few
of the accumulator's on the sums of absolute values where the caller knows them (a gradient may be zero because its summands cancel).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tandem_attn.reference import dense
from tandem_attn.reference.numerics import accumulator_dtype, out_dtype
from tandem_attn.spec.inputs import Inputs
from tandem_attn.spec.problem import Problem

FACTOR = 2.0  # contract line 13
RMS = 0.3  # of rounding errors, in units of eps (0.29 for a uniform error of half a unit); few elements may all be unlucky
FLOOR = 1.0  # units of the dtype's eps, times the largest element of the truth
NOISE = 4.0  # units of the accumulator's eps, times the largest sum of absolute values
EXP2_ERROR = 8.8e-5  # of exp2's degree 3 polynomial, which kernels for 16-bit inputs use: LSE carries it as an absolute error
FLOOR_FLOAT64 = 64.0  # the truth has float64's own rounding errors: only the floor is left to compare with
SHOWN = 5  # positions printed of a non-finite result

FLOATING = ("q", "k", "v", "sink", "alibi_slopes", "bias")


@dataclass(frozen=True)
class Element:
    """One element of a result: where it stands, what was got and what is right."""

    index: tuple[int, ...]
    got: float
    want: float

    def __str__(self) -> str:
        return f"[{', '.join(map(str, self.index))}] got {self.got:.9g}, truth {self.want:.9g}"


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One result beside the truth. ``max_*`` are absolute errors, ``relative_*`` ratios of Frobenius norms."""

    name: str
    max_error: float
    max_bound: float
    relative_error: float
    relative_bound: float
    plain_max_error: float
    plain_relative_error: float
    wrong: tuple[Element, ...]  # the first elements that are NaN or infinite where the truth is not, or the reverse
    wrong_count: int
    worst: Element | None  # None: no element to compare

    @property
    def ok(self) -> bool:
        return not self.wrong_count and self.max_error <= self.max_bound and self.relative_error <= self.relative_bound

    def __str__(self) -> str:
        """Non-finite positions first, then the worst element, then both errors with their bounds."""
        lines = []
        if self.wrong_count:
            lines.append(f"{self.name}: {self.wrong_count} elements are NaN or infinite where the truth is not, or the reverse")
            lines += [f"  {element}" for element in self.wrong]
        if self.worst is not None:
            lines.append(f"{self.name}: worst element {self.worst}")
        lines.append(
            f"{self.name}: max error {self.max_error:.3g} (bound {self.max_bound:.3g}, plain {self.plain_max_error:.3g}), "
            f"relative error {self.relative_error:.3g} (bound {self.relative_bound:.3g}, plain {self.plain_relative_error:.3g})"
        )
        return "\n".join(lines)


def compare(
    name: str,
    got: Tensor,
    truth: Tensor,
    plain: Tensor,
    dtype: torch.dtype | None = None,
    magnitude: Tensor | None = None,
    absolute: float = 0.0,
) -> Comparison:
    """Compares a result with the truth.

    Args:
        name: what the result is called in messages.
        got: the result, any floating dtype.
        truth: float64, same shape. Infinities in it must be met exactly.
        plain: the same computation done plainly, same shape; its error sets the bound. Where it is not finite it is ignored.
        dtype: whose eps is the floor's unit; default: ``got``'s.
        magnitude: same shape, sums of absolute values behind each element; default: the truth's size.
        absolute: an error that every element may have besides.

    Raises:
        ValueError: shapes differ.
    """
    for what, x in (("got", got), ("plain", plain)):
        if x.shape != truth.shape:
            raise ValueError(f"{what} must have truth's shape {tuple(truth.shape)} in {name}, got {tuple(x.shape)}")
    got64, truth, plain64 = (x.detach().to("cpu", torch.float64) for x in (got, truth, plain))
    finite = truth.isfinite()
    same = torch.where(finite, got64.isfinite(), (got64 == truth) | (got64.isnan() & truth.isnan()))
    compared = finite & same
    error = torch.where(compared, (got64 - truth).abs(), 0.0)
    plain_error = torch.where(finite & plain64.isfinite(), (plain64 - truth).abs(), 0.0)
    size = torch.where(finite, truth, 0.0).abs()
    floor, noise = _floors(dtype or got.dtype)
    summed = size if magnitude is None else magnitude.detach().to("cpu", torch.float64).nan_to_num(0.0)
    norm = float(size.norm()) or 1.0
    plain_max, plain_relative = _largest(plain_error), float(plain_error.norm()) / norm
    return Comparison(
        name=name,
        max_error=_largest(error),
        max_bound=FACTOR * plain_max + floor * _largest(size) + noise * _largest(summed) + absolute,
        relative_error=float(error.norm()) / norm,
        relative_bound=FACTOR * plain_relative
        + floor * min(1.0, RMS + size.numel() ** -0.5 if size.numel() else 1.0)
        + (noise * float(summed.norm()) + absolute * math.sqrt(size.numel())) / norm,
        plain_max_error=plain_max,
        plain_relative_error=plain_relative,
        wrong=tuple(_element(got64, truth, index) for index in (~same).nonzero()[:SHOWN].tolist()),
        wrong_count=int((~same).sum()),
        worst=_element(got64, truth, _position(error)) if error.numel() else None,
    )


def _floors(dtype: torch.dtype) -> tuple[float, float]:
    """Floors relative to the truth's size and to the sums of absolute values."""
    if dtype == torch.float64:
        return (FLOOR_FLOAT64 * torch.finfo(dtype).eps,) * 2
    return FLOOR * torch.finfo(dtype).eps, NOISE * torch.finfo(torch.float32).eps


def _largest(x: Tensor) -> float:
    return float(x.max()) if x.numel() else 0.0


def _position(error: Tensor) -> list[int]:
    flat = int(error.argmax())
    index: list[int] = []
    for size in reversed(error.shape):
        flat, at = divmod(flat, size)
        index.insert(0, at)
    return index


def _element(got: Tensor, truth: Tensor, index: list[int]) -> Element:
    at = tuple(index)
    return Element(at, float(got[at]), float(truth[at]))


def results(
    problem: Problem, inputs: Inputs, dtype: torch.dtype, grad_out: Tensor | None = None, grad_lse: Tensor | None = None
) -> dict[str, Tensor]:
    """What the dense computation in ``dtype`` gives: ``out``, ``lse`` and, with ``grad_out`` or ``grad_lse``, ``dq``, ``dk``, ... of each
    floating input."""
    backward = grad_out is not None or grad_lse is not None
    leaves = {name: _leaf(x, dtype, backward) for name in FLOATING if (x := getattr(inputs, name)) is not None}
    with torch.enable_grad():
        out, lse = dense.attention(problem, replace(inputs, **leaves), dtype)
        found = {"out": out.detach(), "lse": lse.detach()}
        if backward:
            pairs = [(x, g.to(dtype)) for x, g in ((out, grad_out), (lse, grad_lse)) if g is not None]
            pairs = [(x, g) for x, g in pairs if x.requires_grad]  # without a sequence nothing depends on the inputs
            grads = tuple(torch.zeros_like(leaf) for leaf in leaves.values())
            if pairs:
                grads = torch.autograd.grad(
                    [x for x, _ in pairs], list(leaves.values()), [g for _, g in pairs], allow_unused=True, materialize_grads=True
                )
            found |= {f"d{name}": grad for name, grad in zip(leaves, grads, strict=True)}
    return found


def _leaf(x: Tensor, dtype: torch.dtype, needs_grad: bool) -> Tensor:
    return x.detach().to(dtype).requires_grad_(needs_grad)


def compare_all(
    got: Mapping[str, Tensor],
    truth: Mapping[str, Tensor],
    plain: Mapping[str, Tensor],
    dtype: torch.dtype,
    magnitudes: Mapping[str, Tensor] | None = None,
    roundings: float = 0.0,
) -> list[Comparison]:
    """One comparison for each result, judged by ``dtype``, LSE by float32 (float64 for float64 inputs), O of 8-bit inputs by its own.

    With inputs of 16 bits or fewer LSE may besides carry the error of the exp2 that their kernels use. ``roundings`` of ``dtype`` on the
    largest of ``magnitudes`` are allowed besides, for problems so small that the plain error is a matter of luck.
    """
    sums, found = magnitudes or {}, []
    for name, x in got.items():
        judged = accumulator_dtype(dtype) if name == "lse" else out_dtype(dtype)
        absolute = EXP2_ERROR if name == "lse" and dtype != judged else 0.0
        if name in sums and roundings:
            absolute += roundings * torch.finfo(dtype).eps * _largest(sums[name].nan_to_num(0.0))
        found.append(compare(name, x, truth[name], plain[name], judged, sums.get(name), absolute))
    return found


def plainly(problem: Problem, inputs: Inputs, grad_out: Tensor | None = None, grad_lse: Tensor | None = None) -> dict[str, Tensor]:
    """The yardstick of ``compare_all``: ``results`` in the inputs' dtype, LSE in float32.

    With 8-bit inputs: in float32, weights rounded to the inputs' dtype as ``dense.attention`` says, and O to its own.
    Where a 16-bit dtype cannot hold an intermediate (logits beyond 65504 in float16), the float32 result rounded to the dtype takes its
    place.
    """
    dtype = inputs.q.dtype
    wide = results(problem, inputs, accumulator_dtype(dtype), grad_out, grad_lse)
    if dtype == accumulator_dtype(dtype):
        return wide
    if dtype.itemsize == 1:  # PyTorch computes nothing in 8 bits: weights are rounded to them, O to its own dtype
        out, _ = dense.attention(problem, inputs, accumulator_dtype(dtype), weights=dtype)
        return wide | {"out": out.to(out_dtype(dtype))}
    narrow = results(problem, inputs, dtype, grad_out, grad_lse)
    return {name: wide[name] if name == "lse" else rounded_where_needed(x, wide[name]) for name, x in narrow.items()}


def rounded_where_needed(narrow: Tensor, wide: Tensor) -> Tensor:
    """``narrow``, or ``wide`` rounded to its dtype where any element of ``narrow`` is not finite."""
    return narrow if math.isfinite(float(narrow.double().abs().sum())) else wide.to(narrow.dtype)
