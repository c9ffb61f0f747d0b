"""tandem_attn.compat.sdpa against torch.nn.functional.scaled_dot_product_attention."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F  # noqa: N812  (its usual name)

from tandem_attn.compat.sdpa import scaled_dot_product_attention


def test_signature_is_torchs() -> None:
    text = torch.nn.functional.scaled_dot_product_attention.__doc__
    assert text is not None
    parameters = inspect.signature(scaled_dot_product_attention).parameters.values()
    bare = [p.name if p.default is p.empty else f"{p.name}={p.default}" for p in parameters]
    assert ", ".join(bare) == "query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False"
    for p in parameters:
        assert p.name in text


def tensors(q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...] | None = None) -> tuple[Tensor, ...]:
    return tuple(torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in (q, k, v or k))


def compare(truth: SimpleNamespace, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> None:
    out = scaled_dot_product_attention(query, key, value, **options)
    expected = F.scaled_dot_product_attention(query, key, value, **options)
    truth.close("O", out, expected)
    inputs = [query, key, value] + [x for x in options.values() if isinstance(x, Tensor) and x.requires_grad]
    truth.grads_close(out, expected, inputs, inputs)


SHAPES = {
    "4-D": ((2, 4, 5, 8), (2, 4, 7, 8), (2, 4, 7, 6)),
    "3-D": ((4, 5, 8), (4, 7, 8)),
    "2-D": ((5, 8), (7, 8)),
    "6-D": ((2, 1, 3, 4, 5, 8), (2, 1, 3, 4, 7, 8)),
    "one key/value head, no GQA flag": ((2, 4, 5, 8), (2, 1, 7, 8)),
    "one query head": ((2, 1, 5, 8), (2, 4, 7, 8)),
    "batch of query broadcasts": ((1, 4, 5, 8), (3, 4, 7, 8)),
    "batch of key broadcasts": ((3, 4, 5, 8), (1, 4, 7, 8)),
    "different ranks": ((4, 5, 8), (2, 4, 7, 8)),
    "long query": ((2, 4, 9, 8), (2, 4, 3, 8)),
    "single query": ((2, 4, 1, 8), (2, 4, 6, 8)),
}


@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("is_causal", [False, True])
def test_shapes(truth: SimpleNamespace, shapes: tuple[tuple[int, ...], ...], is_causal: bool) -> None:
    compare(truth, *tensors(*shapes), is_causal=is_causal, scale=0.4)


@pytest.mark.parametrize("shape", [(), (1,), (7,)], ids=str)
def test_masks_of_fewer_than_two_dimensions(truth: SimpleNamespace, shape: tuple[int, ...]) -> None:
    """PyTorch's own checks take them for calls that its math kernel serves."""
    compare(truth, *tensors((5, 8), (7, 8)), attn_mask=torch.ones(shape, dtype=torch.bool))
    compare(truth, *tensors((5, 8), (7, 8)), attn_mask=torch.randn(shape, dtype=torch.float64))


def test_autocast_casts_as_pytorch_does() -> None:
    """Queries and keys in float32 beside values in bfloat16, as norms and linear layers leave them."""
    q, k, v = (x.detach().float() for x in tensors((2, 4, 5, 8), (2, 4, 7, 8)))
    mask = torch.randn(5, 7)
    with torch.autocast("cpu", torch.bfloat16):
        out = scaled_dot_product_attention(q, k, v.bfloat16(), attn_mask=mask)
        expected = F.scaled_dot_product_attention(q, k, v.bfloat16(), attn_mask=mask)
    assert out.dtype == expected.dtype == torch.bfloat16
    torch.testing.assert_close(out, expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("lead", [(2,), (), (3, 2)], ids=str)
def test_gqa(truth: SimpleNamespace, lead: tuple[int, ...]) -> None:
    compare(truth, *tensors((*lead, 6, 5, 8), (*lead, 2, 7, 8)), enable_gqa=True, is_causal=True)


@pytest.mark.parametrize(
    "shape", [(2, 4, 5, 7), (1, 4, 5, 7), (2, 1, 5, 7), (2, 1, 1, 7), (4, 5, 7), (1, 1, 7), (5, 7), (5, 1), (1, 7), (1, 1)], ids=str
)
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_mask_shapes(truth: SimpleNamespace, shape: tuple[int, ...], kind: str) -> None:
    mask = torch.rand(shape) > 0.4 if kind == "bool" else torch.randn(shape, dtype=torch.float64, requires_grad=True)
    compare(truth, *tensors((2, 4, 5, 8), (2, 4, 7, 8)), attn_mask=mask)


def test_mask_of_more_leading_dimensions(truth: SimpleNamespace) -> None:
    query, key, value = tensors((3, 2, 4, 5, 8), (3, 2, 2, 7, 8))
    for shape in ((3, 1, 4, 5, 7), (2, 1, 5, 7), (5, 7)):
        compare(truth, query, key, value, attn_mask=torch.rand(shape) > 0.4, enable_gqa=True)


def test_float_mask_with_minus_infinity(truth: SimpleNamespace) -> None:
    mask = torch.randn(5, 7, dtype=torch.float64).masked_fill(torch.rand(5, 7) > 0.6, float("-inf"))
    compare(truth, *tensors((2, 4, 5, 8), (2, 4, 7, 8)), attn_mask=mask)


def test_row_without_keys_is_zero_with_zero_gradients() -> None:
    query, key, value = tensors((1, 1, 3, 8), (1, 1, 4, 8))
    mask = torch.ones(3, 4, dtype=torch.bool)
    mask[1] = False
    out = scaled_dot_product_attention(query, key, value, attn_mask=mask)
    out.sum().backward()
    assert torch.equal(out[0, 0, 1], torch.zeros(8, dtype=torch.float64))
    assert query.grad is not None
    assert torch.equal(query.grad[0, 0, 1], torch.zeros(8, dtype=torch.float64))
    assert not any(x.grad.isnan().any() for x in (query, key, value) if x.grad is not None)


def test_no_queries_no_keys_no_batch() -> None:
    for q, k in (((2, 4, 0, 8), (2, 4, 7, 8)), ((2, 4, 5, 8), (2, 4, 0, 8)), ((0, 4, 5, 8), (0, 4, 7, 8))):
        query, key, value = tensors(q, k)
        out = scaled_dot_product_attention(query, key, value)
        assert out.shape == q
        assert torch.equal(out, torch.zeros_like(out))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(data=st.data())
def test_equals_torch_on_random_calls(data: st.DataObject) -> None:
    size = st.integers(1, 9)
    batch, heads_kv, group, sq, sk, d, dv = (data.draw(size) for _ in range(7))
    torch.manual_seed(data.draw(st.integers(0, 9)))
    query, key, value = (
        torch.randn(batch, heads_kv * group, sq, d),
        torch.randn(batch, heads_kv, sk, d),
        torch.randn(batch, heads_kv, sk, dv),
    )
    mask = data.draw(st.sampled_from(["none", "causal", "bool", "float"]))
    options: dict[str, Any] = {"enable_gqa": True, "is_causal": mask == "causal"}
    if mask in ("bool", "float"):
        shape = [n if data.draw(st.booleans()) else 1 for n in (batch, heads_kv * group, sq, sk)]
        options["attn_mask"] = torch.rand(shape) > 0.3 if mask == "bool" else torch.randn(shape)
    expected = F.scaled_dot_product_attention(query.double(), key.double(), value.double(), **_in_double(options))
    out = scaled_dot_product_attention(query, key, value, **options)
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)


def _in_double(options: dict[str, Any]) -> dict[str, Any]:
    return {name: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for name, x in options.items()}


def test_compiles_without_a_graph_break() -> None:
    query, key, value = (torch.randn(2, 4, 16, 8) for _ in range(3))
    mask = torch.rand(16, 16) > 0.3
    compiled = torch.compile(scaled_dot_product_attention, fullgraph=True, backend="aot_eager")
    for options in ({"is_causal": True}, {"attn_mask": mask}):
        assert torch.equal(compiled(query, key, value, **options), scaled_dot_product_attention(query, key, value, **options))
