"""The Blackwell forward for 8-bit q, k and v, in the emulator: right, equal to the tiled reference of the same plan, and judged clean.

Executed on a CPU; never run on a chip. Sizes are multiples of nothing on purpose, and every sequence and KV head has descales of its own.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from accuracy import assert_accurate
from emulation import assert_right, packed, planned, problem, random_inputs, run
from features import FEATURES, Feature, make

from tandem_attn.kernels import backend, emulated
from tandem_attn.spec.exp2 import Exp2Split
from tandem_attn.spec.inputs import Inputs
from tandem_attn.spec.masks import TOP_LEFT, Causal, Full, Mask, Window
from tandem_attn.spec.plan import FORWARD, Launch, Plan, Schedule, ScheduleKind
from tandem_attn.spec.problem import FLOAT8, Problem

STATIC = Schedule(ScheduleKind.NAIVE, Launch.STATIC)
CAUSAL = Causal()


def _problem(seqlen_q: int = 300, seqlen_k: int = 0, **other: object) -> Problem:
    return problem(seqlen_q, seqlen_k, **{"dtype": "float8_e4m3fn", "descale": True, **other})


def _packed(mask: Mask, **other: object) -> Problem:
    return packed(mask, dtype="float8_e4m3fn", descale=True, **other)


PROBLEMS: dict[str, Problem] = {
    "full": _problem(),
    "no descales": _problem(descale=False),
    "one row": _problem(1),
    "causal, sequences and heads": _problem(150, batch=2, heads=4, heads_kv=2, mask=CAUSAL),
    "causal, rows without keys": _problem(400, 150, mask=CAUSAL),
    "causal, top left": _problem(300, 400, mask=Causal(TOP_LEFT)),
    "window": _problem(500, mask=Window(100, 30)),
    "window, none seen": _problem(300, 200, mask=Window(-400, 500)),
    "softcap": _problem(200, softcap=15.0, mask=CAUSAL),
    "sink": _problem(200, sink=True, mask=CAUSAL),
    "sink, rows without keys": _problem(300, 100, sink=True, mask=CAUSAL),
    "alibi, causal, softcap, sink": _problem(200, 300, alibi=True, softcap=20.0, sink=True, mask=CAUSAL, heads=2),
    "scale below zero": _problem(200, scale=-0.1, mask=CAUSAL),
    "seqused, causal": _problem(300, 400, batch=4, seqused=True, mask=CAUSAL),
    "varlen": _packed(Full()),
    "varlen, causal": _packed(CAUSAL),
    "varlen, window, head_dim 64": _packed(Window(50, 10), head_dim=64),
    "varlen, sink, seqused": _packed(CAUSAL, sink=True, seqused=True),
    **{f"head_dim {d}": _problem(330, head_dim=d, mask=CAUSAL) for d in (16, 48, 64, 80, 96, 160, 192, 256)},
    "head_dim 192 and 128": _problem(330, head_dim=192, head_dim_v=128, mask=CAUSAL),
    "head_dim 64 and 256": _problem(head_dim=64, head_dim_v=256),
}
PAIRS: dict[str, Problem] = {
    "pair": _problem(600),
    "pair, causal, heads": _problem(520, heads=4, heads_kv=2, mask=CAUSAL),
    "pair, window": _problem(600, mask=Window(100, 30)),
    "pair, softcap, sink": _problem(520, softcap=10.0, sink=True, heads=2),
    **{f"pair, head_dim {d}": _problem(520, head_dim=d) for d in (48, 64, 96)},  # tails of V of 16 columns a CTA at 96
    "pair, head_dim 192 and 128": _problem(520, head_dim=192, head_dim_v=128),
    "pair, head_dim 192": _problem(520, head_dim=192),
    "pair, head_dim 256": _problem(300, head_dim=256),
}
# What make test has time for: both types, a pair, heads and sequences with descales of their own, ragged rows, changed scores.
QUICK = (
    ("causal, sequences and heads", "float8_e4m3fn"),
    ("varlen, sink, seqused", "float8_e5m2"),
    ("alibi, causal, softcap, sink", "float8_e4m3fn"),
    ("pair, causal, heads", "float8_e4m3fn"),
)


def _plan(name: str, p: Problem) -> Plan:
    return planned(p, cta_group=2) if name in PAIRS else planned(p)


def _check(p: Problem, plan: Plan, spread: float = 1.0, **options: object) -> None:
    inputs = random_inputs(p, spread)
    out, lse, result = run(p, plan, inputs, **options)
    assert result.ok, "\n".join(map(str, result.reports))
    assert out.dtype == torch.bfloat16
    assert_right(p, plan, inputs, out, lse)


@pytest.mark.parametrize(("name", "dtype"), QUICK)
def test_right(name: str, dtype: str) -> None:
    p = replace((PROBLEMS | PAIRS)[name], dtype=dtype)
    _check(p, _plan(name, p))


@pytest.mark.judge
@pytest.mark.parametrize("dtype", FLOAT8)
@pytest.mark.parametrize("name", PROBLEMS | PAIRS)
def test_right_and_clean(name: str, dtype: str) -> None:
    p = replace((PROBLEMS | PAIRS)[name], dtype=dtype)
    _check(p, _plan(name, p), checks="all")


@pytest.mark.judge
@pytest.mark.parametrize(("order", "seed"), [("latest", 0), ("random", 1)])
@pytest.mark.parametrize("name", ["causal, sequences and heads", "varlen, causal", "pair, causal, heads", "head_dim 256"])
def test_clean_in_every_order(name: str, order: str, seed: int) -> None:
    p = (PROBLEMS | PAIRS)[name]
    _check(p, _plan(name, p), checks="all", schedule=order, seed=seed, clusters=2, resident_ctas=2)


TECHNIQUES: dict[str, dict[str, object]] = {
    "exp2 on MUFU only": {"exp2": Exp2Split()},
    "all on FMA, degree 4": {"exp2": Exp2Split(4, 16)},
    "P in one part": {"p_parts": (1.0,)},
    "P in three parts": {"p_parts": (0.25, 0.75, 1.0)},
    "always rescaled": {"rescale_rows": 0},
    "rescale by rows": {"rescale_rows": 1},
    "rescale by query tiles": {"rescale_rows": 128},
    "tau of 3/4": {"rescale_threshold": 0.75},
    "tau of 2": {"rescale_threshold": 2.0, "p_exponent": 6},
    "blocks of 64 keys": {"tile_n": 64},
    "one query tile": {"q_stages": 1},
    "two slots": {"kv_stages": 2},
    "B300": {"arch": "B300"},
}


@pytest.mark.judge
@pytest.mark.parametrize("cta_group", [1, 2])
@pytest.mark.parametrize("name", TECHNIQUES)
def test_techniques(name: str, cta_group: int) -> None:
    """Logits are spread so that maxima grow in some blocks and not in others."""
    p = _problem(300, 420, mask=CAUSAL)
    _check(p, planned(p, **{"cta_group": cta_group, "schedule": STATIC, **TECHNIQUES[name]}), spread=4.0, checks="all")


@pytest.mark.judge
@pytest.mark.parametrize("cta_group", [1, 2])
def test_gluons_own_synchronisation(cta_group: int) -> None:
    p = _problem(300, 420, mask=CAUSAL)
    _check(p, planned(p, cta_group=cta_group, schedule=STATIC), checks="all", plain=True)


@pytest.mark.parametrize("dtype", FLOAT8)
def test_p_does_not_saturate(dtype: str) -> None:
    """Scores that grow from block to block, as the kernel visits them, by all that tau leaves: no weight reaches the type's largest number.

    V is 1 in one column and the sign of odd keys in another; a weight cut to the largest number would show in the first.
    """
    p = _problem(128, 512, head_dim=64, dtype=dtype, descale=False, scale=1.0)
    element = getattr(torch, dtype)
    q, k, v = torch.zeros(1, 128, 1, 64), torch.zeros(1, 512, 1, 64), torch.zeros(1, 512, 1, 64)
    q[..., 0], k[..., 0] = 1.0, torch.repeat_interleave(torch.tensor([6.0, 4.0, 2.0, 0.0]), 128)[None, :, None]
    v[..., 0], v[..., 1] = 1.0, torch.arange(512)[None, :, None] % 2 * 2.0 - 1
    inputs = Inputs(q=q.to(element), k=k.to(element), v=v.to(element))
    plan = planned(p)
    out, lse, result = run(p, plan, inputs)
    assert result.ok
    assert (out[..., 0] - 1).abs().max() <= torch.finfo(element).eps / 2
    assert out[..., 1].abs().max() <= torch.finfo(torch.bfloat16).eps
    assert_right(p, plan, inputs, out, lse)


def _narrowed(feature: Feature, dtype: str) -> Feature:
    """The feature with 8-bit q, k and v, whose descales are views of one number a head."""
    p = feature.problem
    p = replace(p, dtype=dtype, descale=True, bias_dtype=p.bias_type)
    numbers = torch.rand(3, p.heads_kv) + 0.5
    descales = {f"{name}_descale": x.expand(p.batch, -1) for name, x in zip("qkv", numbers, strict=True)}
    main = {name: getattr(feature.inputs, name).to(getattr(torch, dtype)) for name in "qkv"}
    return Feature(p, replace(feature.inputs, **main, **descales), feature.plan)


def _check_feature(name: str, dtype: str, checks: str) -> None:
    feature = _narrowed(make(name, "cpu"), dtype)
    assert backend.lacks(feature.problem, "B200") is None
    plan = backend.plan(feature.problem, FORWARD, "B200").with_(**feature.plan)
    with emulated.settings(checks=checks):
        results = emulated.forward(feature.problem, plan, feature.inputs)
    assert_accurate(feature.problem, feature.inputs, *results)


@pytest.mark.parametrize("name", ["heads packed, packed lengths", "pages of 64, splits"])
def test_features(name: str) -> None:
    _check_feature(name, "float8_e4m3fn", "default")


@pytest.mark.judge
@pytest.mark.parametrize("dtype", FLOAT8)
@pytest.mark.parametrize("name", FEATURES)
def test_judge_accepts_features(name: str, dtype: str) -> None:
    _check_feature(name, dtype, "all")
