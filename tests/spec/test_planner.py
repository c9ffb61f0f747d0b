"""Planner: the public kernels' tilings come out, every head dimension plans or says why not, overrides are kept and checked."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem_attn.spec.arch import get_arch
from tandem_attn.spec.errors import UnsupportedError
from tandem_attn.spec.exp2 import Exp2Split
from tandem_attn.spec.masks import Causal, Full, Mask, Window
from tandem_attn.spec.plan import FORWARD, Launch, Plan, Schedule, ScheduleKind
from tandem_attn.spec.planner import Planned, choose, plan
from tandem_attn.spec.planner_rules import Criterion
from tandem_attn.spec.problem import Problem

GPUS = ("H100", "H200", "B100", "B200", "B300")


def problem(head_dim: int = 128, head_dim_v: int = 0, **changes: Any) -> Problem:
    base: dict[str, Any] = {"batch": 2, "seqlen_q": 8192, "seqlen_k": 8192, "heads": 16, "heads_kv": 16}
    return Problem(**{**base, "head_dim": head_dim, "head_dim_v": head_dim_v, **changes})


# CTA rows x keys of FlashAttention-3; its 128x(80|112) at head_dim 192 and 128x(64|80) at 256 become the powers of two that Gluon has.
@pytest.mark.parametrize(
    ("dims", "rows", "tile_n", "registers"),
    [
        ((64, 64), 192, 128, (160, 160, 160, 32)),
        ((128, 128), 128, 128, (240, 240, 24)),
        ((192, 128), 128, 128, (240, 240, 24)),
        ((192, 192), 128, 64, (240, 240, 24)),
        ((256, 256), 128, 64, (240, 240, 24)),
    ],
)
def test_hopper_forward_tiles(dims: tuple[int, int], rows: int, tile_n: int, registers: tuple[int, ...]) -> None:
    got = plan(problem(*dims), "H200").plan
    assert (got.rows_per_cta, got.tile_n) == (rows, tile_n)
    assert tuple(role.registers for role in got.roles) == registers
    assert not got.tmem and got.exp2.fraction == 0.0


@pytest.mark.parametrize(("dim", "tile"), [(64, (128, 128)), (96, (64, 128)), (128, (64, 128)), (192, (64, 64)), (256, (64, 64))], ids=str)
def test_hopper_backward_tiles(dim: int, tile: tuple[int, int]) -> None:
    got = plan(problem(dim), "H100", direction="backward").plan
    assert (got.tile_m, got.tile_n) == tile
    in_memory = "P" in {region.name for region in got.smem}
    assert in_memory == (got.tile_n == 64), "two warpgroups share 64 keys, so both need all of P"


@pytest.mark.parametrize(
    ("dims", "mask", "kv_stages", "cta_group"),
    [
        ((64, 64), Full(), 10, 1),
        ((96, 96), Full(), 5, 1),
        ((128, 128), Causal(), 3, 1),
        ((128, 128), Full(), 6, 2),
        ((192, 128), Causal(), 3, 1),
    ],
    ids=str,
)
def test_blackwell_forward_matches_public_kernels(dims: tuple[int, int], mask: Mask, kv_stages: int, cta_group: int) -> None:
    got = plan(problem(*dims, mask=mask), "B200").plan
    assert (got.kv_stages, got.cta_group, got.q_stages, got.tile_m, got.tile_n) == (kv_stages, cta_group, 2, 128, 128)


def test_blackwell_tensor_memory_is_exactly_accounted() -> None:
    forward = plan(problem(mask=Causal()), "B200").plan
    assert forward.tmem_columns == 512
    at = {region.name: region.offset for region in forward.tmem}
    assert at == {"S0": 0, "S1": 128, "O0": 256, "O1": 384, "P0": 64, "P1": 192}
    backward = plan(problem(mask=Causal(), deterministic=True), "B200", direction="backward").plan
    at = {region.name: region.offset for region in backward.tmem}
    assert at == {"S": 0, "P": 0, "dV": 128, "dP": 256, "dS": 256, "dQ": 256, "dK": 384}
    pair = plan(problem(), "B200", direction="backward").plan
    assert pair.cta_group == 2 and {r.name: (r.offset, r.size) for r in pair.tmem}["dQ"] == (64, 64)
    assert (forward.warps, pair.warps) == (14, 15)


def test_blackwell_backward_of_large_heads_shares_space_by_name() -> None:
    got = plan(problem(192, 128, deterministic=True), "B200", direction="backward")
    at = {region.name: (region.offset, region.size) for region in got.plan.tmem}
    assert at == {"dV": (0, 128), "dK": (128, 192), "S": (320, 128), "P": (320, 64), "dP": (384, 128), "dS": (384, 64), "dQ": (416, 96)}
    overlaps = {region.name: region.overlaps for region in (*got.plan.tmem, *got.plan.smem) if region.overlaps}
    assert overlaps["dP"] == ("S",) and overlaps["Q transposed"] == ("Q ring",) and overlaps["dO transposed"] == ("dO ring",)
    assert got.plan.cta_group == 2 and any("second half of S" in reason for reason in got.reasons)


def test_exp2_fraction_follows_the_chip_and_mask() -> None:
    fractions = {
        (chip, mask.code): plan(problem(mask=mask), chip).plan.exp2.fraction
        for chip in ("B200", "B300", "H200", "CPU")
        for mask in (Full(), Causal())
    }
    assert [fractions[chip, Full().code] for chip in ("B200", "B300", "H200", "CPU")] == [0.1875, 0, 0, 0]
    assert [fractions[chip, Causal().code] for chip in ("B200", "B300", "H200", "CPU")] == [0.125, 0, 0, 0]
    assert plan(problem(192, 128, mask=Causal()), "B200").plan.exp2.fraction == 0.0625


@pytest.mark.parametrize("chip", GPUS)
def test_every_head_dim_plans_forward(chip: str) -> None:
    for dim in range(8, 257, 8):
        got = plan(problem(dim), chip)
        arch = get_arch(chip)
        assert sum(got.plan.head_dim_chunks) >= dim and got.plan.smem_bytes <= (arch.smem_bytes_cta or 0)
        assert got.plan.tmem_columns <= (arch.tmem_columns or 0)
        assert got.plan.kv_stages >= 2 and got.plan.roles and got.reasons


@pytest.mark.parametrize("chip", GPUS)
def test_every_head_dim_plans_backward_or_says_why(chip: str) -> None:
    for dim in range(8, 257, 8):
        if chip.startswith("H") or dim <= 160:
            assert plan(problem(dim), chip, direction="backward").plan.smem
            continue
        with pytest.raises(UnsupportedError, match=r"nearest that works: head_dim \+ head_dim_v up to 320") as raised:
            plan(problem(dim), chip, direction="backward")
        assert f"head_dim {dim}" in raised.value.missing and "capacity" in raised.value.missing


@pytest.mark.parametrize(
    ("changes", "chip", "missing", "nearest"),
    [
        ({"dtype": "float32"}, "H200", "dtype float32", "float16 or bfloat16, or backend 'reference'"),
        ({"dtype": "float8_e4m3fn"}, "H200", "dtype float8_e4m3fn", "float16 or bfloat16, or backend 'reference'"),
        ({"dtype": "float32"}, "B200", "dtype float32", "float16, bfloat16, float8_e4m3fn or float8_e5m2, or backend 'reference'"),
        ({"dtype": "float8_e5m2", "backward": True}, "B200", "gradients of float8_e5m2", "q, k and v in bfloat16"),
        ({"dtype": "float8_e5m2", "backward": True}, "CPU", "gradients of float8_e5m2", "q, k and v in bfloat16"),
        ({"dtype": "float8_e4m3fn", "head_dim": 72}, "B200", "head_dim 72", "head_dim 80 with zero padding"),
        ({"head_dim": 264}, "B200", "head_dim 264", "head_dim up to 256"),
        ({"head_dim_v": 512}, "B200", "head_dim_v 512", "head_dim_v up to 256"),
        ({"head_dim": 100}, "H100", "head_dim 100", "head_dim 104 with zero padding"),
    ],
)
def test_unsupported_problems_name_the_nearest(changes: dict[str, Any], chip: str, missing: str, nearest: str) -> None:
    with pytest.raises(UnsupportedError) as raised:
        plan(problem(**changes), chip)
    assert missing in raised.value.missing and nearest in raised.value.nearest


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize(("dim", "pair", "kv_stages", "fma_pairs"), [(64, 1, 10, 4), (128, 1, 8, 4), (192, 1, 6, 3), (256, 2, 8, 3)])
def test_8_bit_plans(dtype: str, dim: int, pair: int, kv_stages: int, fma_pairs: int) -> None:
    """P fills a quarter of a column an element and O is bfloat16; products take half the time, so more exponentials go to FMA units, and a
    CTA pair pays at twice the head dimension of 16-bit types."""
    chosen = plan(problem(dim, dtype=dtype, descale=True), "B200").plan
    tmem, smem = ({region.name: region.size for region in regions} for regions in (chosen.tmem, chosen.smem))
    assert (chosen.cta_group, chosen.kv_stages, chosen.exp2.fma_pairs) == (pair, kv_stages, fma_pairs)
    assert (chosen.p_exponent, chosen.rescale_threshold, chosen.descale) == (8, 0.0, True)
    assert (tmem["P0"], smem["Q0"], smem["O0"]) == (chosen.tile_n // 4, 128 * dim, 128 * dim * 2)
    assert plan(problem(dim, dtype=dtype), "B300").plan.exp2.fma_pairs == 0


def test_8_bit_plan_gives_its_reasons() -> None:
    text = "\n".join(plan(problem(dtype="float8_e4m3fn"), "B200").reasons)
    assert "P is kept times 2^8" in text and "so that the largest weight is an exact power of two" in text


def test_cpu_plans_what_the_gpu_does_not() -> None:
    for dtype in ("float16", "bfloat16", "float32", "float64"):
        got = plan(problem(300, dtype=dtype), "cpu").plan
        assert (got.tile_m, got.tile_n, got.q_stages, got.roles, got.smem) == (128, 128, 2, (), ())
    assert plan(problem(), "CPU", exp2=Exp2Split(4, 2), tile_m=4, tile_n=3, rescale_rows=2).plan.tile_n == 3


@pytest.mark.parametrize(
    ("seqlen", "heads_kv", "head_dim", "section"),
    [
        *[(512, 16, 128, 64), (1024, 16, 128, 32), (2048, 16, 128, 16), (4096, 16, 128, 16), (8192, 16, 128, 8), (16384, 16, 128, 4)],
        *[(32768, 8, 256, 2), (4096, 32, 64, 16), (16384, 32, 64, 8)],
        *[(8192, 4, 128, 32), (8192, 1, 128, 32)],
    ],
)
def test_sections_of_heads_on_hopper(seqlen: int, heads_kv: int, head_dim: int, section: int) -> None:
    """The sizes that measured best, see docs/findings.md. 32k tokens."""
    heads = {4: 32, 1: 16}.get(heads_kv, heads_kv)
    sizes = {"batch": 32768 // seqlen, "seqlen_q": seqlen, "seqlen_k": seqlen, "heads": heads, "heads_kv": heads_kv}
    schedule = plan(problem(head_dim, mask=Causal(), **sizes), "H200", direction="forward").plan.schedule
    assert schedule == Schedule(ScheduleKind.LPT, Launch.DYNAMIC, section)


@pytest.mark.parametrize(("head_dim", "launch"), [(64, Launch.DYNAMIC), (128, Launch.STATIC)])
def test_full_masks_on_hopper_go_head_after_head(head_dim: int, launch: Launch) -> None:
    got = plan(problem(batch=4, seqlen_q=8192, seqlen_k=8192, head_dim=head_dim), "H200", direction="forward").plan.schedule
    assert got == Schedule(ScheduleKind.NAIVE, launch, 0)


def test_schedules() -> None:
    full, causal = problem(), problem(mask=Causal())
    assert plan(full, "B200").plan.schedule == Schedule(ScheduleKind.NAIVE, Launch.STATIC, 11)
    assert plan(causal, "B200").plan.schedule == Schedule(ScheduleKind.LPT, Launch.CLC, 11)
    assert plan(causal, "H200").plan.schedule.launch is Launch.DYNAMIC
    assert plan(problem(mask=Window(64, 64)), "H200").plan.schedule.kind is ScheduleKind.NAIVE
    assert plan(problem(varlen=True), "H200").plan.schedule.kind is ScheduleKind.LPT
    backward = {d: plan(problem(mask=Causal(), deterministic=d), "B200", direction="backward").plan.schedule.kind for d in (False, True)}
    assert backward == {False: ScheduleKind.LPT, True: ScheduleKind.SPT}


def test_decoding_packs_heads_and_splits_keys() -> None:
    decode = problem(batch=1, seqlen_q=1, seqlen_k=32768, heads=32, heads_kv=8)
    got = plan(decode, "H200").plan
    assert (got.pack_gqa, got.num_splits, got.q_stages) == (4, 16, 1)
    assert plan(problem(heads_kv=4), "H200").plan.pack_gqa == 1, "full tiles gain nothing from packing"
    assert plan(problem(batch=1, seqlen_q=1, seqlen_k=512), "H200").plan.num_splits == 1, "too few key blocks to split"


def test_only_the_direction_concerned_enters_the_key() -> None:
    training = problem(backward=True, deterministic=True, return_lse=True)
    forward, backward = plan(training, "H200", direction="forward").plan, plan(training, "H200").plan
    assert backward.direction == "backward" and backward.deterministic and not backward.return_lse
    assert forward.return_lse and not forward.deterministic
    assert plan(problem(mask=Window(5, 6)), "H200").plan == plan(problem(mask=Window(7, 8)), "H200").plan


def test_overrides_are_kept_and_said() -> None:
    asked = {"exp2": Exp2Split(5, 4), "cta_group": 1, "q_stages": 1, "schedule": Schedule(ScheduleKind.LPT), "rescale_threshold": 0.0}
    got = plan(problem(), "B200", **asked)
    assert {name: getattr(got.plan, name) for name in asked} == asked
    assert got.reasons[0].startswith("exp2 = 25.00% on FMA") and got.reasons[0].endswith("asked for")
    assert not any("static persistent" in reason for reason in got.reasons)
    assert plan(problem(seqlen_q=1), "B200", q_stages=2).plan.q_stages == 2
    assert plan(problem(), "B200", kv_stages=4).plan.kv_stages == 4
    for direction in ("forward", "backward"):
        pair = plan(problem(64, mask=Causal(), deterministic=True), "B200", direction=direction, cta_group=2).plan
        assert pair.cta_group == 2, "an objection to pairs is a preference, not a limit"
    apart = plan(problem(seqlen_q=1, heads_kv=4), "H200", pack_gqa=1)
    assert apart.plan.pack_gqa == 1 and apart.plan.num_splits > plan(problem(seqlen_q=1, heads_kv=4), "H200", num_splits=1).plan.num_splits


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"tile": 128}, "override 'tile' is no Plan field"),
        ({"head_dim": 64}, "override 'head_dim' follows from the problem"),
        ({"tile_n": "wide"}, "tile_n must be an int >= 1, got 'wide'"),
        ({"tile_m": 96}, "tile_m must be 64 or 128"),
        ({"exp2": 0.25}, "exp2 must be a Exp2Split, got 0.25"),
        ({"rescale_threshold": "high"}, "rescale_threshold must be finite"),
        ({"direction": "up"}, "direction must be 'forward' or 'backward', got 'up'"),
        ({"kv_stages": 40}, "fits the overrides kv_stages=40: smem"),
        ({"q_stages": 3}, "fits the overrides q_stages=3: q_stages must be at most 2"),
        ({"direction": "backward", "cta_group": 1, "do_stages": 40}, "fits the overrides cta_group=1, do_stages=40: smem"),
    ],
)
def test_overrides_are_checked(overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan(problem(), "B200", **overrides)


def test_choose_applies_criteria_in_order() -> None:
    plans = [
        Plan(arch="CPU", direction="forward", dtype="float32", head_dim=8, head_dim_v=8, tile_m=m, tile_n=n)
        for m in (32, 64)
        for n in (1, 2)
    ]
    wide = Criterion(lambda p: -p.tile_n, lambda p: f"wide {p.tile_n}")
    same = Criterion(lambda _: 0, lambda _: "never said")
    tall = Criterion(lambda p: -p.tile_m, lambda p: f"tall {p.tile_m}")
    best, reasons = choose(plans, (same, wide, tall))
    assert (best.tile_m, best.tile_n) == (64, 2)
    assert reasons == ["4 tilings fit the chip", "wide 2 (2 of 4 left out)", "tall 64 (1 of 2 left out)"]


def test_planned_prints_its_reasons() -> None:
    text = str(plan(problem(), "B200"))
    assert "Reasons\n  1. " in text and "tmem = S0[0:128], S1[128:256]" in text


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from([*GPUS, "CPU"]),
    st.integers(1, 256),
    st.integers(1, 256),
    st.integers(0, 4),
    st.integers(0, 40_000),
    st.integers(0, 40_000),
    st.sampled_from([(1, 1), (12, 1), (12, 4), (7, 7)]),
    st.sampled_from([Full(), Causal(), Window(100, 0), Window(0, None)]),
    st.booleans(),
    st.booleans(),
)
def test_any_problem_plans_or_is_unsupported(
    chip: str, d: int, dv: int, batch: int, sq: int, sk: int, heads: tuple[int, int], mask: Mask, backward: bool, varlen: bool
) -> None:
    asked = Problem(
        batch=batch,
        seqlen_q=sq,
        seqlen_k=sk,
        heads=heads[0],
        heads_kv=heads[1],
        head_dim=d,
        head_dim_v=dv,
        mask=mask,
        backward=backward,
        varlen=varlen,
    )
    try:
        got = plan(asked, chip)
    except UnsupportedError as error:
        assert error.backend.startswith("sm_") and error.nearest
        return
    assert isinstance(got, Planned) and hash(got.plan) == hash(plan(asked, chip).plan)
    assert got.plan.direction == ("backward" if backward else "forward") and asked.heads % got.plan.pack_gqa == 0


def _long(seqlen: int, head_dim: int, mask: Mask, **other: object) -> Plan:
    options = {"batch": max(1, 32768 // seqlen), "heads": 2048 // head_dim, "heads_kv": 2048 // head_dim, "device": "cuda", **other}
    return plan(Problem(seqlen_q=seqlen, seqlen_k=seqlen, head_dim=head_dim, mask=mask, **options), "H200", direction=FORWARD).plan  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("seqlen", "head_dim", "mask", "fixed", "together", "q_registers"),
    [
        (512, 64, Full(), False, 1, True),
        (1024, 64, Full(), True, 1, True),
        (4096, 64, Full(), True, 2, False),
        (8192, 64, Causal(), True, 1, False),  # tiles of two CTAs would add 2 % of rows
        (512, 128, Full(), True, 1, False),
        (4096, 128, Full(), True, 1, True),
        (16384, 128, Full(), True, 2, False),
        (1024, 128, Causal(), False, 1, True),
        (2048, 128, Causal(), True, 1, True),
        (8192, 128, Causal(), True, 2, True),
        (16384, 128, Causal(), True, 2, False),
        (1024, 256, Full(), True, 1, False),
        (2048, 256, Full(), True, 2, False),
        (2048, 256, Causal(), False, 1, False),
        (16384, 256, Causal(), False, 2, False),
        (16384, 128, Window(1024, 0), False, 1, False),
    ],
)
def test_forms_for_long_sequences_on_hopper(seqlen: int, head_dim: int, mask: Mask, fixed: bool, together: int, q_registers: bool) -> None:
    """As measured (docs/findings.md)."""
    got = _long(seqlen, head_dim, mask)
    assert (got.fixed_max, got.kv_multicast, got.q_registers) == (fixed, together, q_registers)


@pytest.mark.parametrize(
    ("seqlen", "mask", "tile_n"), [(512, Causal(), 64), (1024, Causal(), 128), (512, Full(), 128), (128, Causal(), 128)]
)
def test_narrow_blocks_under_a_short_diagonal(seqlen: int, mask: Mask, tile_n: int) -> None:
    assert _long(seqlen, 64, mask).tile_n == tile_n


def test_maxima_stay_for_packed_sequences_too() -> None:
    """Which no clusters share, since their short sequences would leave the second CTA without rows."""
    got = _long(16384, 128, Causal(), varlen=True, total_q=1 << 16, total_k=1 << 16, batch=32)
    assert (got.fixed_max, got.kv_multicast) == (True, 1)


def test_places_of_tiles_to_compute_again_have_32_bits() -> None:
    rows = {"varlen": True, "batch": 1, "heads": 64, "heads_kv": 64}
    assert _long(16384, 64, Causal(), **rows, total_q=(1 << 25) - 1, total_k=1 << 25).fixed_max
    assert not _long(16384, 64, Causal(), **rows, total_q=1 << 25, total_k=1 << 25).fixed_max


@pytest.mark.parametrize(("head_dim", "head_dim_v", "lent"), [(64, 64, False), (128, 128, False), (192, 128, True), (256, 256, True)])
def test_o_in_slots_of_v_where_memory_is_scarce(head_dim: int, head_dim_v: int, lent: bool) -> None:
    got = _long(2048, head_dim, Causal(), head_dim_v=head_dim_v)
    assert got.o_in_ring == lent and got.kv_stages >= 4


@pytest.mark.parametrize(
    "change", [{"dtype": "float16"}, {"softcap": 10.0}, {"alibi": True}, {"scale": -1.0}, {"batch": 1, "heads": 1, "heads_kv": 1}]
)
def test_maxima_stay_only_where_weights_have_room(change: dict[str, object]) -> None:
    """And where there are tiles enough that the last ones count for little."""
    assert not _long(16384, 128, Causal(), **change).fixed_max
