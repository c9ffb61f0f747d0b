"""Contract line 11 and the operators: torch.compile(fullgraph), opcheck, FLOP formulas."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

import tandem_attn
from tandem_attn import Causal, Document, Predicate, attention, attention_kvcache, attention_varlen
from tandem_attn.api.ops import ARGUMENTS

NEEDS_COMPILER = pytest.mark.skipif(not (shutil.which("c++") or shutil.which("g++")), reason="inductor needs a C++ compiler, none found")
COMPILERS = ["aot_eager", pytest.param("inductor", marks=NEEDS_COMPILER)]


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> None:
    torch._dynamo.reset()


def rand(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float32).to(dtype)


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def padded(sq: int = 6, sk: int = 9, batch: int = 2) -> list[Tensor]:
    return [rand(batch, sq, 4, 8), rand(batch, sk, 2, 8), rand(batch, sk, 2, 8)]


IDS = int32(0, 0, 1, 1, 2, 2, 2, 2, 2, 3, 3, 3)
EVEN = Predicate(lambda b, h, q_idx, kv_idx: (q_idx + kv_idx) % 2 == 0)


def simple(q: Tensor, k: Tensor, v: Tensor) -> Any:
    return 2 * attention(q * 1.5, k, v, causal=True).relu()


def rich(q: Tensor, k: Tensor, v: Tensor) -> Any:
    out, lse = attention(q, k, v, mask=EVEN | Causal(), softcap=3.0, sink=q.mean((0, 1, 3)), return_lse=True, window=(7, 1))
    return out + lse.sigmoid().transpose(1, 2)[..., None]


def biased(q: Tensor, k: Tensor, v: Tensor) -> Any:
    bias = (q.mean((1, 3))[:, :, None, None] * 0.1).expand(-1, -1, q.shape[1], 1)
    return attention(q, k, v, bias=bias, alibi_slopes=q.mean((0, 1, 3)).abs(), mask=Document(IDS))


def packed(q: Tensor, k: Tensor, v: Tensor) -> Any:
    cu_q, cu_k = (torch.arange(0, x.shape[0] * x.shape[1] + 1, x.shape[1], dtype=torch.int32) for x in (q, k))
    return attention_varlen(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), cu_q, cu_k, q.shape[1], k.shape[1], causal=True)


def function_mask(q: Tensor, k: Tensor, v: Tensor) -> Any:
    return attention(q, k, v, mask=lambda b, h, q_idx, kv_idx: kv_idx % 3 != 1)


FUNCTIONS = [simple, rich, biased, packed, function_mask]


def run(function: Callable[..., Any], tensors: list[Tensor]) -> list[Tensor]:
    leaves = [x.clone().requires_grad_() for x in tensors]
    out = function(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, torch.linspace(-1, 1, out.numel()).view_as(out))]


@pytest.mark.parametrize("compiler", COMPILERS)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_contract_11_compiled_equals_eager(function: Callable[..., Any], compiler: str) -> None:
    compiled = torch.compile(function, fullgraph=True, backend=compiler)
    for got, want in zip(run(compiled, padded()), run(function, padded()), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("function", [simple, rich, packed])
def test_contract_11_compiled_with_dynamic_shapes(function: Callable[..., Any]) -> None:
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend=counter)
    frames = []
    for sizes in ((6, 9, 3), (5, 7, 6), (12, 12, 5), (150, 200, 2)):  # equal sizes in the first call would be taken for one variable
        for got, want in zip(run(compiled, padded(*sizes)), run(function, padded(*sizes)), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
        frames.append(counter.frame_count)
    assert len(set(frames)) == 1, f"one graph serves all shapes, got {frames} compilations after each call"


@pytest.mark.parametrize("compiler", COMPILERS)
def test_contract_11_compiled_cache_call_appends(compiler: str) -> None:
    def step(q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, lengths: Tensor) -> Tensor:
        return attention_kvcache(q + 1, k_cache, v_cache, lengths, k=k * 2, v=v, causal=True, cache_leftpad=lengths // 2)

    compiled = torch.compile(step, fullgraph=True, backend=compiler)
    caches = [[rand(2, 16, 2, 8), rand(2, 16, 2, 8)] for _ in range(2)]
    for start in (0, 1, 2):
        arguments = [rand(2, 1, 4, 8), rand(2, 1, 2, 8), rand(2, 1, 2, 8)]
        lengths = int32(start, 7 + start)
        with torch.no_grad():
            got, want = compiled(*arguments, *caches[0], lengths), step(*arguments, *caches[1], lengths)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    assert all(torch.equal(a, b) for a, b in zip(*caches, strict=True))
    assert torch.equal(caches[0][0][0, 2], 2 * rand(2, 1, 2, 8)[0, 0])


def test_contract_11_max_seqlen_as_a_tensor_compiles_once() -> None:
    """A 0-d tensor as max_seqlen: its value is never read, so no value causes a new compilation."""
    counter = CompileCounterWithBackend("aot_eager")

    @torch.compile(fullgraph=True, backend=counter)
    def call(q: Tensor, k: Tensor, v: Tensor, cu: Tensor, longest: Tensor) -> Tensor:
        return attention_varlen(q, k, v, cu, cu, longest, longest, causal=True)

    q, k, v = rand(12, 4, 8), rand(12, 2, 8), rand(12, 2, 8)
    for cu in (int32(0, 5, 12), int32(0, 6, 12), int32(0, 1, 12)):
        longest = cu.diff().max()
        torch.testing.assert_close(call(q, k, v, cu, longest), attention_varlen(q, k, v, cu, cu, causal=True), rtol=1e-5, atol=1e-5)
    assert counter.frame_count == 1


def test_contract_11_compiled_errors_keep_their_type() -> None:
    compiled = torch.compile(lambda q, k, v: attention(q, k, v, softcap=1.0, backend="sdpa"), backend="eager")
    with pytest.raises(tandem_attn.UnsupportedError, match="softcap"):
        compiled(*padded())


# --- opcheck -----------------------------------------------------------------------------------------------------------------------------


def arguments(**changes: Any) -> tuple[Any, ...]:
    q, k, v = padded()
    named = dict.fromkeys(ARGUMENTS) | {"q": q, "k": k, "v": v, "mask_tensors": [], "mask": "full()", "max_seqlen_q": 6, "max_seqlen_k": 9}
    named |= {"scale": 0.3, "softcap": 0.0, "needs_grad": True, "deterministic": False, "return_lse": True, "backend": "auto"}
    return tuple((named | changes)[name] for name in ARGUMENTS)


FLAT = {"q": rand(12, 4, 8), "k": rand(18, 2, 8), "v": rand(18, 2, 8), "cu_seqlens_q": int32(0, 4, 10), "cu_seqlens_k": int32(0, 9, 18)}
OPERATOR_CALLS = {
    "plain": arguments(),
    "sdpa": arguments(return_lse=False),
    "rich": arguments(
        mask="and(document(#,#),window(5,0,bottom-right))", mask_tensors=[IDS, IDS], sink=rand(4), alibi_slopes=rand(2, 4),
        bias=rand(1, 4, 6, 1), softcap=4.0, seqused_k=int32(3, 9),
    ),
    "half": arguments(**{name: x.half() for name, x in zip("qkv", padded(), strict=True)}),
    "packed": arguments(**FLAT, max_seqlen_q=12, max_seqlen_k=18),
    "strided": arguments(q=rand(2, 4, 6, 8).transpose(1, 2)),
}  # fmt: skip


def with_gradients(args: tuple[Any, ...]) -> tuple[Any, ...]:
    leaf = lambda x: isinstance(x, Tensor) and x.is_floating_point()  # noqa: E731
    return tuple(x.clone(memory_format=torch.preserve_format).requires_grad_() if leaf(x) else x for x in args)


@pytest.mark.parametrize("name", OPERATOR_CALLS)
def test_contract_11_opcheck_attention(name: str) -> None:
    torch.library.opcheck(torch.ops.tandem_attn.attention.default, with_gradients(OPERATOR_CALLS[name]))


@pytest.mark.parametrize("grad_lse", [False, True])
@pytest.mark.parametrize("name", OPERATOR_CALLS)
def test_contract_11_opcheck_backward(name: str, grad_lse: bool) -> None:
    args = OPERATOR_CALLS[name]
    if grad_lse and name == "sdpa":
        args = OPERATOR_CALLS["plain"]
    out, lse = torch.ops.tandem_attn.attention(*args)
    arriving = (torch.ones_like(out), torch.ones_like(lse) if grad_lse else None)
    torch.library.opcheck(torch.ops.tandem_attn.attention_backward.default, (*arriving, out, lse, *args))


@pytest.mark.parametrize("page_size", [0, 4])
def test_contract_11_opcheck_append_kv(page_size: int) -> None:
    cache = (rand(2, 16, 2, 8), rand(2, 16, 2, 8)) if not page_size else (rand(8, page_size, 2, 8), rand(8, page_size, 2, 8))
    table = int32(1, 0).view(2, 1) if not page_size else int32(7, 2, 0, 5).view(2, 2)
    torch.library.opcheck(torch.ops.tandem_attn.append_kv.default, (rand(2, 3, 2, 8), rand(2, 3, 2, 8), *cache, int32(2, 5), table))


def test_contract_11_fake_tensors_have_the_real_shapes() -> None:
    for name, args in OPERATOR_CALLS.items():
        real = torch.ops.tandem_attn.attention(*args)
        meta = torch.ops.tandem_attn.attention(*(_on_meta(x) for x in args))
        for a, b in zip(real, meta, strict=True):
            assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride()), name


def _on_meta(x: Any) -> Any:
    return x.to("meta") if isinstance(x, Tensor) else [_on_meta(item) for item in x] if isinstance(x, list) else x


# --- FLOPs -------------------------------------------------------------------------------------------------------------------------------


def flops(call: Callable[[], Any]) -> int:
    with FlopCounterMode(display=False) as counter:
        call()
    return counter.get_total_flops()


def test_flops_of_forward_and_backward() -> None:
    batch, sq, sk, heads, d, dv = 2, 6, 9, 4, 8, 5
    q, k, v = rand(batch, sq, heads, d).requires_grad_(), rand(batch, sk, 2, d).requires_grad_(), rand(batch, sk, 2, dv).requires_grad_()
    pairs = batch * heads * sq * sk
    out = attention(q, k, v, causal=True)
    assert flops(lambda: attention(q, k, v, causal=True)) == pairs * 2 * (d + dv)
    assert flops(lambda: out.sum().backward()) == pairs * 2 * (3 * d + 2 * dv)


def test_flops_equal_those_of_pytorch() -> None:
    q, k, v = (rand(2, 16, 4, 8) for _ in range(3))
    sizes = [torch.Size((2, 4, 16, 8))] * 3
    assert flops(lambda: attention(q, k, v)) == sdpa_flop_count(*sizes)
    out = attention(q.requires_grad_(), k, v)
    assert flops(lambda: out.sum().backward()) == sdpa_backward_flop_count(sizes[0], *sizes)


def test_flops_of_packed_calls_count_true_lengths() -> None:
    q, k = rand(12, 4, 8), rand(20, 2, 8)
    assert flops(lambda: attention_varlen(q, k, k, int32(0, 3, 12), int32(0, 15, 20))) == 4 * (3 * 15 + 9 * 5) * 4 * 8


def test_flops_of_a_cache_call_count_its_capacity() -> None:
    """Lengths may lie on a device, where reading them would wait for it."""
    assert flops(lambda: attention_kvcache(rand(2, 1, 4, 8), rand(2, 16, 2, 8), rand(2, 16, 2, 8), int32(3, 4))) == 2 * 4 * 16 * 4 * 8
