"""What is measured: one case, its tensors, and the work it counts as."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Case:
    """A dense forward, tensors (batch, seqlen, heads, head_dim) with random normal values."""

    head_dim: int
    seqlen: int
    batch: int
    heads: int
    mask: str = "full"  # or "causal"
    heads_kv: int = 0  # 0: heads
    head_dim_v: int = 0  # 0: head_dim
    dtype: str = "bfloat16"

    @property
    def causal(self) -> bool:
        return self.mask == "causal"

    @property
    def flops(self) -> float:
        """Two products, a multiplication and an addition each, halved for causal masks (FlashAttention's convention)."""
        full = 2.0 * self.batch * self.heads * self.seqlen**2 * (self.head_dim + (self.head_dim_v or self.head_dim))
        return full / 2 if self.causal else full

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        dtype = getattr(torch, self.dtype)
        kv = self.heads_kv or self.heads
        make = lambda heads, dim: torch.randn(self.batch, self.seqlen, heads, dim, device="cuda", dtype=dtype)  # noqa: E731
        return make(self.heads, self.head_dim), make(kv, self.head_dim), make(kv, self.head_dim_v or self.head_dim)

    def __str__(self) -> str:
        dims = f"{self.head_dim}" if not self.head_dim_v else f"{self.head_dim},{self.head_dim_v}"
        heads = f"{self.heads}" if not self.heads_kv else f"{self.heads}/{self.heads_kv}"
        return f"d{dims} S{self.seqlen} B{self.batch} H{heads} {self.mask}"


def by_tokens(head_dim: int, seqlen: int, mask: str, *, tokens: int = 32768, hidden: int = 2048, heads: int = 0, **other: int) -> Case:
    """The paper's set-up: 32k tokens in all, hidden size 2048."""
    return Case(head_dim, seqlen, max(1, tokens // seqlen), heads or hidden // (other.get("head_dim_v") or head_dim), mask, **other)
