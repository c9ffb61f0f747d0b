"""Small forward problems with 8-bit q, k and v for the Blackwell kernel: every sequence and KV head has descales of its own.

Sizes are multiples of nothing on purpose. Run by the emulator, and by a GPU.
"""

from __future__ import annotations

from emulation import packed, problem

from tandem_attn.spec.masks import TOP_LEFT, Causal, Full, Mask, Window
from tandem_attn.spec.problem import Problem

CAUSAL = Causal()


def small(seqlen_q: int = 300, seqlen_k: int = 0, **other: object) -> Problem:
    return problem(seqlen_q, seqlen_k, **{"dtype": "float8_e4m3fn", "descale": True, **other})


def packed_8(mask: Mask, **other: object) -> Problem:
    return packed(mask, dtype="float8_e4m3fn", descale=True, **other)


PROBLEMS: dict[str, Problem] = {
    "full": small(),
    "no descales": small(descale=False),
    "one row": small(1),
    "causal, sequences and heads": small(150, batch=2, heads=4, heads_kv=2, mask=CAUSAL),
    "causal, rows without keys": small(400, 150, mask=CAUSAL),
    "causal, top left": small(300, 400, mask=Causal(TOP_LEFT)),
    "window": small(500, mask=Window(100, 30)),
    "window, none seen": small(300, 200, mask=Window(-400, 500)),
    "softcap": small(200, softcap=15.0, mask=CAUSAL),
    "sink": small(200, sink=True, mask=CAUSAL),
    "sink, rows without keys": small(300, 100, sink=True, mask=CAUSAL),
    "alibi, causal, softcap, sink": small(200, 300, alibi=True, softcap=20.0, sink=True, mask=CAUSAL, heads=2),
    "large logits": small(200, scale=1e3, mask=CAUSAL),
    "scale below zero": small(200, scale=-0.1, mask=CAUSAL),
    "seqused, causal": small(300, 400, batch=4, seqused=True, mask=CAUSAL),
    "varlen": packed_8(Full()),
    "varlen, causal": packed_8(CAUSAL),
    "varlen, window, head_dim 64": packed_8(Window(50, 10), head_dim=64),
    "varlen, sink, seqused": packed_8(CAUSAL, sink=True, seqused=True),
    **{f"head_dim {d}": small(330, head_dim=d, mask=CAUSAL) for d in (16, 48, 64, 80, 96, 160, 192, 256)},
    "head_dim 192 and 128": small(330, head_dim=192, head_dim_v=128, mask=CAUSAL),
    "head_dim 64 and 256": small(head_dim=64, head_dim_v=256),
}
PAIRS: dict[str, Problem] = {
    "pair": small(600),
    "pair, causal, heads": small(520, heads=4, heads_kv=2, mask=CAUSAL),
    "pair, window": small(600, mask=Window(100, 30)),
    "pair, softcap, sink": small(520, softcap=10.0, sink=True, heads=2),
    **{f"pair, head_dim {d}": small(520, head_dim=d) for d in (48, 64, 96)},  # tails of V of 16 columns a CTA at 96
    "pair, head_dim 192 and 128": small(520, head_dim=192, head_dim_v=128),
    "pair, head_dim 192": small(520, head_dim=192),
    "pair, head_dim 256": small(300, head_dim=256),
}
