"""What one more key block costs the Blackwell forward, counted from executed instructions, beside the paper's roofline.

FlashAttention-4 (arXiv 2603.05451) counts for a 128 x 128 tile at head_dim 128: MMA 1024 cycles, shared-memory operands 768, exponentials
1024 on MUFU alone; of 8-bit operands MMA and shared memory take half. Counts are of instructions and bytes; nothing here is time.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import pytest
from emulation import planned, problem, random_inputs, run

from tandem_attn.emulator.events import Access, Event, Issue, Space
from tandem_attn.emulator.report import Report
from tandem_attn.perfmodel.roofline import MMA, SMEM, roofline
from tandem_attn.spec.arch import get_arch
from tandem_attn.spec.plan import Launch, Plan, Schedule, ScheduleKind

TILE_M, TILE_N, HEAD_DIM = 128, 128, 128


@dataclass
class Work:
    """An observer: products issued, and the bytes of shared memory that they read."""

    products: int = 0
    operand_bytes: int = 0

    def event(self, event: Event) -> list[Report]:
        if isinstance(event, Access | Issue) and "tcgen05.mma" in event.site.text:
            if isinstance(event, Issue):
                self.products += 1
            elif event.space is Space.SHARED:
                self.operand_bytes += len(event.starts) * event.size
        return []

    def finish(self) -> list[Report]:
        return []


def _work(plan: Plan, keys: int) -> tuple[Work, Counter[str]]:
    """All query tiles of one CTA over ``keys`` keys: what was moved, and executed warp-instructions by opcode."""
    p = problem(plan.q_stages * TILE_M, keys, head_dim=HEAD_DIM, dtype=plan.dtype)
    work = Work()
    trace = run(p, plan, random_inputs(p), observers=[work], trace=True)[2].trace
    assert trace is not None
    opcodes = Counter(trace.program.code[record.index].opcode for at in trace.warps for record in trace.instructions(*at))
    return work, opcodes


@pytest.mark.judge
@pytest.mark.parametrize("q_stages", [1, 2])
@pytest.mark.parametrize(("dtype", "mma_cycles", "smem_cycles"), [("bfloat16", 1024, 768), ("float8_e4m3fn", 512, 384)])
def test_a_block_costs_what_the_roofline_says(dtype: str, mma_cycles: int, smem_cycles: int, q_stages: int) -> None:
    static = Schedule(ScheduleKind.NAIVE, Launch.STATIC)
    plan = planned(problem(2 * TILE_M, 4096, dtype=dtype), cta_group=1, q_stages=q_stages, schedule=static)
    (four, four_ops), (five, five_ops) = _work(plan, 4 * TILE_N), _work(plan, 5 * TILE_N)
    chip = get_arch(plan.arch)
    tiles = plan.q_stages
    bound = roofline(plan.arch, "forward", tile_m=TILE_M, tile_n=TILE_N, head_dim=HEAD_DIM, dtype=dtype)

    flop = 2 * TILE_M * TILE_N * 32 // plan.element_bytes  # of one product: 32 bytes of K
    mma = (five.products - four.products) * flop / (chip.mma_rate(plan.dtype) or 0) / tiles
    assert mma == bound.cycles(MMA) == mma_cycles

    operands = (five.operand_bytes - four.operand_bytes) / (chip.smem_bytes_clk or 0) / tiles
    assert operands == bound.cycles(SMEM) == smem_cycles

    on_mufu = sum(count for name, count in (five_ops - four_ops).items() if name.startswith("ex2"))
    alphas = 2 * TILE_M // 32  # the only excess: one a row, and with one query tile another, as its sums are kept apart
    exponentials = (on_mufu - alphas) * 32 / (chip.mufu or 0) / tiles
    assert exponentials == 1024 * (1 - plan.exp2.fraction)
