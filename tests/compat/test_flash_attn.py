"""tandem_attn.compat.flash_attn: FlashAttention-2's signatures, numbers and gradients."""

from __future__ import annotations

import inspect
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from tandem_attn.compat import flash_attn as fa

COMMON = (
    "dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False, "
    "return_attn_probs=False"
)
LENGTHS = "cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k"
SIGNATURES = {  # flash-attn 2.8, flash_attn/flash_attn_interface.py
    "flash_attn_func": f"q, k, v, {COMMON}",
    "flash_attn_qkvpacked_func": f"qkv, {COMMON}",
    "flash_attn_kvpacked_func": f"q, kv, {COMMON}",
    "flash_attn_varlen_func": f"q, k, v, {LENGTHS}, {COMMON}, block_table=None",
    "flash_attn_varlen_qkvpacked_func": f"qkv, cu_seqlens, max_seqlen, {COMMON}",
    "flash_attn_varlen_kvpacked_func": f"q, kv, {LENGTHS}, {COMMON}",
    "flash_attn_with_kvcache": "q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None, "
    "cache_batch_idx=None, cache_leftpad=None, block_table=None, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, "
    "rotary_interleaved=True, alibi_slopes=None, num_splits=0, return_softmax_lse=False",
}
DESCALES = ("q_descale", "k_descale", "v_descale")  # FlashAttention-3's; by keyword, so that positions stay those of flash-attn 2
WITH_DESCALES = ("flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache")
WINDOWS = [(-1, -1), (-1, 0), (3, -1), (-1, 2), (0, 0), (2, 3), (100, 100)]


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature_is_flash_attn_2s(name: str) -> None:
    everything = inspect.signature(getattr(fa, name)).parameters.values()
    parameters = [p for p in everything if p.name not in DESCALES]
    bare = [p.name if p.default is p.empty else f"{p.name}={p.default!r}" for p in parameters]
    assert ", ".join(bare) == SIGNATURES[name]
    assert all(p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters)
    added = tuple(p.name for p in everything if p.kind is p.KEYWORD_ONLY and p.default is None)
    assert added == (DESCALES if name in WITH_DESCALES else ())


def test_all_functions_are_exported() -> None:
    assert sorted(fa.__all__) == sorted(SIGNATURES)


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("seqlens", [(7, 7), (5, 12), (12, 5), (1, 9)])
def test_window_convention(truth: SimpleNamespace, seqlens: tuple[int, int], window: tuple[int, int], causal: bool) -> None:
    sq, sk = seqlens
    q, k, v = random(2, sq, 4, 8), random(2, sk, 2, 8), random(2, sk, 2, 8)
    out, lse, s_dmask = fa.flash_attn_func(q, k, v, causal=causal, window_size=window, return_attn_probs=True)
    expected, expected_lse = truth.naive(q, k, v, truth.window_matrix(sq, sk, window, causal))
    truth.close("O", out, expected)
    truth.close("LSE", lse, expected_lse)
    assert s_dmask.shape == (0,)
    truth.grads_close(out, expected, [q, k, v], [q, k, v])


def test_window_as_tensor() -> None:
    q, k, v = random(1, 6, 2, 8), random(1, 6, 2, 8), random(1, 6, 2, 8)
    assert torch.equal(fa.flash_attn_func(q, k, v, window_size=torch.tensor([2, 1])), fa.flash_attn_func(q, k, v, window_size=(2, 1)))


@pytest.mark.parametrize("per_sequence", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_scale_softcap_and_alibi(truth: SimpleNamespace, causal: bool, per_sequence: bool) -> None:
    q, k, v = random(3, 9, 4, 8), random(3, 11, 4, 8), random(3, 11, 4, 8)
    slopes = torch.rand((3, 4) if per_sequence else (4,))
    out = fa.flash_attn_func(q, k, v, softmax_scale=0.7, causal=causal, softcap=1.5, alibi_slopes=slopes, deterministic=True)
    seen, bias = truth.window_matrix(9, 11, causal=causal), truth.alibi(slopes, 9, 11)
    expected, _ = truth.naive(q, k, v, seen, bias=bias, scale=0.7, softcap=1.5)
    truth.close("O", out, expected)
    truth.grads_close(out, expected, [q, k, v], [q, k, v])


def test_packed_in_one_tensor(truth: SimpleNamespace) -> None:
    qkv, q, kv = random(2, 10, 3, 4, 8), random(2, 7, 4, 8), random(2, 10, 2, 2, 8)
    out = fa.flash_attn_qkvpacked_func(qkv, causal=True, window_size=(4, 0))
    expected, _ = truth.naive(*qkv.unbind(2), truth.window_matrix(10, 10, (4, 0)))
    truth.close("O of qkv", out, expected)
    truth.grads_close(out, expected, [qkv], [qkv])
    out, lse, _ = fa.flash_attn_kvpacked_func(q, kv, causal=True, return_attn_probs=True)
    expected, expected_lse = truth.naive(q, *kv.unbind(2), truth.window_matrix(7, 10, causal=True))
    truth.close("O of q, kv", out, expected)
    truth.close("LSE of q, kv", lse, expected_lse)
    truth.grads_close(out, expected, [q, kv], [q, kv])


def test_softcap_at_or_below_zero_is_off() -> None:
    q, k, v = random(1, 6, 2, 8), random(1, 6, 2, 8), random(1, 6, 2, 8)
    assert torch.equal(fa.flash_attn_func(q, k, v, softcap=-1.0), fa.flash_attn_func(q, k, v))


def test_rows_without_keys(truth: SimpleNamespace) -> None:
    q, k, v = random(1, 5, 2, 8), random(1, 2, 2, 8), random(1, 2, 2, 8)
    out, lse, _ = fa.flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    assert torch.equal(out[:, :3], torch.zeros_like(out[:, :3]))
    assert torch.equal(lse[..., :3], torch.full_like(lse[..., :3], float("-inf")))
    truth.close("O", out, truth.naive(q, k, v, truth.window_matrix(5, 2, causal=True))[0])


def cumulative(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)


def varlen_truth(
    truth: SimpleNamespace, q: Tensor, k: Tensor, v: Tensor, lens: tuple[list[int], list[int]], **options: object
) -> tuple[Tensor, Tensor]:
    """Sequence by sequence."""
    outs, lses = [], []
    for qi, ki, vi in zip(q.split(lens[0]), k.split(lens[1]), v.split(lens[1]), strict=True):
        seen = truth.window_matrix(len(qi), len(ki), **options)
        out, lse = truth.naive(qi[None], ki[None], vi[None], seen)
        outs.append(out[0])
        lses.append(lse[0])
    return torch.cat(outs), torch.cat(lses, 1)


@pytest.mark.parametrize("window", [(-1, -1), (2, 1)])
@pytest.mark.parametrize("causal", [False, True])
def test_varlen(truth: SimpleNamespace, causal: bool, window: tuple[int, int]) -> None:
    lens = ([4, 0, 7, 1], [6, 3, 7, 0])
    q, k, v = random(12, 4, 8), random(16, 2, 8), random(16, 2, 8)
    cu = [cumulative(x) for x in lens]
    out, lse, s_dmask = fa.flash_attn_varlen_func(q, k, v, *cu, 7, 7, causal=causal, window_size=window, return_attn_probs=True)
    expected, expected_lse = varlen_truth(truth, q, k, v, lens, window=window, causal=causal)
    truth.close("O", out, expected)
    truth.close("LSE", lse, expected_lse)
    assert s_dmask.shape == (0,)
    truth.grads_close(out, expected, [q, k, v], [q, k, v])


def test_varlen_packed_in_one_tensor(truth: SimpleNamespace) -> None:
    lens = [3, 8, 2]
    cu = cumulative(lens)
    qkv, q, kv = random(13, 3, 2, 8), random(13, 4, 8), random(13, 2, 2, 8)
    out = fa.flash_attn_varlen_qkvpacked_func(qkv, cu, 8, causal=True)
    expected, _ = varlen_truth(truth, *qkv.unbind(1), (lens, lens), causal=True)
    truth.close("O of qkv", out, expected)
    truth.grads_close(out, expected, [qkv], [qkv])
    out = fa.flash_attn_varlen_kvpacked_func(q, kv, cu, cu, 8, 8, causal=True)
    expected, _ = varlen_truth(truth, q, *kv.unbind(1), (lens, lens), causal=True)
    truth.close("O of q, kv", out, expected)
    truth.grads_close(out, expected, [q, kv], [q, kv])


def test_varlen_with_block_table(truth: SimpleNamespace) -> None:
    lens = ([2, 5, 1], [7, 5, 0])
    q = torch.randn(8, 4, 8, dtype=torch.float64)
    k_pages, v_pages = (torch.full((6, 4, 2, 8), float("nan"), dtype=torch.float64) for _ in range(2))
    table = torch.tensor([[5, 0], [2, 3], [99, -1]], dtype=torch.int32)  # entries past a length may hold anything
    k, v = torch.randn(12, 2, 8, dtype=torch.float64), torch.randn(12, 2, 8, dtype=torch.float64)
    for x, pages in ((k, k_pages), (v, v_pages)):
        for b, rows in enumerate(x.split(lens[1])):
            for j, row in enumerate(rows):
                pages[table[b, j // 4], j % 4] = row
    out = fa.flash_attn_varlen_func(q, k_pages, v_pages, *(cumulative(x) for x in lens), 5, 7, causal=True, block_table=table)
    truth.close("O", out, varlen_truth(truth, q, k, v, lens, causal=True)[0])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bit_error_is_at_most_twice_pytorchs(truth: SimpleNamespace, dtype: torch.dtype) -> None:
    q, k, v = (torch.randn(2, 200, h, 64).to(dtype) for h in (6, 2, 2))
    seen = truth.window_matrix(200, 200, (64, 0))
    exact, _ = truth.naive(q.double(), k.double(), v.double(), seen)
    plain = (truth.naive(q, k, v, seen)[0].double() - exact).abs().max()
    out = fa.flash_attn_func(q, k, v, causal=True, window_size=(64, 0))
    assert out.dtype == dtype
    truth.close("O", out, exact, tolerance=2 * float(plain))


def test_compiles_without_a_graph_break() -> None:
    q, k, v = (torch.randn(2, 16, 4, 16) for _ in range(3))
    compiled = torch.compile(fa.flash_attn_func, fullgraph=True, backend="aot_eager")
    out = compiled(q, k, v, causal=True, window_size=(5, 0))
    assert torch.equal(out, fa.flash_attn_func(q, k, v, causal=True, window_size=(5, 0)))


def test_varlen_compiles_without_a_graph_break() -> None:
    q, k, cu = torch.randn(13, 4, 16), torch.randn(13, 2, 16), cumulative([3, 8, 2])
    compiled = torch.compile(fa.flash_attn_varlen_func, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(q, k, k, cu, cu, 8, 8, causal=True), fa.flash_attn_varlen_func(q, k, k, cu, cu, 8, 8, causal=True))
