"""Small forward problems for every feature beyond ``problems``, with their tensors: what the emulator and a GPU are both asked.

Sizes are multiples of nothing on purpose, and what lies beyond a length is NaN.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from problems import problem
from torch import Tensor

from tandem_attn.spec.inputs import Inputs
from tandem_attn.spec.mask_tree import lower
from tandem_attn.spec.masks import TOP_LEFT, Causal, Document, Mask, Predicate, Window
from tandem_attn.spec.plan import FORWARD, Plan
from tandem_attn.spec.planner import plan as make_plan
from tandem_attn.spec.problem import Problem


@dataclass(frozen=True)
class Feature:
    """A problem, its tensors, and fields of its plan that are set by hand."""

    problem: Problem
    inputs: Inputs
    plan: dict[str, Any]


def _random(p: Problem, *shape: int) -> Tensor:
    return torch.randn(shape).to(getattr(torch, p.dtype))


def _int32(values: Any) -> Tensor:
    return torch.tensor(list(values), dtype=torch.int32)


def padded(*, plan: dict[str, Any] | None = None, inputs: dict[str, Any] | None = None, **options: Any) -> Feature:
    p = problem(**{"seqlen_q": 200, "seqlen_k": 300, "heads": 2, "head_dim": 64, **options})
    q = _random(p, p.batch, p.seqlen_q, p.heads, p.head_dim)
    k, v = (_random(p, p.batch, p.seqlen_k, p.heads_kv, width) for width in (p.head_dim, p.head_dim_v))
    extra = dict(inputs or {})
    for side, tensors in (("q", (q,)), ("k", (k, v))):
        for b, n in enumerate(extra.get(f"seqused_{side}", ())):
            for x in tensors:
                x[b, n:] = float("nan")
    return Feature(p, Inputs(q=q, k=k, v=v, **extra), plan or {})


def packed(lengths_q: tuple[int, ...], lengths_k: tuple[int, ...], *, plan: dict[str, Any] | None = None, **options: Any) -> Feature:
    """With a few rows behind the last sequence."""
    totals = {"total_q": sum(lengths_q) + 3, "total_k": sum(lengths_k) + 2, "batch": len(lengths_q)}
    p = problem(max(lengths_q), max(lengths_k), varlen=True, **{"heads": 2, "head_dim": 64, **totals, **options})
    q = _random(p, p.total_q, p.heads, p.head_dim)
    k, v = (_random(p, p.total_k, p.heads_kv, width) for width in (p.head_dim, p.head_dim_v))
    for x, lengths in ((q, lengths_q), (k, lengths_k), (v, lengths_k)):
        x[sum(lengths) :] = float("nan")
    cu_q, cu_k = (_int32([0, *itertools.accumulate(lengths)]) for lengths in (lengths_q, lengths_k))
    sink = torch.randn(p.heads) if p.sink else None
    return Feature(p, Inputs(q=q, k=k, v=v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, sink=sink), plan or {})


def cached(
    page_size: int, used: tuple[int, ...], *, leftpad: tuple[int, ...] | None = None, plan: dict[str, Any] | None = None, **options: Any
) -> Feature:
    """Pages in random order; NaN where no sequence has a key, and table entries that nobody needs are wildly wrong."""
    sizes = {"seqlen_q": 3, "heads": 8, "heads_kv": 2, "head_dim": 64, "batch": len(used)}
    p = problem(page_size=page_size, cache=True, seqused=True, leftpad=leftpad is not None, **{**sizes, **options})
    columns = p.seqlen_k // page_size
    pages = columns * p.batch + 2
    k, v = (
        torch.full((pages, page_size, p.heads_kv, width), float("nan")).to(getattr(torch, p.dtype)) for width in (p.head_dim, p.head_dim_v)
    )
    table = torch.full((p.batch, columns), -(2**31), dtype=torch.int32)
    order = torch.randperm(pages).tolist()
    for b, length in enumerate(used):
        for column in range(-(-length // page_size)):
            table[b, column] = order.pop()
        for j in range(leftpad[b] if leftpad else 0, length):
            place = int(table[b, j // page_size]), j % page_size
            k[place], v[place] = _random(p, p.heads_kv, p.head_dim), _random(p, p.heads_kv, p.head_dim_v)
    q = _random(p, p.batch, p.seqlen_q, p.heads, p.head_dim)
    pad = None if leftpad is None else _int32(leftpad)
    return Feature(p, Inputs(q=q, k=k, v=v, page_table=table, seqused_k=_int32(used), leftpad=pad), plan or {})


def masked(mask: Mask, **options: Any) -> Feature:
    return padded(mask=mask, seqlen_q=300, seqlen_k=200, **options)


def _ids(*shape: int) -> Tensor:
    return torch.randint(0, 3, shape).sort(-1).values


def _captured() -> Feature:
    seen, offset = torch.rand(2, 3, 300, 200) < 0.5, torch.tensor(3)
    return masked(Predicate(lambda b, h, i, j: seen[b, h % 3, i, j] | (j < offset)))


def _lowest_bias() -> Feature:
    low = torch.finfo(torch.bfloat16).min
    bias = torch.where(torch.rand(1, 2, 200, 1) < 0.5, 0.0, low).bfloat16()
    more = {"bias": bias, "alibi_slopes": torch.rand(2) * 0.1, "sink": torch.randn(2)}
    return padded(bias=True, alibi=True, softcap=5.0, sink=True, inputs=more)


def _hiding_bias() -> Feature:
    bias = torch.where(torch.rand(2, 1, 1, 300) < 0.5, 0.0, float("-inf"))
    bias[1] = float("-inf")
    return padded(bias=True, bias_dtype="float32", inputs={"bias": bias})


def _packed_heads() -> Feature:
    more = {"sink": torch.randn(12), "alibi_slopes": torch.rand(2, 12) * 0.2}
    return padded(seqlen_q=3, heads=12, heads_kv=1, mask=Causal(), alibi=True, sink=True, inputs=more)


def _packed_heads_in_use() -> Feature:
    return padded(
        seqlen_q=9, heads=8, heads_kv=2, mask=Causal(), seqused=True, inputs={"seqused_q": _int32([9, 4]), "seqused_k": _int32([300, 170])}
    )


def _packed_heads_masked() -> Feature:
    mask = Predicate(lambda b, h, i, j: (h + i + j) % 3 != 0) & Document(torch.arange(7) // 3, torch.arange(300) // 100)
    return padded(seqlen_q=7, heads=6, heads_kv=2, mask=mask)


def _split_bias() -> Feature:
    return padded(
        seqlen_q=30, seqlen_k=500, mask=Causal(), bias=True, inputs={"bias": torch.randn(1, 2, 1, 500).bfloat16()}, plan={"num_splits": 2}
    )


def _split_sink() -> Feature:
    return padded(seqlen_q=70, seqlen_k=900, mask=Causal(), sink=True, inputs={"sink": torch.randn(2)}, plan={"num_splits": 3})


LENGTHS = ((0, 150, 1, 70), (10, 33, 0, 200))
FEW = ((0, 15, 1, 7), (10, 33, 0, 500))

FEATURES: dict[str, Callable[[], Feature]] = {
    "document": lambda: masked(Document(_ids(2, 300))),
    "document, int64 and one for all": lambda: masked(Document(_ids(300).long())),
    "document, causal": lambda: masked(Causal() & Document(_ids(2, 300).int())),
    "document, ids in disorder": lambda: masked(Document(torch.randint(0, 3, (2, 300)).int(), torch.randint(0, 4, (200,)))),
    "two documents": lambda: masked(Document(_ids(300)) & Document(_ids(2, 300))),
    "one document or another": lambda: masked(Document(_ids(2, 300)) | Document(_ids(300), _ids(200).int())),
    "document, packed": lambda: packed(*LENGTHS, mask=Causal() & Document(_ids(4, 200))),
    "predicate": lambda: masked(Predicate(lambda b, h, i, j: ((i + h) % 3 != 0) & (j % 2 == b % 2))),
    "predicate, captured tensors": _captured,
    "predicate, negative and wide numbers": lambda: masked(
        Predicate(lambda b, h, i, j: ((i - j) // 7 % 3 == 1) | ((i * 100003 - j) % 5 < 1))
    ),
    "predicate, floats": lambda: masked(Predicate(lambda b, h, i, j: i * 0.1 < j / 3)),
    "predicate, where": lambda: masked(Window(30, 0) & Predicate(lambda b, h, i, j: torch.where(i < 150, j, 300 - j) % 4 != 1)),
    "window or predicate": lambda: masked(Window(4, 0) | Predicate(lambda b, h, i, j: j < 3)),
    "many windows": lambda: masked((Window(40, 3) | Window(90, -60)) & (Window(100, 5, TOP_LEFT) | Window(-10, 30))),
    "predicate, nothing seen": lambda: masked(Predicate(lambda b, h, i, j: (i < 0) & (j < 0))),
    "scale 0": lambda: padded(mask=Causal(), scale=0.0),
    "scale negative, sink": lambda: padded(mask=Causal(), scale=-0.4, sink=True, inputs={"sink": torch.randn(2)}),
    "scale negative, softcap": lambda: padded(mask=Causal(), scale=-0.4, softcap=2.0),
    "bias": lambda: padded(mask=Causal(), bias=True, inputs={"bias": torch.randn(2, 2, 200, 300).bfloat16()}),
    "bias that hides": _hiding_bias,
    "bias of the lowest number": _lowest_bias,
    "heads packed": lambda: padded(seqlen_q=5, heads=8, heads_kv=2, mask=Causal()),
    "heads packed, 12": _packed_heads,
    "heads packed, seqused": _packed_heads_in_use,
    "heads packed, masks": _packed_heads_masked,
    "heads packed, head_dim 96": lambda: padded(seqlen_q=5, heads=8, heads_kv=2, head_dim=96, mask=Causal()),
    "heads packed, packed lengths": lambda: packed(*FEW, heads=8, heads_kv=2, mask=Causal()),
    "heads packed, sequences of one query tile": lambda: packed((40, 67, 50), (40, 67, 90), heads=4, heads_kv=2, mask=Causal()),
    "splits, sink": _split_sink,
    "splits, more than blocks": lambda: padded(
        seqlen_q=70, seqlen_k=150, heads=8, heads_kv=2, head_dim=96, mask=Window(20, 10), plan={"num_splits": 5}
    ),
    "splits, bias": _split_bias,
    "splits, packed lengths": lambda: packed(*FEW, heads=8, heads_kv=2, mask=Causal(), sink=True, plan={"num_splits": 3}),
    "cache": lambda: cached(300, (17, 300), seqlen_k=300, seqlen_q=1),
    "cache, leftpad": lambda: cached(300, (129, 60), seqlen_k=300, leftpad=(100, 3), mask=Causal()),
    "cache, empty": lambda: cached(300, (0, 12), seqlen_k=300),
    "pages of 128": lambda: cached(128, (129, 500), seqlen_k=512, mask=Causal()),
    "pages of 16": lambda: cached(16, (129, 500), seqlen_k=512, mask=Causal()),
    "pages of 16, head_dim 96": lambda: cached(16, (129, 60), seqlen_k=160, head_dim=96),
    "pages of 7": lambda: cached(7, (129, 60), seqlen_k=140, head_dim=128, mask=Window(30, 0)),
    "pages of 16, leftpad": lambda: cached(16, (129, 60), seqlen_k=160, leftpad=(100, 3), mask=Causal()),
    "pages of 64, splits": lambda: cached(64, (129, 500), seqlen_k=512, head_dim=128, plan={"num_splits": 3}),
    "pages, document": lambda: cached(64, (129, 300), seqlen_k=320, mask=Document(_ids(2, 320).int()[:, -3:], _ids(2, 320).int())),
}

# Queries enough for both CTAs of a pair (Blackwell), beside FEATURES.
MANY_QUERIES: dict[str, Callable[[], Feature]] = {
    "heads packed, many queries": lambda: padded(seqlen_q=150, heads=8, heads_kv=2, head_dim=128, mask=Causal(), plan={"pack_gqa": 4}),
    "heads packed by 3, many packed queries": lambda: packed(
        (0, 150, 1, 170), (10, 133, 0, 200), heads=6, heads_kv=2, mask=Causal(), plan={"pack_gqa": 3}
    ),
    "heads packed, head_dim 192 and 128": lambda: padded(
        seqlen_q=130, heads=4, heads_kv=1, head_dim=192, head_dim_v=128, mask=Window(70, 10), plan={"pack_gqa": 4}
    ),
    "pages of 256, many queries": lambda: cached(256, (129, 500), seqlen_k=512, seqlen_q=290, heads=2, head_dim=128, mask=Causal()),
    "pages of 16, many queries": lambda: cached(16, (129, 500), seqlen_k=512, seqlen_q=290, heads=2, head_dim=128, mask=Causal()),
    "pages of 128, leftpad, many queries": lambda: cached(
        128, (290, 340), seqlen_k=384, seqlen_q=290, leftpad=(100, 3), heads=2, head_dim=128
    ),
}


def make(name: str, device: str) -> Feature:
    """A feature, its tensors and those of its mask on a device; the same numbers each time."""
    torch.manual_seed(0)
    with torch.device(device):
        return {**FEATURES, **MANY_QUERIES}[name]()


def for_a_pair(feature: Feature, plan: Plan) -> Plan:
    """The plan of a CTA pair (Blackwell) that packs heads, splits keys and hands out tiles like ``plan``."""
    problem = replace(feature.problem, mask=lower(feature.problem.mask)[0])
    same = {"num_splits": plan.num_splits, "pack_gqa": plan.pack_gqa, "schedule": plan.schedule}
    return make_plan(problem, plan.arch, direction=FORWARD, cta_group=2, **same).plan
