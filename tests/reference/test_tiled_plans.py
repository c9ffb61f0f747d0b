"""The tiled reference under other Plans: every field it reads, on and off, against the truth."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tandem_attn.reference import chunk, layout, tiled
from tandem_attn.reference.layout import Group
from tandem_attn.spec.exp2 import Exp2Split
from tandem_attn.spec.inputs import Inputs
from tandem_attn.spec.problem import Problem
from tests.support import judge
from tests.support.cases import Case, build
from tests.support.tiled import check, run

BASE = Case(batch=2, seqlen_q=45, seqlen_k=61, heads=4, heads_kv=2, head_dim=8, grad_lse=True)
MASKS = (
    "full",
    "causal",
    "top-left",
    "window(5,2)",
    "window(17,None)",
    "window-behind",
    "document&causal",
    "captured",
    "function",
    "window|prefix",
    "nothing",
)


@pytest.mark.parametrize("tile", [(1, 1), (16, 16), (32, 8), (7, 13), (64, 64)])
@pytest.mark.parametrize("mask", MASKS)
def test_tile_sizes(tile: tuple[int, int], mask: str) -> None:
    case = BASE if tile != (1, 1) else replace(BASE, seqlen_q=9, seqlen_k=12)
    check(replace(case, mask=mask, sink=True, alibi=1, bias="bhqk"), tile_m=tile[0], tile_n=tile[1])


@pytest.mark.parametrize("num_splits", [1, 2, 3, 7, 50])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("sink", [False, True])
def test_splits_of_the_keys(num_splits: int, mask: str, sink: bool) -> None:
    check(replace(BASE, mask=mask, sink=sink, backward=False), tile_m=16, tile_n=8, num_splits=num_splits)


@pytest.mark.parametrize("threshold", [0.0, 1.0, 8.0])
@pytest.mark.parametrize("rows", [0, 1, 4, 32])
@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
@pytest.mark.parametrize("amplify", [1.0, 6.0])
def test_conditional_rescale(threshold: float, rows: int, dtype: str, amplify: float) -> None:
    check(
        replace(BASE, dtype=dtype, mask="causal", amplify=amplify, grad_lse=False, sink=True),
        tile_m=32, tile_n=8, rescale_threshold=threshold, rescale_rows=rows,
    )  # fmt: skip


def test_rescale_rows_of_a_whole_tile() -> None:
    check(replace(BASE, mask="captured", amplify=4.0), tile_m=48, tile_n=8, rescale_rows=48)


@pytest.mark.parametrize("threshold", [0.0, 8.0])
def test_rescale_keeps_its_promise(threshold: float) -> None:
    """Maxima that grow from block to block by less than the threshold leave P up to 2^threshold, and the result right all the same."""
    case = replace(BASE, batch=1, heads=1, heads_kv=1, backward=False, grad_lse=False)
    call = build(case)
    call.leaves["q"].fill_(1.0)
    call.leaves["k"].copy_(
        (torch.arange(case.seqlen_k) / 30)[None, :, None, None].expand_as(call.leaves["k"])
    )  # logits grow along the keys
    with torch.no_grad():
        got = run(call, {"tile_m": 16, "tile_n": 4, "rescale_threshold": threshold, "rescale_rows": 1})
    s = call.leaves["q"][0, :, 0].double() @ call.leaves["k"][0, :, 0].double().T * 8**-0.5
    torch.testing.assert_close(got["out"][0, :, 0].double(), s.softmax(-1) @ call.leaves["v"][0, :, 0].double(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(got["lse"][0, 0].double(), s.logsumexp(-1), rtol=1e-6, atol=1e-6)


SPLITS = [
    Exp2Split(degree=degree, fma_pairs=pairs, first_pair=first)
    for degree, (pairs, first) in itertools.product((3, 4, 5), ((4, 0), (4, 12), (16, 0)))
]


@pytest.mark.parametrize("split", SPLITS, ids=lambda s: f"degree{s.degree}-{s.fma_pairs}from{s.first_pair}")
@pytest.mark.parametrize("mask", ["full", "causal", "function"])
def test_polynomial_exp2_serves_16_bit_inputs(split: Exp2Split, mask: str) -> None:
    for dtype in ("fp16", "bf16"):
        check(replace(BASE, dtype=dtype, mask=mask, grad_lse=False), tile_m=32, tile_n=32, exp2=split)


def test_polynomial_exp2_is_what_differs() -> None:
    """The planned columns go through the polynomial: with degree 3 a float32 result shows its error, with degree 5 hardly."""
    call = build(replace(BASE, backward=False, grad_lse=False))
    exact = run(call, {"tile_n": 32})["out"]
    errors = [float((run(call, {"tile_n": 32, "exp2": Exp2Split(degree=d, fma_pairs=8)})["out"] - exact).abs().max()) for d in (3, 4, 5)]
    assert 1e-5 < errors[0] < 3e-4 and 3e-7 < errors[1] < 1e-5 and errors[2] < 3e-6, errors


PACKED = Case(layout="packed", batch=4, lengths_q=(7, 0, 20, 5), lengths_k=(9, 6, 20, 0), head_dim=8, tail_q=2, tail_k=3, grad_lse=True)
PADDED = [
    replace(BASE, used_q=(45, 7), used_k=(3, 61)),
    replace(BASE, used_k=(0, 40)),
    PACKED,
    replace(PACKED, used_q=(3, 0, 20, 1), used_k=(9, 0, 11, 0)),
]


@pytest.mark.parametrize("mask", ["full", "causal", "window(5,2)", "top-left", "captured", "document-2d"])
@pytest.mark.parametrize("case", PADDED, ids=str)
def test_lengths_that_no_host_reads(case: Case, mask: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The way of other devices, on the CPU: one group padded to the upper bound, lengths only as tensors."""

    def upper_bound(problem: Problem, inputs: Inputs) -> list[Group]:
        return [layout._upper_bound(problem, inputs)]

    monkeypatch.setattr(tiled, "groups", upper_bound)
    check(replace(case, mask=mask, sink=True), tile_m=16, tile_n=16)
    check(replace(case, mask=mask, bias="bhqk", alibi=2), tile_m=16, tile_n=16)


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("layout_name", ["packed", "cache"])
def test_pages_that_no_host_reads(layout_name: str, page_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def upper_bound(problem: Problem, inputs: Inputs) -> list[Group]:
        return [layout._upper_bound(problem, inputs)]

    monkeypatch.setattr(tiled, "groups", upper_bound)
    cache = Case(
        layout="cache",
        batch=3,
        seqlen_q=3,
        seqlen_k=48,
        head_dim=8,
        used_k=(5, 40, 23),
        page_size=page_size,
        mask="causal",
        leftpad=(1, 0, 7),
    )
    packed = replace(PACKED, page_size=page_size, mask="causal", tail_k=0, used_k=(9, 2, 17, 0))
    judge.check(cache if layout_name == "cache" else packed, "reference")


@pytest.mark.parametrize("elements", [1, 2000, 6000])
@pytest.mark.parametrize("case", [BASE, PACKED], ids=["padded", "packed"])
def test_chunks_of_heads_and_sequences(case: Case, elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Long calls are cut into chunks of key heads and batch entries; here short ones are cut alike."""
    monkeypatch.setattr(chunk, "_TILE_ELEMENTS", elements)
    check(replace(case, heads=6, heads_kv=3, mask="captured", sink=True, alibi=2, bias="bhqk", softcap=3.0), tile_m=16, tile_n=16)
    check(replace(case, heads=6, heads_kv=3, mask="function", sink=True, alibi=1, bias="11qk"), tile_m=16, tile_n=16)


def test_memory_order_does_not_matter() -> None:
    call = build(BASE)
    first = run(call, {"tile_m": 16, "tile_n": 16})
    call.leaves = {name: _shuffled_memory(x) for name, x in call.leaves.items()}
    assert all(torch.equal(a, b) for a, b in zip(first.values(), run(call, {"tile_m": 16, "tile_n": 16}).values(), strict=True))


def _shuffled_memory(x: Tensor) -> Tensor:
    return x.permute(*reversed(range(x.ndim))).contiguous().permute(*reversed(range(x.ndim)))
