"""Schedules: the order of tiles as a bijection between a linear index and coordinates.

A persistent kernel evaluates ``coords`` on the device; these classes say what it must give. A tile is one block of rows (forward: query
rows of a CTA or CTA pair; backward: keys) of one head of one sequence, and one split of its key range.
"""

from __future__ import annotations

import bisect
import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tandem_attn.spec.arch import Arch
from tandem_attn.spec.plan import FORWARD, Plan, ScheduleKind
from tandem_attn.spec.problem import Problem


class Tile(NamedTuple):
    """Coordinates of one work item."""

    block: int  # m_block in the forward, n_block in the backward
    head: int  # with pack_gqa: the KV head
    batch: int
    split: int = 0


@dataclass(frozen=True)
class DenseSchedule:
    """Same number of blocks in every sequence. Section by section; in a section block by block, each for all its heads and splits.

    Heads count through the batch: pair ``batch * heads + head``. A section is ``section`` pairs (the last may be smaller), so K and V of
    one section are read from HBM once and stay in L2 while all its blocks run. ``section=1`` works head after head, ``section=0`` is one
    section of everything.
    """

    blocks: int
    heads: int
    batch: int
    splits: int = 1
    section: int = 1
    descending: bool = False  # last block first

    def __post_init__(self) -> None:
        for name, minimum in (("blocks", 0), ("heads", 1), ("batch", 0), ("splits", 1), ("section", 0)):
            if getattr(self, name) < minimum:
                raise ValueError(f"{name} must be >= {minimum}, got {getattr(self, name)}")

    @property
    def num_tiles(self) -> int:
        return self.blocks * self.heads * self.batch * self.splits

    def coords(self, index: int) -> Tile:
        """The tile worked on at position ``index``.

        Raises:
            IndexError: index outside [0, num_tiles).
        """
        _check_index(index, self.num_tiles)
        section, within = divmod(index, self._section * self.splits * self.blocks)
        first = section * self._section
        size = min(self._section, self._pairs - first)
        rank, within = divmod(within, size * self.splits)
        pair, split = divmod(within, self.splits)
        batch, head = divmod(first + pair, self.heads)
        return Tile(self._block(rank), head, batch, split)

    def index(self, tile: Tile) -> int:
        """The position at which ``tile`` is worked on; the inverse of ``coords``."""
        pair = tile.batch * self.heads + tile.head
        first = pair - pair % self._section
        size = min(self._section, self._pairs - first)
        rank = self._block(tile.block)
        return first * self.splits * self.blocks + (rank * size + pair - first) * self.splits + tile.split

    @property
    def _pairs(self) -> int:
        return self.heads * self.batch

    @property
    def _section(self) -> int:
        return min(self.section or self._pairs, self._pairs) or 1

    def _block(self, rank: int) -> int:
        return self.blocks - 1 - rank if self.descending else rank  # its own inverse


@dataclass(frozen=True)
class VarlenSchedule:
    """Sequences of different lengths, one after the other in ``order``; each is a dense schedule. Sequences without blocks have no
    tiles."""

    blocks: tuple[int, ...]  # of each sequence
    heads: int
    order: tuple[int, ...]  # a permutation of the sequences
    splits: int = 1
    section: int = 1  # heads of one sequence; 0: all
    descending: bool = False

    def __post_init__(self) -> None:
        if sorted(self.order) != list(range(len(self.blocks))):
            raise ValueError(f"order must be a permutation of {len(self.blocks)} sequences, got {self.order}")

    @property
    def num_tiles(self) -> int:
        return self._starts[-1]

    def coords(self, index: int) -> Tile:
        """The tile worked on at position ``index``.

        Raises:
            IndexError: index outside [0, num_tiles).
        """
        _check_index(index, self.num_tiles)
        rank = bisect.bisect_right(self._starts, index) - 1  # the last of equal starts: skips sequences without tiles
        batch = self.order[rank]
        return self._dense(batch).coords(index - self._starts[rank])._replace(batch=batch)

    def index(self, tile: Tile) -> int:
        """The position at which ``tile`` is worked on; the inverse of ``coords``."""
        rank = self.order.index(tile.batch)
        return self._starts[rank] + self._dense(tile.batch).index(tile._replace(batch=0))

    @functools.cached_property
    def _starts(self) -> tuple[int, ...]:
        return tuple(itertools.accumulate((self._dense(batch).num_tiles for batch in self.order), initial=0))

    def _dense(self, batch: int) -> DenseSchedule:
        return DenseSchedule(self.blocks[batch], self.heads, 1, self.splits, self.section, self.descending)


Tiles = DenseSchedule | VarlenSchedule


def schedule_for(problem: Problem, plan: Plan) -> Tiles:
    """The tiles of a problem in the plan's order.

    Raises:
        ValueError: a packed problem whose ``lengths`` are unknown.
    """
    lengths = problem.lengths or ((problem.seqlen_q, problem.seqlen_k),) * problem.batch
    if problem.varlen and not problem.lengths:
        raise ValueError("problem.lengths must be known on the host to lay out a packed schedule")
    blocks = tuple(_blocks(plan, *length) for length in lengths)
    heads = problem.heads // plan.pack_gqa
    kind, section = plan.schedule.kind, plan.schedule.section
    if kind is ScheduleKind.NAIVE:
        section, descending = section or 1, False
    else:
        descending = _work_grows(problem, plan) == (kind is ScheduleKind.LPT)
    if len(set(blocks)) <= 1 and len(set(lengths)) <= 1:
        return DenseSchedule(blocks[0] if blocks else 0, heads, problem.batch, plan.num_splits, section, descending)
    order = sorted_by_work(lengths, plan.direction, kind)
    return VarlenSchedule(blocks, heads, order, plan.num_splits, section, descending)


def sorted_by_work(lengths: Sequence[tuple[int, int]], direction: str, kind: ScheduleKind) -> tuple[int, ...]:
    """Sequences by the length that a tile loops over: longest first for LPT, shortest first for SPT."""
    if kind is ScheduleKind.NAIVE:
        return tuple(range(len(lengths)))
    looped = 1 if direction == FORWARD else 0
    sign = -1 if kind is ScheduleKind.LPT else 1
    return tuple(sorted(range(len(lengths)), key=lambda i: sign * lengths[i][looped]))


def l2_section(problem: Problem, arch: Arch) -> int:
    """Query heads whose K and V fit L2 together: whole groups that share a KV head, at least one.

    0 is no sections: all fit, or the size of L2 is unknown.

    Half of L2 is counted: on H100 and B200 it is two partitions, and what all SMs read is held in both. Q and O only stream.
    """
    fitting = max(1, int(l2_heads(problem, arch)))
    total = problem.heads_kv * problem.batch
    if arch.l2_bytes is None or fitting >= total:
        return 0
    sections = -(-total // fitting)
    return -(-total // sections) * problem.heads_per_kv  # sections of like size: a small last one would run alone


def l2_heads(problem: Problem, arch: Arch) -> float:
    """KV heads whose K and V fit half of L2; 0 if its size is unknown."""
    kv_bytes = max(1, problem.seqlen_k * (problem.head_dim + problem.head_dim_v) * problem.element_bytes)
    return (arch.l2_bytes or 0) / 2 / kv_bytes


def _blocks(plan: Plan, seqlen_q: int, seqlen_k: int) -> int:
    if plan.direction == FORWARD:
        return -(-seqlen_q * plan.pack_rows // (plan.rows_per_cta * plan.ctas))
    return -(-seqlen_k // (plan.tile_n * plan.cta_group))


def _work_grows(problem: Problem, plan: Plan) -> bool:
    """Whether later blocks loop over more: queries under a causal mask; keys see ever fewer queries."""
    outer = problem.mask.bounds(problem.seqlen_q, problem.seqlen_k).outer
    bounded_after = outer.hi is not None
    if plan.direction == FORWARD:
        return bounded_after or outer.lo is None
    return not bounded_after


def _check_index(index: int, num_tiles: int) -> None:
    if not 0 <= index < num_tiles:
        raise IndexError(f"index must be in [0, {num_tiles}), got {index}")
