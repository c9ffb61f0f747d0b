"""Argument checks of the public functions. Each message names the argument, its value and what is required.

Only properties (type, shape, dtype, device) are looked at here, so the checks also hold while torch.compile traces. Values, which only
a CPU can read without waiting, are checked in ``values.py``.
"""

from __future__ import annotations

import math
import numbers
import operator
from typing import Any

import torch
from torch import Tensor

from tandem_attn.spec import problem
from tandem_attn.spec.masks import is_integer, reachable
from tandem_attn.spec.problem import DEVICES

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
FLOAT8 = tuple(getattr(torch, name) for name in problem.FLOAT8)
INDICES = (torch.int32,)
FLOAT32_MAX = torch.finfo(torch.float32).max


def require_tensor(name: str, x: object) -> Tensor:
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
    if x.is_nested or x.layout != torch.strided:
        raise TypeError(f"{name} must be a dense (strided) tensor, got layout {x.layout}{' (nested)' if x.is_nested else ''}")
    return x


def require_shape(name: str, x: Tensor, shape: tuple[int, ...], words: str) -> None:
    if tuple(x.shape) != tuple(shape):
        raise ValueError(f"{name} must have shape {words} = {tuple(shape)}, got {tuple(x.shape)}")


def require_ndim(name: str, x: Tensor, ndim: int, words: str) -> None:
    if x.ndim != ndim:
        raise ValueError(f"{name} must have {ndim} dimensions {words}, got shape {tuple(x.shape)}")


def require_same_device(name: str, x: Tensor, q: Tensor) -> None:
    if x.device != q.device:
        raise ValueError(f"{name} must be on q's device {q.device}, got {x.device}")


def qkv(
    q: object, k: object, v: object, names: tuple[str, str, str], ndim: int, words: tuple[str, str], kv_ndim: int | None = None
) -> None:
    """Types, dtypes, devices, heads and head dimensions of the three main tensors; ``words`` are the layouts of q and of k, v."""
    tensors = [require_tensor(name, x) for name, x in zip(names, (q, k, v), strict=True)]
    query, key, value = tensors
    require_ndim(names[0], query, ndim, words[0])
    for name, x in zip(names[1:], tensors[1:], strict=True):
        require_ndim(name, x, kv_ndim or ndim, words[1])
    if query.dtype not in FLOATS and query.dtype not in FLOAT8:
        raise TypeError(f"{names[0]} must be float16, bfloat16, float32, float64, float8_e4m3fn or float8_e5m2, got {query.dtype}")
    if query.device.type not in DEVICES:
        raise ValueError(f"{names[0]} must be on a CPU or a CUDA device, got {query.device}")
    for name, x in zip(names[1:], tensors[1:], strict=True):
        if x.dtype != query.dtype:
            raise TypeError(f"{name} must have {names[0]}'s dtype {query.dtype}, got {x.dtype}")
        require_same_device(name, x, query)
    if key.shape[:-1] != value.shape[:-1]:
        raise ValueError(f"{names[1]} and {names[2]} must agree in all but the last size, got {tuple(key.shape)} and {tuple(value.shape)}")
    if query.shape[-1] != key.shape[-1]:
        raise ValueError(f"{names[1]} must have {names[0]}'s head_dim {query.shape[-1]}, got {key.shape[-1]}")
    _heads(query, key, value, names, words[0])


def _heads(query: Tensor, key: Tensor, value: Tensor, names: tuple[str, str, str], layout: str) -> None:
    for name, x in zip(names, (query, key, value), strict=True):
        if x.shape[-1] == 0 or x.shape[-2] == 0:
            raise ValueError(f"{name} must have at least one head and one element a head, got shape {tuple(x.shape)}")
    if query.shape[-2] % key.shape[-2]:
        raise ValueError(
            f"{names[0]}'s heads must be a multiple of {names[1]}'s, got {query.shape[-2]} query heads and {key.shape[-2]} key/value heads"
            f" in the layout {layout}"
        )


def same_batch(name: str, x: Tensor, q: Tensor) -> None:
    if x.shape[0] != q.shape[0]:
        raise ValueError(f"{name} must have q's batch size {q.shape[0]}, got {x.shape[0]}")


def lengths(name: str, x: object, q: Tensor, batch: int) -> None:
    """An optional (batch,) int32 tensor."""
    if x is None:
        return
    tensor = require_tensor(name, x)
    if tensor.dtype not in INDICES:
        raise TypeError(f"{name} must be int32, got {tensor.dtype}")
    require_shape(name, tensor, (batch,), "(batch,)")
    require_same_device(name, tensor, q)


def page_table(x: object, q: Tensor, batch: int) -> None:
    """An optional (batch, pages of a sequence) int32 tensor."""
    if x is None:
        return
    tensor = require_tensor("page_table", x)
    if tensor.dtype not in INDICES:
        raise TypeError(f"page_table must be int32, got {tensor.dtype}")
    if tensor.ndim != 2 or tensor.shape[0] != batch:
        raise ValueError(f"page_table must have shape (batch, pages of a sequence) with batch {batch}, got {tuple(tensor.shape)}")
    require_same_device("page_table", tensor, q)


def appended(k: object, v: object, q: Tensor, k_cache: Tensor, v_cache: Tensor) -> int:
    """New keys and values for a cache: (batch, new, heads_kv, head_dim), both or neither. Returns ``new``."""
    if k is None or v is None:
        raise ValueError(
            f"k and v must be given together, got k={'None' if k is None else 'a tensor'}, v={'None' if v is None else 'a tensor'}"
        )
    new: int | None = None
    for name, x, cache in (("k", k, k_cache), ("v", v, v_cache)):
        tensor = require_tensor(name, x)
        require_ndim(name, tensor, 4, "(batch, new, heads_kv, head_dim)")
        new = tensor.shape[1] if new is None else new
        require_shape(name, tensor, (q.shape[0], new, *cache.shape[2:]), f"(batch, new, heads, head_dim) of {name}_cache")
        if tensor.dtype != cache.dtype:
            raise TypeError(f"{name} must have the cache's dtype {cache.dtype}, got {tensor.dtype}")
        require_same_device(name, tensor, q)
        _writable(f"{name}_cache", cache)
    return new or 0


def _writable(name: str, cache: Tensor) -> None:
    if any(stride == 0 and size > 1 for stride, size in zip(cache.stride(), cache.shape, strict=True)):
        raise ValueError(f"{name} must have its own memory for every element to append to it, got strides {cache.stride()}")
    if torch.is_grad_enabled() and cache.requires_grad:
        raise ValueError(f"{name} must not require a gradient to append to it, got requires_grad=True")


def descale(name: str, x: object, q: Tensor, batch: int, heads_kv: int) -> Tensor | None:
    """An optional float32 tensor (batch or 1, heads_kv or 1), or of no dimension, as a (batch, heads_kv) view of itself."""
    if x is None:
        return None
    tensor = require_tensor(name, x)
    if q.dtype not in FLOAT8:
        raise ValueError(f"{name} must be None where q is not float8_e4m3fn or float8_e5m2, got a tensor beside {q.dtype}")
    if tensor.dtype != torch.float32:
        raise TypeError(f"{name} must be float32, got {tensor.dtype}")
    require_same_device(name, tensor, q)
    fits = tensor.ndim == 0 or (tensor.ndim == 2 and tensor.shape[0] in (1, batch) and tensor.shape[1] in (1, heads_kv))
    if not fits:
        raise ValueError(
            f"{name} must have shape (batch, heads_kv) = ({batch}, {heads_kv}), with 1 for either, or none, got {tuple(tensor.shape)}"
        )
    return tensor.expand(batch, heads_kv)


def cu_seqlens(name: str, x: object, q: Tensor) -> Tensor:
    tensor = require_tensor(name, x)
    if tensor.dtype not in INDICES:
        raise TypeError(f"{name} must be int32, got {tensor.dtype}")
    if tensor.ndim != 1 or tensor.shape[0] < 1:
        raise ValueError(f"{name} must have shape (batch + 1,), got {tuple(tensor.shape)}")
    require_same_device(name, tensor, q)
    return tensor


def extras(sink: object, alibi_slopes: object, bias: object, q: Tensor, batch: int, seqlen_q: int | None, seqlen_k: int | None) -> None:
    """The optional score inputs. ``seqlen_q``, ``seqlen_k``: sizes a bias must match; None where the call does not know them."""
    heads = q.shape[-2]
    if sink is not None:
        tensor = _float("sink", sink, q)
        require_shape("sink", tensor, (heads,), "(heads,)")
    if alibi_slopes is not None:
        tensor = _float("alibi_slopes", alibi_slopes, q)
        if tuple(tensor.shape) not in ((heads,), (batch, heads)):
            raise ValueError(
                f"alibi_slopes must have shape (heads,) = ({heads},) or (batch, heads) = ({batch}, {heads}), got {tuple(tensor.shape)}"
            )
    if bias is not None:
        _bias(_float("bias", bias, q), batch, heads, seqlen_q, seqlen_k)


def _float(name: str, x: object, q: Tensor) -> Tensor:
    tensor = require_tensor(name, x)
    if tensor.dtype not in FLOATS:
        raise TypeError(f"{name} must be a floating-point tensor, got {tensor.dtype}")
    require_same_device(name, tensor, q)
    return tensor


def _bias(bias: Tensor, batch: int, heads: int, seqlen_q: int | None, seqlen_k: int | None) -> None:
    require_ndim("bias", bias, 4, "(batch or 1, heads or 1, seqlen_q or 1, seqlen_k or 1)")
    for i, (what, size) in enumerate((("batch", batch), ("heads", heads), ("seqlen_q", seqlen_q), ("seqlen_k", seqlen_k))):
        if size is not None and bias.shape[i] not in (1, size):
            raise ValueError(f"bias must have {what} = {size} or 1 as size {i}, got shape {tuple(bias.shape)}")


def flag(name: str, x: object) -> bool:
    if not isinstance(x, bool):
        raise TypeError(f"{name} must be a bool, got {x!r}")
    return x


def number(name: str, x: Any) -> float:
    if not _is_real(x):
        raise TypeError(f"{name} must be a number, got {type(x).__name__}")
    if not abs(x) < math.inf:  # a comparison, which torch.compile traces with dynamic numbers too; false for NaN
        raise ValueError(f"{name} must be finite, got {x}")
    if abs(x) > FLOAT32_MAX:
        raise ValueError(f"{name} must be finite in float32, got {x}")
    return float(x)


def _is_real(x: Any) -> bool:
    """Python's numbers and numpy's."""
    return not isinstance(x, bool) and isinstance(x, (int, float, numbers.Real))


def softcap(x: Any) -> float:
    value = number("softcap", x)
    if value < 0:
        raise ValueError(f"softcap must be >= 0 (0 is off), got {value:g}")
    return value


def window(x: Any) -> tuple[int | None, int | None]:
    if not isinstance(x, (tuple, list)) or len(x) != 2:
        raise TypeError(f"window must be a pair (left, right), got {x!r}")
    for name, bound in zip(("left", "right"), x, strict=True):
        if bound is not None and not is_integer(bound):
            raise TypeError(f"window's {name} must be an int or None (unbounded), got {bound!r}")
        if bound is not None and bound < 0:
            hint = ": flash-attn's -1 is None here" if bound == -1 else ""
            raise ValueError(f"window's {name} must be >= 0 or None (unbounded), got {bound}{hint}")
    left, right = (None if bound is None else reachable(bound) for bound in x)
    return left, right


def max_seqlen(name: str, x: Any, total: int) -> int:
    """The upper bound a caller gave; ``total`` where it gave none, or a tensor (whose value is never waited for)."""
    if x is None:
        return total
    if isinstance(x, Tensor):
        if x.is_floating_point() or x.is_complex() or x.numel() != 1:
            raise TypeError(f"{name} must be an int, a 0-d tensor or None, got {x.dtype} {tuple(x.shape)}")
        return total
    if not is_integer(x):
        raise TypeError(f"{name} must be an int, a 0-d tensor or None, got {type(x).__name__}")
    if x < 0:
        raise ValueError(f"{name} must be >= 0, got {x}")
    return x if isinstance(x, int) else operator.index(x)
