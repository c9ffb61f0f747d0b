"""One suite for every backend: each test is a list of cases, each case runs on each backend that supports it."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

from tests.semantic.conftest import Cell, cells
from tests.support.cases import DTYPES, STRIDES, Case
from tests.support.masks import MASKS

LONG = Case(batch=1, seqlen_q=150, seqlen_k=301, heads=2, heads_kv=1, head_dim=16)  # several tiles of 128 each way, none of them whole


@cells(Case(dtype=dtype, mask=mask, grad_lse=grad_lse) for dtype in DTYPES for mask in ("full", "causal") for grad_lse in (False, True))
def test_dtypes(cell: Cell) -> None:
    cell.check()


@cells(replace(LONG, dtype=dtype, seqlen_k=seqlen_k) for dtype in DTYPES for seqlen_k in (150, 301))
def test_dtypes_over_several_tiles(cell: Cell) -> None:
    cell.check()


@cells(Case(seqlen_q=sq, seqlen_k=sk, mask=mask) for mask in MASKS for sq, sk in ((37, 53), (53, 37), (40, 40), (1, 30), (30, 1)))
def test_masks(cell: Cell) -> None:
    cell.check()


@cells(
    replace(LONG, mask=mask, seqlen_q=sq, seqlen_k=sk, grad_lse=True, dtype=dtype)
    for mask in MASKS
    for (sq, sk), dtype in zip(((150, 301), (301, 150), (257, 257)), ("fp32", "bf16", "fp64"), strict=True)
)
def test_masks_over_several_tiles(cell: Cell) -> None:
    cell.check()


@cells(
    Case(heads=heads, heads_kv=heads_kv, seqlen_q=9, seqlen_k=14, head_dim=8, mask=mask, sink=sink)
    for heads, heads_kv in ((1, 1), (6, 6), (6, 3), (6, 2), (4, 1), (12, 1), (24, 2), (15, 3), (96, 8))
    for mask, sink in (("full", False), ("causal", True), ("function", False))
)
def test_heads(cell: Cell) -> None:
    cell.check()


@cells(
    Case(head_dim=d, head_dim_v=dv, heads=2, heads_kv=1, seqlen_q=11, seqlen_k=19, dtype=dtype)
    for d, dv in (
        (1, 1),
        (3, 3),
        (8, 8),
        (33, 33),
        (64, 64),
        (80, 80),
        (128, 128),
        (256, 256),
        (128, 96),
        (96, 128),
        (5, 1),
        (1, 7),
        (192, 128),
    )
    for dtype in ("fp32", "bf16")
)
def test_head_dims(cell: Cell) -> None:
    cell.check()


@cells(
    Case(batch=1, heads=4, heads_kv=2, seqlen_q=190, seqlen_k=333, head_dim=d, head_dim_v=dv, dtype=dtype, mask=mask, backward=False)
    for d, dv in ((64, 0), (72, 0), (96, 0), (128, 0), (160, 0), (192, 0), (192, 128), (256, 0), (64, 256), (128, 64), (256, 16))
    for dtype, mask in (("bf16", "full"), ("bf16", "causal"), ("fp16", "window(17,None)"))
)
def test_head_dims_over_several_tiles(cell: Cell) -> None:
    cell.check()


@cells(
    Case(batch=batch, seqlen_q=sq, seqlen_k=sk, heads=2, heads_kv=1, head_dim=8, mask=mask, grad_lse=True)
    for batch, (sq, sk), mask in itertools.product(
        (0, 1, 3), ((0, 0), (0, 5), (5, 0), (1, 1), (1, 129), (129, 1), (127, 128), (128, 127), (129, 255), (256, 256)), ("full", "causal")
    )
)
def test_sizes(cell: Cell) -> None:
    cell.check()


@cells(
    Case(seqlen_q=20, seqlen_k=31, mask=mask, dtype=dtype, **change)
    for mask in ("full", "causal")
    for dtype in ("fp32", "fp16")
    for change in (
        {"scale": 0.0}, {"scale": -0.3}, {"scale": 2.0}, {"scale": 1e-4}, {"softcap": 0.5}, {"softcap": 10.0}, {"sink": True},
        {"softcap": 2.0, "scale": -1.0, "sink": True}, {"alibi": 1}, {"alibi": 2}, {"alibi": 2, "softcap": 3.0, "sink": True},
        {"amplify": 8.0}, {"amplify": 8.0, "softcap": 30.0}, {"amplify": 1e-3},
    )
)  # fmt: skip
def test_scores(cell: Cell) -> None:
    cell.check()


@cells(
    Case(batch=3, seqlen_q=sq, seqlen_k=sk, bias="".join(letters), **change)
    for letters in itertools.product("b1", "h1", "q1", "k1")
    for sq, sk, change in (
        (7, 11, {}),
        (9, 5, {"mask": "causal", "softcap": 2.0, "sink": True, "grad_lse": True, "dtype": "bf16"}),
        (5, 9, {"mask": "window(5,2)", "alibi": 2, "used_q": (5, 0, 3), "used_k": (4, 9, 0)}),
    )
)
def test_bias(cell: Cell) -> None:
    cell.check()


@cells(
    replace(LONG, heads=4, heads_kv=2, bias=bias, mask="causal", dtype=dtype, alibi=1)
    for bias in ("bhqk", "1h1k", "b1q1")
    for dtype in ("fp32", "bf16")
)
def test_bias_over_several_tiles(cell: Cell) -> None:
    cell.check()


@cells(
    Case(batch=4, seqlen_q=33, seqlen_k=40, used_q=used_q, used_k=used_k, mask=mask, grad_lse=True, dtype=dtype)
    for used_q, used_k in ((None, (40, 17, 0, 1)), ((33, 0, 5, 5), None), ((33, 0, 5, 5), (3, 7, 0, 40)))
    for mask in ("full", "causal", "top-left", "window(5,2)", "document-2d", "captured")
    for dtype in ("fp32", "bf16")
)
def test_seqused_with_nan_beyond(cell: Cell) -> None:
    cell.check()


PACKED = Case(layout="packed", batch=5, lengths_q=(7, 0, 20, 1, 7), lengths_k=(9, 6, 20, 0, 9), head_dim=8)


@cells(replace(PACKED, mask=mask, grad_lse=True, dtype=dtype) for mask in MASKS for dtype in ("fp32", "bf16"))
def test_packed_masks(cell: Cell) -> None:
    cell.check()


@cells(
    replace(PACKED, mask="causal", **change)
    for change in (
        {"tail_q": 3}, {"tail_k": 4}, {"tail_q": 1, "tail_k": 1, "grad_lse": True}, {"used_q": (3, 0, 20, 0, 1)},
        {"used_k": (9, 0, 1, 0, 2)},
        {"used_q": (3, 0, 20, 0, 1), "used_k": (9, 0, 1, 0, 2), "tail_q": 2, "tail_k": 2, "sink": True}, {"sink": True}, {"alibi": 1},
        {"alibi": 2, "softcap": 5.0}, {"bias": "bhqk"}, {"bias": "11qk"}, {"bias": "b111"}, {"head_dim_v": 5},
        {"strides": "packed_qkv", "lengths_k": PACKED.lengths_q},
        {"strides": "transposed"}, {"strides": "every_second"}, {"strides": "last_first"}, {"strides": "unaligned"},
        {"grad_out": "expanded"}, {"grad_out": "transposed"}, {"grad_out": "last"}, {"deterministic": True}, {"heads": 12, "heads_kv": 1},
    )
)  # fmt: skip
def test_packed_features(cell: Cell) -> None:
    cell.check()


@cells(
    [
        Case(layout="packed", batch=0, head_dim=8),
        Case(layout="packed", batch=0, head_dim=8, tail_q=3, tail_k=2),
        Case(layout="packed", batch=1, lengths_q=(0,), lengths_k=(0,), head_dim=8),
        Case(layout="packed", batch=1, lengths_q=(150,), lengths_k=(0,), head_dim=8, sink=True, grad_lse=True),
        Case(layout="packed", batch=2, lengths_q=(140, 129), lengths_k=(129, 300), head_dim=8, mask="causal", dtype="bf16"),
        Case(layout="packed", batch=6, lengths_q=(4,) * 6, lengths_k=(4,) * 6, head_dim=8, mask="captured"),
    ]
)
def test_packed_sizes(cell: Cell) -> None:
    cell.check()


@cells(
    replace(PACKED, page_size=page_size, mask=mask, used_k=used_k)
    for page_size in (1, 3, 16)
    for mask in ("full", "causal", "window(5,2)", "captured")
    for used_k in (None, (9, 2, 17, 0, 1))
)
def test_packed_pages(cell: Cell) -> None:
    cell.check()


CACHE = Case(layout="cache", batch=3, seqlen_q=1, seqlen_k=48, head_dim=8, used_k=(5, 40, 23))


@cells(
    replace(CACHE, seqlen_q=seqlen_q, page_size=page_size, new=new, leftpad=leftpad, mask=mask)
    for seqlen_q in (1, 4)
    for page_size in (0, 1, 7, 16)
    for new in (0, 1, 4)
    for leftpad in (None, (0, 11, 5))
    for mask in ("full", "causal", "window(5,2)")
)
def test_cache(cell: Cell) -> None:
    cell.check()


@cells(
    replace(CACHE, **change)
    for change in (
        {"used_k": None}, {"used_k": (0, 48, 1)}, {"used_k": (0, 0, 0), "new": 48}, {"batch_idx": (4, 0, 2)}, {"batch_idx": (1, 1, 0)},
        {"batch_idx": (4, 0, 2), "new": 2, "leftpad": (1, 2, 3), "seqlen_q": 2, "mask": "causal"}, {"leftpad": (5, 0, 3)},
        {"sink": True, "mask": "causal", "seqlen_q": 3}, {"softcap": 4.0}, {"alibi": 1, "seqlen_q": 2}, {"alibi": 2, "page_size": 16},
        {"bias": "bhqk", "seqlen_q": 2}, {"bias": "1h1k", "page_size": 16}, {"scale": -0.5}, {"head_dim_v": 12},
        {"heads": 12, "heads_kv": 1},
        {"mask": "captured", "seqlen_q": 3}, {"mask": "document-2d", "seqlen_q": 3}, {"dtype": "fp16"},
        {"dtype": "bf16", "page_size": 16, "new": 3},
        {"dtype": "fp64", "page_size": 5}, {"seqlen_k": 300, "used_k": (299, 150, 12), "seqlen_q": 140, "mask": "causal"},
        {"seqlen_q": 0}, {"batch": 0, "used_k": None},
    )
)  # fmt: skip
def test_cache_features(cell: Cell) -> None:
    cell.check()


@cells(
    Case(strides=strides, grad_out=grad_out, seqlen_q=sq, seqlen_k=sk, head_dim=8, mask=mask)
    for strides in STRIDES
    for grad_out in ("contiguous", "expanded", "transposed", "last")
    for mask in ("full", "causal")
    for sq, sk in ((29, 29),)
)
def test_strides(cell: Cell) -> None:
    cell.check()


@cells(Case(dtype=dtype, deterministic=True, mask=mask) for dtype in ("fp32", "bf16") for mask in ("full", "causal", "captured"))
def test_deterministic(cell: Cell) -> None:
    cell.check()


def combinations(count: int) -> list[Case]:
    """Cases with every feature drawn at random, the same ones each time."""
    draw = random.Random(2603)
    lengths = (1, 2, 7, 30, 64, 129, 140)
    found = []
    for seed in range(count):
        heads_kv, batch = draw.choice((1, 2, 3)), draw.choice((1, 2, 3))
        packed = draw.random() < 0.4
        sq, sk = draw.choice(lengths), draw.choice(lengths)
        many = {s: tuple(draw.randint(0, n) for _ in range(batch)) for s, n in (("q", sq), ("k", sk))}
        shape = (
            {
                "layout": "packed",
                "lengths_q": many["q"],
                "lengths_k": many["k"],
                "tail_q": draw.choice((0, 2)),
                "tail_k": draw.choice((0, 3)),
            }
            if packed
            else {"seqlen_q": sq, "seqlen_k": sk, "used_q": draw.choice((None, many["q"])), "used_k": draw.choice((None, many["k"]))}
        )
        found.append(
            Case(
                batch=batch,
                heads=heads_kv * draw.choice((1, 2, 5)),
                heads_kv=heads_kv,
                head_dim=draw.choice((4, 16, 24)),
                head_dim_v=draw.choice((0, 0, 9)),
                dtype=draw.choice(tuple(DTYPES)),
                mask=draw.choice(tuple(MASKS)),
                scale=draw.choice((None, None, -0.4)),
                softcap=draw.choice((0.0, 0.0, 3.0)),
                sink=draw.random() < 0.4,
                alibi=draw.choice((0, 0, 1, 2)),
                bias=draw.choice(("", "", "bhqk", "1h1k", "b1q1")),
                grad_lse=draw.random() < 0.5,
                deterministic=draw.random() < 0.3,
                grad_out=draw.choice(("contiguous", "contiguous", "transposed", "last")),
                seed=seed,
                **shape,
            )
        )
    return found


@cells(combinations(250))
def test_combinations(cell: Cell) -> None:
    cell.check(roundings=0.5)  # some have a few elements only
