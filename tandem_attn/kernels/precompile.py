"""Many plans compiled at once, into the disk cache; needs no GPU."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tandem_attn.kernels import backend
from tandem_attn.kernels.compile import Kernel, code_plan, compiled_helper, is_cached, through_disk
from tandem_attn.kernels.cubin import usage
from tandem_attn.kernels.forward import attend
from tandem_attn.kernels.prepare import prepare
from tandem_attn.spec.inputs import Inputs
from tandem_attn.spec.plan import FORWARD, Plan
from tandem_attn.spec.problem import Problem


@dataclass(frozen=True)
class Compiled:
    """What became of one kernel.

    Attributes:
        plan: what it was compiled for, without what is passed at run time (``compile.code_plan``).
        seconds: that it took, from disk or from source.
        cached: whether it was on disk before.
        registers: a thread starts with; the roles then share them out anew.
        stack_bytes: of a thread: what ptxas spilled.
        shared_bytes: of a CTA.
        error: why it does not compile; empty where it does.
    """

    plan: Plan
    seconds: float
    cached: bool
    registers: int = 0
    stack_bytes: int = 0
    shared_bytes: int = 0
    error: str = ""


def distinct(plans: Iterable[Plan]) -> list[Plan]:
    """The kernels behind plans, each once."""
    return list(dict.fromkeys(code_plan(plan) for plan in plans))


def precompile(plans: Iterable[Plan], workers: int = 1, problems: Mapping[Plan, Sequence[Problem]] | None = None) -> Iterator[Compiled]:
    """Compiles the kernels behind plans, each once, and yields them as they are done.

    Processes work side by side, since Triton holds the interpreter's lock; each takes some 400 MB.

    Args:
        problems: for a kernel of ``distinct``, problems whose helpers (``kernels.helpers``) are to be compiled with it.
    """
    from concurrent.futures import ProcessPoolExecutor, as_completed
    from multiprocessing import get_context

    kernels = distinct(plans)
    if min(workers, len(kernels)) <= 1:
        for plan in kernels:
            yield _compile(plan, (problems or {}).get(plan, ()))
        return
    with ProcessPoolExecutor(min(workers, len(kernels)), get_context("spawn")) as pool:
        for done in as_completed([pool.submit(_compile, plan, (problems or {}).get(plan, ())) for plan in kernels]):
            yield done.result()


def _compile(plan: Plan, problems: Sequence[Problem]) -> Compiled:
    start, cached = time.perf_counter(), is_cached(plan)
    try:
        kernel = through_disk(plan)
        for problem in problems:
            _helpers(kernel, problem, plan.arch)
    except ImportError:
        raise  # Triton is missing: nothing will compile
    except Exception as error:
        return Compiled(plan, time.perf_counter() - start, cached, error=f"{type(error).__name__}: {error}")
    used = usage(kernel.cubin)
    return Compiled(plan, time.perf_counter() - start, cached, used.registers, used.stack_bytes, kernel.shared_bytes)


def _helpers(kernel: Kernel, problem: Problem, chip: str) -> None:
    """Compiles what a forward launches beside its kernel: it is prepared with tensors that have shapes only."""

    def execute(problem: Problem, plan: Plan, inputs: Inputs, out: Tensor, lse: Tensor) -> None:
        prepare(kernel, problem, plan, inputs, out, lse, sms=1, counter=_int32(1))

    compiled_helper.cache_clear()  # one in memory may not be on disk
    attend(problem, backend.plan(problem, FORWARD, chip), _shapes(problem), execute)


def _shapes(p: Problem) -> Inputs:
    q_rows, k_rows = ((p.total_q,), (p.total_k,)) if p.varlen else ((p.batch, p.seqlen_q), (p.batch, p.seqlen_k))

    def empty(*shape: int) -> Tensor:
        return torch.empty(*shape, dtype=getattr(torch, p.dtype), device="meta")

    return Inputs(
        q=empty(*q_rows, p.heads, p.head_dim), k=empty(*k_rows, p.heads_kv, p.head_dim), v=empty(*k_rows, p.heads_kv, p.head_dim_v),
        sink=empty(p.heads).float() if p.sink else None,
        alibi_slopes=empty(p.batch, p.heads).float() if p.alibi else None,
        cu_seqlens_q=_int32(p.batch + 1) if p.varlen else None,
        cu_seqlens_k=_int32(p.batch + 1) if p.varlen else None,
        seqused_k=_int32(p.batch) if p.seqused else None,
        **{f"{name}_descale": torch.empty(p.batch, p.heads_kv, device="meta") for name in "qkv" if p.descale},
    )  # fmt: skip


def _int32(size: int) -> Tensor:
    return torch.empty(size, dtype=torch.int32, device="meta")
