"""Plan: validation, overlap rules, register budgets, chunks, stable printing and keys."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from tandem_attn.spec.exp2 import Exp2Split
from tandem_attn.spec.masks import Causal, Full, Predicate, Window
from tandem_attn.spec.plan import Launch, Plan, Schedule, ScheduleKind, mask_scalars, mask_structure
from tandem_attn.spec.resources import Region, Role, check_regions, check_roles, chunks, warpgroup_registers


def hopper(**changes: Any) -> Plan:
    base: dict[str, Any] = {"arch": "H100", "direction": "forward", "dtype": "bfloat16", "head_dim": 128, "head_dim_v": 128}
    return Plan(**{**base, **changes})


def test_plan_is_a_key() -> None:
    a, b = hopper(), hopper()
    assert a == b and hash(a) == hash(b) and len({a, b}) == 1
    assert a != a.with_(exp2=Exp2Split(fma_pairs=2)) and a.digest != a.with_(rescale_threshold=0.0).digest
    code = (
        "from tandem_attn.spec.plan import Plan;"
        "print(Plan(arch='H100', direction='forward', dtype='bfloat16', head_dim=128, head_dim_v=128).digest)"
    )
    elsewhere = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert elsewhere.stdout.strip() == a.digest


def test_plan_prints_what_matters() -> None:
    text = str(hopper(exp2=Exp2Split(fma_pairs=3), schedule=Schedule(ScheduleKind.LPT, Launch.STATIC, 4)))
    assert "tile_m = 128" in text and "18.75% on FMA" in text and "schedule = lpt/static/sections of 4 heads" in text
    assert "sink" not in text and "sink = True" in str(hopper(sink=True))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"arch": "A100"}, "arch must be one of"),
        ({"direction": "sideways"}, "direction must be 'forward' or 'backward', got 'sideways'"),
        ({"dtype": "int8"}, "dtype must be one of"),
        ({"tile_m": 96}, "tile_m must be 64 or 128 on H100"),
        ({"tile_n": 8}, "tile_n must be a multiple of 16"),
        ({"direction": "backward", "kv_stages": 3}, "kv_stages must be 2 in the backward"),
        ({"q_stages": 0}, "q_stages must be an int >= 1, got 0"),
        ({"num_splits": True}, "num_splits must be an int >= 1, got True"),
        ({"cta_group": 2}, "cta_group must be 1, or 2 on a chip with tcgen05, got 2 on H100"),
        ({"schedule": Schedule(launch=Launch.CLC)}, "needs cluster launch control"),
        ({"schedule": Schedule(section=-1)}, "schedule.section must be >= 0"),
        ({"rescale_threshold": -1.0}, "rescale_threshold must be finite and >= 0"),
        ({"rescale_rows": 48}, "rescale_rows must be 0 or divide tile_m=128, got 48"),
        ({"p_parts": (0.5,)}, "p_parts must ascend"),
        ({"p_parts": (0.75, 0.5, 1.0)}, "p_parts must ascend"),
        ({"p_parts": (0.7, 1.0)}, "p_parts must cut tile_n=128 at multiples of 16"),
        ({"dtype": "float8_e4m3fn", "p_exponent": 8}, "must keep P within float8_e4m3fn"),
        ({"dtype": "float8_e4m3fn", "p_exponent": 8, "rescale_threshold": 0.9}, "must keep P within float8_e4m3fn"),
        ({"dtype": "float8_e5m2", "p_exponent": 8, "rescale_threshold": 8.0}, "must keep P within float8_e5m2"),
        (
            {"arch": "B200", "dtype": "float8_e5m2", "o_over_q": True, "rescale_threshold": 0.0},
            "o_over_q must be False for float8_e5m2: O is bfloat16",
        ),
        ({"o_over_q": True}, "o_over_q must be False on H100: O is staged in memory of its own or in V's ring"),
        ({"arch": "B200", "o_in_ring": True}, "o_in_ring must be False but on Hopper with tile_n a multiple of tile_m, got tile_n=128"),
        ({"o_in_ring": True, "tile_n": 96}, "got tile_n=96, tile_m=128 on H100"),
        ({"dtype": "float8_e5m2", "tile_n": 80, "rescale_threshold": 0.0}, "tile_n must be a multiple of 32"),
        ({"descale": True}, "descale must be False for dtype bfloat16"),
        ({"dtype": "float64", "exp2": Exp2Split(fma_pairs=1)}, "exp2.fma_pairs must be 0 for float64"),
        ({"smem": (Region("K", 0, 232_449),)}, "K ends at 232449 bytes, the capacity is 232448"),
        ({"tmem": (Region("S", 0, 1),)}, "has no roles, shared memory or tensor memory"),
        ({"roles": (Role("all", 16, 136),)}, "69632 registers for all 16x136, an SM has 65536"),
        ({"roles": (Role("all", 36, 24),)}, "36 warps"),
    ],
)
def test_plan_names_what_is_wrong(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        hopper(**changes)


def test_fp8_plan_bounds_p() -> None:
    assert hopper(dtype="float8_e4m3fn", rescale_threshold=0.0, p_exponent=8).element_bytes == 1


@pytest.mark.parametrize(
    ("regions", "message"),
    [
        ((Region("a", 0, 8), Region("b", 4, 8)), "share space without naming it"),
        ((Region("a", 0, 8), Region("b", 8, 8, ("a",))), "name an overlap but share no space"),
        ((Region("a", 0, 8), Region("a", 8, 8)), "names must differ"),
        ((Region("a", 0, 8, ("z",)),), "overlaps unknown region z"),
        ((Region("a", -8, 8),), "offset >= 0"),
        ((Region("a", 0, 0),), "size > 0"),
    ],
)
def test_regions_share_space_only_by_name(regions: tuple[Region, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_regions("smem", regions, 64, "bytes")


def test_named_overlap_is_fine() -> None:
    check_regions("tmem", (Region("S", 0, 128), Region("P", 64, 64, ("S",)), Region("O", 128, 128)), 512, "columns")
    check_regions("tmem", (Region("O", 128, 128), Region("S", 0, 128)), 512, "columns")  # neighbours in any order


def test_warpgroups_share_a_budget() -> None:
    blackwell = (Role("softmax0", 4, 192), Role("softmax1", 4, 192), Role("correction", 4, 80), Role("mma", 1, 48), Role("load", 1, 48))
    assert warpgroup_registers(blackwell) == (192, 192, 80, 48)
    check_roles(blackwell, 65_536, 32)
    with pytest.raises(ValueError, match="load shares a warpgroup of 48 registers, so it cannot have 24"):
        warpgroup_registers((*blackwell[:4], Role("load", 1, 24)))
    with pytest.raises(ValueError, match="whole warpgroups, got 6 warps"):
        warpgroup_registers((Role("softmax", 6, 192),))
    with pytest.raises(ValueError, match=r"multiple of 8 in 24\.\.256, got 1 warps of 20"):
        warpgroup_registers((Role("load", 1, 20),))
    with pytest.raises(ValueError, match="names must differ"):
        check_roles((Role("a", 4, 24), Role("a", 4, 24)), 65_536, 32)


def test_chunks_cover_every_head_dim() -> None:
    for extent in range(8, 257, 8):
        parts = chunks(extent)
        assert len(parts) <= 2 and all(p >= 16 and p & (p - 1) == 0 for p in parts)
        assert extent <= sum(parts) < 2 * max(extent, 16)
    named = {64: (64,), 72: (64, 16), 96: (64, 32), 128: (128,), 192: (128, 64), 256: (256,)}
    assert {extent: chunks(extent) for extent in named} == named
    assert chunks(40, 32) == (64,)


def test_mask_structure_keeps_what_is_compiled_in() -> None:
    predicate = Predicate(lambda _b, _h, q, k: q >= k, name="mine")
    assert mask_structure(Full().code) == "full()"
    assert mask_structure(Causal().code) == "window(None,0,bottom-right)"
    assert mask_structure(Window(5, 6).code) == mask_structure(Window(7, 8).code) == "window(#,#,bottom-right)"
    both = (Window(5, 0) & predicate).code
    assert mask_structure(both) == f"and(window(#,0,bottom-right),predicate({predicate.name}))"
    assert mask_scalars(both) == (5,) and mask_scalars((Window(-1, 2) | Window(None, 3)).code) == (-1, 2, 3)
