"""Small forward problems that together reach every path of the Hopper kernel; sizes are multiples of nothing on purpose."""

from __future__ import annotations

from typing import Any

from tandem_attn.spec.masks import TOP_LEFT, Causal, Full, Mask, Window
from tandem_attn.spec.problem import Problem


def problem(
    seqlen_q: int = 300,
    seqlen_k: int = 0,
    *,
    head_dim: int = 128,
    heads: int = 4,
    heads_kv: int = 0,
    mask: Mask | None = None,
    **other: Any,
) -> Problem:
    options = {"batch": 2, "device": "cuda", "return_lse": True, **other}
    return Problem(
        seqlen_q=seqlen_q, seqlen_k=seqlen_k or seqlen_q, heads=heads, heads_kv=heads_kv or heads, head_dim=head_dim,
        mask=Full() if mask is None else mask, **options,
    )  # fmt: skip


Q_LENGTHS = (0, 150, 1, 600, 77, 0, 129)
K_LENGTHS = (10, 0, 33, 600, 500, 4, 128)


def packed(mask: Mask, **other: Any) -> Problem:
    """Packed sequences of Q_LENGTHS queries and K_LENGTHS keys, with a few rows behind the last one."""
    totals = {"total_q": sum(Q_LENGTHS) + 5, "total_k": sum(K_LENGTHS) + 3}
    return problem(600, 600, heads=4, heads_kv=2, batch=len(Q_LENGTHS), varlen=True, mask=mask, **totals, **other)


PROBLEMS: dict[str, Problem] = {
    "full": problem(),
    "full, one row": problem(1),
    "full, whole tiles": problem(512),
    "causal": problem(mask=Causal()),
    "causal, whole tiles": problem(512, mask=Causal()),
    "causal, long": problem(1111, 1300, mask=Causal()),
    "causal, rows without keys": problem(700, 300, mask=Causal()),
    "causal, few queries": problem(5, 900, mask=Causal()),
    "causal, top left": problem(300, 500, mask=Causal(TOP_LEFT)),
    "window": problem(900, mask=Window(200, 30)),
    "window, left only": problem(900, mask=Window(100, None)),
    "window and causal": problem(1500, mask=Window(300, 0)),
    "window, none seen": problem(300, 200, mask=Window(-400, 500)),
    "windows of two alignments": problem(500, 700, mask=Window(100, 0) & Window(None, 20, TOP_LEFT)),
    "one window or another": problem(500, mask=Window(20, 0) | Window(None, -300)),
    "float16": problem(mask=Causal(), dtype="float16"),
    "gqa 4": problem(heads=8, heads_kv=2, mask=Causal()),
    "gqa 12": problem(heads=24, heads_kv=2),
    "mqa": problem(heads=16, heads_kv=1, mask=Causal()),
    "sink": problem(sink=True, mask=Causal()),
    "sink, rows without keys": problem(400, 100, sink=True, mask=Causal()),
    "softcap": problem(softcap=15.0, mask=Causal()),
    "alibi": problem(alibi=True),
    "alibi, causal, softcap, sink": problem(400, 600, alibi=True, softcap=20.0, sink=True, mask=Causal()),
    "seqused": problem(400, 500, batch=4, seqused=True),
    "seqused, causal": problem(400, 500, batch=4, seqused=True, mask=Causal()),
    "varlen": packed(Full()),
    "varlen, causal": packed(Causal()),
    "varlen, window": packed(Window(50, 10)),
    "varlen, causal, head_dim 64": packed(Causal(), head_dim=64),
    "varlen, head_dim 192 and 128": packed(Full(), head_dim=192, head_dim_v=128),
    "varlen, sink, seqused": packed(Causal(), sink=True, seqused=True),
    **{f"head_dim {d}": problem(330, head_dim=d, mask=Causal()) for d in (8, 16, 32, 40, 64, 72, 96, 104, 160, 192, 256)},
    "head_dim 64, full": problem(500, head_dim=64),
    "head_dim 256, full": problem(500, head_dim=256),
    "head_dim 192 and 128": problem(500, head_dim=192, head_dim_v=128, mask=Causal()),
    "head_dim 128 and 96": problem(400, head_dim=128, head_dim_v=96),
    "head_dim 64 and 256": problem(400, head_dim=64, head_dim_v=256),
}
