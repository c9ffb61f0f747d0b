"""The arithmetic of one tile, in the kernel's order and roundings: exp by two units, the running maximum, rounding of P."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tandem_attn.spec.exp2 import CLAMP, COEFFICIENTS, Exp2Split

LOG2E = math.log2(math.e)
LN2 = math.log(2.0)


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    """float32 for everything the kernels take; float64 stays float64, so that gradients can be checked numerically."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def out_dtype(dtype: torch.dtype) -> torch.dtype:
    """Of O, for inputs of ``dtype``: see ``Problem.out_dtype``."""
    return torch.bfloat16 if dtype.itemsize == 1 else dtype


def exp_(x: Tensor, split: Exp2Split) -> Tensor:
    """e^x in place: the planned columns as 2^(log2(e) x) by the FMA units' polynomial, the others exactly rounded (the MUFU model)."""
    if split.fma_pairs == 0 or x.dtype == torch.float64:
        return x.exp_()
    columns = torch.tensor(split.columns(x.shape[-1]), device=x.device)
    polynomial = _exp2_polynomial(x.index_select(-1, columns) * LOG2E, split.degree)
    return x.exp_().index_copy_(-1, columns, polynomial)


def _exp2_polynomial(x: Tensor, degree: int) -> Tensor:
    """Cody-Waite on tensors: the operations of ``spec.exp2.exp2_poly``, whose multiply-adds round once where these round twice."""
    x = x.clamp(min=CLAMP)
    whole = x.floor()
    fraction = x - whole
    *rest, lead = COEFFICIENTS[degree]
    p = torch.full_like(fraction, lead)
    for c in reversed(rest):
        p.mul_(fraction).add_(c)
    return (p.view(torch.int32) + (whole.to(torch.int32) << 23)).view(torch.float32)


def next_max(m_old: Tensor, m_tile: Tensor, threshold: float, rows: int) -> Tensor:
    """Running maximum (..., M) with conditional rescale: the old one is kept while no row of a group outgrows it by ``threshold``, which
    is in log2 units.

    ``rows`` neighbouring rows decide together (32: a warp); 0: every row takes its new maximum.
    """
    m_new = torch.maximum(m_old, m_tile)
    if rows == 0:
        return m_new
    grew = (m_new - m_old) > threshold * LN2  # False where both are -inf
    return torch.where(_any_of_group(grew, rows), m_new, m_old)


def _any_of_group(flags: Tensor, rows: int) -> Tensor:
    m = flags.shape[-1]
    if rows == 1:
        return flags
    padded = torch.nn.functional.pad(flags, (0, -m % rows))
    grouped = padded.unflatten(-1, (-1, rows)).any(-1, keepdim=True)
    return grouped.expand(*grouped.shape[:-1], rows).flatten(-2)[..., :m]


def finite_or_zero(m: Tensor) -> Tensor:
    """The maximum to subtract: 0 where no key was seen, so that -inf - m stays -inf instead of NaN."""
    return torch.where(torch.isneginf(m), torch.zeros_like(m), m)


def round_to(x: Tensor, dtype: torch.dtype, exponent: int = 0) -> Tensor:
    """x with the precision that ``dtype`` has for x * 2^exponent, still in its accumulator dtype: an operand of the next MMA."""
    if dtype == x.dtype:
        return x
    return x.to(dtype).to(x.dtype) if exponent == 0 else (x * 2.0**exponent).to(dtype).to(x.dtype) * 2.0**-exponent
