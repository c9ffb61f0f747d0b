"""8-bit q, k and v with descales over every backend that takes them; descales differ from sequence to sequence and head to head."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

from tests.semantic.conftest import Cell, cells
from tests.support.cases import DESCALES, FLOAT8, STRIDES, Case
from tests.support.masks import MASKS

CASE = Case(dtype="e4m3", descale="bh")
LONG = replace(CASE, batch=2, seqlen_q=150, seqlen_k=301, heads=2, heads_kv=2)  # several tiles of 128 each way, none of them whole
PACKED = replace(CASE, layout="packed", batch=5, lengths_q=(7, 0, 20, 1, 7), lengths_k=(9, 6, 20, 0, 9))
CACHE = replace(CASE, layout="cache", batch=3, seqlen_q=1, seqlen_k=48, used_k=(5, 40, 23))


@cells(replace(CASE, dtype=dtype, descale=descale, mask=mask) for dtype in FLOAT8 for descale in DESCALES for mask in ("full", "causal"))
def test_descales(cell: Cell) -> None:
    cell.check()


@cells(
    replace(LONG, dtype=dtype, mask=mask, seqlen_q=sq, seqlen_k=sk, amplify=amplify)
    for dtype in FLOAT8
    for mask, (sq, sk) in zip(MASKS, itertools.cycle(((150, 301), (301, 150), (257, 257))))
    for amplify in (1.0, 3.0)  # rows of many weights alike, and rows of a few
)
def test_masks_over_several_tiles(cell: Cell) -> None:
    cell.check()


@cells(
    replace(CASE, seqlen_q=20, seqlen_k=131, mask=mask, dtype=dtype, **change)
    for mask in ("full", "causal")
    for dtype in FLOAT8
    for change in (
        {"scale": 0.0}, {"scale": -0.3}, {"scale": 2.0}, {"softcap": 0.5}, {"softcap": 10.0, "amplify": 4.0}, {"sink": True},
        {"softcap": 2.0, "scale": -1.0, "sink": True}, {"alibi": 1}, {"alibi": 2, "softcap": 3.0, "sink": True}, {"amplify": 8.0},
        {"bias": "bhqk"}, {"bias": "1h1k", "alibi": 2, "sink": True},
    )
)  # fmt: skip
def test_scores(cell: Cell) -> None:
    cell.check()


@cells(
    replace(CASE, heads=heads, heads_kv=heads_kv, seqlen_q=9, seqlen_k=140, mask=mask, sink=sink)
    for heads, heads_kv in ((1, 1), (6, 6), (6, 2), (12, 1), (24, 2), (15, 3))  # the query heads of a KV head packed into a tile's rows
    for mask, sink in (("full", False), ("causal", True), ("function", False))
)
def test_heads(cell: Cell) -> None:
    cell.check()


@cells(
    replace(CASE, batch=1, heads=4, heads_kv=2, seqlen_q=190, seqlen_k=333, head_dim=d, head_dim_v=dv, dtype=dtype, mask=mask)
    for d, dv in ((64, 0), (80, 0), (96, 0), (128, 0), (192, 128), (256, 0), (64, 256), (128, 16))
    for dtype, mask in (("e4m3", "causal"), ("e5m2", "full"))
)
def test_head_dims(cell: Cell) -> None:
    cell.check()


@cells(
    replace(CASE, batch=batch, seqlen_q=sq, seqlen_k=sk, heads=2, heads_kv=1, mask=mask)
    for batch, (sq, sk) in itertools.product((0, 3), ((0, 0), (0, 5), (5, 0), (1, 1), (1, 129), (129, 1), (128, 127), (256, 256)))
    for mask in ("full", "causal")
)
def test_sizes(cell: Cell) -> None:
    cell.check()


@cells(
    replace(CASE, batch=1, heads=heads, heads_kv=heads_kv, seqlen_q=seqlen_q, seqlen_k=1100, head_dim=64, dtype=dtype, mask=mask, sink=sink)
    for heads, heads_kv, seqlen_q in ((1, 1, 1), (8, 2, 3), (2, 1, 140))
    for dtype in FLOAT8
    for mask, sink in (("full", False), ("causal", True), ("window(17,None)", False))
)
def test_split_keys(cell: Cell) -> None:
    cell.check()


@cells(
    replace(CASE, batch=4, seqlen_q=33, seqlen_k=140, used_q=used_q, used_k=used_k, mask=mask, dtype=dtype)
    for used_q, used_k in ((None, (140, 17, 0, 1)), ((33, 0, 5, 5), None), ((33, 0, 5, 5), (3, 7, 0, 140)))
    for dtype, mask in (("e4m3", "causal"), ("e5m2", "window(5,2)"), ("e4m3", "document-2d"))
)
def test_seqused_with_nan_beyond(cell: Cell) -> None:
    cell.check()


@cells(replace(PACKED, mask=mask, dtype=dtype) for mask, dtype in zip(MASKS, itertools.cycle(FLOAT8)))
def test_packed_masks(cell: Cell) -> None:
    cell.check()


@cells(
    replace(PACKED, mask="causal", **change)
    for change in (
        {"tail_q": 3, "tail_k": 4}, {"used_q": (3, 0, 20, 0, 1)}, {"used_q": (3, 0, 20, 0, 1), "used_k": (9, 0, 1, 0, 2), "sink": True},
        {"alibi": 2, "softcap": 5.0}, {"bias": "bhqk"}, {"head_dim_v": 32}, {"strides": "packed_qkv", "lengths_k": PACKED.lengths_q},
        {"strides": "transposed"}, {"heads": 12, "heads_kv": 1}, {"descale": "1h"},
        {"batch": 2, "lengths_q": (140, 129), "lengths_k": (129, 300), "dtype": "e5m2"}, {"batch": 0, "lengths_q": (), "lengths_k": ()},
    )
)  # fmt: skip
def test_packed_features(cell: Cell) -> None:
    cell.check()


@cells(
    replace(PACKED, page_size=page_size, mask=mask, dtype=dtype, used_k=used_k)
    for page_size in (3, 16)
    for mask, dtype in (("full", "e4m3"), ("causal", "e5m2"))
    for used_k in (None, (9, 2, 17, 0, 1))
)
def test_packed_pages(cell: Cell) -> None:
    cell.check()


@cells(
    replace(CACHE, seqlen_q=seqlen_q, page_size=page_size, new=new, leftpad=leftpad, mask=mask)
    for seqlen_q, mask in ((1, "full"), (4, "causal"), (4, "window(5,2)"))
    for page_size in (0, 7, 16)
    for new in (0, 4)
    for leftpad in (None, (0, 11, 5))
)
def test_cache(cell: Cell) -> None:
    cell.check()


@cells(
    replace(CACHE, **change)
    for change in (
        {"used_k": None}, {"used_k": (0, 48, 1)}, {"batch_idx": (4, 0, 2)}, {"batch_idx": (1, 1, 0)}, {"dtype": "e5m2", "page_size": 16},
        {"sink": True, "mask": "causal", "seqlen_q": 3}, {"softcap": 4.0, "alibi": 2, "page_size": 16}, {"bias": "1h1k", "page_size": 16},
        {"heads": 12, "heads_kv": 1}, {"heads": 8, "heads_kv": 2, "page_size": 64, "seqlen_k": 1088, "used_k": (1000, 3, 700)},
        {"mask": "captured", "seqlen_q": 3}, {"seqlen_k": 300, "used_k": (299, 150, 12), "seqlen_q": 140, "mask": "causal"},
    )
)  # fmt: skip
def test_cache_features(cell: Cell) -> None:
    cell.check()


@cells(replace(CASE, strides=strides, seqlen_q=29, seqlen_k=29, mask=mask) for strides in STRIDES for mask in ("full", "causal"))
def test_strides(cell: Cell) -> None:
    cell.check()


def combinations(count: int) -> list[Case]:
    """Cases with every feature drawn at random, the same ones each time."""
    draw = random.Random(2603)
    lengths = (1, 7, 30, 64, 129, 140, 300)
    found = []
    for seed in range(count):
        heads_kv, batch = draw.choice((1, 2, 3)), draw.choice((1, 2, 3))
        sq, sk = draw.choice(lengths), draw.choice(lengths)
        many = {s: tuple(draw.randint(0, n) for _ in range(batch)) for s, n in (("q", sq), ("k", sk))}
        packed = {"layout": "packed", "lengths_q": many["q"], "lengths_k": many["k"], "tail_q": 2, "tail_k": 3}
        used = {"used_q": draw.choice((None, many["q"])), "used_k": draw.choice((None, many["k"]))}
        found.append(
            Case(
                batch=batch,
                heads=heads_kv * draw.choice((1, 2, 5)),
                heads_kv=heads_kv,
                head_dim=draw.choice((16, 32, 80)),
                head_dim_v=draw.choice((0, 0, 48)),
                dtype=draw.choice(tuple(FLOAT8)),
                descale=draw.choice(DESCALES),
                mask=draw.choice(tuple(MASKS)),
                scale=draw.choice((None, None, -0.4)),
                softcap=draw.choice((0.0, 0.0, 3.0)),
                sink=draw.random() < 0.4,
                alibi=draw.choice((0, 0, 1, 2)),
                bias=draw.choice(("", "", "", "bhqk", "1h1k", "b1q1")),
                amplify=draw.choice((1.0, 3.0)),
                seed=seed,
                **(packed if draw.random() < 0.4 else {"seqlen_q": sq, "seqlen_k": sk, **used}),
            )
        )
    return found


@cells(combinations(60))
def test_combinations(cell: Cell) -> None:
    cell.check()
