"""Bound calls on a GPU: bitwise what the whole way computes, on any stream and device, and beside CUDA graphs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from features import make
from problems import K_LENGTHS, PROBLEMS, Q_LENGTHS

import tandem_attn
from tandem_attn.api import repeated
from tandem_attn.kernels import backend
from tandem_attn.spec.inputs import Inputs

on_hopper = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not on_hopper, reason="needs a Hopper GPU")]
ORDER = tuple(Inputs.__dataclass_fields__)


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    repeated.forget()
    yield
    repeated.forget()


def tensors(batch: int = 2, seqlen: int = 300, heads: int = 4, device: str = "cuda") -> list[torch.Tensor]:
    return [torch.randn(batch, seqlen, heads, 128, device=device, dtype=torch.bfloat16) for _ in range(3)]


def whole_way(function: Any, *args: Any, **options: Any) -> Any:
    """The call with an empty table."""
    repeated.forget()
    found = function(*args, **options)
    repeated.forget()
    return found


def bound_calls() -> int:
    return sum(call is not None for call in repeated._table.calls.values())


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True, "return_lse": True},
        {"window": (100, 0)},
        {"causal": True, "sink": torch.zeros(4), "softcap": 20.0},
        {"seqused_k": torch.tensor([5, 290], dtype=torch.int32)},
    ],
    ids=str,
)
def test_dense(options: dict[str, Any]) -> None:
    options = {name: x.cuda() if isinstance(x, torch.Tensor) else x for name, x in options.items()}
    given = [tensors() for _ in range(3)]
    wanted = [whole_way(tandem_attn.attention, *x, backend="tandem", **options) for x in given]
    got = [tandem_attn.attention(*x, backend="tandem", **options) for x in (*given, given[0])]
    assert bound_calls() == 1
    for a, b in zip(got, [*wanted, wanted[0]], strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


@pytest.mark.parametrize("return_lse", [False, True])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"causal": True, "sink": True}], ids=str)
def test_gradients(options: dict[str, Any], return_lse: bool) -> None:
    """A bound forward, and the backward that the operator has."""
    sink = torch.nn.Parameter(torch.zeros(4, device="cuda")) if options.get("sink") else None
    given = [x.requires_grad_() for x in tensors()]
    leaves = given if sink is None else [*given, sink]

    def attend() -> tuple[torch.Tensor, ...]:
        found = tandem_attn.attention(*given, **{**options, "sink": sink}, return_lse=return_lse, deterministic=True, backend="tandem")
        out, lse = found if return_lse else (found, None)
        total = out.float().square().sum() + (0.0 if lse is None else lse.sum())
        return (out.detach(), *torch.autograd.grad(total, leaves))

    wanted = whole_way(attend)
    for _ in range(3):
        for got, want in zip(attend(), wanted, strict=True):
            torch.testing.assert_close(got, want, rtol=0, atol=0)
    assert bound_calls() == 1


def test_packed() -> None:
    cu_q, cu_k = (torch.tensor([0, *x]).cumsum(0).int().cuda() for x in (Q_LENGTHS, K_LENGTHS))
    other = cu_k.clone()
    other[3] += 10  # the same shapes, another split
    given = [[torch.randn(n, 4, 128, device="cuda").bfloat16() for n in (sum(Q_LENGTHS), sum(K_LENGTHS), sum(K_LENGTHS))] for _ in range(2)]
    calls = [(*x, cu_q, cu, 600, 600) for x, cu in zip(given, (cu_k, other), strict=True)]
    wanted = [whole_way(tandem_attn.attention_varlen, *x, causal=True, backend="tandem", return_lse=True) for x in calls]
    got = [tandem_attn.attention_varlen(*x, causal=True, backend="tandem", return_lse=True) for x in (*calls, calls[0])]
    assert bound_calls() == 1
    for a, b in zip(got, [*wanted, wanted[0]], strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["bias", "heads packed, 12", "splits, packed lengths", "cache, leftpad", "pages of 64, splits"])
def test_features(name: str) -> None:
    """Of the backend alone, so that plans that are set by hand are bound as well."""
    feature = make(name, "cuda")
    p, plan = feature.problem, backend.plan(feature.problem).with_(**feature.plan)
    call = backend.bind(p, plan, feature.inputs)
    assert call is not None
    wanted = backend.forward(p, plan, feature.inputs)
    for _ in range(2):
        got = call(tuple(getattr(feature.inputs, field) for field in ORDER))
        torch.testing.assert_close(got, wanted, rtol=0, atol=0, equal_nan=True)


def test_cache() -> None:
    q, (k_cache, v_cache) = torch.randn(2, 1, 8, 128, device="cuda").bfloat16(), tensors(heads=2)[:2]
    for used in ([3, 300], [0, 17]):
        lengths = torch.tensor(used, dtype=torch.int32, device="cuda")
        wanted = whole_way(tandem_attn.attention_kvcache, q, k_cache, v_cache, lengths, backend="tandem")
        got = [tandem_attn.attention_kvcache(q, k_cache, v_cache, lengths, backend="tandem") for _ in range(2)]
        assert all(torch.equal(x, wanted) for x in got)
        assert bound_calls() == 1


def test_streams_each_have_a_counter() -> None:
    x = tensors(batch=8, seqlen=1000)
    wanted = whole_way(tandem_attn.attention, *x, causal=True, backend="tandem")
    tandem_attn.attention(*x, causal=True, backend="tandem")
    streams = [torch.cuda.Stream() for _ in range(3)]
    torch.cuda.synchronize()
    results = []
    for _ in range(5):
        for stream in streams:
            with torch.cuda.stream(stream):
                results.append(tandem_attn.attention(*x, causal=True, backend="tandem"))
    torch.cuda.synchronize()
    assert bound_calls() == 1
    assert all(torch.equal(result, wanted) for result in results)


def test_graph_captured_after_binding() -> None:
    x = tensors()
    call = lambda: tandem_attn.attention(*x, causal=True, backend="tandem")  # noqa: E731
    for _ in range(2):
        call()
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    with torch.cuda.graph(graph):
        out = call()
    for _ in range(2):
        for tensor in x:
            tensor.copy_(torch.randn_like(tensor))
        graph.replay()
        between = call()
        graph.replay()
        assert torch.equal(out, between)


def test_misplaced_tensors_after_binding() -> None:
    x = tensors()
    tandem_attn.attention(*x, backend="tandem")
    memory = torch.empty(x[0].numel() + 1, device="cuda", dtype=torch.bfloat16)
    moved = memory[1:].view(x[0].shape).copy_(x[0])
    wanted = tandem_attn.attention(*x, backend="tandem")
    assert torch.equal(tandem_attn.attention(moved, x[1], x[2], backend="tandem"), wanted)


@pytest.mark.cuda(devices=2)
def test_another_device_is_current() -> None:
    x = tensors(device="cuda:1")
    wanted = whole_way(tandem_attn.attention, *x, causal=True, backend="tandem")
    with torch.cuda.device(0):
        got = [tandem_attn.attention(*x, causal=True, backend="tandem") for _ in range(3)]
        assert torch.cuda.current_device() == 0
    assert all(torch.equal(out, wanted) and out.device == wanted.device for out in got)


def test_every_problem_binds() -> None:
    """What keeps a problem from being bound is told here, not found by a slow call."""
    assert backend.lacks(PROBLEMS["full"]) is None
    unbound = []
    for name in ("full", "causal", "window", "gqa 4", "sink", "softcap", "head_dim 64, full", "head_dim 192 and 128"):
        p = PROBLEMS[name]
        q = torch.randn(p.batch, p.seqlen_q, p.heads, p.head_dim, device="cuda").bfloat16()
        k = torch.randn(p.batch, p.seqlen_k, p.heads_kv, p.head_dim, device="cuda").bfloat16()
        v = torch.randn(p.batch, p.seqlen_k, p.heads_kv, p.head_dim_v, device="cuda").bfloat16()
        sink = torch.zeros(p.heads, device="cuda") if p.sink else None
        if backend.bind(p, backend.plan(p), Inputs(q=q, k=k, v=v, sink=sink)) is None:
            unbound.append(name)
    assert not unbound
