"""Blackwell forwards run in the emulator: small problems, their inputs, and what their outputs are held to.

The sizes are multiples of nothing on purpose, and just large enough for two query tiles and a few key blocks.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tandem_attn.emulator import Result
from tandem_attn.kernels import emulated
from tandem_attn.kernels.compile import compiled
from tandem_attn.kernels.forward import attend
from tandem_attn.kernels.prepare import prepare
from tandem_attn.reference import dense, tiled
from tandem_attn.reference.compare import EXP2_ERROR, compare, plainly
from tandem_attn.spec.inputs import Inputs
from tandem_attn.spec.masks import TOP_LEFT, Causal, Full, Mask, Window
from tandem_attn.spec.plan import Plan
from tandem_attn.spec.planner import plan as make_plan
from tandem_attn.spec.problem import Problem

Q_LENGTHS = (0, 150, 1, 300, 77, 0, 129)
K_LENGTHS = (10, 0, 33, 300, 200, 4, 128)
RARE = 50  # one row in so many may hold an 8-bit weight that tipped; one in 120 was seen
TIPPED = 1 / 4  # share of a row's weights that may round the other way, where float32 sums in another order tip them


def problem(
    seqlen_q: int = 300, seqlen_k: int = 0, *, head_dim: int = 128, heads: int = 1, mask: Mask | None = None, **other: Any
) -> Problem:
    options = {"batch": 1, "heads_kv": heads, "device": "cuda", "return_lse": True, **other}
    return Problem(
        seqlen_q=seqlen_q, seqlen_k=seqlen_k or seqlen_q, heads=heads, head_dim=head_dim, mask=Full() if mask is None else mask, **options
    )


def packed(mask: Mask, **other: Any) -> Problem:
    """Packed sequences of Q_LENGTHS queries and K_LENGTHS keys, with a few rows behind the last one."""
    totals = {"total_q": sum(Q_LENGTHS) + 5, "total_k": sum(K_LENGTHS) + 3}
    return problem(300, 300, heads=2, heads_kv=1, batch=len(Q_LENGTHS), varlen=True, mask=mask, **totals, **other)


PROBLEMS: dict[str, Problem] = {
    "full": problem(),
    "one row": problem(1),
    "whole tiles": problem(256),
    "causal": problem(mask=Causal(), heads=2),
    "causal, rows without keys": problem(400, 150, mask=Causal()),
    "causal, few queries": problem(5, 300, mask=Causal()),
    "causal, top left": problem(300, 400, mask=Causal(TOP_LEFT)),
    "window": problem(500, mask=Window(100, 30)),
    "window, left only": problem(400, mask=Window(60, None)),
    "window, none seen": problem(300, 200, mask=Window(-400, 500)),
    "windows of two alignments": problem(300, 400, mask=Window(100, 0) & Window(None, 20, TOP_LEFT)),
    "one window or another": problem(400, mask=Window(20, 0) | Window(None, -200)),
    "float16": problem(200, mask=Causal(), dtype="float16"),
    "gqa 2": problem(150, heads=4, heads_kv=2, mask=Causal()),
    "sink": problem(200, sink=True, mask=Causal()),
    "sink, rows without keys": problem(300, 100, sink=True, mask=Causal()),
    "softcap": problem(200, softcap=15.0, mask=Causal()),
    "alibi": problem(alibi=True, heads=2),
    "alibi, causal, softcap, sink": problem(200, 300, alibi=True, softcap=20.0, sink=True, mask=Causal(), heads=2),
    "seqused": problem(300, 400, batch=4, seqused=True),
    "seqused, causal": problem(300, 400, batch=4, seqused=True, mask=Causal()),
    "varlen": packed(Full()),
    "varlen, causal": packed(Causal()),
    "varlen, window, head_dim 64": packed(Window(50, 10), head_dim=64),
    "varlen, sink, seqused": packed(Causal(), sink=True, seqused=True),
    **{f"head_dim {d}": problem(330, head_dim=d, mask=Causal()) for d in (8, 40, 64, 72, 96, 160, 192, 256)},
    "head_dim 192 and 128": problem(330, head_dim=192, head_dim_v=128, mask=Causal()),
    "head_dim 128 and 96": problem(head_dim=128, head_dim_v=96),
    "head_dim 64 and 256": problem(head_dim=64, head_dim_v=256),
    "pair": problem(600),
    "pair, float16, softcap": problem(520, dtype="float16", softcap=10.0, heads=2),
    "pair, head_dim 192 and 128": problem(520, head_dim=192, head_dim_v=128),
    "pair, head_dim 192": problem(520, head_dim=192),
    "pair, head_dim 256": problem(300, head_dim=256),
}


def planned(p: Problem, arch: str = "B200", **overrides: Any) -> Plan:
    return make_plan(p, arch, direction="forward", num_splits=1, pack_gqa=1, **overrides).plan


def random_inputs(p: Problem, spread: float = 1.0, seed: int = 0) -> Inputs:
    """Normal values, and descales between 1/2 and 3/2; what lies beyond the rows in use is NaN."""
    generator = torch.Generator().manual_seed(seed)
    make = lambda *shape, size=1.0: (torch.randn(shape, generator=generator) * size).to(getattr(torch, p.dtype))  # noqa: E731
    rows_q, rows_k = ((p.total_q,), (p.total_k,)) if p.varlen else ((p.batch, p.seqlen_q), (p.batch, p.seqlen_k))
    q, k, v = (
        make(*rows_q, p.heads, p.head_dim, size=spread),
        make(*rows_k, p.heads_kv, p.head_dim),
        make(*rows_k, p.heads_kv, p.head_dim_v),
    )
    extra: dict[str, Tensor] = {}
    if p.varlen:
        for side, lengths, tensors in (("q", Q_LENGTHS, (q,)), ("k", K_LENGTHS, (k, v))):
            extra[f"cu_seqlens_{side}"] = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
            for x in tensors:
                x[sum(lengths) :] = float("nan")
    if p.seqused and p.varlen:
        extra["seqused_k"] = torch.tensor([5, 0, 33, 201, 190, 0, 127], dtype=torch.int32)
        for start, length, used in zip(extra["cu_seqlens_k"].tolist(), K_LENGTHS, extra["seqused_k"].tolist(), strict=False):
            for x in (k, v):
                x[start + used : start + length] = float("nan")
    elif p.seqused:
        extra["seqused_q"] = torch.tensor([p.seqlen_q, 0, p.seqlen_q - 3, 130], dtype=torch.int32)
        extra["seqused_k"] = torch.tensor([p.seqlen_k - 7, 40, 0, 257], dtype=torch.int32)
        for x, used in ((q, extra["seqused_q"]), (k, extra["seqused_k"]), (v, extra["seqused_k"])):
            for b in range(p.batch):
                x[b, used[b] :] = float("nan")
    if p.sink:
        extra["sink"] = torch.randn(p.heads, generator=generator)
    if p.alibi:
        extra["alibi_slopes"] = torch.rand(p.heads, generator=generator) * 0.1
    if p.descale:  # KV heads outermost: strides are not those of a contiguous tensor
        numbers = torch.rand(3, p.heads_kv, p.batch, generator=generator) + 0.5
        extra |= {f"{name}_descale": x.T for name, x in zip("qkv", numbers, strict=True)}
    return Inputs(q=q, k=k, v=v, **extra)


def run(p: Problem, plan: Plan, inputs: Inputs, *, clusters: int = 2, plain: bool = False, **options: Any) -> tuple[Tensor, Tensor, Result]:
    """O, LSE and the emulator's verdict. O starts as NaN wherever the kernel must write it."""
    results: list[Result] = []
    others = {name: options.pop(name) for name in ("observers", "resident_ctas") if name in options}
    settings = emulated.Settings(**{"checks": "default", **options})

    def execute(p: Problem, plan: Plan, inputs: Inputs, out: Tensor, lse: Tensor) -> None:
        if not p.varlen:
            out.fill_(float("nan"))
            lse.fill_(float("nan"))
        kernel = compiled(plan, plain=plain)
        counter = torch.zeros(1, dtype=torch.int32)
        results.append(emulated.execute(prepare(kernel, p, plan, inputs, out, lse, sms=clusters, counter=counter), settings, **others))
        assert counter.item() == 0

    out, lse = attend(p, plan, inputs, execute)
    return out, lse, results[0]


def assert_right(p: Problem, plan: Plan, inputs: Inputs, out: Tensor, lse: Tensor) -> None:
    """Within the contract of the fp64 truth, and equal to the tiled reference of the same plan up to the order of float32 sums.

    The truth is computed where the inputs lie, the tiled reference on the host: elsewhere it visits blocks that the kernel leaves out.
    """
    truth, truth_lse = dense.attention(p, inputs)
    plain = plainly(p, inputs)
    for comparison in (compare("O", out, truth, plain["out"]), compare("LSE", lse, truth_lse, plain["lse"], absolute=EXP2_ERROR)):
        assert comparison.ok, str(comparison)
    on_host = Inputs(**{name: None if x is None else x.cpu() for name, x in vars(inputs).items()})
    assert_like_tiled(plan, on_host, out.cpu(), tiled.forward(replace(p, device="cpu"), plan, on_host)[0])


def assert_like_tiled(plan: Plan, inputs: Inputs, out: Tensor, expected: Tensor) -> None:
    """Each element within one unit in the last place of O, and half a unit of the weights that a sum's last bit may tip, times V.

    The largest seen in ``PROBLEMS`` is a fifth of the second term. Where weights have 8 bits it is large, but they tip rarely: all rows but
    one in ``RARE`` are within one unit of O.
    """
    eps = torch.finfo(out.dtype).eps
    size = torch.maximum(out.abs(), expected.abs()).double()
    unit = 2.0 ** torch.floor(torch.log2(size.clamp_min(torch.finfo(out.dtype).tiny))) * eps
    v_max = inputs.v.double().nan_to_num(0.0).abs().max() * (1.0 if inputs.v_descale is None else inputs.v_descale.max())
    allowed = unit + TIPPED * torch.finfo(inputs.v.dtype).eps / 2 * v_max
    difference = (out.double() - expected.double()).abs()
    excess = difference - allowed
    worst = torch.unravel_index(excess.argmax(), excess.shape)
    at = tuple(int(i) for i in worst)
    assert excess.max() <= 0, (
        f"O{list(at)} = {out[at].item():.9g}, tiled {expected[at].item():.9g}, allowed {allowed[at].item():.3g}; {plan}"
    )
    if inputs.v.dtype.itemsize == 1:
        tipped = (difference > unit).any(-1)
        assert tipped.sum() <= 2 + tipped.numel() // RARE, (
            f"{int(tipped.sum())} of {tipped.numel()} rows differ from tiled by more than a unit"
        )
