"""Diagonal bands: the part of a mask that can be decided without looking at single elements.

A band holds the pairs (i, j) with ``i + lo <= j <= i + hi``; ``None`` is unbounded. Every mask has an outer band (it contains the mask)
and may have an inner band (the mask contains it). The outer band says which key blocks a query tile must visit, the inner one which of
them need no element mask. Both claims are proved by brute force in ``tests/spec/test_masks.py``.
"""

from __future__ import annotations

from dataclasses import dataclass


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


@dataclass(frozen=True)
class Band:
    """Pairs (i, j) with ``i + lo <= j <= i + hi``; ``None`` is unbounded on that side."""

    lo: int | None = None
    hi: int | None = None

    @property
    def empty(self) -> bool:
        return self.lo is not None and self.hi is not None and self.lo > self.hi

    def transposed(self) -> Band:
        """The same pairs seen from the keys: i between ``j - hi`` and ``j - lo``."""
        return Band(None if self.hi is None else -self.hi, None if self.lo is None else -self.lo)

    def intersect(self, other: Band) -> Band:
        lo = max((x for x in (self.lo, other.lo) if x is not None), default=None)
        hi = min((x for x in (self.hi, other.hi) if x is not None), default=None)
        return Band(lo, hi)

    def hull(self, other: Band) -> Band:
        """The smallest band that contains both."""
        if self.empty:
            return other
        if other.empty:
            return self
        lo = None if self.lo is None or other.lo is None else min(self.lo, other.lo)
        hi = None if self.hi is None or other.hi is None else max(self.hi, other.hi)
        return Band(lo, hi)

    def touches(self, other: Band) -> bool:
        """Whether the union of the two bands is a band."""
        above = self.hi is None or other.lo is None or other.lo <= self.hi + 1
        below = other.hi is None or self.lo is None or self.lo <= other.hi + 1
        return above and below


@dataclass(frozen=True)
class Bounds:
    """``outer`` contains the mask; the mask contains ``inner`` (None: nothing is known)."""

    outer: Band
    inner: Band | None

    def __and__(self, other: Bounds) -> Bounds:
        inner = None if self.inner is None or other.inner is None else self.inner.intersect(other.inner)
        return Bounds(self.outer.intersect(other.outer), inner)

    def __or__(self, other: Bounds) -> Bounds:
        return Bounds(self.outer.hull(other.outer), _inner_of_union(self.inner, other.inner))

    def transposed(self) -> Bounds:
        return Bounds(self.outer.transposed(), None if self.inner is None else self.inner.transposed())


def _inner_of_union(a: Band | None, b: Band | None) -> Band | None:
    if a is None or a.empty:
        return b
    if b is None or b.empty or not a.touches(b):
        return a  # the union is no band: one of the two is a valid, smaller claim
    return a.hull(b)


@dataclass(frozen=True)
class BlockRange:
    """Blocks one tile visits: ``[start, stop)``; those in ``[full_start, full_stop)`` need no element mask.

    ``start <= full_start <= full_stop <= stop`` always holds, and an empty range is (0, 0, 0, 0).
    """

    start: int
    full_start: int
    full_stop: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    def is_full(self, block: int) -> bool:
        return self.full_start <= block < self.full_stop


_EMPTY = BlockRange(0, 0, 0, 0)


def block_range(bounds: Bounds, first: int, last: int, tile: int, length: int) -> BlockRange:
    """Blocks of ``tile`` columns that rows ``first..last`` (inclusive) visit among ``length`` columns."""
    outer, inner = bounds.outer, bounds.inner
    if first > last or length <= 0 or outer.empty:
        return _EMPTY
    low = 0 if outer.lo is None else max(0, first + outer.lo)
    high = length if outer.hi is None else min(length, last + outer.hi + 1)
    if low >= high:
        return _EMPTY
    start, stop = low // tile, _ceil_div(high, tile)
    if inner is None or inner.empty:
        return BlockRange(start, stop, stop, stop)
    # A full block is allowed for every row, and lies wholly inside the columns.
    full_start = start if inner.lo is None else max(start, _ceil_div(max(0, last + inner.lo), tile))
    full_stop = length // tile if inner.hi is None else min(length, first + inner.hi + 1) // tile
    full_stop = min(full_stop, stop)
    if full_start >= full_stop:
        return BlockRange(start, stop, stop, stop)
    return BlockRange(start, full_start, full_stop, stop)
