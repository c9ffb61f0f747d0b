"""The reference backend: any layout and feature, computed group by group by the tiled forward and backward."""

from __future__ import annotations

import torch
from torch import Tensor

from tandem_attn.reference import tiled_backward, tiled_forward
from tandem_attn.reference.chunk import Dense
from tandem_attn.reference.layout import Group, blank, descaled, gather, groups, scatter
from tandem_attn.reference.numerics import accumulator_dtype, out_dtype
from tandem_attn.spec.inputs import Gradients, Inputs
from tandem_attn.spec.plan import Plan
from tandem_attn.spec.problem import Problem


def forward(problem: Problem, plan: Plan, inputs: Inputs) -> tuple[Tensor, Tensor]:
    """O, shaped as q with last size head_dim_v, and LSE: (B, H, Sq), or (H, total_q) for packed calls.

    O has the inputs' dtype (bfloat16 for 8-bit ones); LSE is float32, natural log (float64 for float64 inputs).
    """
    out = blank(problem, inputs.q, problem.head_dim_v, 0.0, out_dtype(inputs.q.dtype))
    lse = blank(problem, inputs.q, 1, float("-inf"), accumulator_dtype(inputs.q.dtype))
    for group in groups(problem, inputs):
        group_out, group_lse = tiled_forward.forward(_dense(problem, inputs, group), plan)
        scatter(out, group.q_rows, group.lens_q, group_out)
        scatter(lse, group.q_rows, group.lens_q, group_lse.transpose(1, 2).unsqueeze(-1))
    return _trimmed(problem, out), _trimmed(problem, lse).squeeze(-1).transpose(-1, -2).contiguous()


def backward(
    problem: Problem, plan: Plan, inputs: Inputs, out: Tensor, lse: Tensor, grad_out: Tensor, grad_lse: Tensor | None
) -> Gradients:
    """Gradients of a padded or packed call; out, lse and their gradients are shaped as ``forward`` returns them."""
    total = _Totals(problem, inputs)
    lse_rows, grad_lse_rows = _lse_rows(lse), None if grad_lse is None else _lse_rows(grad_lse)
    for group in groups(problem, inputs):
        grads = tiled_backward.backward(
            _dense(problem, inputs, group),
            plan,
            gather(out, group.q_rows, group.lens_q),
            _heads_first(lse_rows, group),
            gather(grad_out, group.q_rows, group.lens_q),
            None if grad_lse_rows is None else _heads_first(grad_lse_rows, group),
        )
        total.add(group, grads)
    return total.result()


class _Totals:
    """Gradients of the whole call, filled group by group."""

    def __init__(self, problem: Problem, inputs: Inputs) -> None:
        self.problem = problem
        self.q, self.k, self.v = (blank(problem, x, x.shape[-1], 0.0, x.dtype) for x in (inputs.q, inputs.k, inputs.v))
        acc = accumulator_dtype(inputs.q.dtype)
        self.sink, self.alibi_slopes, self.bias = (
            None if x is None else torch.zeros(x.shape, dtype=acc, device=x.device) for x in (inputs.sink, inputs.alibi_slopes, inputs.bias)
        )

    def add(self, group: Group, grads: Gradients) -> None:
        scatter(self.q, group.q_rows, group.lens_q, grads.q)
        scatter(self.k, group.k_rows, group.lens_k, grads.k)
        scatter(self.v, group.k_rows, group.lens_k, grads.v)
        if self.sink is not None and grads.sink is not None:
            self.sink += grads.sink
        if self.alibi_slopes is not None and grads.alibi_slopes is not None:
            self.alibi_slopes[_slopes_of(self.alibi_slopes, group)] += grads.alibi_slopes
        if self.bias is not None and grads.bias is not None:
            self.bias[_bias_of(self.bias, group)] += grads.bias

    def result(self) -> Gradients:
        q, k, v = (_trimmed(self.problem, x) for x in (self.q, self.k, self.v))
        return Gradients(q=q, k=k, v=v, sink=self.sink, alibi_slopes=self.alibi_slopes, bias=self.bias)


def _dense(problem: Problem, inputs: Inputs, group: Group) -> Dense:
    slopes, bias = inputs.alibi_slopes, inputs.bias
    return Dense(
        problem=problem,
        members=group.members,
        q=descaled(gather(inputs.q, group.q_rows, group.lens_q), inputs.q_descale, group.members),
        k=descaled(gather(inputs.k, group.k_rows, group.lens_k), inputs.k_descale, group.members),
        v=descaled(gather(inputs.v, group.k_rows, group.lens_k), inputs.v_descale, group.members),
        sink=inputs.sink,
        alibi_slopes=None if slopes is None else slopes[_slopes_of(slopes, group)],
        bias=None if bias is None else bias[_bias_of(bias, group)],
        lens_q=group.lens_q,
        lens_k=group.lens_k,
    )


def _slopes_of(slopes: Tensor, group: Group) -> Tensor | slice:
    return group.members if slopes.ndim == 2 else slice(None)


def _bias_of(bias: Tensor, group: Group) -> tuple[Tensor | slice, ...]:
    members = group.members if bias.shape[0] > 1 else slice(None)
    return (members, slice(None), slice(0, group.len_q), slice(0, group.len_k))


def _lse_rows(lse: Tensor) -> Tensor:
    """(B, H, Sq) or (H, total_q) -> shaped as q with last size 1."""
    return lse.transpose(-1, -2).unsqueeze(-1)


def _heads_first(rows: Tensor, group: Group) -> Tensor:
    return gather(rows, group.q_rows, group.lens_q).squeeze(-1).transpose(1, 2)


def _trimmed(problem: Problem, x: Tensor) -> Tensor:
    """Without the spare row of packed tensors."""
    return x[:-1] if problem.varlen else x
