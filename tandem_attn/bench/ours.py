"""Tandem as a function of a case: the public call, and variants of its plan."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tandem_attn.api.functions import attention, attention_kvcache, attention_varlen
from tandem_attn.bench.cases import DECODE, Case, Tensors
from tandem_attn.kernels import backend as kernels
from tandem_attn.spec.inputs import Inputs
from tandem_attn.spec.plan import Plan, Schedule, ScheduleKind

Run = Callable[[], Tensor]
NAME = "tandem"


def run(case: Case, t: Tensors, backend: str) -> Run:
    """O of the public function."""
    q, k, v = t.qkv
    if case.kind == DECODE:
        used = torch.full((case.batch,), case.seqlen, dtype=torch.int32, device=q.device)
        return lambda: attention_kvcache(q, k, v, used, backend=backend)
    if t.cu_seqlens is not None:
        cu, longest = t.cu_seqlens, case.seqlen
        return lambda: attention_varlen(q, k, v, cu, cu, longest, longest, causal=case.causal, backend=backend)
    return lambda: attention(q, k, v, causal=case.causal, backend=backend)


def _naive_order(plan: Plan) -> Plan:
    """The same kernel, its tiles in the order in which they come."""
    return plan.with_(schedule=Schedule(ScheduleKind.NAIVE, plan.schedule.launch, 0))


VARIANTS: dict[str, Callable[[Plan], Plan]] = {"naive order": _naive_order}


def variant(case: Case, t: Tensors, name: str) -> Run:
    """O of our kernel under a changed plan."""
    problem = case.problem("cuda")
    plan = VARIANTS[name](kernels.plan(problem))
    inputs = Inputs(q=t.q, k=t.k, v=t.v, cu_seqlens_q=t.cu_seqlens, cu_seqlens_k=t.cu_seqlens)
    return lambda: kernels.forward(problem, plan, inputs)[0]


def plans(cases: list[Case]) -> list[Plan]:
    """What our kernels compile for these cases; nothing for cases that they do not cover."""
    found = []
    for case in cases:
        problem = case.problem("cuda")
        if kernels.lacks(problem) is None:
            planned = kernels.plan(problem)
            found += [planned, *(VARIANTS[name](planned) for name in case.variants)]
    return found
