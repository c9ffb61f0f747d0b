"""torch.nn.functional.scaled_dot_product_attention's call on Tandem: its arguments, layout (..., heads, seqlen, head_dim) and broadcasting.

Reference: https://docs.pytorch.org/docs/stable/generated/torch.nn.functional.scaled_dot_product_attention.html
"""

from __future__ import annotations

import torch
from torch import Tensor

from tandem_attn.api import checks
from tandem_attn.api.functions import attention
from tandem_attn.compat import autocast, errors
from tandem_attn.spec.masks import TOP_LEFT, Causal

_NAMES = {"q": "query", "k": "key", "v": "value", "bias": "attn_mask"}


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """softmax(scale * Q K^T + attn_mask) V, differentiable with respect to query, key, value and a float attn_mask.

    Leading dimensions (any number, heads the last of them) broadcast, as in PyTorch.

    Args:
        query: (..., H, L, E), float16, bfloat16, float32 or float64.
        key: (..., Hkv, S, E), same dtype and device.
        value: (..., Hkv, S, Ev), same dtype and device. Under torch.autocast all take its dtype, as in PyTorch.
        attn_mask: broadcasts to (..., H, L, S). Boolean: True takes part. Float (float32 or query's dtype): added to the logits.
        dropout_p: must be 0.
        is_causal: query i sees keys j <= i (aligned top-left, whatever L and S). Not with ``attn_mask``.
        scale: factor of the logits; default 1 / sqrt(E).
        enable_gqa: Hkv may be a divisor of H; each key/value head then serves H / Hkv neighbouring query heads.

    Returns:
        (..., H, L, Ev) in query's dtype. A row without keys gives 0 and zero gradients.

    Raises:
        TypeError, ValueError: an argument is wrong; the message names it, its value and what is required.
        UnsupportedError: dropout_p > 0, or no backend covers the call.
    """
    errors.refuse_dropout("dropout_p", dropout_p, "dropout_p=0.0, or PyTorch's own scaled_dot_product_attention")
    if checks.flag("is_causal", is_causal) and attn_mask is not None:
        raise ValueError("attn_mask must be None with is_causal=True, got a mask")
    _check_shapes(query, key, value)
    query, key, value, attn_mask = autocast.cast(query.device.type, query, key, value, attn_mask)
    lead = _leading(query, key, value, checks.flag("enable_gqa", enable_gqa))
    heads_kv = max(key.shape[-3] if key.ndim > 2 else 1, value.shape[-3] if value.ndim > 2 else 1)
    q, k, v = (_batched(x, lead[:-1], heads) for x, heads in ((query, lead[-1]), (key, heads_kv), (value, heads_kv)))
    bias = None if attn_mask is None else _bias(attn_mask, (*lead, query.shape[-2], key.shape[-2]), query)
    mask = Causal(TOP_LEFT) if is_causal else None
    out = errors.call(attention, _NAMES, q, k, v, mask=mask, scale=scale, bias=bias)
    rank = max(query.ndim, key.ndim, value.ndim)
    shape = (*lead, query.shape[-2], value.shape[-1])
    return out.transpose(1, 2).reshape(shape[len(shape) - rank :])


def _check_shapes(query: Tensor, key: Tensor, value: Tensor) -> None:
    for name, x in (("query", query), ("key", key), ("value", value)):
        if checks.require_tensor(name, x).ndim < 2:
            raise ValueError(f"{name} must have at least 2 dimensions (..., seqlen, head_dim), got shape {tuple(x.shape)}")
    if key.shape[-1] != query.shape[-1]:
        raise ValueError(f"key must have query's head_dim {query.shape[-1]}, got shape {tuple(key.shape)}")
    if value.shape[-2] != key.shape[-2]:
        raise ValueError(f"value must have key's seqlen {key.shape[-2]}, got shape {tuple(value.shape)}")


def _leading(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> tuple[int, ...]:
    """Leading dimensions of the result, at least (1, 1): batch dimensions and query heads."""
    leads = [(1, 1, *x.shape[:-2])[-max(2, x.ndim - 2) :] for x in (query, key, value)]
    heads = [lead[-1] for lead in leads]
    if enable_gqa:
        if heads[1] != heads[2] or heads[1] == 0 or heads[0] % heads[1]:
            raise ValueError(
                f"key and value must have the same number of heads, a divisor of query's {heads[0]}, with enable_gqa=True, "
                f"got {heads[1]} and {heads[2]}"
            )
        leads = [(*lead[:-1], heads[0]) for lead in leads]
    try:
        return tuple(torch.broadcast_shapes(*leads))
    except RuntimeError:
        shapes = ", ".join(str(tuple(x.shape)) for x in (query, key, value))
        hint = "" if enable_gqa else " (fewer key/value heads than query heads need enable_gqa=True)"
        raise ValueError(f"query, key and value must have leading dimensions that broadcast{hint}, got shapes {shapes}") from None


def _batched(x: Tensor, batch: tuple[int, ...], heads: int) -> Tensor:
    """(..., heads, S, D) -> (B, S, heads, D), batch dimensions broadcast and flattened; a view where nothing is broadcast."""
    x = x[(None,) * max(0, 4 - x.ndim)]
    return x.expand(*batch, heads, *x.shape[-2:]).flatten(0, len(batch) - 1).transpose(1, 2)


def _bias(attn_mask: Tensor, target: tuple[int, ...], query: Tensor) -> Tensor:
    """The mask as a bias (B or 1, H or 1, L or 1, S or 1): hidden keys get -inf."""
    mask = checks.require_tensor("attn_mask", attn_mask)
    if mask.dtype not in (torch.bool, torch.float32, query.dtype):
        raise TypeError(f"attn_mask must be bool, float32 or query's dtype {query.dtype}, got {mask.dtype}")
    padded = (1,) * (len(target) - mask.ndim) + tuple(mask.shape)
    if mask.ndim > len(target) or any(m not in (1, t) for m, t in zip(padded, target, strict=True)):
        raise ValueError(f"attn_mask must broadcast to (..., heads, seqlen_q, seqlen_k) = {target}, got shape {tuple(mask.shape)}")
    mask = mask.reshape(padded)
    batch = len(target) - 3
    if any(size > 1 for size in padded[:batch]):
        mask = mask.expand(*target[:batch], *padded[batch:])
    mask = mask.flatten(0, batch - 1)
    if mask.dtype == torch.bool:
        return torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, float("-inf"))
    return mask
