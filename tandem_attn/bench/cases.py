"""What is measured: one case, its tensors, and the work it counts as."""

from __future__ import annotations

import itertools
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from tandem_attn.spec.masks import Causal, Full
from tandem_attn.spec.problem import Problem

FORWARD, BACKWARD = "fwd", "bwd"
DENSE, VARLEN, DECODE = "dense", "varlen", "decode"
BACKWARD_WORK = 2.5  # five products beside the forward's two (FlashAttention's convention)


@dataclass(frozen=True)
class Case:
    """One problem to time: dense (batch, seqlen), packed ``lengths``, or one new query for each of ``batch`` caches of ``seqlen`` keys."""

    head_dim: int
    seqlen: int  # of packed sequences: the longest
    batch: int
    heads: int
    mask: str = "full"  # or "causal"
    heads_kv: int = 0  # 0: heads
    head_dim_v: int = 0  # 0: head_dim
    dtype: str = "bfloat16"
    direction: str = FORWARD
    lengths: tuple[int, ...] = ()
    kind: str = DENSE
    variants: tuple[str, ...] = ()  # of ours, timed beside it: names of ``ours.VARIANTS``

    def __post_init__(self) -> None:
        object.__setattr__(self, "heads_kv", self.heads_kv or self.heads)
        object.__setattr__(self, "head_dim_v", self.head_dim_v or self.head_dim)

    @property
    def causal(self) -> bool:
        return self.mask == "causal"

    @property
    def queries(self) -> int:
        """Of each sequence."""
        return 1 if self.kind == DECODE else self.seqlen

    @property
    def scores(self) -> float:
        """Scores of one head over all sequences; half of them for causal masks."""
        if self.kind == DECODE:
            return float(self.batch * self.seqlen)
        lengths = self.lengths or (self.seqlen,) * self.batch
        return sum(s * s for s in lengths) / (2 if self.causal else 1)

    @property
    def flops(self) -> float:
        """Two products, a multiplication and an addition each; 2.5 times that in the backward."""
        work = 2.0 * self.heads * self.scores * (self.head_dim + self.head_dim_v)
        return work * (BACKWARD_WORK if self.direction == BACKWARD else 1)

    @property
    def kv_bytes(self) -> float:
        """Of K and V, each read once."""
        rows = sum(self.lengths) if self.lengths else self.batch * self.seqlen
        return float(rows * self.heads_kv * (self.head_dim + self.head_dim_v) * torch.finfo(getattr(torch, self.dtype)).bits // 8)

    def problem(self, device: str) -> Problem:
        more: dict[str, Any] = {"varlen": True, "total_q": sum(self.lengths), "total_k": sum(self.lengths)} if self.lengths else {}
        if self.kind == DECODE:  # one page a sequence
            more = {"cache": True, "page_size": self.seqlen, "seqused": True}
        return Problem(
            batch=self.batch, seqlen_q=self.queries, seqlen_k=self.seqlen, heads=self.heads, heads_kv=self.heads_kv,
            head_dim=self.head_dim, head_dim_v=self.head_dim_v, dtype=self.dtype, mask=Causal() if self.causal else Full(),
            device=device, backward=self.direction == BACKWARD, **more,
        )  # fmt: skip

    def as_dict(self) -> dict[str, Any]:
        found = asdict(self)
        del found["variants"]
        return found

    def __str__(self) -> str:
        dims = f"{self.head_dim}" if self.head_dim_v == self.head_dim else f"{self.head_dim},{self.head_dim_v}"
        heads = f"{self.heads}" if self.heads_kv == self.heads else f"{self.heads}/{self.heads_kv}"
        kind = "" if self.kind == DENSE else f" {self.kind}"
        return f"d{dims} S{self.seqlen} B{self.batch} H{heads} {self.mask}{kind} {self.direction}"


@dataclass(frozen=True)
class Tensors:
    """Random normal tensors of a case; packed ones with their offsets. In the backward q, k and v ask for gradients."""

    q: Tensor
    k: Tensor
    v: Tensor
    grad_out: Tensor | None
    cu_seqlens: Tensor | None

    @property
    def qkv(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.q, self.k, self.v


def tensors(case: Case, device: str, seed: int = 0) -> Tensors:
    generator = torch.Generator(device).manual_seed(seed)
    dtype = getattr(torch, case.dtype)
    grad = case.direction == BACKWARD

    def normal(rows: tuple[int, ...], heads: int, dim: int, *, leaf: bool) -> Tensor:
        made = torch.randn(*rows, heads, dim, generator=generator, device=device, dtype=torch.float32).to(dtype)
        return made.requires_grad_(leaf)

    q_rows = (sum(case.lengths),) if case.lengths else (case.batch, case.queries)
    k_rows = (sum(case.lengths),) if case.lengths else (case.batch, case.seqlen)
    offsets = [0, *itertools.accumulate(case.lengths)]
    return Tensors(
        q=normal(q_rows, case.heads, case.head_dim, leaf=grad),
        k=normal(k_rows, case.heads_kv, case.head_dim, leaf=grad),
        v=normal(k_rows, case.heads_kv, case.head_dim_v, leaf=grad),
        grad_out=normal(q_rows, case.heads, case.head_dim_v, leaf=False) if grad else None,
        cu_seqlens=torch.tensor(offsets, dtype=torch.int32, device=device) if case.lengths else None,
    )


def by_tokens(head_dim: int, seqlen: int, mask: str, *, tokens: int = 32768, hidden: int = 2048, heads: int = 0, **other: Any) -> Case:
    """The paper's set-up: 32k tokens in all, hidden size 2048."""
    return Case(head_dim, seqlen, max(1, tokens // seqlen), heads or hidden // (other.get("head_dim_v") or head_dim), mask, **other)
