"""Masks, each twice: as the keywords of a call and as a predicate written without ``tandem_attn``.

``MASKS[name](seqs, g, device)`` returns (keywords, sees); ``seqs`` is (batch, longest seqlen_q, longest seqlen_k), ``g`` a random
generator, ``device`` that of the tensors in the keywords; ``sees`` works on the CPU and takes (b, h, i, j, seqlen_q, seqlen_k), integers
or integer tensors that broadcast, and returns a bool tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tandem_attn import Causal, Document, Full, Predicate, Window

Sees = Callable[..., Any]
Built = tuple[dict[str, Any], Sees]
Builder = Callable[[tuple[int, int, int], torch.Generator, str], Built]


def _band(left: int | None, right: int | None, top_left: bool = False) -> Sees:
    def sees(b: Any, h: Any, i: Any, j: Any, sq: int, sk: int) -> Any:
        diagonal = i if top_left else i + sk - sq
        far = torch.ones(torch.broadcast_shapes(i.shape, j.shape), dtype=torch.bool)
        if left is not None:
            far = far & (diagonal - j <= left)
        if right is not None:
            far = far & (j - diagonal <= right)
        return far

    return sees


def _fixed(sees: Sees, **keywords: Any) -> Builder:
    return lambda seqs, g, device: (keywords, sees)


def _document(two_dimensional: bool, own_keys: bool) -> Builder:
    def build(seqs: tuple[int, int, int], g: torch.Generator, device: str) -> Built:
        batch, seqlen_q, seqlen_k = seqs
        length = seqlen_q if own_keys else max(seqlen_q, seqlen_k)
        lead = (batch,) if two_dimensional else ()
        q_ids = torch.randint(0, 3, (*lead, length), generator=g).sort(-1).values
        k_ids = torch.randint(0, 3, (*lead, seqlen_k), generator=g) if own_keys else None
        keys = q_ids if k_ids is None else k_ids

        def sees(b: int, h: Any, i: Any, j: Any, sq: int, sk: int) -> Any:
            return (q_ids[b] if two_dimensional else q_ids)[i] == (keys[b] if two_dimensional else keys)[j]

        return {"mask": Document(q_ids.to(device), None if k_ids is None else k_ids.to(device))}, sees

    return build


def _captured(seqs: tuple[int, int, int], g: torch.Generator, device: str) -> Built:
    """A predicate that reads tensors: random visibility that differs between batch entries and heads."""
    batch, seqlen_q, seqlen_k = seqs
    table = torch.rand(batch, 3, max(seqlen_q, 1), max(seqlen_k, 1), generator=g) < 0.6
    placed = table.to(device)
    mask = Predicate(lambda b, h, i, j: placed[b, h % 3, i, j], name="captured")
    return {"mask": mask}, lambda b, h, i, j, sq, sk: table[b, h % 3, i, j]


def _function(seqs: tuple[int, int, int], g: torch.Generator, device: str) -> Built:
    """A plain function as a mask; whole stripes of queries see nothing."""
    return {
        "mask": lambda b, h, i, j: ((i + h) % 3 != 0) & (j % 2 == b % 2)
    }, lambda b, h, i, j, sq, sk: ((i + h) % 3 != 0) & (j % 2 == b % 2)


def _predicate_and_causal(seqs: tuple[int, int, int], g: torch.Generator, device: str) -> Built:
    return {
        "mask": Predicate(lambda b, h, i, j: (i + j) % 3 != 0),
        "causal": True,
    }, lambda b, h, i, j, sq, sk: ((i + j) % 3 != 0) & (j - i <= sk - sq)


def _window_or_prefix(seqs: tuple[int, int, int], g: torch.Generator, device: str) -> Built:
    mask = Window(4, 0) | Predicate(lambda b, h, i, j: j < 3, name="prefix")
    return {"mask": mask}, lambda b, h, i, j, sq, sk: ((i + sk - sq - j <= 4) & (j <= i + sk - sq)) | (j < 3)


def _document_and_causal(seqs: tuple[int, int, int], g: torch.Generator, device: str) -> Built:
    keywords, same = _document(True, False)(seqs, g, device)
    return {"mask": keywords["mask"] & Causal()}, lambda b, h, i, j, sq, sk: same(b, h, i, j, sq, sk) & (j <= i + sk - sq)


def _two_documents(seqs: tuple[int, int, int], g: torch.Generator, device: str) -> Built:
    """Two masks that carry data, so that their tensors must keep their order."""
    first, sees_first = _document(False, False)(seqs, g, device)
    second, sees_second = _document(True, True)(seqs, g, device)
    return {"mask": first["mask"] | second["mask"]}, lambda *at: sees_first(*at) | sees_second(*at)


MASKS: dict[str, Builder] = {
    "full": _fixed(_band(None, None)),
    "full-object": _fixed(_band(None, None), mask=Full()),
    "causal": _fixed(_band(None, 0), causal=True),
    "causal-object": _fixed(_band(None, 0), mask=Causal()),
    "top-left": _fixed(_band(None, 0, top_left=True), mask=Causal("top-left")),
    "window(5,2)": _fixed(_band(5, 2), window=(5, 2)),
    "window(0,0)": _fixed(_band(0, 0), window=(0, 0)),
    "window(17,None)": _fixed(_band(17, None), window=(17, None)),
    "window(None,3)": _fixed(_band(None, 3), window=(None, 3)),
    "window(None,None)": _fixed(_band(None, None), window=(None, None)),
    "window+causal": _fixed(_band(11, 0), window=(11, 9), causal=True),
    "window-top-left": _fixed(_band(6, 1, top_left=True), mask=Window(6, 1, "top-left")),
    "window-behind": _fixed(_band(9, -1), mask=Window(9, -1)),
    "window-ahead": _fixed(_band(-2, None), mask=Window(-2, None)),
    "two-alignments": _fixed(
        lambda *at: _band(None, 4)(*at) & _band(None, 4, top_left=True)(*at), mask=Window(None, 4) & Window(None, 4, "top-left")
    ),
    "document-1d": _document(False, False),
    "document-2d": _document(True, False),
    "document-keys": _document(True, True),
    "document&causal": _document_and_causal,
    "document|document": _two_documents,
    "captured": _captured,
    "function": _function,
    "predicate&causal": _predicate_and_causal,
    "window|prefix": _window_or_prefix,
    "nothing": lambda seqs, g, device: (
        {"mask": Predicate(lambda b, h, i, j: (i < 0) & (j < 0))},
        lambda b, h, i, j, sq, sk: (i < 0) & (j < 0),
    ),
}
