"""Many plans compiled at once, into the disk cache; needs no GPU."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from tandem_attn.kernels.compile import code_plan, is_cached, through_disk
from tandem_attn.kernels.cubin import usage
from tandem_attn.spec.plan import Plan


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


def precompile(plans: Iterable[Plan], workers: int = 1) -> Iterator[Compiled]:
    """Compiles the kernels behind plans, each once, and yields them as they are done.

    Processes work side by side, since Triton holds the interpreter's lock; each takes some 400 MB.
    """
    from concurrent.futures import ProcessPoolExecutor, as_completed
    from multiprocessing import get_context

    kernels = distinct(plans)
    if min(workers, len(kernels)) <= 1:
        yield from map(_compile, kernels)
        return
    with ProcessPoolExecutor(min(workers, len(kernels)), get_context("spawn")) as pool:
        for done in as_completed([pool.submit(_compile, plan) for plan in kernels]):
            yield done.result()


def _compile(plan: Plan) -> Compiled:
    start, cached = time.perf_counter(), is_cached(plan)
    try:
        kernel = through_disk(plan)
    except ImportError:
        raise  # Triton is missing: nothing will compile
    except Exception as error:
        return Compiled(plan, time.perf_counter() - start, cached, error=f"{type(error).__name__}: {error}")
    used = usage(kernel.cubin)
    return Compiled(plan, time.perf_counter() - start, cached, used.registers, used.stack_bytes, kernel.shared_bytes)
