"""Predicates as expressions: what is traced computes what the function computes, and what cannot be is refused by name."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tandem_attn.spec.mask_tree import Expression, Opaque, has_data, lower, parse
from tandem_attn.spec.masks import Causal, Document, Full, Predicate, Window
from tandem_attn.spec.predicates import UntraceableError, trace

BATCH, HEADS, SEQLEN_Q, SEQLEN_K = 2, 3, 7, 9
SEEN = torch.rand(BATCH, HEADS, SEQLEN_Q, SEQLEN_K, generator=torch.Generator().manual_seed(0)) < 0.5
IDS = torch.arange(SEQLEN_K) % 4
SLOPES = torch.linspace(-1, 1, HEADS)
LIMIT = torch.tensor(3)


def near(i: Any, j: Any) -> Any:
    return (i - j).abs() < LIMIT


PREDICATES: dict[str, Callable[..., Any]] = {
    "tables": lambda b, h, i, j: SEEN[b, h, i, j],
    "view of a table": lambda b, h, i, j: SEEN[0][h, i, j] & ~SEEN[0][h, 0, j],
    "negative index": lambda b, h, i, j: SEEN[b, -1 - h, i, j],
    "helper": lambda b, h, i, j: near(i, j) | (j < 2),
    "arithmetic": lambda b, h, i, j: (i * 3 - j + h) % 4 < 2 + b,
    "round down": lambda b, h, i, j: ((i - j) // 3 + (i - j) % 3 < 1) ^ (j // -2 < i - 5),
    "bits": lambda b, h, i, j: ((i & 1) ^ (j >> 1) | (h << 1)) > 2,
    "reflected": lambda b, h, i, j: (5 - j < i) & (2 * i != 7) & (LIMIT > j),  # noqa: SIM300 - PyTorch's operator, not the symbol's
    "wide": lambda b, h, i, j: (i * 1_000_003 + j * 999_983) * 7919 % 1009 < 500,
    "where": lambda b, h, i, j: torch.where(IDS[j] == i % 4, i < 5, j > 3),
    "functions": lambda b, h, i, j: torch.logical_or(torch.minimum(i, j) < 2, torch.remainder(j, 3).eq(1)),
    "floats": lambda b, h, i, j: SLOPES[h] * 0.3 < i / 7 - j * 0.1,
    "constant": lambda b, h, i, j: True,
    "no index": lambda b, h, i, j: LIMIT < 4,
}

_OPERATORS: dict[str, Callable[..., Any]] = {
    "div": operator.truediv, "floordiv": operator.floordiv, "and": operator.and_, "or": operator.or_, "not": operator.invert,
    "shl": operator.lshift, "shr": operator.rshift, "min": torch.minimum, "max": torch.maximum, "where": torch.where,
}  # fmt: skip


def value(e: Expression, at: dict[str, Tensor], tables: dict[int, Tensor]) -> Any:
    """What an expression means, by PyTorch."""
    if e.kind in at:
        return at[e.kind]
    if e.kind == "constant":
        return e.number
    args = [value(x, at, tables) for x in e.args]
    if e.kind == "table":
        return tables[e.at][tuple(args)]
    return _OPERATORS.get(e.kind, getattr(operator, e.kind, None))(*args)  # type: ignore[misc]


def indices() -> dict[str, Tensor]:
    b, h, i, j = (torch.arange(n) for n in (BATCH, HEADS, SEQLEN_Q, SEQLEN_K))
    return {"b": b.view(-1, 1, 1, 1), "h": h.view(-1, 1, 1), "i": i.view(-1, 1), "j": j}


@pytest.mark.parametrize("name", PREDICATES)
def test_expression_means_the_function(name: str) -> None:
    fn = PREDICATES[name]
    traced = trace(fn)
    tree = parse(f"predicate({traced.code})")
    pointers = [place for place, kind in enumerate(tree.data) if kind.startswith("pointer")]
    tables = dict(zip(pointers, traced.tables, strict=True))
    found = torch.as_tensor(value(tree.root.seen, indices(), tables))  # type: ignore[arg-type]
    assert torch.equal(*torch.broadcast_tensors(found, torch.as_tensor(fn(*indices().values()))))


def test_products_that_32_bits_do_not_hold_are_marked() -> None:
    assert trace(lambda b, h, i, j: i * 3 + j < 5).code == "lt(add(mul(i,3),j),5)"
    assert trace(lambda b, h, i, j: i * 100 % 7 < j).code == "lt(mod64(mul64(i,100),7),j)"


def test_numbers_are_constants_and_tensors_are_read() -> None:
    limits, tensor = [3], torch.tensor(3)
    assert trace(lambda b, h, i, j: j < limits[0]).code == "lt(j,3)"
    limits[0] = 4
    assert trace(lambda b, h, i, j: j < limits[0]).code == "lt(j,4)"
    read = trace(lambda b, h, i, j: j < tensor)
    assert read.code == "lt64(j,#0:i64())"
    assert len(read.tables) == 1 and read.tables[0] is tensor


@pytest.mark.parametrize(
    ("fn", "words"),
    [
        (lambda b, h, i, j: i and j, "if, and, or, not"),
        (lambda b, h, i, j: 0 < i < 5, "chained comparison"),
        (lambda b, h, i, j: i, "a result that is an integer"),
        (lambda b, h, i, j: SEEN[b], "1 indices of a captured tensor with 4 dimensions"),
        (lambda b, h, i, j: torch.sin(i) < 1, "torch.sin"),
        (lambda b, h, i, j: i.float() < 1, "attribute 'float'"),
        (lambda b, h, i, j: SLOPES.double()[h] < 1, "float64"),
        (lambda b, h, i, j: IDS < j, "index it first"),  # noqa: SIM300
        (lambda b, h, i, j: (i < j) + (j < 3), "add of a boolean"),
        (lambda b, h, i, j: [1, 2][i] < j, "an index's value"),
        (lambda b, h, i, j: 1 / 0, "ZeroDivisionError"),
        (lambda b, h, i, j: torch.logical_and(i, j), "logical_and of what is no boolean"),
        (lambda b, h, i, j: i < 1 << 70, "more than 64 bits"),
        (lambda b, h, i, j: SEEN[0, 0, i < 3, 0], "an index that is no integer"),
    ],
)
def test_what_cannot_be_compiled_is_named(fn: Callable[..., Any], words: str) -> None:
    with pytest.raises(UntraceableError, match=words):
        trace(fn)


def test_calls_with_other_data_share_a_structure() -> None:
    masks = [
        Causal() & Document(torch.arange(n)) | Predicate(lambda b, h, i, j, m=m: SEEN[b, h, i, j] & (j < LIMIT))
        for n, m in ((5, 1), (6, 2))
    ]
    (one, of_one), (two, _) = (lower(mask) for mask in masks)
    assert one == two and hash(one) == hash(two)
    assert one.code == "or(and(window(None,0,bottom-right),document(i64,i64)),predicate(and(#0:i1(b,h,i,j),lt64(j,#1:i64()))))"
    assert [x.ndim for x in of_one] == [1, 1, 4, 0]
    assert all(isinstance(leaf, (Opaque, Window)) for leaf in one.leaves())


def test_masks_without_data_stay() -> None:
    mask = Window(3, 0) & Window(None, 1, "top-left")
    assert lower(mask) == (mask, ()) and not has_data(mask) and not has_data(Full())


def test_places_of_data() -> None:
    tree = parse("and(document(i32,i64),predicate(eq(#0:i64(j),#1:i64())))")
    assert tree.documents == 1
    assert [kind for kind in tree.data if kind.startswith("pointer")] == [
        "pointer i32",
        "pointer i64",
        "pointer i32",
        "pointer i64",
        "pointer i64",
    ]
    node = tree.root.b
    assert node is not None and node.seen is not None
    assert [tree.data[x.at] for x in node.seen.args] == ["pointer i64", "pointer i64"]


@pytest.mark.parametrize("text", ["predicate(frobnicate(i,j))", "predicate()", "full() and more"])
def test_wrong_structures_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="structure"):
        parse(text)
