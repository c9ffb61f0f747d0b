"""The launches beside a forward, executed by the emulator, against the same in PyTorch."""

from __future__ import annotations

import pytest
import torch
from problems import packed, problem
from torch import Tensor

from tandem_attn.kernels import backend, emulated, helpers
from tandem_attn.spec.masks import Full
from tandem_attn.spec.plan import Plan

pytest.importorskip("triton", reason="kernels are compiled by Triton: pip install tandem-attn[cuda]")
pytest.importorskip("numpy", reason="the emulator needs NumPy: pip install tandem-attn[emulator]")

SETTINGS = emulated.Settings(checks="default")


def cumulative(lengths: Tensor) -> Tensor:
    return torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]).int()


@pytest.mark.parametrize("batch", [1, 300])
@pytest.mark.parametrize("seqused", [False, True])
def test_packed_tiles_are_sorted_and_counted(batch: int, seqused: bool) -> None:
    g = torch.Generator().manual_seed(batch)
    lengths_q, lengths_k = (torch.randint(0, 700, (batch,), generator=g) // 3 * 3 for _ in range(2))
    used = torch.randint(0, 300, (batch,), generator=g).int() if seqused else None
    plan = backend.plan(packed(Full()))
    order, starts, launch = helpers.packed_tiles(plan, cumulative(lengths_q), cumulative(lengths_k), used, 4)
    assert emulated.execute(launch, SETTINGS).ok
    keys = lengths_k if used is None else torch.minimum(lengths_k, used)
    wanted = torch.argsort(keys, descending=True, stable=True)
    assert torch.equal(order.long(), wanted)
    blocks = -(-lengths_q // plan.queries_per_tile)
    assert torch.equal(starts, cumulative(blocks[wanted] * 4))


def ranges(plan: Plan, q_ids: Tensor, k_ids: Tensor, seqlen_q: int, seqlen_k: int) -> Tensor:
    batch = q_ids.shape[0]
    out, launch = helpers.document_ranges(plan, q_ids, k_ids, (None,) * 4, batch, seqlen_q, seqlen_k)
    assert emulated.execute(launch, SETTINGS).ok
    return out.view(batch, -1, 4)


@pytest.mark.parametrize("ascending", [True, False])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_key_ranges_hold_a_tiles_documents(ascending: bool, dtype: torch.dtype) -> None:
    """Nothing outside the outer range is seen, and each query of the tile sees all of the inner one."""
    g = torch.Generator().manual_seed(1)
    q_ids, k_ids = (torch.randint(-2, 6, (2, n), generator=g, dtype=dtype) for n in (1500, 2100))
    if ascending:
        q_ids, k_ids = q_ids.sort(-1).values, k_ids.sort(-1).values
    plan = backend.plan(problem(1500, 2100, mask=Full()))
    found = ranges(plan, q_ids, k_ids, 1500, 2100)
    inner = 0
    for b in range(2):
        for block, (lo, hi, inner_lo, inner_hi) in enumerate(found[b].tolist()):
            tile = q_ids[b, block * plan.queries_per_tile : (block + 1) * plan.queries_per_tile]
            seen = tile[:, None] == k_ids[b]
            anyone = seen.any(0).nonzero().flatten()
            assert not ascending or (lo, hi) == (int(anyone.min()), int(anyone.max()) + 1)
            assert not seen[:, : max(lo, 0)].any() and not seen[:, max(hi, 0) :].any()
            if inner_lo < inner_hi:
                inner += 1
                assert seen[:, inner_lo:inner_hi].all()
    assert bool(inner) == ascending
