"""Online softmax in base 2 with conditional rescale, in plain floats: the algorithm every backend follows, small enough to prove.

FlashAttention's recurrence keeps for each row a stabiliser m, the sum l of 2^(x - m) and the accumulator sum of 2^(x - m) v, and rescales
l and the accumulator by 2^(m_old - m_new) when the maximum grows. FlashAttention-4 (arXiv 2603.05451) skips that while the maximum grew
by at most tau: any stabiliser gives the same quotient, and 2^(x - m) stays below 2^tau. So ``row_max`` here is a stabiliser: at most tau
below the true maximum.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

LOG2_E = math.log2(math.e)
LN_2 = math.log(2.0)
_NEVER = float("-inf")

Row = tuple[float, ...]


@dataclass(frozen=True)
class SoftmaxState:
    """Rows of one query tile between two key blocks."""

    row_max: Row  # stabilisers, log2 units; -inf: the row has seen no key
    row_sum: Row
    acc: tuple[Row, ...]  # rows x head_dim_v, not normalised

    @classmethod
    def start(cls, rows: int, head_dim_v: int) -> SoftmaxState:
        return cls((_NEVER,) * rows, (0.0,) * rows, ((0.0,) * head_dim_v,) * rows)


@dataclass(frozen=True)
class Partial:
    """Normalised output rows and their log-sum-exp (natural log), of all keys or of one split."""

    out: tuple[Row, ...]
    lse: Row


def rescale_groups(old: Sequence[float], new: Sequence[float], tau: float, rescale_rows: int) -> tuple[bool, ...]:
    """Which groups of ``rescale_rows`` rows move to their new maxima: those in which a maximum grew by more than ``tau``.

    With ``rescale_rows=0`` there is one group and it always moves.
    """
    if rescale_rows == 0:
        return (True,)
    grew = [b > a and b - a > tau for a, b in zip(old, new, strict=True)]  # b > a first: -inf minus -inf is NaN
    return tuple(any(grew[i : i + rescale_rows]) for i in range(0, len(grew), rescale_rows))


def update(
    state: SoftmaxState,
    scores: Sequence[Sequence[float]],
    values: Sequence[Sequence[float]],
    *,
    tau: float = 8.0,
    rescale_rows: int = 1,
    exp2: Callable[[float], float] = lambda x: 2.0**x,
) -> tuple[SoftmaxState, tuple[bool, ...]]:
    """Takes in one key block.

    Args:
        state: before the block.
        scores: rows x keys, log2 units (logit * log2 e); -inf is masked.
        values: keys x head_dim_v.
        tau: threshold in log2 units, see ``rescale_groups``.
        rescale_rows: rows that decide together; 0: always rescale.
        exp2: 2^x for x <= tau; must give 0 for -inf.

    Returns:
        The state after the block, and which row groups were rescaled.
    """
    grown = [max(m, *row) for m, row in zip(state.row_max, scores, strict=True)]
    moved = rescale_groups(state.row_max, grown, tau, rescale_rows)
    size = rescale_rows or len(grown)
    rows = [
        _update_row(old, new if moved[i // size] else old, row_sum, acc, row, values, exp2)
        for i, (old, new, row_sum, acc, row) in enumerate(zip(state.row_max, grown, state.row_sum, state.acc, scores, strict=True))
    ]
    return SoftmaxState(tuple(r[0] for r in rows), tuple(r[1] for r in rows), tuple(r[2] for r in rows)), moved


def _update_row(
    old: float,
    new: float,
    row_sum: float,
    acc: Row,
    scores: Sequence[float],
    values: Sequence[Sequence[float]],
    exp2: Callable[[float], float],
) -> tuple[float, float, Row]:
    if new == _NEVER:
        return new, row_sum, acc  # no key yet
    alpha = 1.0 if new == old else exp2(old - new)
    p = [exp2(x - new) for x in scores]
    out = tuple(a * alpha + sum(weight * value[j] for weight, value in zip(p, values, strict=True)) for j, a in enumerate(acc))
    return new, row_sum * alpha + sum(p), out


def finalize(state: SoftmaxState, sink: float | None = None) -> Partial:
    """Normalises once, exactly, whatever stabilisers were kept.

    Args:
        state: after the last block.
        sink: a learnable logit (natural units) that joins the denominator and has no value; None: none.

    Returns:
        Output and LSE. A row that saw no key gives 0 and -inf; with a sink, 0 and the sink.
    """
    rows = [_finalize_row(*row, sink) for row in zip(state.row_max, state.row_sum, state.acc, strict=True)]
    return Partial(tuple(out for out, _ in rows), tuple(lse for _, lse in rows))


def _finalize_row(row_max: float, row_sum: float, acc: Row, sink: float | None) -> tuple[Row, float]:
    sink_log2 = _NEVER if sink is None else sink * LOG2_E
    top = max(row_max, sink_log2)
    if top == _NEVER:
        return (0.0,) * len(acc), _NEVER
    share = 2.0 ** (row_max - top)  # 0 for a row without keys
    total = row_sum * share + 2.0 ** (sink_log2 - top)
    return tuple(a * share / total for a in acc), (top + math.log2(total)) * LN_2


def merge(partials: Sequence[Partial], sink: float | None = None) -> Partial:
    """Combines the results of disjoint key ranges (split-KV). The sink joins here, once, not in the splits."""
    rows = []
    for i in range(len(partials[0].lse)):
        lses = [partial.lse[i] for partial in partials] + ([] if sink is None else [sink])
        top = max(lses)
        if top == _NEVER:
            rows.append(((0.0,) * len(partials[0].out[i]), _NEVER))
            continue
        total = sum(math.exp(lse - top) for lse in lses)
        weights = [math.exp(partial.lse[i] - top) / total for partial in partials]
        columns = zip(*(partial.out[i] for partial in partials), strict=True)
        rows.append((tuple(sum(w * x for w, x in zip(weights, column, strict=True)) for column in columns), top + math.log(total)))
    return Partial(tuple(out for out, _ in rows), tuple(lse for _, lse in rows))
