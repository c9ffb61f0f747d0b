"""Random tensors for a Problem, the same for the same seed on every device."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tandem_attn.spec.inputs import Inputs
from tandem_attn.spec.problem import Problem


@dataclass(frozen=True)
class Sample:
    """Inputs and the gradient that arrives at O."""

    inputs: Inputs
    grad_out: Tensor


def sample(problem: Problem, seed: int, device: str | torch.device = "cpu") -> Sample:
    """Standard normal q, k, v, sink and grad_out, ALiBi slopes as in its paper, descales in [1/2, 3/2).

    Padded, or packed with ``problem.lengths``.

    Raises:
        ValueError: a packed problem without lengths, or a problem with a cache or a bias, which this function does not make.
    """
    if problem.cache or problem.bias or (problem.varlen and not problem.lengths and problem.batch):
        raise ValueError(f"problem must be padded, or packed with lengths, without cache and bias; got {problem}")
    generator = torch.Generator().manual_seed(seed)
    dtype = getattr(torch, problem.dtype)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype).to(device)

    q_rows = (problem.total_q,) if problem.varlen else (problem.batch, problem.seqlen_q)
    k_rows = (problem.total_k,) if problem.varlen else (problem.batch, problem.seqlen_k)
    inputs = Inputs(
        q=normal(*q_rows, problem.heads, problem.head_dim),
        k=normal(*k_rows, problem.heads_kv, problem.head_dim),
        v=normal(*k_rows, problem.heads_kv, problem.head_dim_v),
        sink=normal(problem.heads).float() if problem.sink else None,
        alibi_slopes=_slopes(problem.heads, device) if problem.alibi else None,
        cu_seqlens_q=_offsets([q for q, _ in problem.lengths], device) if problem.varlen else None,
        cu_seqlens_k=_offsets([k for _, k in problem.lengths], device) if problem.varlen else None,
    )
    grad_out = normal(*q_rows, problem.heads, problem.head_dim_v).to(getattr(torch, problem.out_dtype))
    if problem.descale:
        numbers = (torch.rand(3, problem.batch, problem.heads_kv, generator=generator) + 0.5).to(device)
        inputs = replace(inputs, q_descale=numbers[0], k_descale=numbers[1], v_descale=numbers[2])
    return Sample(inputs, grad_out)


def _slopes(heads: int, device: str | torch.device) -> Tensor:
    """2^(-8 i / heads), i = 1 .. heads (Press et al., arXiv 2108.12409)."""
    return torch.exp2(torch.arange(1, heads + 1) * (-8.0 / heads)).to(device)


def _offsets(lengths: list[int], device: str | torch.device) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32).to(device)
