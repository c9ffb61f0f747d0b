"""Named lists of cases."""

from __future__ import annotations

from dataclasses import replace

from tandem_attn.bench.cases import BACKWARD, DECODE, VARLEN, Case, by_tokens

SEQLENS = (512, 1024, 2048, 4096, 8192, 16384, 32768)
HEAD_DIMS = ((64, 64), (128, 128), (192, 128), (256, 256))
MASKS = ("full", "causal")
# Two of each, one after the other: lengths as skewed as a serving batch.
SKEWED = tuple(n for n in (16384, 8192, 4096, 1024, 512, 512, 256, 256, 128, 128, 64, 64, 32, 16, 8, 1) for _ in range(2))


def grid() -> list[Case]:
    """32k tokens, hidden size 2048 (16 heads for (192, 128)), every head dimension, length and mask."""
    found = []
    for d, dv in HEAD_DIMS:
        other = {} if d == dv else {"head_dim_v": dv, "heads": 16}
        found += [by_tokens(d, s, mask, **other) for s in SEQLENS for mask in MASKS]
    return found


def gqa() -> list[Case]:
    """Grouped queries, 32 heads on 4, and multi-query, 16 on 1."""
    return [by_tokens(128, 8192, mask, heads=h, heads_kv=kv) for h, kv in ((32, 4), (16, 1)) for mask in MASKS]


def varlen() -> list[Case]:
    """Packed sequences of skewed lengths."""
    return [Case(128, max(SKEWED), len(SKEWED), 16, "causal", lengths=SKEWED, kind=VARLEN)]


def decode() -> list[Case]:
    """One new query a sequence over a long cache: bound by reading K and V."""
    shapes = ((1, 32, 8, 32768), (16, 32, 8, 8192), (128, 64, 8, 4096), (1, 64, 8, 131072))
    return [Case(128, s, b, h, heads_kv=kv, kind=DECODE) for b, h, kv, s in shapes]


def schedule() -> list[Case]:
    """Longest-first against naive tile order, for MHA, MQA and packed sequences."""
    dense = [by_tokens(128, s, "causal", heads=16, heads_kv=kv) for kv in (16, 1) for s in (1024, 4096, 16384)]
    return [replace(case, variants=("naive order",)) for case in (*dense, *varlen())]


def quick() -> list[Case]:
    """Head dimension 128 at three lengths."""
    return [by_tokens(128, s, mask) for s in (1024, 4096, 16384) for mask in MASKS]


def cpu() -> list[Case]:
    """Small enough for a CPU."""
    return [
        Case(64, 2048, 1, 8, "causal", dtype="float32"),
        Case(64, 2048, 1, 8, "full", dtype="float32"),
        Case(64, 2048, 1, 8, "causal"),
        Case(128, 512, 4, 8, "causal", dtype="float32"),
        Case(64, 512, 2, 8, "causal", heads_kv=2, dtype="float32"),
    ]


PRESETS = {each.__name__: each for each in (grid, gqa, varlen, decode, schedule, quick, cpu)}


def cases(presets: tuple[str, ...], directions: tuple[str, ...]) -> list[Case]:
    """Of all presets, each case once; the backward only of dense cases."""
    found = [case for name in presets for case in PRESETS[name]()]
    turned = [replace(case, direction=way) for case in found for way in directions if way != BACKWARD or case.kind != DECODE]
    return list(dict.fromkeys(turned))
