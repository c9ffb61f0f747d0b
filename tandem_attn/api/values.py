"""Checks of values, where they can be read without waiting: on a CPU. On a GPU the kernels stay inside their tensors instead."""

from __future__ import annotations

import torch
from torch import Tensor

from tandem_attn.spec.inputs import Inputs
from tandem_attn.spec.masks import Document, Mask


def check(inputs: Inputs, mask: Mask, max_seqlen_q: int, max_seqlen_k: int) -> None:
    """Raises ValueError for lengths, offsets, page numbers and document ids that leave their tensors, and for descales <= 0."""
    if inputs.q.device.type != "cpu":
        return
    for name in ("q_descale", "k_descale", "v_descale"):
        _positive(name, getattr(inputs, name))
    paged = inputs.page_table is not None
    q_lengths = _lengths("q", inputs.cu_seqlens_q, inputs.q, False, inputs.seqused_q, max_seqlen_q)
    k_lengths = _lengths("k", inputs.cu_seqlens_k, inputs.k, paged, inputs.seqused_k, max_seqlen_k)
    if inputs.page_table is not None:
        _within("cache_leftpad", inputs.leftpad, k_lengths)
        start = 0 if inputs.leftpad is None else inputs.leftpad
        _pages(inputs.page_table, start, k_lengths, inputs.k.shape[1], inputs.k.shape[0])
    batch = inputs.q.shape[0] if inputs.cu_seqlens_q is None else inputs.cu_seqlens_q.shape[0] - 1
    for leaf in mask.leaves():
        if isinstance(leaf, Document):
            _document("q_ids", leaf.tensors[0], batch, q_lengths)
            _document("kv_ids", leaf.tensors[1], batch, k_lengths)
    if inputs.bias is not None and inputs.cu_seqlens_q is not None:
        _bias(inputs.bias, q_lengths, k_lengths)


def _lengths(side: str, cu: Tensor | None, x: Tensor, paged: bool, used: Tensor | None, bound: int) -> Tensor:
    """Lengths of all sequences of one side, checked."""
    if cu is None:
        room = torch.tensor(bound, device="cpu")  # the default device may be another
    else:
        _cu_seqlens(f"cu_seqlens_{side}", cu, None if paged else x.shape[0], side)
        room = cu.diff()
    _within("cache_seqlens" if paged else f"seqused_{side}", used, room)
    lengths = room if used is None else used
    if cu is not None and lengths.numel() and int(lengths.max()) > bound:
        raise ValueError(f"max_seqlen_{side} must be at least the longest sequence ({int(lengths.max())}), got {bound}")
    return lengths


def _positive(name: str, x: Tensor | None) -> None:
    if x is None or not x.numel():
        return
    bad = ~((x > 0) & x.isfinite())  # NaN is not > 0
    if bool(bad.any()):
        b, head = (int(i) for i in bad.nonzero()[0])
        raise ValueError(f"{name} must be positive and finite, got {float(x[b, head]):g} at ({b}, {head})")


def _longest(lengths: Tensor) -> int:
    return int(lengths.max()) if lengths.numel() else 0


def _document(name: str, ids: Tensor, batch: int, lengths: Tensor) -> None:
    longest = _longest(lengths)
    if ids.shape[-1] < longest or (ids.ndim == 2 and ids.shape[0] < batch):
        raise ValueError(f"Document's {name} must cover all {batch} sequences (longest: {longest}), got shape {tuple(ids.shape)}")


def _bias(bias: Tensor, q_lengths: Tensor, k_lengths: Tensor) -> None:
    """Packed calls know their lengths only here."""
    for i, side, lengths in ((2, "q", q_lengths), (3, "k", k_lengths)):
        longest = _longest(lengths)
        if bias.shape[i] != 1 and bias.shape[i] < longest:
            raise ValueError(f"bias must cover the longest seqlen_{side} ({longest}) or be 1 as size {i}, got shape {tuple(bias.shape)}")


def _cu_seqlens(name: str, cu: Tensor, total: int | None, owner: str) -> None:
    if int(cu[0]) != 0:
        raise ValueError(f"{name} must start with 0, got {int(cu[0])}")
    steps = cu.long().diff()  # the difference of two int32 may leave int32
    if steps.numel() and int(steps.min()) < 0:
        at = int(steps.argmin())
        raise ValueError(f"{name} must not decrease, got {int(cu[at])} before {int(cu[at + 1])} at position {at + 1}")
    if total is not None and int(cu[-1]) > total:
        raise ValueError(f"{name} must end at {owner}'s rows ({total}) or before, got {int(cu[-1])}")


def _within(name: str, used: Tensor | None, limit: Tensor, room: str = "") -> None:
    if used is None or not used.numel():
        return
    bad = (used < 0) | (used > limit)
    if bool(bad.any()):
        at = int(bad.int().argmax())
        most = int(limit.expand_as(used)[at])
        words = f" ({room})" if room else ""
        raise ValueError(f"{name} must lie between 0 and {most}{words}, got {int(used[at])} at position {at}")


def check_append(cache_seqlens: Tensor, page_table: Tensor, k: Tensor, k_cache: Tensor) -> None:
    """Raises ValueError for new tokens that do not fit behind a sequence, before any is written."""
    if k.device.type != "cpu":
        return
    page_size, new = k_cache.shape[1], k.shape[1]
    capacity = page_table.shape[1] * page_size
    if new > capacity and cache_seqlens.numel():
        raise ValueError(f"k must have at most as many new tokens as the cache holds ({capacity}), got {new}")
    _within("cache_seqlens", cache_seqlens, torch.tensor(capacity - new, device="cpu"), "after appending k")
    if new == 0:
        return
    _pages(page_table, cache_seqlens // page_size * page_size, cache_seqlens + new, page_size, k_cache.shape[0])
    at = cache_seqlens.long()[:, None] + torch.arange(new, device="cpu")
    places = page_table.long().gather(1, at // page_size) * page_size + at % page_size
    if places.unique().numel() < places.numel():
        raise ValueError("page_table (or cache_batch_idx) must give every appended token a place of its own, got one place for two tokens")


def _pages(page_table: Tensor, start: Tensor | int, stop: Tensor, page_size: int, count: int) -> None:
    """Pages of the keys ``[start, stop)`` of each sequence must exist; the rest of the table may hold anything."""
    column = torch.arange(page_table.shape[1], device="cpu") * page_size
    start = start if isinstance(start, int) else start[:, None]
    used = (column < stop[:, None]) & (column + page_size > start)
    bad = used & ((page_table < 0) | (page_table >= count))
    if bool(bad.any()):
        b, at = (int(x) for x in bad.nonzero()[0])
        raise ValueError(
            f"page_table (or cache_batch_idx) must hold pages between 0 and {count - 1} where a sequence uses them, "
            f"got {int(page_table[b, at])} at ({b}, {at})"
        )
