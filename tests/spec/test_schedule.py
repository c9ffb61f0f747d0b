"""Schedules, proved by brute force over all small sizes: each tile exactly once, coords and index inverse, stated orders kept."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from tandem_attn.spec.arch import B200, CPU, H200
from tandem_attn.spec.masks import Causal, Full, Mask, Window
from tandem_attn.spec.plan import Plan, Schedule, ScheduleKind
from tandem_attn.spec.problem import Problem
from tandem_attn.spec.schedule import DenseSchedule, Tile, Tiles, VarlenSchedule, l2_section, schedule_for, sorted_by_work

KINDS = tuple(ScheduleKind)


def assert_bijective(schedule: Tiles, expected: set[Tile]) -> list[Tile]:
    tiles = [schedule.coords(i) for i in range(schedule.num_tiles)]
    assert len(tiles) == len(expected) and set(tiles) == expected, schedule
    assert [schedule.index(tile) for tile in tiles] == list(range(len(tiles))), schedule
    for outside in (-1, schedule.num_tiles):
        with pytest.raises(IndexError):
            schedule.coords(outside)
    return tiles


def test_dense_covers_each_tile_once_for_all_small_sizes() -> None:
    sizes = itertools.product(range(5), range(1, 5), range(4), range(1, 4), range(8), (False, True))
    for blocks, heads, batch, splits, section, descending in sizes:
        schedule = DenseSchedule(blocks, heads, batch, splits, section, descending)
        expected = {Tile(*t) for t in itertools.product(range(blocks), range(heads), range(batch), range(splits))}
        tiles = assert_bijective(schedule, expected)
        _check_sections(tiles, heads, section or heads * batch or 1, descending)


def _check_sections(tiles: list[Tile], heads: int, section: int, descending: bool) -> None:
    groups = [(tile.batch * heads + tile.head) // section for tile in tiles]
    assert groups == sorted(groups), "a section is finished before the next begins"
    for _, members in itertools.groupby(zip(groups, tiles, strict=True), key=lambda pair: pair[0]):
        order = [tile.block for _, tile in members]
        assert order == sorted(order, reverse=descending), "in a section, blocks follow one order"


def test_varlen_covers_each_tile_once_for_all_small_sizes() -> None:
    for count in range(4):
        for blocks in itertools.product(range(4), repeat=count):
            for order in itertools.permutations(range(count)):
                for heads, splits, section in ((1, 1, 0), (2, 1, 1), (3, 2, 2)):
                    schedule = VarlenSchedule(blocks, heads, order, splits, section, descending=True)
                    expected = {
                        Tile(b, h, s, split)
                        for s in range(count)
                        for b, h, split in itertools.product(range(blocks[s]), range(heads), range(splits))
                    }
                    tiles = assert_bijective(schedule, expected)
                    visited = [batch for batch, _ in itertools.groupby(tile.batch for tile in tiles)]
                    assert visited == [s for s in order if blocks[s]], "sequences follow the order, empty ones are skipped"


def plan_of(direction: str, kind: ScheduleKind, **changes: Any) -> Plan:
    base: dict[str, Any] = {"arch": "CPU", "dtype": "float32", "head_dim": 8, "head_dim_v": 8, "tile_m": 2, "tile_n": 2, "q_stages": 2}
    return Plan(direction=direction, schedule=Schedule(kind), **{**base, **changes})


def work(problem: Problem, plan: Plan, tile: Tile) -> int:
    """Blocks that a tile loops over."""
    lengths = problem.lengths or ((problem.seqlen_q, problem.seqlen_k),) * problem.batch
    seqlen_q, seqlen_k = lengths[tile.batch]
    if plan.direction == "forward":
        rows = plan.rows_per_cta
        return len(problem.mask.n_block_range(tile.block * rows, (tile.block + 1) * rows, 1, seqlen_q, seqlen_k))
    return len(problem.mask.m_block_range(tile.block * plan.tile_n, (tile.block + 1) * plan.tile_n, 1, seqlen_q, seqlen_k))


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("mask", [Full(), Causal(), Window(0, None)], ids=["full", "causal", "anticausal"])
def test_longest_and_shortest_first(direction: str, mask: Mask) -> None:
    for size, heads, batch in itertools.product((4, 8, 16, 24), (1, 2), (1, 2)):
        problem = Problem(batch=batch, seqlen_q=size, seqlen_k=size, heads=heads, heads_kv=1, head_dim=8, dtype="float32", mask=mask)
        for kind in (ScheduleKind.LPT, ScheduleKind.SPT):
            plan = plan_of(direction, kind)
            schedule = schedule_for(problem, plan)
            amounts = [work(problem, plan, schedule.coords(i)) for i in range(schedule.num_tiles)]
            assert amounts == sorted(amounts, reverse=kind is ScheduleKind.LPT), (kind, size)


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("kind", KINDS)
def test_packed_sequences_are_sorted_by_work(direction: str, kind: ScheduleKind) -> None:
    lengths = ((5, 9), (0, 4), (16, 16), (3, 0), (8, 2))
    problem = Problem(
        batch=5,
        seqlen_q=16,
        seqlen_k=16,
        heads=2,
        heads_kv=2,
        head_dim=8,
        dtype="float32",
        varlen=True,
        lengths=lengths,
        total_q=32,
        total_k=31,
    )
    plan = plan_of(direction, kind)
    schedule = schedule_for(problem, plan)
    tiles = [schedule.coords(i) for i in range(schedule.num_tiles)]
    rows, axis = (plan.rows_per_cta, 0) if direction == "forward" else (plan.tile_n, 1)
    assert len(set(tiles)) == len(tiles) == sum(2 * -(-length[axis] // rows) for length in lengths)
    amounts = [work(problem, plan, tile) for tile in tiles]
    if kind is ScheduleKind.NAIVE:
        assert [tile.batch for tile in tiles] == sorted(tile.batch for tile in tiles)
    else:
        assert amounts == sorted(amounts, reverse=kind is ScheduleKind.LPT)


def test_pack_gqa_and_cta_pairs_change_the_tile() -> None:
    problem = Problem(batch=1, seqlen_q=10, seqlen_k=10, heads=6, heads_kv=2, head_dim=8, dtype="float32")
    packed = schedule_for(problem, plan_of("forward", ScheduleKind.NAIVE, pack_gqa=3))
    assert (packed.num_tiles, packed.coords(19).head) == (2 * 10, 1)  # three heads take four rows of a tile of four
    b200 = Plan(arch="B200", direction="forward", dtype="bfloat16", head_dim=128, head_dim_v=128, cta_group=2)
    long = Problem(batch=1, seqlen_q=1025, seqlen_k=1, heads=1, heads_kv=1, head_dim=128)
    assert schedule_for(long, b200).num_tiles == 3


def test_unknown_lengths_are_named() -> None:
    problem = Problem(batch=2, seqlen_q=4, seqlen_k=4, heads=1, heads_kv=1, head_dim=8, varlen=True)
    with pytest.raises(ValueError, match=r"problem\.lengths must be known"):
        schedule_for(problem, plan_of("forward", ScheduleKind.NAIVE))
    with pytest.raises(ValueError, match="order must be a permutation of 2 sequences"):
        VarlenSchedule((1, 2), 1, (0, 0))
    with pytest.raises(ValueError, match="heads must be >= 1, got 0"):
        DenseSchedule(1, 0, 1)
    assert sorted_by_work(((1, 5), (5, 1)), "backward", ScheduleKind.SPT) == (0, 1)


def test_l2_section_holds_whole_kv_groups() -> None:
    long = Problem(batch=1, seqlen_q=32768, seqlen_k=32768, heads=32, heads_kv=4, head_dim=128)
    bytes_a_head = 32768 * 256 * 2  # 16 MiB of K and V
    assert l2_section(long, H200) == 8 and H200.l2_bytes // 2 // bytes_a_head == 1  # type: ignore[operator]
    assert l2_section(long, B200) == 16  # 3 of 4 groups fit: two sections of two
    assert l2_section(long, CPU) == 0
    short = Problem(batch=2, seqlen_q=1024, seqlen_k=1024, heads=4, heads_kv=4, head_dim=64)
    assert l2_section(short, H200) == 0
