"""The public functions: check the arguments, turn keywords into operator arguments, call the operator."""

from __future__ import annotations

import functools
import math
from typing import Any, Literal, TypedDict, overload

import torch
from torch import Tensor
from torch.autograd import forward_ad
from typing_extensions import Unpack  # a dependency of torch; in typing from Python 3.11

from tandem_attn.api import checks, ops, repeated
from tandem_attn.api.backends import AUTO, check_name
from tandem_attn.spec.errors import UnsupportedError
from tandem_attn.spec.masks import Causal, Full, Mask, Predicate, PredicateFn, bound_text, is_integer

Result = Tensor | tuple[Tensor, Tensor]


class Options(TypedDict, total=False):
    """Keywords that all three functions share; see ``attention``."""

    mask: Mask | PredicateFn | None
    causal: bool
    window: tuple[int | None, int | None] | None
    scale: float | None
    softcap: float
    sink: Tensor | None
    alibi_slopes: Tensor | None
    bias: Tensor | None
    q_descale: Tensor | None
    k_descale: Tensor | None
    v_descale: Tensor | None
    deterministic: bool
    backend: str


class PaddedOptions(Options, total=False):
    seqused_q: Tensor | None
    seqused_k: Tensor | None


class VarlenOptions(PaddedOptions, total=False):
    page_table: Tensor | None


class CacheOptions(Options, total=False):
    k: Tensor | None
    v: Tensor | None
    page_table: Tensor | None
    cache_batch_idx: Tensor | None
    cache_leftpad: Tensor | None


@overload
def attention(q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[False] = False, **options: Unpack[PaddedOptions]) -> Tensor: ...
@overload
def attention(q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[True], **options: Unpack[PaddedOptions]) -> tuple[Tensor, Tensor]: ...
@overload
def attention(q: Tensor, k: Tensor, v: Tensor, *, return_lse: bool, **options: Unpack[PaddedOptions]) -> Result: ...
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Mask | PredicateFn | None = None,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    sink: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    bias: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    return_lse: bool = False,
    deterministic: bool = False,
    backend: str = AUTO,
) -> Result:
    """Exact attention, softmax(scale * Q K^T) V, forward and backward.

    B batch, Sq and Sk sequence lengths, H query heads, Hkv key/value heads (H a multiple of Hkv), D head_dim, Dv head_dim_v.

    Args:
        q: (B, Sq, H, D), float16, bfloat16, float32 or float64; float8_e4m3fn or float8_e5m2 without gradients.
        k: (B, Sk, Hkv, D), same dtype and device.
        v: (B, Sk, Hkv, Dv), same dtype and device.
        mask: a Mask (``Full``, ``Causal``, ``Window``, ``Document``, ``Predicate``, combined with & and |), or a function (b, h, q_idx,
            kv_idx) -> bool tensor.
        causal: query i sees keys j <= i + Sk - Sq (aligned bottom-right). With ``mask`` or ``window``, all of them apply.
        window: (left, right) keys each side of the diagonal, the diagonal included; None is unbounded (-1 in flash-attn).
        scale: factor of the logits; default 1 / sqrt(D).
        softcap: > 0 replaces a logit s by softcap * tanh(s / softcap).
        sink: (H,) a logit that joins each row's softmax without a value.
        alibi_slopes: (H,) or (B, H); adds -slope * abs(i + Sk - Sq - j) to a logit.
        bias: (B or 1, H or 1, Sq or 1, Sk or 1), added to the logits (after softcap).
        seqused_q: (B,) int32, queries of each sequence in use; what lies beyond may hold NaN and gives O = 0, LSE = -inf.
        seqused_k: (B,) int32, keys in use; with it causal masks and windows align to the used lengths.
        q_descale: float32 (B, Hkv), either size may be 1, or of no dimension; for 8-bit q, which stands for q * q_descale. The query heads
            of a KV head share its number. Positive and finite; None is 1. Used where it lies, strided and expanded tensors too.
        k_descale: likewise for k.
        v_descale: likewise for v.
        return_lse: also return the log-sum-exp of each row.
        deterministic: bitwise repeatable gradients (the forward always is).
        backend: a name of ``tandem_attn.backends()``; "auto" takes the first that covers the call, a named one never falls back.

    Returns:
        O (B, Sq, H, Dv) in q's dtype, bfloat16 where q has 8 bits; with ``return_lse`` (O, LSE), LSE (B, H, Sq) float32 (float64 for
        float64 inputs), natural log. A
        row that sees no key has O = 0, LSE = -inf (with a sink: LSE = sink) and zero gradients. Both are differentiable with respect to
        q, k, v, sink, alibi_slopes and bias, once.

    Raises:
        TypeError, ValueError: an argument is wrong; the message names it, its value and what is required.
        UnsupportedError: the backend lacks something; see ``supports``.
    """
    tensors: tuple[Any, ...] = (
        q, k, v, sink, alibi_slopes, bias, None, None, seqused_q, seqused_k, None, None, q_descale, k_descale, v_descale,
    )  # fmt: skip
    key = None
    if not torch.compiler.is_compiling():
        plain = sink is None and alibi_slopes is None and bias is None and seqused_q is None and seqused_k is None
        plain = plain and q_descale is None and k_descale is None and v_descale is None
        others = () if plain else tensors[3:]
        key = repeated.key(q, k, v, others, (window, mask, causal, scale, softcap, return_lse, deterministic, backend))
        if (call := repeated.find(key)) is not None and (found := call(tensors)) is not None:
            return found if return_lse else found[0]
    checks.qkv(q, k, v, ("q", "k", "v"), 4, ("(batch, seqlen_q, heads, head_dim)", "(batch, seqlen_k, heads_kv, head_dim)"))
    checks.same_batch("k", k, q)
    checks.lengths("seqused_q", seqused_q, q, q.shape[0])
    checks.lengths("seqused_k", seqused_k, q, q.shape[0])
    checks.extras(sink, alibi_slopes, bias, q, q.shape[0], q.shape[1], k.shape[1])
    tensors = (*tensors[:-3], *_descales(q_descale, k_descale, v_descale, q, q.shape[0], k.shape[-2]))
    code, mask_tensors = _mask(mask, causal, window, q)
    sizes = (mask_tensors, code, q.shape[1], k.shape[1])
    return _run(_arguments(tensors, sizes, scale, softcap, deterministic, return_lse, backend), return_lse, key)


@overload
def attention_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int | Tensor | None = None,
    max_seqlen_k: int | Tensor | None = None, *, return_lse: Literal[False] = False, **options: Unpack[VarlenOptions],
) -> Tensor: ...  # fmt: skip
@overload
def attention_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int | Tensor | None = None,
    max_seqlen_k: int | Tensor | None = None, *, return_lse: Literal[True], **options: Unpack[VarlenOptions],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def attention_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int | Tensor | None = None,
    max_seqlen_k: int | Tensor | None = None, *, return_lse: bool, **options: Unpack[VarlenOptions],
) -> Result: ...  # fmt: skip
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | Tensor | None = None,
    max_seqlen_k: int | Tensor | None = None,
    *,
    mask: Mask | PredicateFn | None = None,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    sink: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    bias: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    page_table: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    return_lse: bool = False,
    deterministic: bool = False,
    backend: str = AUTO,
) -> Result:
    """``attention`` over sequences packed one behind the other; lengths may differ and may be zero.

    Args:
        q: (total_q, H, D).
        k: (total_k, Hkv, D); with ``page_table`` (pages, page_size, Hkv, D), forward only.
        v: (total_k, Hkv, Dv); with ``page_table`` (pages, page_size, Hkv, Dv).
        cu_seqlens_q: (B + 1,) int32, on q's device: sequence b holds the rows cu_seqlens_q[b] to cu_seqlens_q[b + 1] - 1. Rows behind
            the last sequence are legal: O = 0, LSE = -inf, zero gradients.
        cu_seqlens_k: likewise for the keys.
        max_seqlen_q: an upper bound of the lengths. It saves memory on backends that pad; a tensor is accepted, and its value is not read.
        max_seqlen_k: likewise for the keys.
        bias: (B or 1, H or 1, longest seqlen_q or 1, longest seqlen_k or 1), indexed within each sequence.
        seqused_q: (B,) int32, the rows of each sequence in use.
        seqused_k: likewise for the keys.
        page_table: (B, pages of a sequence) int32, see ``attention_kvcache``.

    The other arguments are those of ``attention``. Masks see b as the sequence's number and indices within the sequence.

    Returns:
        O (total_q, H, Dv); with ``return_lse`` (O, LSE), LSE (H, total_q).

    Raises:
        TypeError, ValueError, UnsupportedError: as ``attention``.
    """
    tensors: tuple[Any, ...] = (
        q, k, v, sink, alibi_slopes, bias, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, page_table, None,
        q_descale, k_descale, v_descale,
    )  # fmt: skip
    key = None
    if not (torch.compiler.is_compiling() or isinstance(max_seqlen_q, Tensor) or isinstance(max_seqlen_k, Tensor)):
        options = (window, mask, causal, scale, softcap, return_lse, deterministic, backend, max_seqlen_q, max_seqlen_k)
        key = repeated.key(q, k, v, tensors[3:], options)
        if (call := repeated.find(key)) is not None and (found := call(tensors)) is not None:
            return found if return_lse else found[0]
    kv = "(total_k, heads_kv, head_dim)" if page_table is None else "(pages, page_size, heads_kv, head_dim)"
    checks.qkv(q, k, v, ("q", "k", "v"), 3, ("(total_q, heads, head_dim)", kv), kv_ndim=3 if page_table is None else 4)
    batch = checks.cu_seqlens("cu_seqlens_q", cu_seqlens_q, q).shape[0] - 1
    if checks.cu_seqlens("cu_seqlens_k", cu_seqlens_k, q).shape[0] - 1 != batch:
        raise ValueError(f"cu_seqlens_k must have cu_seqlens_q's shape ({batch + 1},), got {tuple(cu_seqlens_k.shape)}")
    checks.lengths("seqused_q", seqused_q, q, batch)
    checks.lengths("seqused_k", seqused_k, q, batch)
    checks.page_table(page_table, q, batch)
    total_k = k.shape[0] if page_table is None else page_table.shape[1] * k.shape[1]
    longest_q = checks.max_seqlen("max_seqlen_q", max_seqlen_q, q.shape[0])
    longest_k = checks.max_seqlen("max_seqlen_k", max_seqlen_k, total_k)
    checks.extras(sink, alibi_slopes, bias, q, batch, None, None)
    tensors = (*tensors[:-3], *_descales(q_descale, k_descale, v_descale, q, batch, k.shape[-2]))
    code, mask_tensors = _mask(mask, causal, window, q)
    sizes = (mask_tensors, code, longest_q, longest_k)
    return _run(_arguments(tensors, sizes, scale, softcap, deterministic, return_lse, backend), return_lse, key)


@overload
def attention_kvcache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, cache_seqlens: Tensor | int | None = None, *, return_lse: Literal[False] = False,
    **options: Unpack[CacheOptions],
) -> Tensor: ...  # fmt: skip
@overload
def attention_kvcache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, cache_seqlens: Tensor | int | None = None, *, return_lse: Literal[True],
    **options: Unpack[CacheOptions],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def attention_kvcache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, cache_seqlens: Tensor | int | None = None, *, return_lse: bool,
    **options: Unpack[CacheOptions],
) -> Result: ...  # fmt: skip
def attention_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cache_seqlens: Tensor | int | None = None,
    *,
    k: Tensor | None = None,
    v: Tensor | None = None,
    page_table: Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    mask: Mask | PredicateFn | None = None,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    sink: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    bias: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    return_lse: bool = False,
    deterministic: bool = False,
    backend: str = AUTO,
) -> Result:
    """Attention of one or more new queries to a cache of keys and values; forward only.

    Args:
        q: (B, Sq, H, D), the newest tokens of each sequence.
        k_cache: (B_cache, S_cache, Hkv, D), or with ``page_table`` (pages, page_size, Hkv, D).
        v_cache: likewise, last size Dv.
        cache_seqlens: (B,) int32 or an int: keys each sequence has in the cache, before ``k`` is appended. Default: the whole cache. The
            call does not advance it: add the appended tokens before the next one.
        k: (B, new, Hkv, D), written into the cache in place behind ``cache_seqlens``, then attended to.
        v: (B, new, Hkv, Dv), likewise; both or neither.
        page_table: (B, pages of a sequence) int32: key j of sequence b lies in page ``page_table[b, j // page_size]``. Entries beyond a
            length are not read.
        cache_batch_idx: (B,) int32, the cache row of each sequence; default its own number. Not with ``page_table``.
        cache_leftpad: (B,) int32, keys at the start of the cache that are not part of the sequence.

    The other arguments are those of ``attention``; Sk is a sequence's length after appending, less its leftpad. Masks are aligned
    bottom-right, so the last query is the last key's; more than one new token of a causal model (a prompt) needs ``causal=True``. ``bias``
    spans the capacity of the cache.

    Returns:
        O (B, Sq, H, Dv); with ``return_lse`` (O, LSE), LSE (B, H, Sq).

    Raises:
        TypeError, ValueError, UnsupportedError: as ``attention``. New tokens that do not fit raise on a CPU before anything is written;
            on a GPU, where lengths are not read by the host, they are dropped.
    """
    key = None
    if not torch.compiler.is_compiling() and k is None and v is None and isinstance(cache_seqlens, Tensor):
        others = (sink, alibi_slopes, bias, cache_seqlens, page_table, cache_batch_idx, cache_leftpad, q_descale, k_descale, v_descale)
        options = (window, mask, causal, scale, softcap, return_lse, deterministic, backend, "cache")
        key = repeated.key(q, k_cache, v_cache, others, options)
        if (call := repeated.find(key)) is not None:
            rows = cache_batch_idx[:, None] if cache_batch_idx is not None else _own_rows(q.shape[0], q.device)
            table = rows if page_table is None else page_table
            found = call(
                (
                    q, k_cache, v_cache, sink, alibi_slopes, bias, None, None, None, cache_seqlens, table, cache_leftpad,
                    q_descale, k_descale, v_descale,
                )
            )  # fmt: skip
            if found is not None:
                return found if return_lse else found[0]
    names = ("q", "k_cache", "v_cache")
    kv = "(batch, seqlen_cache, heads_kv, head_dim)" if page_table is None else "(pages, page_size, heads_kv, head_dim)"
    checks.qkv(q, k_cache, v_cache, names, 4, ("(batch, seqlen_q, heads, head_dim)", kv))
    batch = q.shape[0]
    table = _pages(q, k_cache, page_table, cache_batch_idx)
    capacity = table.shape[1] * k_cache.shape[1]
    lengths = _cache_lengths(cache_seqlens, q, capacity, k is not None)
    checks.lengths("cache_leftpad", cache_leftpad, q, batch)
    checks.extras(sink, alibi_slopes, bias, q, batch, q.shape[1], capacity)
    descales = _descales(q_descale, k_descale, v_descale, q, batch, k_cache.shape[-2])
    code, mask_tensors = _mask(mask, causal, window, q)
    before = lengths
    if k is not None or v is not None:
        lengths = before + checks.appended(k, v, q, k_cache, v_cache)
    arguments = _arguments(
        (q, k_cache, v_cache, sink, alibi_slopes, bias, None, None, None, lengths, table, cache_leftpad, *descales),
        (mask_tensors, code, q.shape[1], capacity),
        scale, softcap, deterministic, return_lse, backend,
    )  # fmt: skip
    if k is not None:
        ops.check_append(k, k_cache, before, table, arguments)
        q, k, v = (_apart(x, k_cache, v_cache) for x in (q, k, v))
        arguments = (q, *arguments[1:])
        torch.ops.tandem_attn.append_kv(k, v, k_cache, v_cache, before, table)
    return _run(arguments, return_lse, key)


def _descales(q_descale: Any, k_descale: Any, v_descale: Any, q: Tensor, batch: int, heads_kv: int) -> tuple[Tensor | None, ...]:
    named = (("q_descale", q_descale), ("k_descale", k_descale), ("v_descale", v_descale))
    return tuple(checks.descale(name, x, q, batch, heads_kv) for name, x in named)


def _apart(x: Any, *caches: Tensor) -> Any:
    """A copy of what shares memory with a cache that is about to be written. Compilers, which have no addresses, see to this themselves."""
    if torch.compiler.is_compiling():
        return x
    shares = any(x.untyped_storage()._cdata == cache.untyped_storage()._cdata for cache in caches)
    return x.clone() if shares else x


def _arguments(
    tensors: tuple[Any, ...],
    sizes: tuple[list[Tensor], str, int, int],
    scale: float | None,
    softcap: float,
    deterministic: bool,
    return_lse: bool,
    backend: str,
) -> tuple[Any, ...]:
    """Arguments of the operator, all checked."""
    check_name(backend)
    if not torch.compiler.is_compiling():
        _reject_transforms(tensors, backend)
    factor = 1.0 / math.sqrt(tensors[0].shape[-1]) if scale is None else checks.number("scale", scale)
    needs_grad = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (*tensors[:6], *tensors[-3:]))
    if needs_grad and tensors[0].dtype in checks.FLOAT8:
        nearest = "q, k and v in bfloat16, or the call under torch.no_grad()"
        raise UnsupportedError(backend=backend, missing=f"gradients of a call with {tensors[0].dtype} inputs", nearest=nearest)
    return (
        *tensors, *sizes, factor, checks.softcap(softcap), needs_grad, checks.flag("deterministic", deterministic),
        checks.flag("return_lse", return_lse), backend,
    )  # fmt: skip


def _run(arguments: tuple[Any, ...], return_lse: bool, key: repeated.Key | None = None) -> Result:
    """Calls the operator; with ``key``, a call like this one is bound for the next time."""
    out, lse = torch.ops.tandem_attn.attention(*arguments)
    if key is not None:
        repeated.remember(key, arguments)
    return (out, lse) if return_lse else out


def _reject_transforms(tensors: tuple[Any, ...], backend: str) -> None:
    """torch.func and forward-mode AD cannot see into the operators; the latter would silently give a zero tangent."""
    missing = ""
    if torch._C._are_functorch_transforms_active():
        missing = "torch.func transforms (vmap, grad, jvp)"
    elif forward_ad._current_level >= 0 and any(isinstance(x, Tensor) and forward_ad.unpack_dual(x).tangent is not None for x in tensors):
        missing = "forward-mode automatic differentiation"
    if missing:
        raise UnsupportedError(backend=backend, missing=missing, nearest="torch.autograd.grad on batched tensors")


def _mask(
    mask: Mask | PredicateFn | None, causal: bool, window: tuple[int | None, int | None] | None, q: Tensor
) -> tuple[str, list[Tensor]]:
    """Code and tensors of all masks together."""
    left, right = (None, None) if window is None else checks.window(window)
    if checks.flag("causal", causal):
        right = 0
    band = "" if left is None and right is None else f"window({bound_text(left)},{bound_text(right)},bottom-right)"
    code, data = _given(mask)
    tensors = [_ids(x, q) for x in data]
    if code == Full().code:
        return band or code, tensors
    return f"and({code},{band})" if band else code, tensors


def _not_a_mask(x: object) -> TypeError:
    if isinstance(x, type) or x is Causal:
        name = getattr(x, "__name__", "")
        return TypeError(f"mask must be a Mask, not its class: write {name}(...), got {name}")
    hint = " (for a boolean tensor t: lambda b, h, q_idx, kv_idx: t[q_idx, kv_idx])" if isinstance(x, Tensor) else ""
    return TypeError(f"mask must be a Mask, a function (b, h, q_idx, kv_idx) -> bool tensor, or None, got {type(x).__name__}{hint}")


def _given(mask: Mask | PredicateFn | None) -> tuple[str, tuple[Any, ...]]:
    """Code and data of the ``mask`` argument."""
    if mask is None:
        return Full().code, ()
    if isinstance(mask, Mask):
        return mask.code, mask.tensors
    if isinstance(mask, type) or mask is Causal or not callable(mask):
        raise _not_a_mask(mask)
    if torch.compiler.is_compiling():
        id(mask)  # compiled code then holds for this very object: functions of the same code may differ in what they capture
        return _pinned_code(mask), ()
    hashable = type(mask).__hash__ is not None
    return (_predicate(mask) if hashable else Predicate(mask)).code, ()


@functools.lru_cache(maxsize=256)
def _predicate(fn: PredicateFn) -> Predicate:
    return Predicate(fn)


_pinned: list[Predicate] = []  # compiled code may run as long as the process does


def _pinned_code(fn: PredicateFn) -> str:
    _pinned.append(Predicate(fn))
    return _pinned[-1].code


# All that torch.compiler.assume_constant_result does, whose call would import the compiler (a second) with this module.
_pinned_code._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _ids(ids: Any, q: Tensor) -> Tensor:
    """Document ids as a tensor on q's device."""
    try:
        tensor = ids if isinstance(ids, Tensor) else _tensor(ids, q.device)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"Document's ids must be an integer tensor, array or (nested) list, got {type(ids).__name__}") from error
    checks.require_same_device("Document's ids", tensor, q)
    if tensor.ndim not in (1, 2) or tensor.is_floating_point() or tensor.is_complex():
        raise ValueError(f"Document's ids must be integers of shape (seqlen,) or (batch, seqlen), got {tensor.dtype} {tuple(tensor.shape)}")
    return tensor


def _tensor(ids: Any, device: torch.device) -> Tensor:
    """An array or list as a tensor. Arrays are copied: they may be read-only or have negative strides, which no tensor can."""
    tensor = torch.as_tensor(ids.copy() if hasattr(ids, "ndim") else ids, device=device)
    return tensor if tensor.numel() else tensor.int()  # an empty list has no dtype


def _pages(q: Tensor, k_cache: Tensor, page_table: Tensor | None, cache_batch_idx: Tensor | None) -> Tensor:
    """A contiguous cache is paged with one page a sequence."""
    batch = q.shape[0]
    if page_table is not None:
        if cache_batch_idx is not None:
            raise ValueError("cache_batch_idx must be None with page_table (the table already says where each sequence lies)")
        checks.page_table(page_table, q, batch)
        return page_table
    if cache_batch_idx is not None:
        checks.lengths("cache_batch_idx", cache_batch_idx, q, batch)
        return cache_batch_idx[:, None]
    checks.same_batch("k_cache", k_cache, q)
    return _rows(batch, q.device)


def _rows(batch: int, device: torch.device) -> Tensor:
    return torch.arange(batch, dtype=torch.int32, device=device)[:, None]


_kept_rows = functools.lru_cache(maxsize=64)(_rows)


def _own_rows(batch: int, device: torch.device) -> Tensor:
    """``_rows``, kept; while a CUDA graph is captured they are made anew, since what the graph allocates is the graph's."""
    capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    return _rows(batch, device) if capturing else _kept_rows(batch, device)


def _cache_lengths(cache_seqlens: Tensor | int | None, q: Tensor, capacity: int, appends: bool) -> Tensor:
    if cache_seqlens is None:
        if appends:
            raise ValueError("cache_seqlens must be given when k is appended, got None")
        cache_seqlens = capacity
    if not isinstance(cache_seqlens, Tensor) and not is_integer(cache_seqlens):
        raise TypeError(f"cache_seqlens must be an int32 tensor (batch,), an int or None, got {type(cache_seqlens).__name__}")
    if isinstance(cache_seqlens, Tensor):
        checks.lengths("cache_seqlens", cache_seqlens, q, q.shape[0])
        return cache_seqlens
    if not 0 <= cache_seqlens <= capacity:
        raise ValueError(f"cache_seqlens must lie between 0 and {capacity}, got {cache_seqlens}")
    return torch.full((q.shape[0],), int(cache_seqlens), dtype=torch.int32, device=q.device)
