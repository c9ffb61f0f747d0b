"""Blackwell kernels compile here, without a GPU, to what their plans say. Compiled is not executed, and neither is measured."""

from __future__ import annotations

import re
from dataclasses import dataclass

import pytest
from emulation import problem
from sass import Sass, disassemble

from tandem_attn.kernels.compile import Kernel, compiled, entry_registers
from tandem_attn.spec.arch import get_arch
from tandem_attn.spec.exp2 import Exp2Split
from tandem_attn.spec.masks import Causal
from tandem_attn.spec.plan import Plan
from tandem_attn.spec.planner import plan as make_plan

LARGE = 4096  # rows: the planner's choices for real problems


def _plan(arch: str = "B200", head_dim: int = 128, head_dim_v: int = 0, **other: object) -> Plan:
    overrides = {name: other.pop(name) for name in ("cta_group", "q_stages") if name in other}
    p = problem(LARGE, head_dim=head_dim, head_dim_v=head_dim_v, heads=16, **other)
    return make_plan(p, arch, direction="forward", num_splits=1, pack_gqa=1, **overrides).plan


PLANS = {
    "d128, pair": _plan(),
    "d128, one CTA": _plan(cta_group=1),
    "d128, causal": _plan(mask=Causal()),
    "d64": _plan(head_dim=64),
    "d96, causal": _plan(head_dim=96, mask=Causal()),
    "d192 and 128, pair": _plan(head_dim=192, head_dim_v=128),
    "d192 and 128, causal": _plan(head_dim=192, head_dim_v=128, mask=Causal()),
    "d192, causal": _plan(head_dim=192, mask=Causal()),
    "d256, causal": _plan(head_dim=256, mask=Causal()),
    "d256, pair": _plan(head_dim=256),
    "d128, one query tile": _plan(q_stages=1, cta_group=1),
    "B300, d128, pair": _plan("B300"),
    "e4m3, d128": _plan(dtype="float8_e4m3fn", descale=True),
    "e5m2, d128, causal": _plan(dtype="float8_e5m2", descale=True, mask=Causal()),
    "e4m3, d128, pair": _plan(dtype="float8_e4m3fn", cta_group=2),
    "e4m3, d64": _plan(dtype="float8_e4m3fn", head_dim=64),
    "e4m3, d192 and 128": _plan(dtype="float8_e4m3fn", head_dim=192, head_dim_v=128),
    "e5m2, d256, pair": _plan(dtype="float8_e5m2", head_dim=256),
}


@dataclass(frozen=True)
class Compiled:
    kernel: Kernel
    sass: Sass
    smem_planned: int = 0

    @property
    def plan(self) -> Plan:
        return self.kernel.plan

    @property
    def softmax_loops(self) -> list[Sass]:
        return self.sass.loops("MUFU.EX2", self.plan.tile_n // 4)


@pytest.fixture(scope="module", params=PLANS)
def built(request: pytest.FixtureRequest) -> Compiled:
    kernel = compiled(PLANS[request.param])
    return Compiled(kernel, disassemble(kernel.cubin), PLANS[request.param].smem_bytes)


def _product(plan: Plan) -> str:
    """A product's instruction: of halves, or of quarters of a 32-bit word."""
    return "UTCQMMA" if plan.element_bytes == 1 else "UTCHMMA"


def test_no_spills(built: Compiled) -> None:
    softmax, correction, load = built.softmax_loops, built.sass.loops("FMUL2", 16), built.sass.loops("UTMALDG", 1)
    mma = built.sass.loops(_product(built.plan), 1)
    assert (len(softmax), len(correction), len(load), len(mma)) == (2, 1, 1, 1)
    assert not built.sass.spills


def test_softmax_loop_waits_for_no_other_warp(built: Compiled) -> None:
    assert not sum(loop.count("BAR") for loop in built.softmax_loops)


def test_capacity(built: Compiled) -> None:
    chip = get_arch(built.plan.arch)
    assert built.kernel.shared_bytes <= built.smem_planned <= (chip.smem_bytes_cta or 0)
    (columns,) = {int(n) for n in re.findall(r"tcgen05\.alloc\S* \[\S+\], (\d+)", built.kernel.ptx)}
    assert built.plan.tmem_columns <= columns <= 512
    assert "trap;" not in built.kernel.ptx


def test_registers(built: Compiled) -> None:
    """setmaxnreg gives each role what the plan says, and the sum fits an SM."""
    budgets = set(built.sass.register_budgets)
    assert {role.registers for role in built.plan.roles} <= budgets | {entry_registers(built.plan)}
    assert entry_registers(built.plan) * built.kernel.threads <= (get_arch(built.plan.arch).registers or 0)


def test_products(built: Compiled) -> None:
    """S of the first block, S and O of the block loop, O of the last block, for each S tile; a product takes 32 bytes at a time."""
    plan = built.plan
    step = 32 // plan.element_bytes
    k_steps = sum(plan.head_dim_chunks) // step
    v_steps = plan.tile_n // step * len(plan.head_dim_v_chunks)
    assert built.sass.count(_product(plan)) == 4 * (k_steps + v_steps)


def test_exponentials(built: Compiled) -> None:
    """A block's exponentials: one that scales the row sums, and the planned columns on FMA units, two at a time, the others on MUFU."""
    plan = built.plan
    on_fma = len(plan.exp2.columns(plan.tile_n))
    for loop in built.softmax_loops:
        assert loop.count("MUFU.EX2") == plan.tile_n - on_fma + 1
        assert loop.count("FFMA2") == plan.tile_n // 2 + plan.exp2.degree * on_fma // 2


def test_first_signal_of_p(built: Compiled) -> None:
    """The first part of P is signalled when its exponentials are made and not those of the next part."""
    plan = built.plan
    first = round(plan.p_parts[0] * plan.tile_n)
    planned = 1 + first - sum(column < first for column in plan.exp2.columns(plan.tile_n))
    for loop in built.softmax_loops:
        names = [name for name, _ in loop.instructions]
        stored = next(i for i, name in enumerate(names) if name.startswith("STTM"))
        signal = next(i for i in range(stored, len(names)) if names[i].startswith("SYNCS.ARRIVE"))
        assert sum(name.startswith("MUFU.EX2") for name in names[:signal]) == planned


@pytest.mark.parametrize("degree", [3, 4, 5])
@pytest.mark.parametrize("pairs", [0, 4])
def test_exp2_split(degree: int, pairs: int) -> None:
    plan = PLANS["d128, one CTA"].with_(exp2=Exp2Split(degree, pairs, 16, 16 - pairs))
    for loop in Compiled(kernel := compiled(plan), disassemble(kernel.cubin)).softmax_loops:
        assert loop.count("MUFU.EX2") == 128 - 8 * pairs + 1
        assert loop.count("FFMA2") == 64 + degree * 4 * pairs


@pytest.mark.parametrize("rescale_rows", [0, 1, 32, 128])
def test_rescale_votes(rescale_rows: int) -> None:
    """Without a threshold nothing branches; rows, warps and tiles decide by a comparison, a vote, and a vote behind a barrier."""
    plan = PLANS["d128, one CTA"].with_(rescale_rows=rescale_rows)
    sass = disassemble(compiled(plan).cubin)
    softmax = sass.loops("MUFU.EX2", 32)
    correction = sass.loops("FMUL2", 64)
    assert bool(sum(loop.count("VOTE") for loop in correction)) == (rescale_rows > 0)
    assert bool(sum(loop.count("VOTE") for loop in softmax)) == (rescale_rows == 32)
    assert bool(sum(loop.count("BAR") for loop in softmax)) == (rescale_rows == 128)
