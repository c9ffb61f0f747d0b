"""Every kernel the planner asks for compiles here, without a GPU, within the chip's resources. Compiled is not executed."""

from __future__ import annotations

import re

import pytest
from problems import PROBLEMS
from sass import disassemble, ptxas_messages

from tandem_attn.bench.cases import by_tokens
from tandem_attn.kernels import backend, launch
from tandem_attn.kernels.compile import Kernel, compiled, entry_registers
from tandem_attn.spec.arch import get_arch
from tandem_attn.spec.exp2 import Exp2Split
from tandem_attn.spec.plan import Plan
from tandem_attn.spec.problem import Problem

# One of each code path; the whole list runs on a GPU (test_forward_cuda).
NAMES = (
    "full",
    "causal",
    "window",
    "seqused, causal",
    "varlen, causal",
    "head_dim 64",
    "head_dim 96",
    "head_dim 192 and 128",
    "head_dim 256",
)


# As the planner has them for long sequences: maxima that stay, K and V loaded for two CTAs, or both.
LONG = {
    "d64, causal, long": by_tokens(64, 4096, "causal"),
    "d64, full, long": by_tokens(64, 8192, "full"),
    "d128, full, 4096": by_tokens(128, 4096, "full"),
    "d128, full, long": by_tokens(128, 16384, "full"),
    "d128, causal, 8192": by_tokens(128, 8192, "causal"),
    "d128, causal, long": by_tokens(128, 16384, "causal"),
    "d192 and 128, causal, long": by_tokens(192, 8192, "causal", heads=16, head_dim_v=128),
    "d256, causal, long": by_tokens(256, 8192, "causal"),
    "d256, full, long": by_tokens(256, 8192, "full"),
}
ALL: dict[str, Problem] = {**{name: PROBLEMS[name] for name in NAMES}, **{name: case.problem("cuda") for name, case in LONG.items()}}


@pytest.fixture(scope="module", params=ALL)
def kernel(request: pytest.FixtureRequest) -> Kernel:
    return compiled(backend.plan(ALL[request.param], chip="H200"))


def _block_loops(kernel: Kernel) -> list[list[str]]:
    """Opcodes of each loop over key blocks: from the wait for S (the only one that leaves products in flight) to the branch back."""
    names = [name for name, _ in disassemble(kernel.cubin).instructions]
    rests = [rest for _, rest in disassemble(kernel.cubin).instructions]
    starts = [i for i, name in enumerate(names) if name.startswith("WARPGROUP.DEPBAR") and not rests[i].strip().endswith("0x0")]
    ends = [next(j for j in range(i, len(names)) if names[j].startswith("BRA")) for i in starts]
    return [names[i:j] for i, j in zip(starts, ends, strict=True)]


def test_no_spills(kernel: Kernel) -> None:
    assert disassemble(kernel.cubin).spills == 0


def test_fences_of_the_gpu(kernel: Kernel) -> None:
    """MEMBAR.*.GPU is dear (h200_sweep17): before the cluster's barrier at the start, and where consumers report at the end."""
    names = [name for name, _ in disassemble(kernel.cubin).instructions]
    fences = [i for i, name in enumerate(names) if name.startswith("MEMBAR") and name.endswith("GPU")]
    clusters = kernel.plan.kv_multicast == 2
    once = kernel.plan.q_stages + 4 if clusters else 0  # roles at the start (consumers, producer, two without work), and a link passed on
    reports = 2 * kernel.plan.q_stages if clusters and kernel.plan.fixed_max else 0  # behind a tile, or without any
    assert len(fences) <= once + reports
    loops = _block_loops(kernel)
    assert len(loops) >= 2 * kernel.plan.q_stages
    assert not [name for loop in loops for name in loop if name.startswith("MEMBAR")]


def test_ptxas_serialises_nothing(kernel: Kernel) -> None:
    assert not re.findall(r"C75\d\d", ptxas_messages(kernel.ptx))


def test_capacity(kernel: Kernel) -> None:
    assert kernel.shared_bytes <= (get_arch("H200").smem_bytes_cta or 0)


def test_register_budgets(kernel: Kernel) -> None:
    """setmaxnreg hands each role what the plan says; Triton parks idle warps at half of the entry's registers."""
    budgets = set(disassemble(kernel.cubin).register_budgets)
    wanted = {role.registers for role in kernel.plan.roles}
    assert entry_registers(kernel.plan) * 32 * kernel.threads // 32 <= (get_arch("H200").registers or 0)
    assert wanted <= budgets | {entry_registers(kernel.plan)}


def test_products(kernel: Kernel) -> None:
    """HGMMAs a consumer: S in every copy of the block loop and in the first block, P V in every copy and at the end."""
    plan = kernel.plan
    count = disassemble(kernel.cubin).count("HGMMA")
    k_steps = sum(plan.head_dim_chunks) // 16
    v_steps = plan.tile_n // 16 * len(plan.head_dim_v_chunks)
    assert count % (plan.q_stages * (k_steps + v_steps)) == 0
    assert count >= 2 * plan.q_stages * (k_steps + v_steps)


def test_launch_block_fits_parameters(kernel: Kernel) -> None:
    """The launcher passes as many parameters as the PTX entry declares."""
    entry = re.search(r"\.entry [^(]*\((.*?)\)\n", kernel.ptx, re.S)
    assert entry is not None
    assert len(launch._pointers(0, kernel)) == entry[1].count(".param")


@pytest.mark.parametrize("rescale_rows", [0, 16])
def test_conditional_rescale_votes(rescale_rows: int) -> None:
    plan: Plan = backend.plan(PROBLEMS["causal"]).with_(rescale_rows=rescale_rows)
    votes = disassemble(compiled(plan).cubin).count("VOTE")
    assert bool(votes) == bool(rescale_rows)


def test_exp2_fraction_leaves_mufu() -> None:
    """A quarter of each block's exponentials moves to FMA units, in every copy of the block: first, masked and full."""
    plan = backend.plan(PROBLEMS["full"])
    on_mufu = disassemble(compiled(plan).cubin).count("MUFU.EX2")
    split = disassemble(compiled(plan.with_(exp2=Exp2Split(3, 4, 16))).cubin).count("MUFU.EX2")
    assert on_mufu - split == 3 * plan.q_stages * plan.tile_n // 2 // 4
