"""Gradients against finite differences in float64, one feature at a time and all together: O's and LSE's, with respect to every input."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.cases import Call, Case, build
from tests.support.masks import MASKS

SMALL = {"batch": 2, "seqlen_q": 4, "seqlen_k": 5, "heads": 2, "heads_kv": 1, "head_dim": 3, "dtype": "fp64", "grad_lse": True}
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "mqa": {"heads": 3}, "head_dim_v": {"head_dim_v": 2}, "causal-tall": {"seqlen_q": 6, "seqlen_k": 3, "mask": "causal"},
    "scale": {"scale": -0.7}, "scale-0": {"scale": 0.0}, "softcap": {"softcap": 1.5}, "sink": {"sink": True}, "alibi-1d": {"alibi": 1},
    "alibi-2d": {"alibi": 2}, "deterministic": {"deterministic": True}, "seqused": {"used_q": (4, 2), "used_k": (0, 5)},
    **{f"bias-{letters}": {"bias": letters} for letters in ("bhqk", "1hqk", "b1qk", "bh1k", "bhq1", "1111", "11qk", "b111")},
    **{f"mask-{name}": {"mask": name} for name in MASKS},
    "packed": {"layout": "packed", "lengths_q": (3, 2), "lengths_k": (2, 4), "tail_q": 1, "tail_k": 1, "mask": "causal"},
    "packed-all": {"layout": "packed", "batch": 3, "lengths_q": (3, 0, 2), "lengths_k": (2, 3, 4),
                   "mask": "causal", "sink": True, "alibi": 2,
                   "bias": "bhqk", "softcap": 2.0},
    "all": {"mask": "window|prefix", "sink": True, "alibi": 2, "bias": "bhqk", "softcap": 2.0, "head_dim_v": 2, "heads": 4, "heads_kv": 2},
}  # fmt: skip


@pytest.mark.parametrize("feature", FEATURES)
def test_gradients(feature: str) -> None:
    call = build(Case(**(SMALL | FEATURES[feature])))
    names = list(call.leaves)
    values = [call.leaves[name].nan_to_num(0.0).clone().requires_grad_() for name in names]  # finite differences cannot step from NaN

    def function(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = call.call(dict(zip(names, tensors, strict=True)), "auto", return_lse=True)
        return out, torch.where(lse.isinf(), 0.0, lse)

    assert torch.autograd.gradcheck(function, values, eps=1e-6, atol=1e-6, rtol=1e-5, nondet_tol=0.0)


def test_gradients_of_the_sdpa_backend() -> None:
    for mask in ("full", "causal"):
        call = build(Case(**(SMALL | {"mask": mask, "heads": 2, "heads_kv": 2, "seqlen_k": 4, "grad_lse": False})))
        values = [call.leaves[name].clone().requires_grad_() for name in "qkv"]

        def function(*tensors: Tensor, call: Call = call) -> Tensor:
            return call.call(dict(zip("qkv", tensors, strict=True)), "sdpa", return_lse=False)

        assert torch.autograd.gradcheck(function, values)


def test_only_what_requires_a_gradient_gets_one() -> None:
    call = build(Case(**(SMALL | {"sink": True, "bias": "bhqk"})))
    for name in call.leaves:
        leaves = {other: x.detach().requires_grad_(other == name) for other, x in call.leaves.items()}
        out, _ = call.call(leaves, "auto", return_lse=True)
        out.sum().backward()
        assert [other for other, x in leaves.items() if x.grad is not None] == [name]
