"""Wrong calls: each must raise, before any work, an error that names the argument, its value and what is required."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import tandem_attn
from tandem_attn import Causal, Document, Mask, Predicate, Problem, UnsupportedError, Window


def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(*shape, dtype=dtype)


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def padded(**changes: Any) -> Any:
    """B 2, Sq 5, Sk 7, H 4, Hkv 2, D 8."""
    call = {"q": zeros(2, 5, 4, 8), "k": zeros(2, 7, 2, 8), "v": zeros(2, 7, 2, 8)} | changes
    return tandem_attn.attention(**call)


def packed(**changes: Any) -> Any:
    """Lengths (5, 7) and (7, 7)."""
    call = {"q": zeros(12, 4, 8), "k": zeros(14, 2, 8), "v": zeros(14, 2, 8)}
    call |= {"cu_seqlens_q": int32(0, 5, 12), "cu_seqlens_k": int32(0, 7, 14)}
    return tandem_attn.attention_varlen(**(call | changes))


def cached(**changes: Any) -> Any:
    """Lengths 3 and 4 in a cache of 16."""
    call = {"q": zeros(2, 1, 4, 8), "k_cache": zeros(2, 16, 2, 8), "v_cache": zeros(2, 16, 2, 8), "cache_seqlens": int32(3, 4)}
    return tandem_attn.attention_kvcache(**(call | changes))


def pages(**changes: Any) -> Any:
    """Six pages of 4 keys, two for each sequence."""
    call = {
        "k_cache": zeros(6, 4, 2, 8),
        "v_cache": zeros(6, 4, 2, 8),
        "page_table": int32(0, 1, 2, 3).view(2, 2),
        "cache_seqlens": int32(5, 3),
    }
    return cached(**(call | changes))


def new(length: int = 1, **changes: Any) -> dict[str, Any]:
    return {"k": zeros(2, length, 2, 8), "v": zeros(2, length, 2, 8)} | changes


def problem(**changes: Any) -> Problem:
    return Problem(**({"batch": 1, "seqlen_q": 4, "seqlen_k": 4, "heads": 2, "heads_kv": 1, "head_dim": 8} | changes))


META = {"device": "meta"}
TENSOR = "must be a torch.Tensor, got"
ONE_HEAD = "must have at least one head and one element a head, got shape"

WRONG: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    # the three main tensors
    "q-list": (lambda: padded(q=[1.0]), TypeError, f"q {TENSOR} list"),
    "k-none": (lambda: padded(k=None), TypeError, f"k {TENSOR} NoneType"),
    "v-numpy": (lambda: padded(v=zeros(2, 7, 2, 8).numpy()), TypeError, f"v {TENSOR} ndarray"),
    "q-3d": (
        lambda: padded(q=zeros(5, 4, 8)), ValueError,
        "q must have 4 dimensions (batch, seqlen_q, heads, head_dim), got shape (5, 4, 8)",
    ),
    "q-4d-packed": (
        lambda: packed(q=zeros(2, 5, 4, 8)), ValueError,
        "q must have 3 dimensions (total_q, heads, head_dim), got shape (2, 5, 4, 8)",
    ),
    "k-3d-paged": (
        lambda: packed(page_table=int32(0, 1).view(2, 1)), ValueError,
        "k must have 4 dimensions (pages, page_size, heads_kv, head_dim), got shape (14, 2, 8)",
    ),
    "q-int": (
        lambda: padded(q=zeros(2, 5, 4, 8, dtype=torch.int32)), TypeError,
        "q must be float16, bfloat16, float32, float64, float8_e4m3fn or float8_e5m2, got torch.int32",
    ),
    "q-complex": (
        lambda: padded(q=zeros(2, 5, 4, 8, dtype=torch.complex64)), TypeError,
        "q must be float16, bfloat16, float32, float64, float8_e4m3fn or float8_e5m2, got torch.complex64",
    ),
    "k-dtype": (lambda: padded(k=zeros(2, 7, 2, 8).half()), TypeError, "k must have q's dtype torch.float32, got torch.float16"),
    "v_cache-dtype": (
        lambda: cached(v_cache=zeros(2, 16, 2, 8).double()), TypeError,
        "v_cache must have q's dtype torch.float32, got torch.float64",
    ),
    "v-length": (
        lambda: padded(v=zeros(2, 6, 2, 8)), ValueError,
        "k and v must agree in all but the last size, got (2, 7, 2, 8) and (2, 6, 2, 8)",
    ),
    "head_dim": (lambda: padded(k=zeros(2, 7, 2, 6)), ValueError, "k must have q's head_dim 8, got 6"),
    "heads": (
        lambda: padded(q=zeros(2, 5, 3, 8)), ValueError,
        "q's heads must be a multiple of k's, got 3 query heads and 2 key/value heads in the layout (batch, seqlen_q, heads, head_dim)",
    ),
    "batch": (lambda: padded(k=zeros(1, 7, 2, 8), v=zeros(1, 7, 2, 8)), ValueError, "k must have q's batch size 2, got 1"),
    "cache-batch": (
        lambda: cached(k_cache=zeros(3, 16, 2, 8), v_cache=zeros(3, 16, 2, 8)), ValueError,
        "k_cache must have q's batch size 2, got 3",
    ),
    "heads-0": (lambda: padded(q=zeros(2, 5, 0, 8)), ValueError, f"q {ONE_HEAD} (2, 5, 0, 8)"),
    "heads_kv-0": (lambda: padded(k=zeros(2, 7, 0, 8), v=zeros(2, 7, 0, 8)), ValueError, f"k {ONE_HEAD} (2, 7, 0, 8)"),
    "head_dim-0": (lambda: padded(q=zeros(2, 5, 4, 0), k=zeros(2, 7, 2, 0)), ValueError, f"q {ONE_HEAD} (2, 5, 4, 0)"),
    "head_dim_v-0": (lambda: padded(v=zeros(2, 7, 2, 0)), ValueError, f"v {ONE_HEAD} (2, 7, 2, 0)"),
    "device": (lambda: padded(k=torch.zeros(2, 7, 2, 8, **META)), ValueError, "k must be on q's device cpu, got meta"),
    "sparse": (
        lambda: padded(q=zeros(2, 5, 4, 8).to_sparse()), TypeError,
        "q must be a dense (strided) tensor, got layout torch.sparse_coo",
    ),
    # numbers and flags
    "scale-str": (lambda: padded(scale="1"), TypeError, "scale must be a number, got str"),
    "scale-tensor": (lambda: padded(scale=torch.tensor(1.0)), TypeError, "scale must be a number, got Tensor"),
    "scale-nan": (lambda: padded(scale=float("nan")), ValueError, "scale must be finite, got nan"),
    "scale-bool": (lambda: padded(scale=True), TypeError, "scale must be a number, got bool"),
    "softcap-negative": (lambda: padded(softcap=-1.0), ValueError, "softcap must be >= 0 (0 is off), got -1"),
    "softcap-infinite": (lambda: padded(softcap=float("inf")), ValueError, "softcap must be finite, got inf"),
    "softcap-none": (lambda: packed(softcap=None), TypeError, "softcap must be a number, got NoneType"),
    "deterministic": (lambda: padded(deterministic=1), TypeError, "deterministic must be a bool, got 1"),
    "return_lse": (lambda: cached(return_lse="yes"), TypeError, "return_lse must be a bool, got 'yes'"),
    "causal": (lambda: padded(causal=1), TypeError, "causal must be a bool, got 1"),
    "dropout": (lambda: padded(dropout_p=0.1), TypeError, "attention() got an unexpected keyword argument 'dropout_p'"),
    # masks
    "window-int": (lambda: padded(window=3), TypeError, "window must be a pair (left, right), got 3"),
    "window-three": (lambda: padded(window=(1, 2, 3)), TypeError, "window must be a pair (left, right), got (1, 2, 3)"),
    "window-negative": (lambda: padded(window=(-1, 0)), ValueError,
        "window's left must be >= 0 or None (unbounded), got -1: flash-attn's -1 is None here"),
    "window-float": (lambda: padded(window=(0, 1.5)), TypeError, "window's right must be an int or None (unbounded), got 1.5"),
    "mask-str": (
        lambda: padded(mask="causal"), TypeError, "mask must be a Mask, a function (b, h, q_idx, kv_idx) -> bool tensor, or None, got str"
    ),
    "mask-tensor": (
        lambda: padded(mask=torch.ones(5, 7, dtype=torch.bool)), TypeError,
        "mask must be a Mask, a function (b, h, q_idx, kv_idx) -> bool tensor, or None, got Tensor"
        " (for a boolean tensor t: lambda b, h, q_idx, kv_idx: t[q_idx, kv_idx])",
    ),
    "mask-class": (lambda: padded(mask=Document), TypeError, "mask must be a Mask, not its class: write Document(...), got Document"),
    "mask-causal-uncalled": (lambda: padded(mask=Causal), TypeError, "mask must be a Mask, not its class: write Causal(...), got Causal"),
    "mask-keyword-and": (
        lambda: padded(mask=Causal() and Window(2, 0)), TypeError,
        "a mask has no truth value: combine masks with & and |, not with and, or, not",
    ),
    "predicate-float": (
        lambda: padded(mask=lambda b, h, i, j: (i + j).float()),
        TypeError, "mask predicate must return a bool tensor, got a torch.float32 tensor"
    ),
    "predicate-number": (lambda: padded(mask=lambda b, h, i, j: 1), TypeError, "mask predicate must return a bool tensor, got int"),
    "predicate-shape": (
        lambda: padded(mask=lambda b, h, i, j: torch.ones(3, dtype=torch.bool)), ValueError,
        "mask predicate must return a shape that broadcasts with its indices, got (3,)",
    ),
    "predicate-not-callable": (lambda: Predicate(3), TypeError, "fn must be callable as fn(b, h, q_idx, kv_idx), got 3"),
    "Window-float": (lambda: Window(1.5), TypeError, "left must be an int or None (unbounded), got 1.5"),
    "Window-align": (lambda: Window(1, 1, "center"), ValueError, "align must be one of ('bottom-right', 'top-left'), got 'center'"),
    "mask-and-int": (lambda: Causal() & 3, TypeError, "unsupported operand type(s) for &: 'Window' and 'int'"),
    "document-short": (
        lambda: padded(mask=Document([0, 0, 1])), ValueError, "Document's q_ids must cover all 2 sequences (longest: 5), got shape (3,)"
    ),
    "document-keys": (
        lambda: padded(mask=Document([0] * 5)), ValueError, "Document's kv_ids must cover all 2 sequences (longest: 7), got shape (5,)"
    ),
    "document-batch": (
        lambda: padded(mask=Document(zeros(1, 7, dtype=torch.int32))), ValueError,
        "Document's q_ids must cover all 2 sequences (longest: 5), got shape (1, 7)",
    ),
    "document-float": (
        lambda: padded(mask=Document(zeros(7))), ValueError,
        "Document's ids must be integers of shape (seqlen,) or (batch, seqlen), got torch.float32 (7,)",
    ),
    "document-none": (
        lambda: padded(mask=Document(None)), TypeError, "Document's ids must be an integer tensor, array or (nested) list, got NoneType"
    ),
    "document-device": (
        lambda: padded(mask=Document(torch.zeros(7, dtype=torch.int32, **META))),
        ValueError, "Document's ids must be on q's device cpu, got meta"
    ),
    # score inputs
    "sink-shape": (lambda: padded(sink=zeros(2)), ValueError, "sink must have shape (heads,) = (4,), got (2,)"),
    "sink-int": (lambda: padded(sink=int32(1, 2, 3, 4)), TypeError, "sink must be a floating-point tensor, got torch.int32"),
    "sink-number": (lambda: padded(sink=1.0), TypeError, f"sink {TENSOR} float"),
    "alibi": (
        lambda: padded(alibi_slopes=zeros(1, 4)), ValueError,
        "alibi_slopes must have shape (heads,) = (4,) or (batch, heads) = (2, 4), got (1, 4)",
    ),
    "bias-3d": (
        lambda: padded(bias=zeros(4, 5, 7)), ValueError,
        "bias must have 4 dimensions (batch or 1, heads or 1, seqlen_q or 1, seqlen_k or 1), got shape (4, 5, 7)",
    ),
    "bias-keys": (lambda: padded(bias=zeros(1, 1, 5, 6)), ValueError, "bias must have seqlen_k = 7 or 1 as size 3, got shape (1, 1, 5, 6)"),
    "bias-bool": (
        lambda: padded(bias=torch.ones(1, 1, 5, 7, dtype=torch.bool)), TypeError,
        "bias must be a floating-point tensor, got torch.bool",
    ),
    "bias-short-packed": (
        lambda: packed(bias=zeros(1, 1, 3, 7)),
        ValueError, "bias must cover the longest seqlen_q (7) or be 1 as size 2, got shape (1, 1, 3, 7)"
    ),
    # lengths
    "seqused-dtype": (lambda: padded(seqused_k=torch.tensor([1, 2])), TypeError, "seqused_k must be int32, got torch.int64"),
    "seqused-shape": (lambda: padded(seqused_k=int32(1)), ValueError, "seqused_k must have shape (batch,) = (2,), got (1,)"),
    "seqused-large": (lambda: padded(seqused_k=int32(3, 8)), ValueError, "seqused_k must lie between 0 and 7, got 8 at position 1"),
    "seqused-negative": (lambda: padded(seqused_q=int32(-1, 3)), ValueError, "seqused_q must lie between 0 and 5, got -1 at position 0"),
    "seqused-packed": (lambda: packed(seqused_k=int32(8, 7)), ValueError, "seqused_k must lie between 0 and 7, got 8 at position 0"),
    "cu-dtype": (lambda: packed(cu_seqlens_q=torch.tensor([0, 5, 12])), TypeError, "cu_seqlens_q must be int32, got torch.int64"),
    "cu-none": (lambda: packed(cu_seqlens_k=None), TypeError, f"cu_seqlens_k {TENSOR} NoneType"),
    "cu-2d": (lambda: packed(cu_seqlens_q=int32(0, 5, 12)[None]), ValueError, "cu_seqlens_q must have shape (batch + 1,), got (1, 3)"),
    "cu-empty": (lambda: packed(cu_seqlens_q=int32()), ValueError, "cu_seqlens_q must have shape (batch + 1,), got (0,)"),
    "cu-batch": (lambda: packed(cu_seqlens_k=int32(0, 14)), ValueError, "cu_seqlens_k must have cu_seqlens_q's shape (3,), got (2,)"),
    "cu-start": (lambda: packed(cu_seqlens_q=int32(1, 5, 12)), ValueError, "cu_seqlens_q must start with 0, got 1"),
    "cu-decreasing": (
        lambda: packed(cu_seqlens_q=int32(0, 13, 12)), ValueError, "cu_seqlens_q must not decrease, got 13 before 12 at position 2"
    ),
    "cu-beyond": (lambda: packed(cu_seqlens_k=int32(0, 7, 15)), ValueError, "cu_seqlens_k must end at k's rows (14) or before, got 15"),
    "cu-overflow": (
        lambda: packed(cu_seqlens_k=int32(0, 2**31 - 1, -(2**31))), ValueError,
        "cu_seqlens_k must not decrease, got 2147483647 before -2147483648 at position 2",
    ),
    "max-small": (lambda: packed(max_seqlen_q=6), ValueError, "max_seqlen_q must be at least the longest sequence (7), got 6"),
    "max-negative": (lambda: packed(max_seqlen_q=-1), ValueError, "max_seqlen_q must be >= 0, got -1"),
    "max-float": (lambda: packed(max_seqlen_k=7.0), TypeError, "max_seqlen_k must be an int, a 0-d tensor or None, got float"),
    # caches
    "cache_seqlens-large": (
        lambda: cached(cache_seqlens=int32(3, 17)), ValueError,
        "cache_seqlens must lie between 0 and 16, got 17 at position 1",
    ),
    "cache_seqlens-int": (lambda: cached(cache_seqlens=2**40), ValueError, "cache_seqlens must lie between 0 and 16, got 1099511627776"),
    "cache_seqlens-float": (
        lambda: cached(cache_seqlens=3.0), TypeError, "cache_seqlens must be an int32 tensor (batch,), an int or None, got float"
    ),
    "cache_seqlens-missing": (
        lambda: cached(cache_seqlens=None, **new()), ValueError, "cache_seqlens must be given when k is appended, got None"
    ),
    "append-k-alone": (lambda: cached(k=zeros(2, 1, 2, 8)), ValueError, "k and v must be given together, got k=a tensor, v=None"),
    "append-v-alone": (lambda: cached(v=zeros(2, 1, 2, 8)), ValueError, "k and v must be given together, got k=None, v=a tensor"),
    "append-shape": (
        lambda: cached(**new(k=zeros(2, 1, 3, 8))), ValueError,
        "k must have shape (batch, new, heads, head_dim) of k_cache = (2, 1, 2, 8), got (2, 1, 3, 8)",
    ),
    "append-dtype": (
        lambda: cached(**new(v=zeros(2, 1, 2, 8).half())), TypeError,
        "v must have the cache's dtype torch.float32, got torch.float16",
    ),
    "append-full": (
        lambda: cached(cache_seqlens=int32(3, 15), **new(2)), ValueError,
        "cache_seqlens must lie between 0 and 14 (after appending k), got 15 at position 1",
    ),
    "append-expanded": (
        lambda: cached(k_cache=zeros(1, 16, 2, 8).expand(2, 16, 2, 8), **new()), ValueError,
        "k_cache must have its own memory for every element to append to it, got strides (0, 16, 8, 1)",
    ),
    "append-gradient": (
        lambda: cached(v_cache=zeros(2, 16, 2, 8).requires_grad_(), **new()), ValueError,
        "v_cache must not require a gradient to append to it, got requires_grad=True",
    ),
    "append-same-place": (
        lambda: pages(page_table=int32(0, 1, 0, 1).view(2, 2), cache_seqlens=int32(2, 2), **new()), ValueError,
        "page_table (or cache_batch_idx) must give every appended token a place of its own, got one place for two tokens",
    ),
    "batch_idx-and-pages": (
        lambda: pages(cache_batch_idx=int32(0, 1)), ValueError,
        "cache_batch_idx must be None with page_table (the table already says where each sequence lies)",
    ),
    "batch_idx-beyond": (
        lambda: cached(cache_batch_idx=int32(0, 2)), ValueError,
        "page_table (or cache_batch_idx) must hold pages between 0 and 1 where a sequence uses them, got 2 at (1, 0)",
    ),
    "pages-negative": (
        lambda: pages(page_table=int32(0, -1, 2, 3).view(2, 2)), ValueError,
        "page_table (or cache_batch_idx) must hold pages between 0 and 5 where a sequence uses them, got -1 at (0, 1)",
    ),
    "pages-shape": (
        lambda: pages(page_table=int32(0, 1, 2).view(1, 3)), ValueError,
        "page_table must have shape (batch, pages of a sequence) with batch 2, got (1, 3)",
    ),
    "pages-dtype": (lambda: pages(page_table=zeros(2, 2)), TypeError, "page_table must be int32, got torch.float32"),
    "leftpad-beyond": (
        lambda: cached(cache_leftpad=int32(4, 1)), ValueError,
        "cache_leftpad must lie between 0 and 3, got 4 at position 0",
    ),
    "leftpad-negative": (
        lambda: cached(cache_leftpad=int32(0, -1)), ValueError,
        "cache_leftpad must lie between 0 and 4, got -1 at position 1",
    ),
    # backends and problems
    "backend-name": (lambda: padded(backend="flash"), ValueError, "backend must be one of auto, sdpa, reference, got 'flash'"),
    "backend-none": (lambda: padded(backend=None), TypeError, "backend must be a str, got NoneType"),
    "supports-type": (lambda: tandem_attn.supports(3), TypeError, "problem must be a tandem_attn.Problem, got int"),
    "supports-name": (lambda: tandem_attn.supports(problem(), "x"), ValueError, "backend must be one of auto, sdpa, reference, got 'x'"),
    "problem-heads": (lambda: problem(heads=3, heads_kv=2), ValueError, "heads must be a multiple of heads_kv, got heads=3, heads_kv=2"),
    "problem-dtype": (lambda: problem(dtype="int8"), TypeError,
        "dtype must be the name of one of float16, bfloat16, float32, float64, float8_e4m3fn, float8_e5m2, got 'int8'"),
    "problem-size": (lambda: problem(seqlen_q=-1), ValueError, "seqlen_q must be >= 0, got -1"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_message(name: str) -> None:
    call, kind, message = WRONG[name]
    if "must be one of auto" in message:  # the list of backends grows
        message = message.replace("auto, sdpa, reference", ", ".join(tandem_attn.backends()))
    with pytest.raises(kind, match=f"^{re.escape(message)}$") as caught:
        call()
    assert caught.type is kind


UNSUPPORTED: dict[str, tuple[Callable[..., Any], Problem, str]] = {
    "softcap": (lambda **kw: padded(softcap=1.0, **kw), problem(softcap=1.0), "softcap"),
    "sink": (lambda **kw: padded(sink=zeros(4), **kw), problem(sink=True), "a sink"),
    "alibi": (lambda **kw: padded(alibi_slopes=zeros(4), **kw), problem(alibi=True), "ALiBi"),
    "bias": (lambda **kw: padded(bias=zeros(1, 1, 1, 1), **kw), problem(bias=True), "a bias"),
    "packed": (packed, problem(varlen=True), "packed variable length"),
    "cache": (cached, problem(cache=True, seqused=True), "seqused, a KV cache"),
    "seqused": (lambda **kw: padded(seqused_k=int32(1, 2), **kw), problem(seqused=True), "seqused"),
    "scale": (lambda **kw: padded(scale=-1.0, **kw), problem(scale=-1.0), "scale=-1 (only positive scales)"),
    "head_dim_v": (lambda **kw: padded(v=zeros(2, 7, 2, 4), **kw), problem(head_dim_v=4), "head_dim_v=4 beside head_dim=8"),
    "mask": (
        lambda **kw: padded(window=(2, 0), **kw), problem(mask=Window(2, 0), seqlen_q=5, seqlen_k=7),
        "the mask window(2,0,bottom-right) for seqlen_q=5, seqlen_k=7",
    ),
    "empty": (lambda **kw: padded(q=zeros(2, 0, 4, 8), **kw), problem(seqlen_q=0), "empty tensors"),
}  # fmt: skip


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_unsupported_error_and_supports_agree(name: str) -> None:
    call, asked, missing = UNSUPPORTED[name]
    support = tandem_attn.supports(asked, "sdpa")
    assert not support
    with pytest.raises(UnsupportedError) as caught:
        call(backend="sdpa")
    error = caught.value
    assert (error.backend, error.nearest) == ("sdpa", "backend='reference'")
    assert error.missing == missing == support.reason
    assert str(error) == f"backend 'sdpa' does not cover {error.missing}; nearest that works: backend='reference'"
    assert call(backend="auto") is not None, "auto falls back"
    assert tandem_attn.supports(asked)


def test_supports_names_the_backend_that_runs() -> None:
    assert tandem_attn.supports(problem()).backend == "sdpa"
    assert tandem_attn.supports(problem(softcap=1.0)).backend == "reference"
    assert tandem_attn.supports(problem(softcap=1.0), "reference").backend == "reference"


def test_backends_are_described() -> None:
    described = tandem_attn.backends()
    assert next(iter(described)) == "auto"
    assert all(described.values())


@pytest.mark.parametrize(
    "wrong",
    [
        {"backend": "nowhere"}, {"backend": "sdpa"}, {"scale": "1"}, {"softcap": -1.0}, {"cache_leftpad": int32(9, 0)},
        {"mask": Document([0])}, {"return_lse": 1}, {"deterministic": None}, {"cache_seqlens": int32(3, 16)},
    ],
    ids=lambda wrong: str(*wrong),
)  # fmt: skip
def test_a_wrong_call_appends_nothing(wrong: dict[str, Any]) -> None:
    k_cache, v_cache = zeros(2, 16, 2, 8), zeros(2, 16, 2, 8)
    with pytest.raises((ValueError, TypeError, UnsupportedError)):
        cached(k_cache=k_cache, v_cache=v_cache, k=torch.ones(2, 1, 2, 8), v=torch.ones(2, 1, 2, 8), **wrong)
    assert not k_cache.any() and not v_cache.any()


def test_a_gradient_through_a_cache_is_unsupported() -> None:
    out = cached(q=zeros(2, 1, 4, 8).requires_grad_())
    with pytest.raises(UnsupportedError, match="a gradient through a KV cache; nearest that works: attention or attention_varlen"):
        out.sum().backward()


def test_a_second_derivative_is_unsupported() -> None:
    q = zeros(2, 5, 4, 8).requires_grad_()
    (grad,) = torch.autograd.grad(padded(q=q).sum(), q, create_graph=True)
    with pytest.raises(UnsupportedError, match="a second derivative of attention"):
        torch.autograd.grad(grad.sum(), q)


def test_a_mask_whose_predicate_is_gone() -> None:
    with pytest.raises(ValueError, match="mask predicate 'gone:1' no longer exists: keep the Predicate object alive"):
        tandem_attn.spec.masks.from_code("predicate(gone:1)")


def test_mask_base_class_is_abstract() -> None:
    with pytest.raises(NotImplementedError):
        padded(mask=Mask())
