"""Drawn at random by hypothesis: shapes, masks, lengths, strides and page tables against the float64 truth, under drawn Plans too."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem_attn import Window, attention, attention_varlen
from tandem_attn.spec.exp2 import Exp2Split
from tests.support import judge, tiled
from tests.support.cases import STRIDES, Case
from tests.support.masks import MASKS

LENGTH = st.integers(0, 40)


@st.composite
def features(draw: st.DrawFn) -> dict[str, Any]:
    heads_kv = draw(st.integers(1, 3))
    return {
        "heads_kv": heads_kv,
        "heads": heads_kv * draw(st.integers(1, 4)),
        "head_dim": draw(st.integers(1, 20)),
        "head_dim_v": draw(st.sampled_from((0, 0, 1, 7, 16))),
        "dtype": draw(st.sampled_from(("fp16", "bf16", "fp32", "fp64"))),
        "mask": draw(st.sampled_from(tuple(MASKS))),
        "scale": draw(st.sampled_from((None, None, 0.0, -0.5, 1.7))),
        "softcap": draw(st.sampled_from((0.0, 0.0, 2.5))),
        "sink": draw(st.booleans()),
        "alibi": draw(st.integers(0, 2)),
        "bias": draw(st.sampled_from(("", "", "bhqk", "1hqk", "b11k", "11q1", "1111"))),
        "grad_lse": draw(st.booleans()),
        "deterministic": draw(st.booleans()),
        "seed": draw(st.integers(0, 2**20)),
    }


@st.composite
def padded_cases(draw: st.DrawFn) -> Case:
    batch, sq, sk = draw(st.integers(1, 3)), draw(LENGTH), draw(LENGTH)

    def used(longest: int) -> tuple[int, ...] | None:
        return draw(st.none() | st.tuples(*[st.integers(0, longest)] * batch))

    strides = draw(st.sampled_from(tuple(STRIDES)))
    common = draw(features())
    if strides == "packed_qkv":
        sk, common = sq, common | {"head_dim_v": 0}
    expanded = strides == "expanded"
    return Case(
        batch=batch, seqlen_q=sq, seqlen_k=sk, used_q=used(sq), used_k=None if expanded else used(sk), strides=strides,
        grad_out=draw(st.sampled_from(("contiguous", "expanded", "transposed", "last"))), **common,
    )  # fmt: skip


@st.composite
def packed_cases(draw: st.DrawFn, paged: bool = False) -> Case:
    lengths = draw(st.lists(st.tuples(LENGTH, LENGTH), min_size=0, max_size=5))
    lengths_q, lengths_k = tuple(a for a, _ in lengths), tuple(b for _, b in lengths)

    def used(longest: tuple[int, ...]) -> tuple[int, ...] | None:
        return draw(st.none() | st.tuples(*(st.integers(0, n) for n in longest))) if longest else None

    return Case(
        layout="packed", batch=len(lengths), lengths_q=lengths_q, lengths_k=lengths_k, used_q=used(lengths_q), used_k=used(lengths_k),
        tail_q=draw(st.integers(0, 3)), tail_k=0 if paged else draw(st.integers(0, 3)), page_size=draw(st.integers(1, 9)) if paged else 0,
        **draw(features()),
    )  # fmt: skip


@st.composite
def cache_cases(draw: st.DrawFn) -> Case:
    batch, capacity, new = draw(st.integers(1, 3)), draw(st.integers(1, 40)), draw(st.integers(0, 3))
    new = min(new, capacity)
    used = draw(st.tuples(*[st.integers(0, capacity - new)] * batch))
    page_size = draw(st.sampled_from((0, 0, 1, 4, 16)))
    lines = draw(st.permutations(range(batch + 2)))[:batch] if not page_size and draw(st.booleans()) else None
    return Case(
        layout="cache", batch=batch, seqlen_q=draw(st.integers(0, 5)), seqlen_k=capacity, used_k=used, new=new, page_size=page_size,
        leftpad=draw(st.none() | st.tuples(*(st.integers(0, n) for n in used))), batch_idx=None if lines is None else tuple(lines),
        **draw(features()),
    )  # fmt: skip


PLANS = st.fixed_dictionaries(
    {
        "tile_m": st.sampled_from((8, 16, 32)),
        "tile_n": st.integers(1, 40),
        "num_splits": st.integers(1, 6),
        "rescale_threshold": st.sampled_from((0.0, 3.0, 8.0)),
        "rescale_rows": st.sampled_from((0, 1, 8)),
    }
)


@settings(max_examples=150)
@given(padded_cases())
def test_padded(case: Case) -> None:
    judge.check(case, "auto", roundings=1.0)


@settings(max_examples=100)
@given(packed_cases())
def test_packed(case: Case) -> None:
    judge.check(case, "reference", roundings=1.0)


@settings(max_examples=60)
@given(packed_cases(paged=True))
def test_packed_pages(case: Case) -> None:
    judge.check(case, "auto", roundings=1.0)


@settings(max_examples=120)
@given(cache_cases())
def test_caches(case: Case) -> None:
    judge.check(case, "auto", roundings=1.0)


@settings(max_examples=150)
@given(padded_cases() | packed_cases(), PLANS)
def test_plans(case: Case, plan: dict[str, Any]) -> None:
    tiled.check(case, roundings=1.0, **plan)


@settings(max_examples=60)
@given(padded_cases(), PLANS, st.sampled_from((3, 4, 5)), st.integers(0, 16))
def test_plans_with_polynomials(case: Case, plan: dict[str, Any], degree: int, pairs: int) -> None:
    tiled.check(replace(case, dtype="bf16", grad_lse=False), roundings=1.0, exp2=Exp2Split(degree=degree, fma_pairs=pairs), **plan)


@settings(max_examples=60)
@given(
    st.integers(1, 30),
    st.integers(1, 30),
    st.none() | st.integers(0, 30),
    st.none() | st.integers(0, 30),
    st.sampled_from(("bottom-right", "top-left")),
)
def test_windows_see_what_they_draw(sq: int, sk: int, left: int | None, right: int | None, align: str) -> None:
    """``Mask.draw`` and attention agree, element by element."""
    mask = Window(left, right, align)
    out = attention(torch.zeros(1, sq, 1, 2), torch.zeros(1, sk, 1, 2), torch.eye(sk)[None, :, None], mask=mask)
    assert mask.draw(sq, sk) == "\n".join("".join("#" if x else "." for x in row) for row in out[0, :, 0].tolist())


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(1, 12), st.integers(1, 12)), min_size=1, max_size=4), st.booleans(), st.integers(0, 1000))
def test_packing_is_padding(lengths: list[tuple[int, int]], causal: bool, seed: int) -> None:
    """A packed call gives, sequence by sequence, what each gives alone."""
    g = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(sum(n[side] for n in lengths), 2, 4, generator=g) for side in (0, 1, 1))
    cu_q, cu_k = (torch.tensor([0, *(n[side] for n in lengths)]).cumsum(0).int() for side in (0, 1))
    out = attention_varlen(q, k, v, cu_q, cu_k, causal=causal)
    for b in range(len(lengths)):
        rows_q, rows_k = slice(cu_q[b], cu_q[b + 1]), slice(cu_k[b], cu_k[b + 1])
        alone = attention(q[None, rows_q], k[None, rows_k], v[None, rows_k], causal=causal)
        torch.testing.assert_close(out[rows_q], alone[0], rtol=1e-5, atol=1e-6)


@settings(max_examples=40)
@given(st.integers(1, 30), st.integers(1, 30), st.floats(-1000, 1000), st.integers(0, 1000))
def test_a_constant_added_to_all_logits_changes_lse_alone(sq: int, sk: int, shift: float, seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(1, n, 1, 4, generator=g, dtype=torch.float64) for n in (sq, sk, sk))
    bias = torch.full((1, 1, 1, 1), shift, dtype=torch.float64)
    (out, lse), (moved, lse_moved) = attention(q, k, v, return_lse=True), attention(q, k, v, bias=bias, return_lse=True)
    torch.testing.assert_close(moved, out, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(lse_moved, lse + shift, rtol=1e-9, atol=1e-9)
