"""Repeated calls that need a gradient: bound like the others, and for autograd the operator itself."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import tandem_attn
from tandem_attn import UnsupportedError
from tests.support.recorder import Q, Recorder, qkv

Attend = Callable[..., Any]


def ways(attend: Attend, found: Recorder) -> tuple[Any, Any]:
    """What ``attend`` gives for calls that go the whole way, and then for a bound call."""
    whole = attend("reference")
    attend("recorder")
    before = found.calls
    bound = attend("recorder")
    assert found.calls > before
    return whole, bound


def leaves(needed: str = "qkv") -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {name: x.requires_grad_(name in needed) for name, x in zip("qkv", qkv(), strict=True)}


@pytest.mark.parametrize("needed", ["qkv", "q", "v", "kv"])
@pytest.mark.parametrize("return_lse", [False, True])
@pytest.mark.parametrize("options", [{}, {"causal": True, "softcap": 2.0}, {"seqused_k": torch.tensor([3, 7], dtype=torch.int32)}], ids=str)
def test_gradients_are_equal(options: dict[str, Any], return_lse: bool, needed: str, recorder: Recorder) -> None:
    arriving = torch.randn(Q)

    def attend(backend: str) -> list[Tensor]:
        given = leaves(needed)
        found = tandem_attn.attention(**given, return_lse=return_lse, backend=backend, **options)
        out, lse = found if return_lse else (found, None)
        assert out.requires_grad and (lse is None or lse.requires_grad) and not out.is_leaf
        total = (out * arriving).sum() + (0.0 if lse is None else lse.sum())
        return [out.detach(), *torch.autograd.grad(total, [given[name] for name in needed])]

    assert all(torch.equal(a, b) for a, b in zip(*ways(attend, recorder), strict=True))


@pytest.mark.parametrize("name", ["sink", "alibi_slopes", "bias"])
@pytest.mark.parametrize("kind", [torch.nn.Parameter, lambda x: x.requires_grad_()], ids=["parameter", "tensor"])
def test_other_inputs_may_need_it_alone(kind: Any, name: str, recorder: Recorder) -> None:
    shape = (1, 4, 7, 7) if name == "bias" else (4,)

    def attend(backend: str) -> Tensor:
        x = kind(torch.ones(shape))
        out = tandem_attn.attention(**leaves(""), backend=backend, **{name: x})
        return torch.autograd.grad(out.square().sum(), x)[0]

    whole, bound = ways(attend, recorder)
    assert whole.any() and torch.equal(whole, bound)


def test_a_parameter_without_gradients_is_a_tensor(recorder: Recorder) -> None:
    sink = torch.nn.Parameter(torch.zeros(4))
    for _ in range(3):
        with torch.no_grad():
            assert not tandem_attn.attention(**leaves(), sink=sink, backend="recorder").requires_grad
    assert recorder.calls == 2


def test_needing_a_gradient_is_part_of_the_key(recorder: Recorder) -> None:
    with_grad, without = leaves(), leaves("")
    for given in (with_grad, without, with_grad, without):
        assert tandem_attn.attention(**given, backend="recorder").requires_grad == given["q"].requires_grad
    with torch.no_grad():
        assert not tandem_attn.attention(**with_grad, backend="recorder").requires_grad
    with torch.inference_mode():
        assert tandem_attn.attention(**with_grad, backend="recorder").is_inference()
    assert (recorder.binds, recorder.calls) == (2, 4)


@pytest.mark.parametrize("return_lse", [False, True])
def test_saves_what_the_operator_saves(return_lse: bool, recorder: Recorder) -> None:
    given = leaves() | {"sink": torch.zeros(4)}
    names = {x.data_ptr(): name for name, x in given.items()}

    def attend(backend: str) -> list[Any]:
        packed: list[Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x: (packed.append(x), x)[1], lambda x: x):
            found = tandem_attn.attention(**given, return_lse=return_lse, backend=backend)
        return [(names.get(x.data_ptr()), x.shape, x.dtype) for x in packed] + [type(found)]

    whole, bound = ways(attend, recorder)
    assert [name for name, *_ in whole[:-1]] == [None, None, "q", "k", "v", "sink"] and whole == bound


@pytest.mark.parametrize("which", ["out", "lse"])
def test_a_second_derivative_is_refused(which: str, recorder: Recorder) -> None:
    def attend(backend: str) -> str:
        given = leaves()
        found = dict(zip(("out", "lse"), tandem_attn.attention(**given, return_lse=True, backend=backend), strict=True))
        grads = torch.autograd.grad(found[which].square().sum(), list(given.values()), create_graph=True)
        with pytest.raises(UnsupportedError, match="second derivative") as raised:
            sum(x.sum() for x in grads).backward()  # type: ignore[union-attr]
        return str(raised.value)

    whole, bound = ways(attend, recorder)
    assert whole == bound


def test_an_input_changed_in_place_is_noticed(recorder: Recorder) -> None:
    def attend(backend: str) -> str:
        given = leaves("q")
        out = tandem_attn.attention(**given, backend=backend)
        given["v"].add_(1.0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation") as raised:
            out.sum().backward()
        return str(raised.value).split(";")[0]

    whole, bound = ways(attend, recorder)
    assert whole.startswith("one of the variables") and bound.startswith("one of the variables")


def test_a_graph_serves_once_unless_it_is_kept(recorder: Recorder) -> None:
    def attend(backend: str) -> list[Tensor]:
        given = leaves()
        out = tandem_attn.attention(**given, backend=backend)
        twice = [torch.autograd.grad(out.sum(), given["q"], retain_graph=keep)[0] for keep in (True, False)]
        with pytest.raises(RuntimeError, match="second time"):
            torch.autograd.grad(out.sum(), given["q"])
        assert not out.detach().requires_grad
        return twice

    whole, bound = ways(attend, recorder)
    assert all(torch.equal(x, whole[0]) for x in (*whole, *bound))


def test_strides_of_inputs_and_gradients(recorder: Recorder) -> None:
    """Slices of one tensor, and a gradient of stride 0."""
    torch.manual_seed(0)
    qkv = torch.randn(2, 7, 3, 4, 8)

    def attend(backend: str) -> Tensor:
        leaf = qkv.clone().requires_grad_()
        return torch.autograd.grad(tandem_attn.attention(*leaf.unbind(2), backend=backend).sum(), leaf)[0]

    assert torch.equal(*ways(attend, recorder))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(reentrant: bool, recorder: Recorder) -> None:
    """The first call goes the whole way, its repetition in backward is bound."""

    def attend(backend: str) -> tuple[Tensor, ...]:
        given = leaves()
        run = lambda q, k, v: tandem_attn.attention(q * 2, k, v, backend=backend)  # noqa: E731
        out = checkpoint(run, *given.values(), use_reentrant=reentrant)
        out.sum().backward()
        return (out.detach(), *(x.grad for x in given.values()))

    first = attend("recorder")
    whole, bound = ways(attend, recorder)
    assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(first, whole, bound, strict=True))


def test_a_call_that_its_bound_form_declines(recorder: Recorder) -> None:
    def attend(backend: str) -> tuple[Tensor, ...]:
        given = leaves()
        return torch.autograd.grad(tandem_attn.attention(**given, backend=backend).square().sum(), list(given.values()))

    whole, _ = ways(attend, recorder)
    recorder.declines, before = True, recorder.calls
    assert all(torch.equal(a, b) for a, b in zip(attend("recorder"), whole, strict=True))
    assert recorder.calls == before


def test_packed_and_cached_calls(recorder: Recorder) -> None:
    cu = torch.tensor([0, 3, 9], dtype=torch.int32)

    def packed(backend: str) -> Tensor:
        torch.manual_seed(0)
        x = torch.randn(9, 4, 8, requires_grad=True)
        return torch.autograd.grad(tandem_attn.attention_varlen(x, x, x, cu, cu, 6, 6, backend=backend).square().sum(), x)[0]

    def cached(backend: str) -> str:
        given = leaves("q")
        out = tandem_attn.attention_kvcache(*given.values(), torch.tensor([3, 7], dtype=torch.int32), backend=backend)
        with pytest.raises(UnsupportedError) as raised:
            out.sum().backward()
        return str(raised.value).replace("recorder", "reference")

    assert torch.equal(*ways(packed, recorder))
    whole, bound = ways(cached, recorder)
    assert whole == bound and "gradient through a KV cache" in whole


def test_compiled_calls_take_the_operator(recorder: Recorder) -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return tandem_attn.attention(q, k, v, backend="recorder")

    given = leaves()
    eager = [torch.autograd.grad(attend(**given).sum(), list(given.values())) for _ in range(2)]
    calls = recorder.calls
    compiled = torch.autograd.grad(torch.compile(attend, backend="aot_eager", fullgraph=True)(**given).sum(), list(given.values()))
    assert calls == recorder.calls == 1
    assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(*eager, compiled, strict=True))


def test_nothing_is_kept_alive(recorder: Recorder) -> None:
    given = leaves()
    for _ in range(2):
        out = tandem_attn.attention(**given, backend="recorder")
    out.sum().backward()
    alive = [weakref.ref(x) for x in (*given.values(), out)]
    assert recorder.calls == 1
    del given, out
    gc.collect()
    assert [ref() for ref in alive] == [None] * 4
