"""Forms of the Hopper kernel: maxima that stay and K and V loaded for two CTAs, for long sequences, and O staged in slots lent by the ring.

``PROBLEMS`` are small ones that both forms are made for; ``with_large_logits`` makes inputs whose weights overflow without a second pass.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from emulation import packed, problem

from tandem_attn.spec.inputs import Inputs
from tandem_attn.spec.masks import TOP_LEFT, Causal, Full, Window
from tandem_attn.spec.problem import Problem

FIXED = {"fixed_max": True}
SHARED = {"kv_multicast": 2}
LENT = {"o_in_ring": True}
FORMS: dict[str, dict[str, object]] = {
    "fixed": FIXED,
    "shared": SHARED,
    "both": {**FIXED, **SHARED},
    "lent": LENT,
    "all three": {**FIXED, **SHARED, **LENT},
}

PROBLEMS: dict[str, Problem] = {
    "full": problem(300, 430, heads=2),
    "full, few keys": problem(300, 20),
    "causal": problem(500, heads=2, batch=2, mask=Causal()),
    "causal, more keys": problem(300, 600, mask=Causal()),
    "causal, first row ends a block": problem(257, 384, mask=Causal()),  # it sees 128 keys, and nothing of the block behind
    "causal, rows without keys": problem(500, 200, mask=Causal()),
    "causal, top left": problem(300, 500, mask=Causal(TOP_LEFT)),
    "window": problem(600, mask=Window(300, 30)),
    "window, left only": problem(500, mask=Window(300, None)),
    "windows of two alignments": problem(400, 500, mask=Window(300, 0) & Window(None, 20, TOP_LEFT)),
    "seqused": problem(300, 400, batch=4, seqused=True),
    "seqused, causal": problem(300, 400, batch=4, seqused=True, mask=Causal()),
    "sink, causal": problem(300, sink=True, mask=Causal(), heads=2),
    "sink": problem(300, 430, sink=True),
    "gqa 3": problem(300, heads=3, heads_kv=1, mask=Causal()),
    "head_dim 64": problem(600, head_dim=64, mask=Causal()),
    "head_dim 64, full": problem(600, head_dim=64),
    "head_dim 96": problem(300, head_dim=96, mask=Causal()),
    "head_dim 192 and 128": problem(300, 430, head_dim=192, head_dim_v=128, mask=Causal()),
    "head_dim 256": problem(300, 430, head_dim=256, mask=Causal()),
    "one row": problem(1, 300),
    "packed": packed(Full()),
    "packed, causal": packed(Causal()),
    "packed, causal, seqused": packed(Causal(), seqused=True),
    "packed, window": packed(Window(200, 10), head_dim=64),
}
OVERFLOWING = (
    "full",
    "causal",
    "causal, first row ends a block",
    "seqused, causal",
    "head_dim 64",
    "head_dim 192 and 128",
    "head_dim 256",
    "packed",
    "packed, causal, seqused",
)


def with_large_logits(inputs: Inputs, where: str) -> Inputs:
    """First keys, which a tile visits last, whose logits exceed all others by far more than 2^127: of one head, of one query, or of all.

    ``middle``: of one head, not the first, so that windows have whole blocks there, and masked ones behind.
    """
    q, k = inputs.q.clone(), inputs.k.clone()
    if inputs.cu_seqlens_q is not None and inputs.cu_seqlens_k is not None:
        longest = int(inputs.cu_seqlens_k.diff().argmax())
        start_q, start_k = int(inputs.cu_seqlens_q[longest]), int(inputs.cu_seqlens_k[longest])
        (q[start_q + 140, 0] if where == "query" else k[start_k : start_k + 60, -1]).mul_(400)
    elif where == "head":
        k[-1, :60, -1] *= 400
    elif where == "middle":
        k[-1, 256:300, -1] *= 400
    elif where == "query":
        q[0, q.shape[1] // 2, 0] *= 400
    else:
        k[:, :60] *= 400
    return replace(inputs, q=q, k=k)


def with_sums_near_the_end(inputs: Inputs) -> Inputs:
    """Sums about the end of float32, whose weights are far from it: finite or infinite, by the row's first maximum; with a sink, one beside
    which they vanish. For head_dim 128."""
    q, k = torch.ones_like(inputs.q), inputs.k.clone()
    k[:, :60] = 7.65 if inputs.sink is None else 7.8  # times sqrt(128): 86.5 and 88.2 natural units
    return replace(inputs, q=q, k=k, sink=None if inputs.sink is None else inputs.sink + 300)


def with_large_values(inputs: Inputs) -> Inputs:
    """Values so large that products with weights above 1 overflow, though the result does not."""
    q, v = inputs.q.clone() * 3, inputs.v.clone()
    v[:, :, 0] = v[:, :, 0] * torch.tensor(2.0**118, dtype=v.dtype)
    return replace(inputs, q=q, v=v)
