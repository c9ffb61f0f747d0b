"""A chunk: some batch entries and key/value heads of a group, arranged for matrix products, with the scores of any of its tiles.

Query heads that share a key/value head are stacked as rows of one product. S of a tile has the shape (batch entries * kv heads, query
heads per kv head * M, N); ``grid`` shows it as (batch entries, kv heads, query heads per kv head, M, N), the shape that masks, biases
and slopes broadcast to.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tandem_attn.reference.numerics import accumulator_dtype
from tandem_attn.spec.problem import Problem

_TILE_ELEMENTS = 1 << 18  # S of all heads of a chunk: 1 MiB of float32, so that its passes stay in a core's L2 cache


@dataclass(frozen=True, kw_only=True)
class Dense:
    """One group of a call: q (B, Sq, H, D), k (B, Sk, Hkv, D), v (B, Sk, Hkv, Dv); every length equal, or in ``lens_q``, ``lens_k``."""

    problem: Problem
    members: Tensor  # (B,) batch indices in the call, which predicates see
    q: Tensor
    k: Tensor
    v: Tensor
    sink: Tensor | None = None
    alibi_slopes: Tensor | None = None  # (H,) or (B, H)
    bias: Tensor | None = None  # (B or 1, H or 1, Sq or 1, Sk or 1)
    lens_q: Tensor | None = None
    lens_k: Tensor | None = None

    @property
    def seqlen_q(self) -> int:
        return self.q.shape[1]

    @property
    def seqlen_k(self) -> int:
        return self.k.shape[1]


@dataclass(frozen=True)
class Chunk:
    dense: Dense
    batch: slice
    kv_heads: slice

    @property
    def members(self) -> Tensor:
        return self.dense.members[self.batch]

    @property
    def group(self) -> int:
        """Query heads of one key/value head."""
        return self.dense.problem.heads_per_kv

    @property
    def heads(self) -> slice:
        return slice(self.kv_heads.start * self.group, self.kv_heads.stop * self.group)

    @property
    def grid(self) -> tuple[int, int, int]:
        return (self.batch.stop - self.batch.start, self.kv_heads.stop - self.kv_heads.start, self.group)

    def query_rows(self, x: Tensor) -> Tensor:
        """(B, Sq, H, D) of the group -> (chunk, heads per kv, Sq, D) in the accumulator dtype, contiguous."""
        taken = x[self.batch, :, self.heads].to(accumulator_dtype(x.dtype)).transpose(1, 2)
        return taken.unflatten(1, (-1, self.group)).flatten(0, 1).contiguous()

    def key_rows(self, x: Tensor) -> Tensor:
        """(B, Sk, Hkv, D) of the group -> (chunk, Sk, D) in the accumulator dtype, contiguous."""
        taken = x[self.batch, :, self.kv_heads].to(accumulator_dtype(x.dtype)).transpose(1, 2)
        return taken.flatten(0, 1).contiguous()

    def heads_first(self, x: Tensor) -> Tensor:
        """(chunk, heads per kv, ...) -> (batch entries, query heads of the chunk, ...)."""
        return x.reshape(self.grid[0], self.grid[1] * self.grid[2], *x.shape[2:])

    def per_head(self, x: Tensor) -> Tensor:
        """(H,) or (B, H) -> broadcasts to ``grid`` + (1, 1)."""
        taken = x[..., self.heads] if x.ndim == 1 else x[self.batch, self.heads]
        return taken.reshape(-1, *self.grid[1:], 1, 1)

    def scores(self, q: Tensor, k: Tensor, m: slice, n: slice, sees: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Scores of one tile (chunk, group * M, N), and tanh of the soft cap where there is one (for its derivative).

        ``q`` (chunk, group * M, D) and ``k`` (chunk, N, D) are the tile's operands; keys outside ``sees`` get -inf.
        """
        p = self.dense.problem
        s = torch.baddbmm(q.new_empty(()), q, k.transpose(1, 2), beta=0, alpha=p.scale_value)
        capped = None
        if p.softcap:
            capped = s.div_(p.softcap).tanh_()
            s = capped * p.softcap
        self._add_biases(s, m, n)
        if sees is not None:
            self._hide(s, m, n, sees)
        return s, capped

    def _shown(self, s: Tensor, m: slice, n: slice) -> Tensor:
        return s.view(*self.grid, m.stop - m.start, n.stop - n.start)

    def _add_biases(self, s: Tensor, m: slice, n: slice) -> None:
        shown = self._shown(s, m, n)
        if self.dense.bias is not None:
            shown.add_(self.bias_tile(self.dense.bias, m, n))
        if self.dense.alibi_slopes is not None:
            shown.sub_(self.per_head(self.dense.alibi_slopes).to(s.dtype) * self.distance(m, n))

    def bias_tile(self, bias: Tensor, m: slice, n: slice) -> Tensor:
        """The part of a (B or 1, H or 1, Sq or 1, Sk or 1) tensor that belongs to a tile; broadcasts to the tile shown on ``grid``.

        A view.
        """
        whole = slice(None)
        parts = (self.batch, self.heads, m, n)
        taken = bias[tuple(part if size > 1 else whole for part, size in zip(parts, bias.shape, strict=True))]
        return taken.unflatten(1, self.grid[1:]) if bias.shape[1] > 1 else taken.unsqueeze(1)

    def distance(self, m: slice, n: slice) -> Tensor:
        """ALiBi's |i + Sk - Sq - j|, broadcasting to the tile shown on ``grid``."""
        _, _, q_idx, kv_idx, seqlen_q, seqlen_k = self._coordinates(m, n)
        return (q_idx + (seqlen_k - seqlen_q) - kv_idx).abs()

    def _coordinates(self, m: slice, n: slice) -> tuple[Any, ...]:
        device = self.dense.q.device
        b = self.members.view(-1, 1, 1, 1, 1)
        h = torch.arange(self.heads.start, self.heads.stop, device=device).view(1, -1, self.group, 1, 1)
        q_idx = torch.arange(m.start, m.stop, device=device).view(-1, 1)
        kv_idx = torch.arange(n.start, n.stop, device=device)
        return b, h, q_idx.view(1, 1, 1, -1, 1), kv_idx.view(1, 1, 1, 1, -1), *self._lengths()

    def _lengths(self) -> tuple[Any, Any]:
        def one(lens: Tensor | None, common: int) -> Any:
            return common if lens is None else lens[self.batch].view(-1, 1, 1, 1, 1)

        return one(self.dense.lens_q, self.dense.seqlen_q), one(self.dense.lens_k, self.dense.seqlen_k)

    def sees(self, m: slice, n: slice) -> Tensor | None:
        """Which keys of a tile its queries see, broadcasting to the tile shown on ``grid``; None: all."""
        b, h, q_idx, kv_idx, seqlen_q, seqlen_k = self._coordinates(m, n)
        if self.dense.lens_q is None:
            sees = _tensor(self.dense.problem.mask.allowed(b, h, q_idx, kv_idx, seqlen_q, seqlen_k), self.members.device)
        else:  # a mask may read tensors as long as the sequences: it gets no index beyond
            i, j = torch.minimum(q_idx, (seqlen_q - 1).clamp(min=0)), torch.minimum(kv_idx, (seqlen_k - 1).clamp(min=0))
            sees = _tensor(self.dense.problem.mask.allowed(b, h, i, j, seqlen_q, seqlen_k), self.members.device)
            sees = sees & (q_idx < seqlen_q) & (kv_idx < seqlen_k)
        return None if sees is True else sees

    def _hide(self, s: Tensor, m: slice, n: slice, sees: Tensor) -> None:
        self._shown(s, m, n).masked_fill_(~sees, float("-inf"))


def _tensor(sees: Any, device: torch.device) -> Any:
    """False as a tensor; True, which needs no mask, stays."""
    return torch.zeros((), dtype=torch.bool, device=device) if sees is False else sees


def chunks(dense: Dense, tile_m: int, tile_n: int) -> Iterator[Chunk]:
    """Chunks that cover the group once, none with more scores a tile than fit in a core's cache."""
    problem, batch = dense.problem, dense.q.shape[0]
    tile = problem.heads_per_kv * max(1, min(tile_m, dense.seqlen_q)) * max(1, min(tile_n, dense.seqlen_k))
    fit = max(1, _TILE_ELEMENTS // tile)
    heads = min(problem.heads_kv, fit)
    entries = max(1, fit // problem.heads_kv)
    for b in range(0, batch, entries):
        for h in range(0, problem.heads_kv, heads):
            yield Chunk(dense, slice(b, min(b + entries, batch)), slice(h, min(h + heads, problem.heads_kv)))
