"""The Blackwell forward for 8-bit q, k and v, in the emulator: right, equal to the tiled reference of the same plan, and judged clean.

Executed on a CPU; never run on a chip. Sizes are multiples of nothing on purpose, and every sequence and KV head has descales of its own.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from accuracy import assert_accurate
from emulation import assert_right, planned, random_inputs, run
from features import FEATURES, MANY_QUERIES, Feature, for_a_pair, make
from float8 import CAUSAL, PAIRS, PROBLEMS, small

from tandem_attn import attention_kvcache, attention_varlen
from tandem_attn.kernels import backend, emulated
from tandem_attn.reference.compare import EXP2_ERROR
from tandem_attn.spec.exp2 import Exp2Split
from tandem_attn.spec.inputs import Inputs
from tandem_attn.spec.plan import FORWARD, Launch, Plan, Schedule, ScheduleKind
from tandem_attn.spec.problem import FLOAT8, Problem

STATIC = Schedule(ScheduleKind.NAIVE, Launch.STATIC)
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
    p = small(300, 420, mask=CAUSAL)
    _check(p, planned(p, **{"cta_group": cta_group, "schedule": STATIC, **TECHNIQUES[name]}), spread=4.0, checks="all")


@pytest.mark.judge
@pytest.mark.parametrize("cta_group", [1, 2])
def test_gluons_own_synchronisation(cta_group: int) -> None:
    p = small(300, 420, mask=CAUSAL)
    _check(p, planned(p, cta_group=cta_group, schedule=STATIC), checks="all", plain=True)


@pytest.mark.parametrize("dtype", FLOAT8)
def test_p_does_not_saturate(dtype: str) -> None:
    """Scores that grow from block to block, as the kernel visits them, by all that tau leaves: no weight reaches the type's largest number.

    V is 1 in one column and the sign of odd keys in another; a weight cut to the largest number would show in the first.
    """
    p = small(128, 512, head_dim=64, dtype=dtype, descale=False, scale=1.0)
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


def _check_feature(name: str, dtype: str, checks: str, *, pair: bool = False) -> None:
    feature = _narrowed(make(name, "cpu"), dtype)
    assert backend.lacks(feature.problem, "B200") is None
    plan = backend.plan(feature.problem, FORWARD, "B200").with_(**feature.plan)
    if pair:
        plan = for_a_pair(feature, plan)
    with emulated.settings(checks=checks):
        results = emulated.forward(feature.problem, plan, feature.inputs)
    assert_accurate(feature.problem, feature.inputs, *results)


@pytest.mark.parametrize("name", ["heads packed, packed lengths", "pages of 64, splits"])
def test_features(name: str) -> None:
    _check_feature(name, "float8_e4m3fn", "default")


def test_public_functions() -> None:
    """Packed sequences and a paged cache through the functions that users call, by the name of the backend."""
    generator = torch.Generator().manual_seed(0)
    make_8 = lambda *shape: torch.randn(shape, generator=generator).to(torch.float8_e4m3fn)  # noqa: E731
    descales = {f"{name}_descale": torch.rand(2, 2, generator=generator) + 0.5 for name in "qkv"}
    cu = torch.tensor([0, 40, 107], dtype=torch.int32)
    table = torch.tensor([[3, 0, 4], [1, 3, 2]], dtype=torch.int32)
    used = torch.tensor([43, 30], dtype=torch.int32)
    varlen = (make_8(107, 4, 64), make_8(107, 2, 64), make_8(107, 2, 64), cu, cu)
    cache = (make_8(2, 3, 4, 64), make_8(5, 16, 2, 64), make_8(5, 16, 2, 64), used)
    for function, arguments, more in ((attention_varlen, varlen, {}), (attention_kvcache, cache, {"page_table": table})):
        out, lse = function(*arguments, causal=True, return_lse=True, backend="emulator:sm_100a", **descales, **more)
        want, want_lse = function(*arguments, causal=True, return_lse=True, backend="reference", **descales, **more)
        assert out.dtype == want.dtype == torch.bfloat16
        assert (out.double() - want.double()).norm() <= 2.0**-8 * want.double().norm()
        assert (lse - want_lse).abs().max() <= EXP2_ERROR


@pytest.mark.judge
@pytest.mark.parametrize("dtype", FLOAT8)
@pytest.mark.parametrize("name", FEATURES)
def test_judge_accepts_features(name: str, dtype: str) -> None:
    _check_feature(name, dtype, "all")


@pytest.mark.judge
@pytest.mark.parametrize("dtype", FLOAT8)
@pytest.mark.parametrize("name", [*(name for name in FEATURES if "heads packed" in name), *MANY_QUERIES])
def test_judge_accepts_packed_heads_and_many_queries_in_pairs(name: str, dtype: str) -> None:
    _check_feature(name, dtype, "all", pair=True)
