"""The Blackwell attention forward as a subject: PTX text with the launch that `tandem_attn.kernels` prepares for it."""

import re

import torch

from tandem_attn.kernels.compile import compiled
from tandem_attn.kernels.emulated import arguments
from tandem_attn.kernels.prepare import prepare
from tandem_attn.reference import dense
from tandem_attn.spec.inputs import Inputs
from tandem_attn.spec.masks import Causal
from tandem_attn.spec.plan import Launch, Schedule, ScheduleKind
from tandem_attn.spec.planner import plan
from tandem_attn.spec.problem import Problem
from tests.emulator.subjects.subject import Subject, random_tensor, unwritten


def forward_sm100(
    seqlen_q: int = 200, seqlen_k: int = 300, heads: int = 2, clusters: int = 1, seed: int = 0, spread: float = 1.0, **overrides: object
) -> Subject:
    """Causal, bf16, head_dim 128, logits of standard deviation ``spread``; overrides are fields of the plan.

    One persistent cluster takes all tiles, longest first.
    """
    sizes = {"seqlen_q": seqlen_q, "seqlen_k": seqlen_k, "heads": heads, "heads_kv": heads, "head_dim": 128}
    problem = Problem(batch=1, mask=Causal(), device="cpu", return_lse=True, **sizes)
    chosen = {"schedule": Schedule(ScheduleKind.LPT, Launch.STATIC), "num_splits": 1, "pack_gqa": 1, **overrides}
    made = plan(problem, "B200", direction="forward", **chosen).plan
    q = random_tensor((1, seqlen_q, heads, 128), torch.bfloat16, seed) * spread
    k, v = (random_tensor((1, seqlen_k, heads, 128), torch.bfloat16, seed + i) for i in (1, 2))
    inputs = Inputs(q=q, k=k, v=v)
    out, lse = unwritten((1, seqlen_q, heads, 128), torch.bfloat16), unwritten((1, heads, seqlen_q), torch.float32)
    kernel = compiled(made)
    launch = prepare(kernel, problem, made, inputs, out, lse, sms=clusters, counter=torch.zeros(1, dtype=torch.int32))
    expected, _ = dense.attention(problem, inputs)
    tolerance = float(expected.abs().max()) * 2**-7  # half a bf16 ulp of the largest element, and P's roundings
    grid = (launch.grid * kernel.ctas, 1, 1)
    name = f"forward_sm100 cta_group {made.cta_group}, {made.q_stages} query tiles"
    return Subject(
        name, _one_a_line(kernel.ptx), tuple(arguments(launch)), grid, out, expected, tolerance, (kernel.threads, 1, 1), kernel.shared_bytes
    )


def _one_a_line(ptx: str) -> str:
    """Every instruction and label of inline assembly on a line of its own, as mutants take them."""
    ptx = re.sub(r";[ \t]+(?!//)", ";\n", ptx)
    return re.sub(r"^[ \t]*(\{|\w+:)[ \t]+", r"\1\n", ptx, flags=re.M)
