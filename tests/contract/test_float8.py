"""8-bit q, k and v with descales: every entry point against float64, and what is refused."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from tandem_attn import UnsupportedError, attention, attention_kvcache, attention_varlen, supports
from tandem_attn.api import backends, repeated
from tandem_attn.compat import flash_attn as fa
from tandem_attn.spec.problem import Problem

TYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
B, SQ, SK, H, HKV, D = 2, 37, 150, 4, 2, 16


def rand(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def qkv(dtype: torch.dtype = torch.float8_e4m3fn) -> tuple[Tensor, Tensor, Tensor]:
    return rand(B, SQ, H, D).to(dtype), rand(B, SK, HKV, D, seed=1).to(dtype), rand(B, SK, HKV, D, seed=2).to(dtype)


def numbers(seed: int) -> Tensor:
    return torch.rand(B, HKV, generator=torch.Generator().manual_seed(seed)) + 0.5


DESCALES: dict[str, Callable[[int], Tensor]] = {
    "contiguous": numbers,
    "transposed": lambda seed: numbers(seed).T.contiguous().T,
    "every second of a larger one": lambda seed: torch.stack([numbers(seed), numbers(seed + 50)], -1).flatten(1)[:, ::2],
    "expanded": lambda seed: numbers(seed)[:1].expand(B, HKV),
    "one sequence": lambda seed: numbers(seed)[:1],
    "one head": lambda seed: numbers(seed)[:, :1],
    "a number": lambda seed: numbers(seed)[0, 0],
}


def meant(x: Tensor, descale: Tensor) -> Tensor:
    """What x (B, S, heads, D) stands for, in float64."""
    each = descale.double().expand(B, HKV)
    return x.double() * torch.stack([each[:, h * HKV // x.shape[2]] for h in range(x.shape[2])], 1)[:, None, :, None]


def close(out: Tensor, truth: Tensor, dtype: torch.dtype) -> None:
    """Each weight is off by half a unit of the dtype at most, 0.3 units on average, and the sum of a row by less."""
    assert out.dtype == torch.bfloat16
    error = float((out.double() - truth).norm() / truth.norm())
    assert error <= 0.3 * torch.finfo(dtype).eps, f"relative error {error:.3g}"


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("form", DESCALES)
def test_attention(form: str, dtype: torch.dtype) -> None:
    q, k, v = qkv(dtype)
    descales = [DESCALES[form](seed) for seed in range(3)]
    named = dict(zip(("q_descale", "k_descale", "v_descale"), descales, strict=True))
    out, lse = attention(q, k, v, causal=True, return_lse=True, **named)
    truth = [meant(x, descale) for x, descale in zip((q, k, v), descales, strict=True)]
    want, want_lse = attention(*truth, causal=True, return_lse=True)
    close(out, want, dtype)
    assert lse.dtype == torch.float32 and torch.allclose(lse.double(), want_lse, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["q_descale", "k_descale", "v_descale"])
def test_one_descale_alone(name: str) -> None:
    q, k, v = qkv()
    out = attention(q, k, v, **{name: numbers(3)})
    others = torch.ones(B, HKV)
    want = attention(*(meant(x, numbers(3) if name[0] == which else others) for x, which in zip((q, k, v), "qkv", strict=True)))
    close(out, want, q.dtype)


def test_powers_of_two_are_exact() -> None:
    """A descale is as good as the scale of logits, or a factor of O; both exactly for powers of two."""
    q, k, v = qkv()
    plain = attention(q, k, v, scale=0.5)
    assert torch.equal(attention(q, k, v, scale=0.125, q_descale=torch.tensor(8.0), k_descale=torch.tensor(0.5)), plain)
    assert torch.equal(attention(q, k, v, scale=0.5, v_descale=torch.tensor(4.0)), plain * 4)


def test_varlen_with_empty_sequences() -> None:
    """The third row of each descale belongs to the third sequence, also behind an empty one."""
    lengths = [(37, 50), (0, 20), (20, 80), (13, 0)]
    cu_q, cu_k = (torch.tensor([0, *(pair[i] for pair in lengths)]).cumsum(0).int() for i in (0, 1))
    q, k, v = (rand(n, heads, D, seed=n).to(TYPES[0]) for n, heads in ((70, H), (150, HKV), (150, HKV)))
    descales = [torch.rand(4, HKV, generator=torch.Generator().manual_seed(i)) + 0.5 for i in range(3)]
    out, lse = attention_varlen(
        q, k, v, cu_q, cu_k, q_descale=descales[0], k_descale=descales[1], v_descale=descales[2], causal=True, return_lse=True
    )
    for b, (len_q, len_k) in enumerate(lengths):
        at_q, at_k = slice(int(cu_q[b]), int(cu_q[b]) + len_q), slice(int(cu_k[b]), int(cu_k[b]) + len_k)
        factors = [x[b].repeat_interleave(n // HKV).double()[:, None] for x, n in zip(descales, (H, HKV, HKV), strict=True)]
        parts = [(x[at].double() * f)[None] for x, at, f in zip((q, k, v), (at_q, at_k, at_k), factors, strict=True)]
        want, want_lse = attention(*parts, causal=True, return_lse=True)
        if len_q and len_k:
            close(out[at_q], want[0], q.dtype)
        assert torch.allclose(lse[:, at_q].double(), want_lse[0], rtol=1e-6, atol=1e-6)
    assert not out[-13:].any() and torch.isneginf(lse[:, -13:]).all()


@pytest.mark.parametrize("paged", [False, True])
def test_cache_with_new_tokens(paged: bool) -> None:
    """New tokens are written as they are; a page serves sequences with descales of their own."""
    q = rand(B, 3, H, D).to(TYPES[0])
    new_k, new_v = (rand(B, 3, HKV, D, seed=i).to(TYPES[0]) for i in (1, 2))
    cache = [rand(*((6, 16) if paged else (B, 48)), HKV, D, seed=i).to(TYPES[0]) for i in (3, 4)]
    table = torch.tensor([[5, 0, 2], [5, 3, 1]], dtype=torch.int32) if paged else None  # the first page is shared
    lengths = torch.tensor([33, 17], dtype=torch.int32)
    descales = [numbers(i) for i in range(3)]
    named = dict(zip(("q_descale", "k_descale", "v_descale"), descales, strict=True))
    out = attention_kvcache(q, *cache, lengths, k=new_k, v=new_v, page_table=table, causal=True, **named)
    rows = cache if table is None else [x.view(torch.uint8)[table.long()].flatten(1, 2).view(TYPES[0]) for x in cache]
    for b in range(B):
        stop = int(lengths[b]) + 3
        assert torch.equal(rows[0][b, stop - 3 : stop].float(), new_k[b].float())
        parts = [meant(x, descale)[b : b + 1, :n] for x, descale, n in zip((q, *rows), descales, (3, stop, stop), strict=True)]
        close(out[b : b + 1], attention(*parts, causal=True), q.dtype)


def test_flash_attn_functions_take_descales() -> None:
    q, k, v = qkv()
    named = {f"{name}_descale": numbers(i) for i, name in enumerate("qkv")}
    want = attention(q, k, v, causal=True, **named)
    assert torch.equal(fa.flash_attn_func(q, k, v, causal=True, **named), want)
    assert torch.equal(fa.flash_attn_with_kvcache(q, k, v, causal=True, **named), want)
    cu_q, cu_k = (torch.arange(B + 1, dtype=torch.int32) * n for n in (SQ, SK))
    packed = fa.flash_attn_varlen_func(*(x.flatten(0, 1) for x in (q, k, v)), cu_q, cu_k, SQ, SK, causal=True, **named)
    assert torch.equal(packed.view_as(want), want)


def test_flash_attn_rotates_no_8_bit_tokens() -> None:
    q, k, v = qkv()
    table = torch.zeros(SK, D // 2, dtype=torch.bfloat16)
    with pytest.raises(UnsupportedError, match=r"rotary embedding of torch\.float8_e4m3fn"):
        fa.flash_attn_with_kvcache(q, k, v, q[:, :1, :HKV], q[:, :1, :HKV], table, table, cache_seqlens=3)


WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "16-bit q": (
        {"q": torch.zeros(B, SQ, H, D).bfloat16(), "k": torch.zeros(B, SK, HKV, D).bfloat16(), "v": torch.zeros(B, SK, HKV, D).bfloat16()},
        ValueError,
        "q_descale must be None where q is not float8_e4m3fn or float8_e5m2, got a tensor beside torch.bfloat16",
    ),
    "mixed types": (
        {"k": torch.zeros(B, SK, HKV, D).to(TYPES[1])},
        TypeError,
        "k must have q's dtype torch.float8_e4m3fn, got torch.float8_e5m2",
    ),
    "no tensor": ({"q_descale": 0.5}, TypeError, "q_descale must be a torch.Tensor, got float"),
    "dtype": ({"k_descale": numbers(0).bfloat16()}, TypeError, "k_descale must be float32, got torch.bfloat16"),
    "query heads": (
        {"q_descale": torch.ones(B, H)},
        ValueError,
        "q_descale must have shape (batch, heads_kv) = (2, 2), with 1 for either, or none, got (2, 4)",
    ),
    "one dimension": ({"v_descale": torch.ones(HKV)}, ValueError, "v_descale must have shape (batch, heads_kv) = (2, 2)"),
    "device": ({"v_descale": torch.ones(B, HKV, device="meta")}, ValueError, "v_descale must be on q's device cpu, got meta"),
    "zero": ({"v_descale": torch.tensor([[1.0, 1.0], [0.0, 1.0]])}, ValueError, "v_descale must be positive and finite, got 0 at (1, 0)"),
    "NaN": ({"k_descale": torch.tensor(float("nan"))}, ValueError, "k_descale must be positive and finite, got nan at (0, 0)"),
    "gradient of a descale": ({"q_descale": torch.ones(B, HKV, requires_grad=True)}, UnsupportedError, "gradients of a call with"),
    "gradient of a sink": ({"sink": torch.ones(H, requires_grad=True)}, UnsupportedError, "or the call under torch.no_grad()"),
    "gradient of k": ({"k": torch.zeros(B, SK, HKV, D).to(TYPES[0]).requires_grad_()}, UnsupportedError, "q, k and v in bfloat16"),
    "Hopper": ({"backend": "emulator:sm_90a"}, UnsupportedError, "dtype float8_e4m3fn (the kernels for H200 take float16, bfloat16)"),
    "sdpa": ({"backend": "sdpa"}, UnsupportedError, "dtype float8_e4m3fn"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_calls(name: str) -> None:
    changes, kind, message = WRONG[name]
    q, k, v = qkv()
    with pytest.raises(kind, match=re.escape(message)):
        attention(**{"q": q, "k": k, "v": v, "q_descale": numbers(0), **changes})


def test_no_grad_lets_a_parameter_through() -> None:
    with torch.no_grad():
        attention(*qkv(), sink=torch.ones(H, requires_grad=True))


def test_support() -> None:
    problem = Problem(batch=1, seqlen_q=8, seqlen_k=8, heads=1, heads_kv=1, head_dim=16, dtype="float8_e5m2")
    assert supports(problem, "reference") and supports(problem, "emulator:sm_100a") and supports(problem, "emulator:sm_103a")
    backward = Problem(batch=1, seqlen_q=8, seqlen_k=8, heads=1, heads_kv=1, head_dim=16, dtype="float8_e5m2", backward=True)
    for backend in backends.BACKENDS:
        assert supports(backward, backend).reason == "gradients of float8_e5m2"


def with_descales(q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor) -> Any:
    return attention(q, k, v, causal=True, q_descale=a, k_descale=b[0, 0], v_descale=b, return_lse=True)


def test_compiles_in_one_graph() -> None:
    arguments = (*qkv(), numbers(0), numbers(1))
    torch._dynamo.reset()
    compiled = torch.compile(with_descales, fullgraph=True, backend="aot_eager")
    for got, want in zip(compiled(*arguments), with_descales(*arguments), strict=True):
        assert got.dtype == want.dtype and torch.equal(got, want)


def test_fake_tensors() -> None:
    with FakeTensorMode() as mode:
        q, k, v = (mode.from_tensor(x) for x in qkv())
        out, lse = with_descales(q, k, v, torch.ones(B, HKV), torch.ones(B, HKV))
    assert (out.dtype, out.shape, lse.dtype, lse.shape) == (torch.bfloat16, (B, SQ, H, D), torch.float32, (B, H, SQ))


@pytest.fixture
def bound(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[Any, ...]]]:
    """Tensors that bound calls of the reference backend were given."""
    calls: list[tuple[Any, ...]] = []
    reference = backends.BACKENDS["reference"]

    def bind(problem: Any, plan: Any, inputs: Any) -> Any:
        def call(tensors: tuple[Any, ...]) -> Any:
            calls.append(tensors)
            return attention(*tensors[:3], q_descale=tensors[-3], k_descale=tensors[-2], v_descale=tensors[-1], return_lse=True)

        return call

    monkeypatch.setitem(backends.BACKENDS, "reference", backends.Backend(**{**vars(reference), "bind": bind}))
    repeated.forget()
    yield calls
    repeated.forget()


def test_repeated_calls_take_new_descales(bound: list[tuple[Any, ...]]) -> None:
    q, k, v = qkv()
    first = attention(q, k, v, q_descale=numbers(0), backend="reference")
    other = attention(q, k, v, q_descale=numbers(9), backend="reference")
    assert len(bound) == 1 and not torch.equal(first, other)
    attention(q, k, v, q_descale=torch.tensor(2.0), backend="reference")  # another shape is another call
    assert len(bound) == 1
