"""Masks: block ranges are proved against the predicates by brute force over all small sizes, for every tile of every problem."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem_attn.spec.bands import BlockRange
from tandem_attn.spec.masks import BOTTOM_RIGHT, TOP_LEFT, And, Causal, Document, Full, Mask, Or, Predicate, Window, from_code

SIZES = range(10)
TILES = range(1, 5)
BOUNDS = (None, -2, -1, 0, 1, 3)
ALIGNMENTS = (BOTTOM_RIGHT, TOP_LEFT)

WINDOWS = [Window(left, right, align) for left in BOUNDS for right in BOUNDS for align in ALIGNMENTS]
PREDICATE = Predicate(lambda _b, _h, q, k: (q + k) % 3 != 1, name="thirds")
DOCUMENT = Document([0, 0, 1, 1, 1, 2, 2, 3, 3], [0, 1, 1, 1, 2, 2, 2, 2, 3])
COMBINED = [
    Causal() & Window(2, None),
    Causal(TOP_LEFT) & Causal(),
    Window(1, -1) | Window(-1, 1),
    Window(0, 0) | Window(None, -3),
    Window(None, 1) & (Window(2, 0) | Window(-2, 3)),
    (Causal() | Window(1, 1)) & Window(3, None, TOP_LEFT),
    Window(3, 2) & Window(-3, 4),
    Window(1, -2) | Window(2, 2),
    Causal() & PREDICATE,
    Window(2, 1) | PREDICATE,
    Causal() & DOCUMENT,
    DOCUMENT | Window(0, 0),
    (DOCUMENT & PREDICATE) | (Causal() & Window(1, None)),
]


def table(mask: Mask, seqlen_q: int, seqlen_k: int) -> list[list[bool]]:
    return [[bool(mask.allowed(0, 0, i, j, seqlen_q, seqlen_k)) for j in range(seqlen_k)] for i in range(seqlen_q)]


def transposed(rows: list[list[bool]], columns: int) -> list[list[bool]]:
    return [[row[j] for row in rows] for j in range(columns)]


def check_range(got: BlockRange, rows: list[list[bool]], tile: int, length: int, *, tight: bool, context: object) -> None:
    """``rows`` are the rows of one tile against all ``length`` columns."""
    assert got.start <= got.full_start <= got.full_stop <= got.stop, context
    assert got.start >= 0 and got.stop <= math.ceil(length / tile), context
    touched = {j // tile for row in rows for j, sees in enumerate(row) if sees}
    assert touched <= set(range(got.start, got.stop)), ("an allowed pair lies outside the range", context)
    for block in range(got.full_start, got.full_stop):
        assert (block + 1) * tile <= length, ("a full block ends beyond the columns", context)
        assert all(all(row[block * tile : (block + 1) * tile]) for row in rows), ("a full block holds a masked pair", context)
    if tight:
        assert (got.start, got.stop) == ((min(touched), max(touched) + 1) if touched else (0, 0)), ("the range is not tight", context)
        whole = [b for b in range(length // tile) if rows and all(all(row[b * tile : (b + 1) * tile]) for row in rows)]
        assert list(range(got.full_start, got.full_stop)) == whole, ("a full block is taken for a partial one", context)


def prove(mask: Mask, seqlen_q: int, seqlen_k: int, tile_m: int, tile_n: int, *, tight: bool) -> None:
    rows = table(mask, seqlen_q, seqlen_k)
    columns = transposed(rows, seqlen_k)
    for m in range(0, seqlen_q + tile_m, tile_m):  # one tile beyond the end too: it visits nothing
        got = mask.n_block_range(m, m + tile_m, tile_n, seqlen_q, seqlen_k)
        check_range(
            got, rows[m : m + tile_m], tile_n, seqlen_k, tight=tight, context=("n", mask.code, seqlen_q, seqlen_k, tile_m, tile_n, m, got)
        )
    for n in range(0, seqlen_k + tile_n, tile_n):
        got = mask.m_block_range(n, n + tile_n, tile_m, seqlen_q, seqlen_k)
        check_range(
            got,
            columns[n : n + tile_n],
            tile_m,
            seqlen_q,
            tight=tight,
            context=("m", mask.code, seqlen_q, seqlen_k, tile_m, tile_n, n, got),
        )


def small_problems() -> Iterator[tuple[int, int, int, int]]:
    return itertools.product(SIZES, SIZES, TILES, TILES)


@pytest.mark.parametrize("align", ALIGNMENTS)
@pytest.mark.parametrize("left", BOUNDS, ids=str)
def test_window_ranges_are_exact_for_all_small_sizes(left: int | None, align: str) -> None:
    for right in BOUNDS:
        for seqlen_q, seqlen_k, tile_m, tile_n in small_problems():
            prove(Window(left, right, align), seqlen_q, seqlen_k, tile_m, tile_n, tight=True)


def test_full_ranges_are_exact_for_all_small_sizes() -> None:
    for seqlen_q, seqlen_k, tile_m, tile_n in small_problems():
        prove(Full(), seqlen_q, seqlen_k, tile_m, tile_n, tight=True)


@pytest.mark.parametrize("mask", [*COMBINED, PREDICATE, DOCUMENT], ids=lambda mask: mask.code)
def test_other_ranges_cover_and_full_blocks_are_full_for_all_small_sizes(mask: Mask) -> None:
    for seqlen_q, seqlen_k, tile_m, tile_n in small_problems():
        prove(mask, seqlen_q, seqlen_k, tile_m, tile_n, tight=False)


@pytest.mark.parametrize("pair", list(itertools.product(WINDOWS[::7], WINDOWS[3::5])), ids=lambda pair: f"{pair[0].code} {pair[1].code}")
def test_pairs_of_windows(pair: tuple[Window, Window]) -> None:
    """An intersection of bands is a band: exact. A union need not be: covered."""
    for seqlen_q, seqlen_k in itertools.product((0, 1, 4, 7), (0, 1, 5, 8)):
        for tile_m, tile_n in ((1, 2), (2, 3), (3, 1)):
            prove(And(*pair), seqlen_q, seqlen_k, tile_m, tile_n, tight=True)
            prove(Or(*pair), seqlen_q, seqlen_k, tile_m, tile_n, tight=False)


LEAVES = st.one_of(
    st.builds(Window, st.sampled_from([None, *range(-9, 60)]), st.sampled_from([None, *range(-9, 60)]), st.sampled_from(ALIGNMENTS)),
    st.just(Full()),
    st.just(PREDICATE),
)
TREES = st.recursive(LEAVES, lambda inner: st.one_of(st.builds(And, inner, inner), st.builds(Or, inner, inner)), max_leaves=5)


@settings(max_examples=200, deadline=None)
@given(TREES, st.integers(0, 90), st.integers(0, 90), st.sampled_from([1, 5, 16, 32]), st.sampled_from([1, 7, 16, 64]))
def test_any_combination_of_any_size(mask: Mask, seqlen_q: int, seqlen_k: int, tile_m: int, tile_n: int) -> None:
    prove(mask, seqlen_q, seqlen_k, tile_m, tile_n, tight=False)


@settings(max_examples=100, deadline=None)
@given(
    LEAVES.filter(lambda leaf: leaf is not PREDICATE),
    st.integers(0, 90),
    st.integers(0, 90),
    st.sampled_from([1, 16]),
    st.sampled_from([7, 64]),
)
def test_bands_of_any_size_are_exact(mask: Mask, seqlen_q: int, seqlen_k: int, tile_m: int, tile_n: int) -> None:
    prove(mask, seqlen_q, seqlen_k, tile_m, tile_n, tight=True)


# The meaning of masks, their text form and their errors.


def test_causal_alignments() -> None:
    assert Causal().draw(2, 4) == "###.\n####"
    assert Causal(TOP_LEFT).draw(2, 4) == "#...\n##.."
    assert Causal().draw(4, 2) == "..\n..\n#.\n##"


def test_window_counts_both_sides_of_the_diagonal() -> None:
    assert Window(1, 1).draw(4, 4) == "##..\n###.\n.###\n..##"
    assert Window(None, -1).draw(3, 3) == "...\n#..\n##."


def test_combinations_and_simplification() -> None:
    for i, j in itertools.product(range(6), range(6)):
        at = (0, 0, i, j, 6, 6)
        assert (Causal() & PREDICATE).allowed(*at) == (Causal().allowed(*at) and PREDICATE.allowed(*at))
        assert (Causal() | PREDICATE).allowed(*at) == (Causal().allowed(*at) or PREDICATE.allowed(*at))
    assert (Full() & Causal()) == Causal() == (Causal() & Full())
    assert (Full() | Causal()) == Full() == (Causal() | Full())
    assert list((Causal() & (PREDICATE | DOCUMENT)).leaves()) == [Causal(), PREDICATE, DOCUMENT]
    with pytest.raises(TypeError):
        Causal() & 1  # type: ignore[operator]


def test_document_reads_ids_by_batch() -> None:
    ids = Document([[0, 0, 1], [0, 1, 1]])
    assert [ids.allowed(b, 0, 0, 1, 3, 3) for b in (0, 1)] == [True, False]
    assert DOCUMENT.draw(3, 3) == "#..\n#..\n.##"


@pytest.mark.parametrize("mask", [Full(), *WINDOWS[::5], PREDICATE, DOCUMENT, *COMBINED], ids=lambda mask: mask.code)
def test_code_and_tensors_give_the_mask_back(mask: Mask) -> None:
    again = from_code(mask.code, mask.tensors)
    assert again.code == mask.code and type(again) is type(mask)
    assert len(again.tensors) == len(mask.tensors) and all(a is b for a, b in zip(again.tensors, mask.tensors, strict=True))
    assert table(again, 9, 9) == table(mask, 9, 9)


@settings(max_examples=100, deadline=None)
@given(st.recursive(LEAVES, lambda inner: st.builds(operator.and_, inner, inner) | st.builds(operator.or_, inner, inner), max_leaves=5))
def test_code_of_any_combination(mask: Mask) -> None:
    """Built by operators, as users do: they may simplify, and the text then gives the simplified mask back."""
    assert from_code(mask.code, mask.tensors) == mask


def test_wrong_masks_are_named() -> None:
    gone = Predicate(lambda _b, _h, q, k: q == k).code.replace(":", ":9")
    for code, message in (("circle()", "unknown mask 'circle'"), ("full()x", "trailing text 'x'"), (gone, "no longer exists")):
        with pytest.raises(ValueError, match=message):
            from_code(code)
    with pytest.raises(TypeError, match="left must be an int or None"):
        Window(1.5)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="right must be an int or None"):
        Window(1, True)
    with pytest.raises(ValueError, match="align must be one of"):
        Window(1, 1, "middle")
    with pytest.raises(TypeError, match="fn must be callable"):
        Predicate("q >= k")  # type: ignore[arg-type]
