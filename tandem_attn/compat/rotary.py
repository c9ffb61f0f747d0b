"""Rotary position embedding (RoFormer, arXiv 2104.09864, section 3.4.2) of the new tokens of a cache call."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tandem_attn.api import checks
from tandem_attn.reference.numerics import accumulator_dtype


def check_table(name: str, table: Any, q: Tensor, positions: int) -> None:
    """A (positions or more, R / 2) table of cosines or sines in q's dtype, on its device, with R <= head_dim."""
    x = checks.require_tensor(name, table)
    checks.require_ndim(name, x, 2, "(positions, rotary_dim / 2)")
    if x.dtype != q.dtype:
        raise TypeError(f"{name} must have q's dtype {q.dtype}, got {x.dtype}")
    checks.require_same_device(name, x, q)
    if x.shape[0] < positions:
        raise ValueError(f"{name} must have a row for each of the cache's {positions} positions, got shape {tuple(x.shape)}")
    if x.shape[1] == 0 or 2 * x.shape[1] > q.shape[-1]:
        raise ValueError(f"{name} must have between 1 and head_dim / 2 = {q.shape[-1] // 2} columns, got shape {tuple(x.shape)}")


def rotate(x: Tensor, cos: Tensor, sin: Tensor, first: Tensor, *, interleaved: bool, same_position: bool = False) -> Tensor:
    """x (B, S, heads, D) with its first R dimensions rotated; computed in float32, returned in x's dtype.

    Args:
        x: (B, S, heads, D).
        cos: (positions, R / 2).
        sin: (positions, R / 2).
        first: (B,) integers, position of each sequence's first token. A position outside the tables takes the nearest row: new keys there
            do not fit into the cache, and the cache call refuses or drops them.
        interleaved: pairs (0, 1), (2, 3), ...; False: (0, R / 2), (1, R / 2 + 1), ...
        same_position: every token stands at ``first``.
    """
    steps = torch.arange(x.shape[1], device=x.device)
    at = first.long()[:, None] + (torch.zeros_like(steps) if same_position else steps)
    at = at.clamp(0, cos.shape[0] - 1)
    acc = accumulator_dtype(x.dtype)
    c, s = (table[at].to(acc)[:, :, None] for table in (cos, sin))  # (B, S, 1, R / 2)
    half = cos.shape[1]
    turned, rest = x[..., : 2 * half].to(acc), x[..., 2 * half :]
    a, b = (turned[..., 0::2], turned[..., 1::2]) if interleaved else (turned[..., :half], turned[..., half:])
    pair = (a * c - b * s, a * s + b * c)
    joined = torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)
    return torch.cat((joined.to(x.dtype), rest), -1)
