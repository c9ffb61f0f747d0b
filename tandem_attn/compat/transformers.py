"""``attn_implementation="tandem"`` for Hugging Face transformers.

    import tandem_attn.compat.transformers

    tandem_attn.compat.transformers.register()
    model = AutoModelForCausalLM.from_pretrained(..., attn_implementation="tandem")

Masks are made by transformers' own mask function for SDPA, so every pattern it can express is right: it gives None for a plain causal or a
plain bidirectional call, otherwise a boolean (batch, heads or 1, seqlen_q, seqlen_k) mask. The interfaces are described at
https://huggingface.co/docs/transformers/attention_interface.
"""

from __future__ import annotations

import functools
import importlib.metadata
import re
from typing import Any, Protocol

import torch
from torch import Tensor

from tandem_attn.api import checks
from tandem_attn.api.backends import AUTO, check_name
from tandem_attn.api.functions import attention, attention_varlen
from tandem_attn.compat import autocast, errors
from tandem_attn.spec.errors import UnsupportedError
from tandem_attn.spec.masks import TOP_LEFT, Causal, Document, Full, Mask

NAME = "tandem"
OLDEST = "4.56"  # the first release with AttentionInterface and AttentionMaskInterface as used here
TESTED = "5.24.0"
_NAMES = {"q": "query", "k": "key", "v": "value", "scale": "scaling", "bias": "attention_mask", "sink": "s_aux"}
_NAMES |= {"cu_seqlens_q": "cu_seq_lens_q", "cu_seqlens_k": "cu_seq_lens_k", "max_seqlen_q": "max_length_q", "max_seqlen_k": "max_length_k"}
_NEAREST = 'attn_implementation="eager"'


class AttentionModule(Protocol):
    """What is read of a model's attention layer: whether it is causal where the call does not say."""

    is_causal: bool


def register(name: str = NAME, backend: str = AUTO) -> None:
    """Makes ``attn_implementation=name`` known to transformers, for all models that use its attention interface. May be called again.

    Args:
        name: what models will ask for.
        backend: a name of ``tandem_attn.backends()``.

    Raises:
        ImportError: transformers is missing or too old; the message names the version found and the one needed.
        TypeError, ValueError: wrong arguments.
    """
    if not isinstance(name, str):
        raise TypeError(f"name must be a str, got {type(name).__name__}")
    if not name:
        raise ValueError("name must not be empty, got ''")
    check_name(backend)
    _require_transformers()
    from transformers import AttentionInterface, AttentionMaskInterface  # noqa: PLC0415  (loaded only for those who use it)

    AttentionInterface.register(name, functools.partial(attention_forward, backend=backend))
    AttentionMaskInterface.register(name, AttentionMaskInterface()["sdpa"])


def _require_transformers() -> None:
    needed = f"tandem_attn.compat.transformers needs transformers >= {OLDEST} (tested with {TESTED})"
    try:
        found = importlib.metadata.version("transformers")
    except importlib.metadata.PackageNotFoundError:
        raise ImportError(f"{needed}, found none: pip install 'transformers=={TESTED}'") from None
    if _release(found) < _release(OLDEST):
        raise ImportError(f"{needed}, found {found}: pip install 'transformers=={TESTED}'")


def _release(version: str) -> tuple[int, ...]:
    """(major, minor) of a version text."""
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])


def attention_forward(
    module: AttentionModule,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    backend: str = AUTO,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface.

    Args:
        module: the attention layer that calls; its ``is_causal`` holds where the argument is None.
        query: (B, H, Sq, D).
        key: (B, Hkv, Sk, D).
        value: (B, Hkv, Sk, Dv).
        attention_mask: (B or 1, H or 1, Sq or 1, >= Sk), boolean (True takes part) or additive. None: causal when ``is_causal``, the
            queries being the first tokens of the keys (a static cache has empty places behind them); a single query sees all keys.
        dropout: must be 0.
        scaling: factor of the logits; default 1 / sqrt(D).
        is_causal: see ``attention_mask``.
        sliding_window: read with ``cu_seq_lens_q`` and no mask only; a mask contains it.
        softcap: > 0 replaces a logit s by softcap * tanh(s / softcap).
        s_aux: (H,) a logit that joins each row's softmax without a value (attention sink).
        position_bias: (B or 1, H or 1, Sq or 1, Sk or 1), added to the logits.
        backend: a name of ``tandem_attn.backends()``.
        kwargs: ``cu_seq_lens_q``, ``cu_seq_lens_k``, ``max_length_q``, ``max_length_k`` describe sequences packed in one row, which do not
            see each other. What else models pass is not about the result.

    Returns:
        O (B, Sq, H, Dv) and None: attention weights are never formed.

    Raises:
        TypeError, ValueError: an argument is wrong.
        UnsupportedError: dropout > 0, output_attentions=True, or sinks for each token.
    """
    errors.refuse_dropout("dropout", dropout, f"attention_dropout=0.0 in the model's config, model.eval(), or {_NEAREST}")
    _refuse_extras(kwargs)
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    options = {"scale": scaling, "softcap": softcap or 0.0, "sink": s_aux, "backend": backend}
    query, key, value = autocast.cast(query.device.type, query, key, value)
    batch = max(query.shape[0], key.shape[0])  # learned queries come with batch 1
    q, k, v = (x.expand(batch, -1, -1, -1).transpose(1, 2) for x in (query, key, value))
    is_packed = kwargs.get("cu_seq_lens_q") is not None
    if is_packed and attention_mask is None and position_bias is None:
        return _packed(q, k, v, bool(causal), sliding_window, options, kwargs), None
    causal = bool(causal) and attention_mask is None and q.shape[1] > 1
    bias = _bias(attention_mask, position_bias, q, k.shape[1])
    if causal:  # the places behind the queries are hidden anyway
        k, v = k[:, : q.shape[1]], v[:, : q.shape[1]]
        bias = bias if bias is None or bias.shape[3] == 1 else bias[..., : k.shape[1]]
    mask: Mask = Causal(TOP_LEFT) if causal else Full()
    if is_packed:
        mask = mask & _documents(kwargs, q.shape[1], k.shape[1])
    out = errors.call(attention, _NAMES, q, k, v, mask=mask, bias=bias, **options)
    return out.contiguous(), None


def _refuse_extras(kwargs: dict[str, Any]) -> None:
    for name, words in (("output_attentions", "attention weights as a result"), ("sinks", "sinks that differ between tokens")):
        if kwargs.get(name) is not None and kwargs[name] is not False:
            raise UnsupportedError(backend=AUTO, missing=f"{words} ({name})", nearest=_NEAREST)


def _packed(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, sliding_window: int | None, options: dict[str, Any], kwargs: dict[str, Any]
) -> Tensor:
    """Sequences packed in one row: (1, total, heads, D)."""
    if q.shape[0] != 1:
        raise ValueError(f"cu_seq_lens_q describes sequences packed in one row, got a batch of {q.shape[0]}")
    if causal:  # transformers counts the query's own key in a causal window, and not in a bidirectional one
        sliding_window = None if sliding_window is None else sliding_window - 1
    window = None if sliding_window is None else (sliding_window, sliding_window)
    out = errors.call(
        attention_varlen, _NAMES, q[0], k[0], v[0], kwargs["cu_seq_lens_q"], kwargs.get("cu_seq_lens_k"),
        kwargs.get("max_length_q"), kwargs.get("max_length_k"), causal=causal, window=window, **options,
    )  # fmt: skip
    return out[None].contiguous()


def _documents(kwargs: dict[str, Any], seqlen_q: int, seqlen_k: int) -> Mask:
    """The packed sequences as a mask, beside a mask or bias that covers the whole row."""

    def ids(name: str, seqlen: int) -> Tensor:
        cu = checks.require_tensor(name, kwargs.get(name))
        return torch.searchsorted(cu, torch.arange(seqlen, dtype=cu.dtype, device=cu.device), right=True)

    return Document(ids("cu_seq_lens_q", seqlen_q), ids("cu_seq_lens_k", seqlen_k))


def _bias(attention_mask: Tensor | None, position_bias: Tensor | None, q: Tensor, seqlen_k: int) -> Tensor | None:
    """Mask and position bias as one additive tensor; hidden keys get -inf."""
    if attention_mask is None:
        return position_bias
    mask = checks.require_tensor("attention_mask", attention_mask)
    checks.require_ndim("attention_mask", mask, 4, "(batch or 1, heads or 1, seqlen_q or 1, seqlen_k or more)")
    if mask.shape[3] != 1:
        mask = mask[..., :seqlen_k]
    if mask.dtype == torch.bool:
        zeros = torch.zeros((), dtype=q.dtype, device=mask.device) if position_bias is None else position_bias
        return torch.where(mask, zeros, float("-inf"))
    return mask if position_bias is None else mask + position_bias
