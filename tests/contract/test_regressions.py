"""Defects that were found by attacking the library; each test is the smallest call that showed one."""

from __future__ import annotations

import copy
import gc
import operator
import pickle
import re
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from tandem_attn import (
    Causal,
    Document,
    Mask,
    Predicate,
    Problem,
    UnsupportedError,
    Window,
    attention,
    attention_kvcache,
    attention_varlen,
)
from tandem_attn.spec import masks

SIZES: dict[str, Any] = {"batch": 2, "seqlen_q": 1, "seqlen_k": 1, "heads": 1, "heads_kv": 1, "head_dim": 8}


def rand(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_bias_of_the_smallest_finite_number_is_a_logit(dtype: torch.dtype) -> None:
    """A row masked with ``torch.finfo(dtype).min`` throughout, as eager masks do, is an ordinary softmax over equal logits."""
    q, k, v = rand(1, 3, 2, 8), rand(1, 5, 2, 8), rand(1, 5, 2, 8)
    lowest = torch.finfo(dtype).min
    out, lse = attention(q, k, v, bias=torch.full((1, 1, 3, 5), lowest, dtype=dtype), return_lse=True)
    torch.testing.assert_close(out, v.mean(1, keepdim=True).expand_as(out))
    assert bool((lse == lowest).all())


@pytest.mark.parametrize("backend", ["sdpa", "reference"])
@pytest.mark.parametrize("size", [1e8, 1e20, 1e35])
def test_gradients_of_huge_logits_are_those_of_a_hard_maximum(size: float, backend: str) -> None:
    """One key wins in every row: dV is a sum of rows of dO, whatever the rounding of LSE."""
    q, k, v = (x.requires_grad_() for x in (rand(1, 20, 2, 8) * size**0.5, rand(1, 30, 2, 8) * size**0.5, rand(1, 30, 2, 8)))
    grad_out = rand(1, 20, 2, 8)
    dq, dk, dv = torch.autograd.grad(attention(q, k, v, backend=backend), (q, k, v), grad_out)
    winner = torch.einsum("bihd,bjhd->bihj", q.double(), k.double()).argmax(-1)[..., None].expand(-1, -1, -1, 8)
    expected = torch.zeros_like(v, requires_grad=False).scatter_add_(1, winner, grad_out)
    torch.testing.assert_close(dv, expected, rtol=1e-5, atol=1e-5)
    assert bool(dq.isfinite().all()) and bool(dk.isfinite().all())


def test_logits_as_large_as_float32_holds() -> None:
    v = rand(1, 3, 1, 4)
    k = torch.tensor([-1.0, -0.5, 0.9]).view(1, 3, 1, 1).expand(1, 3, 1, 4) * 3e38
    out, lse = attention(torch.tensor([1.0, 0, 0, 0]).view(1, 1, 1, 4), k, v, scale=1.0, return_lse=True)
    torch.testing.assert_close(out[:, 0], v[:, 2])
    torch.testing.assert_close(lse, torch.full((1, 1, 1), 2.7e38))
    sink = torch.full((1,), 3e38)
    assert float(attention(v, v, v, sink=sink, return_lse=True)[1][0, 0, 0]) == pytest.approx(3e38)


class Below:
    """A predicate object that a pickle can carry: each key below n is seen."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __call__(self, *indices: Tensor) -> Tensor:
        return indices[3] < self.n


@pytest.mark.parametrize("clone", [copy.copy, copy.deepcopy, lambda mask: pickle.loads(pickle.dumps(mask))])
def test_a_copied_predicate_is_a_predicate_of_its_own(clone: Callable[[Predicate], Predicate]) -> None:
    """Names identify predicates within one process: a copy under its original's name dies with it, or is mistaken for another."""
    original, q = Predicate(Below(2)), rand(1, 3, 1, 8)
    expected, copied = attention(q, q, q, mask=original), clone(original)
    assert copied.code != original.code
    masks._recent.clear()
    del original
    gc.collect()
    assert torch.equal(attention(q, q, q, mask=copied), expected)


def test_unsupported_error_comes_back_from_a_worker() -> None:
    error = pickle.loads(pickle.dumps(UnsupportedError(backend="a", missing="b", nearest="c")))
    assert str(error) == "backend 'a' does not cover b; nearest that works: c" and error.missing == "b"


def shifted(n: int) -> Callable[..., Tensor]:
    return lambda b, h, q_idx, kv_idx: q_idx >= kv_idx + n


def test_compiled_code_is_not_reused_for_another_closure() -> None:
    """Two functions of the same code that capture different numbers are different masks."""
    q = rand(1, 5, 1, 8)
    compiled = torch.compile(lambda q, mask: attention(q, q, q, mask=mask), fullgraph=True, backend="eager")
    for n in (0, 1, 2):
        assert torch.equal(compiled(q, shifted(n)), attention(q, q, q, mask=shifted(n)))


@pytest.mark.parametrize("options", [lambda n: {"window": (n, 0)}, lambda n: {"mask": Window(n, 0)}], ids=["window", "Window"])
def test_compiled_windows_may_change(options: Callable[[int], dict[str, Any]]) -> None:
    """The second number makes torch.compile take bounds as symbolic."""
    q = rand(1, 7, 1, 8)
    inside = torch.compile(lambda q, n: attention(q, q, q, **options(n)), fullgraph=True, backend="eager")
    given = torch.compile(lambda q, keywords: attention(q, q, q, **keywords), fullgraph=True, backend="eager")
    for n in (2, 3, 4):
        expected = attention(q, q, q, window=(n, 0))
        assert torch.equal(inside(q, n), expected) and torch.equal(given(q, options(n)), expected)


def test_numbers_may_be_numpys() -> None:
    q, three = rand(1, 5, 1, 8), np.int64(3)
    assert torch.equal(attention(q, q, q, window=(three, 0), scale=np.float32(0.5)), attention(q, q, q, window=(3, 0), scale=0.5))
    assert torch.equal(attention(q, q, q, mask=Window(three, np.int32(0))), attention(q, q, q, window=(3, 0)))
    assert torch.equal(attention_kvcache(q, q, q, three), attention_kvcache(q, q, q, 3))
    cu = torch.tensor([0, 3, 5], dtype=torch.int32)
    assert torch.equal(attention_varlen(q[0], q[0], q[0], cu, cu, three, three), attention_varlen(q[0], q[0], q[0], cu, cu))
    assert Problem(batch=three, seqlen_q=1, seqlen_k=1, heads=1, heads_kv=1, head_dim=8).batch == 3


def test_document_ids_as_numpy_makes_them() -> None:
    """Reversed and read-only arrays have no tensor of their own; an empty list has no dtype."""
    q, ids = rand(1, 5, 1, 8), np.array([1, 1, 0, 0, 0])[::-1]
    ids.flags.writeable = False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(attention(q, q, q, mask=Document(ids)), attention(q, q, q, mask=Document([0, 0, 0, 1, 1])))
    assert attention(q[:, :0], q[:, :0], q[:, :0], mask=Document([])).shape == (1, 0, 1, 8)


@pytest.mark.parametrize("join", [operator.and_, operator.or_])
def test_a_wrong_predicate_is_named_inside_a_combination(join: Callable[[Mask, Mask], Mask]) -> None:
    q = rand(1, 5, 1, 8)
    for answer, kind, message in (
        (None, TypeError, "mask predicate must return a bool tensor, got NoneType"),
        (torch.zeros(0, dtype=torch.bool), ValueError, "mask predicate must return a shape that broadcasts with its indices, got (0,)"),
        (np.zeros((5, 5), dtype=bool), TypeError, "mask predicate must return a bool tensor, got ndarray"),
    ):
        with pytest.raises(kind, match=re.escape(message)):
            attention(q, q, q, mask=join(Predicate(lambda b, h, i, j, answer=answer: answer), Causal()))  # type: ignore[misc]
    sees_all = attention(q, q, q, mask=join(Predicate(lambda b, h, i, j: np.True_), Causal()))
    torch.testing.assert_close(sees_all, attention(q, q, q, causal=join is operator.and_))


def test_window_bounds_of_any_size_beside_other_masks() -> None:
    q = rand(1, 5, 1, 8)
    far = (Window(10**30, 10**30) | Window(-(10**30), 0)) & Document([0] * 5)
    torch.testing.assert_close(attention(q, q, q, mask=far), attention(q, q, q))


def test_appending_nothing_to_a_cache_without_room() -> None:
    q, cache, nothing = rand(2, 1, 1, 8), torch.zeros(2, 0, 1, 8), torch.zeros(2, 0, 1, 8)
    assert not attention_kvcache(q, cache, cache.clone(), 0, k=nothing, v=nothing).any()


def test_new_tokens_may_lie_in_the_cache_that_they_go_to() -> None:
    cache, values = rand(1, 6, 1, 8), rand(1, 6, 1, 8) * 2
    keys = cache.clone()
    q, k, v = (x[:, 3:4].clone() for x in (cache, cache, cache))
    expected = attention_kvcache(q, cache.clone(), values.clone(), 2, k=k, v=v)
    assert torch.equal(attention_kvcache(keys[:, 3:4], keys, values, 2, k=keys[:, 3:4], v=keys[:, 3:4]), expected)
    expected = attention_kvcache(q, keys.clone(), values.clone(), 3, k=q * 2, v=v)
    assert torch.equal(attention_kvcache(keys[:, 3:4], keys, values, 3, k=q * 2, v=keys[:, 3:4]), expected)


def test_a_refused_transform_appends_nothing() -> None:
    cache, new = torch.zeros(1, 4, 1, 8), torch.ones(1, 1, 1, 8)
    with pytest.raises(UnsupportedError):
        torch.func.vmap(lambda q: attention_kvcache(q, cache, cache.clone(), 2, k=new, v=new))(rand(2, 1, 1, 1, 8))
    assert not cache.any()


def test_the_default_device_does_not_matter() -> None:
    q, cache, new = rand(2, 1, 1, 8), rand(2, 4, 1, 8), rand(2, 1, 1, 8)
    lengths = torch.tensor([2, 3], dtype=torch.int32)
    expected = attention_kvcache(q, cache.clone(), cache.clone(), lengths, k=new, v=new, causal=True)
    with torch.device("meta"):
        got = attention_kvcache(q, cache.clone(), cache.clone(), lengths, k=new, v=new, causal=True)
    assert torch.equal(got, expected)


def test_fake_tensors_append() -> None:
    with FakeTensorMode():
        q, cache = torch.zeros(2, 1, 1, 8), torch.zeros(2, 4, 1, 8)
        assert attention_kvcache(q, cache, cache.clone(), 2, k=q, v=q).shape == q.shape


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (lambda x: attention(x, x, x, softcap=1e39), ValueError, "softcap must be finite in float32, got 1e+39"),
        (lambda x: attention(x, x, x, mask=Document(torch.zeros(2, dtype=torch.complex64))), ValueError, "Document's ids must be int"),
        (
            lambda x: attention_kvcache(x, x, x, 0, k=x.repeat(1, 2, 1, 1), v=x.repeat(1, 2, 1, 1)),
            ValueError,
            "k must have at most as many",
        ),
        (lambda x: Problem(**SIZES, scale="a"), TypeError, "scale must be a number, got 'a'"),
        (lambda x: Problem(**SIZES, softcap=None), TypeError, "softcap must be a number, got None"),
        (lambda x: Problem(**SIZES, sink="yes"), TypeError, "sink must be a bool, got 'yes'"),
        (lambda x: Problem(**SIZES, device="tpu"), ValueError, "device must be one of cpu, cuda, meta, got 'tpu'"),
        (lambda x: Problem(**SIZES, lengths=5), TypeError, "lengths must be a tuple of (seqlen_q, seqlen_k), got 5"),
    ],
)
def test_wrong_values_are_named(call: Callable[[Tensor], object], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=re.escape(message)):
        call(rand(1, 2, 1, 8))
