"""The emulated backends as backends: by name only, refusals, settings, and a judgement that reaches the caller."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import tandem_attn
from tandem_attn.api.backends import ORDER
from tandem_attn.kernels import emulated
from tandem_attn.kernels.compile import Kernel
from tandem_attn.spec.masks import Predicate
from tandem_attn.spec.plan import Plan
from tandem_attn.spec.problem import Problem

pytest.importorskip("triton", reason="the kernels are compiled by Triton: pip install tandem-attn[cuda]")

from tandem_attn.emulator import JudgementError

PROBLEM = Problem(batch=1, seqlen_q=20, seqlen_k=30, heads=2, heads_kv=1, head_dim=16)
NAMES = [emulated.PREFIX + arch for arch in emulated.CHIPS]


def tensors() -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, rows, heads, 16).bfloat16() for rows, heads in ((20, 2), (30, 1), (30, 1)))
    return q, k, v


def test_auto_never_takes_one() -> None:
    assert not set(NAMES) & set(ORDER)
    assert set(NAMES) <= set(tandem_attn.backends())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"device": "cuda"}, "devices other than the CPU"),
        ({"dtype": "float32"}, "float32"),
        ({"mask": Predicate(lambda b, h, i, j: i > 0 and j > 0)}, "a mask with a decision by value"),
        ({"head_dim": 12, "head_dim_v": 12}, "head_dim=12 (multiples of 8)"),
    ],
)
def test_what_the_kernels_lack_is_said(name: str, change: dict[str, object], reason: str) -> None:
    answer = tandem_attn.supports(replace(PROBLEM, **change), name)  # type: ignore[arg-type]
    assert not answer and reason in answer.reason
    assert tandem_attn.supports(PROBLEM, name)


@pytest.mark.parametrize("name", NAMES)
def test_settings_hold_inside_their_block(name: str) -> None:
    before = emulated._settings.get()
    with emulated.settings(schedule="sometimes"), pytest.raises(ValueError, match="schedule 'sometimes' is not one of"):
        tandem_attn.attention(*tensors(), backend=name)
    assert emulated._settings.get() == before


@pytest.mark.parametrize("name", NAMES)
def test_a_judgement_is_raised_with_its_result(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutant: no thread fences its writes of O to shared memory before TMA reads them."""
    right = emulated.compiled

    def broken(plan: Plan, **options: bool) -> Kernel:
        kernel = right(plan, **options)
        assert "fence.proxy.async" in kernel.ptx
        return replace(kernel, ptx=kernel.ptx.replace("fence.proxy.async.shared::cta;", "").replace("fence.proxy.async;", ""))

    monkeypatch.setattr(emulated, "compiled", broken)
    with pytest.raises(JudgementError, match="missing-proxy-fence") as raised:
        tandem_attn.attention(*tensors(), backend=name)
    assert not raised.value.result.ok
    assert {report.kind for report in raised.value.result.reports} == {"missing-proxy-fence"}
