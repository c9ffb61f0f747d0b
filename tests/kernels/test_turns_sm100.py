"""One query tile a CTA on Blackwell: two softmax roles take its key blocks in turns. In the emulator; never run on a chip.

Any number of blocks (a role may have none), and maxima that grow where it matters: what one role's sums and O are relative to then changes
in the other's blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from emulation import assert_right, packed, planned, problem, random_inputs, run
from test_forward_sm100 import ORDERS, STRICT

from tandem_attn import attention
from tandem_attn.spec.inputs import Inputs
from tandem_attn.spec.masks import Causal, Full, Window
from tandem_attn.spec.plan import Launch, Plan, Schedule, ScheduleKind
from tandem_attn.spec.problem import Problem

STATIC = Schedule(ScheduleKind.NAIVE, Launch.STATIC)
KEYS = 128  # of a block
# Which blocks, numbered in the order of their visit, exceed all before; role 0 takes the even ones.
GROWTH: dict[str, Callable[[int], bool]] = {
    "every block": lambda _: True,
    "no block": lambda _: False,
    "blocks of role 0": lambda turn: turn % 2 == 0,
    "blocks of role 1": lambda turn: turn % 2 == 1,
    "every third block": lambda turn: turn % 3 == 2,
}


def _plan(p: Problem, cta_group: int = 1, **other: object) -> Plan:
    got = planned(p, q_stages=1, cta_group=cta_group, **{"schedule": STATIC, **other})
    assert [role.name for role in got.roles] == ["correction", "softmax0", "softmax1", "mma", "load"]
    return got


def _check(p: Problem, plan: Plan, inputs: Inputs, **options: object) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse, result = run(p, plan, inputs, **{"checks": STRICT, **options})
    assert result.ok, "\n".join(map(str, result.reports))
    assert_right(p, plan, inputs, out, lse)
    return out, lse


def _growing(p: Problem, grows: Callable[[int], bool]) -> Inputs:
    """Scores grow in some blocks by 0 to 17 in units of log2, more in each row than in the one before: tau lies between."""
    inputs = random_inputs(p)
    q, k = inputs.q.clone(), inputs.k.clone()
    rows = torch.arange(p.seqlen_q) / p.seqlen_q
    q[..., 0] = (rows * 12 * p.head_dim**0.5 / 8)[None, :, None]
    level, blocks = 0, -(-p.seqlen_k // KEYS)
    for turn in range(blocks):
        level += grows(turn)
        first = (blocks - 1 - turn) * KEYS
        k[:, first : first + KEYS, :, 0] = 8.0 * level - 8.0
    return replace(inputs, q=q.to(inputs.q.dtype), k=k.to(inputs.k.dtype))


@pytest.mark.parametrize("growth", ["every block", "blocks of role 1"])
@pytest.mark.parametrize("blocks", [1, 2, 3])
def test_right(blocks: int, growth: str) -> None:
    p = problem(70, blocks * KEYS - 9, head_dim=64)
    _check(p, _plan(p), _growing(p, GROWTH[growth]))


@pytest.mark.judge
@pytest.mark.parametrize("cta_group", [1, 2])
@pytest.mark.parametrize("growth", GROWTH)
@pytest.mark.parametrize("blocks", [1, 2, 3, 4, 5, 6])
def test_any_number_of_blocks(blocks: int, growth: str, cta_group: int) -> None:
    """Two tiles a cluster, so that a tile follows one with an odd or an even number of blocks."""
    p = problem(120, blocks * KEYS - 9, head_dim=64, heads=2)
    _check(p, _plan(p, cta_group), _growing(p, GROWTH[growth]), clusters=1)


@pytest.mark.judge
@pytest.mark.parametrize("rescale_rows", [0, 1, 32, 128])
@pytest.mark.parametrize("tau", [0.0, 8.0])
def test_who_decides_and_when(tau: float, rescale_rows: int) -> None:
    p = problem(120, 4 * KEYS - 9, head_dim=64)
    _check(p, _plan(p, rescale_rows=rescale_rows, rescale_threshold=tau), _growing(p, GROWTH["every block"]))


@pytest.mark.judge
@pytest.mark.parametrize("dtype", ["float16", "float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("cta_group", [1, 2])
def test_other_types(dtype: str, cta_group: int) -> None:
    p = problem(120, 4 * KEYS - 9, head_dim=128, dtype=dtype, descale=dtype.startswith("float8"))
    _check(p, _plan(p, cta_group), random_inputs(p, spread=4.0))


@pytest.mark.judge
@pytest.mark.parametrize(("order", "seed"), ORDERS)
@pytest.mark.parametrize("cta_group", [1, 2])
@pytest.mark.parametrize("blocks", [1, 3, 4])
def test_clean_in_every_order(blocks: int, cta_group: int, order: str, seed: int) -> None:
    """Three tiles for one cluster, and every order gives the same bits."""
    p = problem(100, blocks * KEYS - 9, head_dim=64, heads=3)
    inputs = _growing(p, GROWTH["every block"])
    out, lse = _check(p, _plan(p, cta_group), inputs, schedule=order, seed=seed, clusters=1, resident_ctas=2)
    first, first_lse, _ = run(p, _plan(p, cta_group), inputs, checks=STRICT)
    assert torch.equal(out, first) and torch.equal(lse, first_lse)


# Numbers of blocks that differ from tile to tile, sequences without queries or keys, tiles without keys, all that changes scores.
FEATURES: dict[str, Problem] = {
    "packed": packed(Full(), head_dim=64),
    "packed, causal, sink": packed(Causal(), head_dim=64, sink=True),
    "packed, seqused, window": packed(Window(70, 10), head_dim=64, seqused=True),
    "window, none seen": problem(300, 200, head_dim=64, mask=Window(-400, 500)),
    "sink, rows without keys": problem(300, 150, head_dim=64, sink=True, mask=Causal()),
    "seqused": problem(200, 400, head_dim=64, batch=4, seqused=True),
    "alibi, causal, softcap, sink": problem(200, 300, head_dim=64, alibi=True, softcap=20.0, sink=True, mask=Causal(), heads=2),
    "head_dim 256": problem(200, 640, head_dim=256),
    "head_dim 192 and 224": problem(200, 420, head_dim=192, head_dim_v=224, mask=Causal()),
}


@pytest.mark.judge
@pytest.mark.parametrize("cta_group", [1, 2])
@pytest.mark.parametrize("name", FEATURES)
def test_features(name: str, cta_group: int) -> None:
    p = FEATURES[name]
    _check(p, _plan(p, cta_group), random_inputs(p, spread=2.0), clusters=1, schedule="random", seed=5)


@pytest.mark.judge
@pytest.mark.parametrize("cta_group", [1, 2])
def test_gluons_own_synchronisation(cta_group: int) -> None:
    p = problem(120, 4 * KEYS - 9, head_dim=64, mask=Causal())
    _check(p, _plan(p, cta_group), _growing(p, GROWTH["every block"]), checks="all", plain=True)


@pytest.mark.judge
@pytest.mark.parametrize("spread", [300.0, 1e4])
def test_large_logits(spread: float) -> None:
    p = problem(100, 4 * KEYS - 9, head_dim=64)
    inputs = random_inputs(p, spread)
    out, _, result = run(p, _plan(p), inputs)
    assert result.ok and out.isfinite().all()
    assert out.float().abs().max() <= inputs.v.float().abs().max()


@pytest.mark.judge
@pytest.mark.parametrize("keys", [0, 1, 300])
def test_decoding_in_parts(keys: int) -> None:
    """One query a sequence, its keys in parts of which some are empty: through the public function, with the planner's own choices."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, n, 2, 64, generator=generator).bfloat16() for n in (1, keys, keys))
    out, lse = attention(q, k, v, causal=True, return_lse=True, backend="emulator:sm_100a")
    want, want_lse = attention(q, k, v, causal=True, return_lse=True, backend="reference")
    assert torch.allclose(out.float(), want.float(), atol=2e-2, rtol=2e-2)
    assert torch.allclose(lse, want_lse, atol=1e-3)
