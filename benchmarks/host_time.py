"""Host time of a call: Tandem through its public functions and its parts, beside its peers. On a GPU.

python -m benchmarks.host_time [OUT.json]

The problem is tiny, so that the host is what takes time; calls are issued without waiting. Microseconds, medians of rounds.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from unittest import mock

import torch

from tandem_attn import attention, attention_varlen
from tandem_attn.api import repeated
from tandem_attn.bench.cases import DENSE, VARLEN, Case, Tensors, tensors
from tandem_attn.bench.machine import environment
from tandem_attn.bench.peers import PEERS, missing
from tandem_attn.bench.protocol import Run, host_microseconds
from tandem_attn.kernels import backend
from tandem_attn.kernels.bound import Bound
from tandem_attn.spec.inputs import Inputs

DENSE_CASE = Case(128, 128, 1, 4, "causal", kind=DENSE)
PACKED_CASE = Case(128, 64, 4, 4, "causal", lengths=(64, 16, 1, 47), kind=VARLEN)


def stages(case: Case, t: Tensors) -> dict[str, Run]:
    """The public call, then what it is made of."""
    q, k, v = t.qkv
    problem, inputs = case.problem("cuda"), Inputs(q=q, k=k, v=v)
    plan = backend.plan(problem)
    options = (None, None, True, None, 0.0, False, False, "tandem")
    key = repeated.key(q, k, v, (), options)
    attention(q, k, v, causal=True, backend="tandem")
    bound = repeated._table.calls[key] if key is not None else None
    assert isinstance(bound, Bound), "the call was not bound"
    given = (q, k, v, *(None,) * 9)
    stream = torch.cuda.current_stream().cuda_stream

    def launches() -> None:
        for step in bound._steps:
            step._launch(step._grid, stream)

    like = torch.empty(1, device="cuda", dtype=q.dtype).expand(q.shape)
    leaves = [x.detach().clone().requires_grad_() for x in t.qkv]
    return {
        "tandem attention": lambda: attention(q, k, v, causal=True, backend="tandem"),
        "  with gradients": lambda: attention(*leaves, causal=True, backend="tandem"),
        "  key": lambda: repeated.key(q, k, v, (), options),
        "  bound call": lambda: bound(given),
        "  torch.empty_like": lambda: torch.empty_like(like),
        "  capturing": torch.cuda.is_current_stream_capturing,
        "  launches alone": launches,
        "tandem backend.forward": lambda: backend.forward(problem, plan, inputs),
    }


def packed(case: Case, t: Tensors) -> dict[str, Run]:
    q, k, v = t.qkv
    cu, longest = t.cu_seqlens, case.seqlen
    assert cu is not None
    return {"tandem attention_varlen": lambda: attention_varlen(q, k, v, cu, cu, longest, longest, causal=True, backend="tandem")}


def main() -> None:
    found: dict[str, float | str] = {}
    for case, ours in ((DENSE_CASE, stages), (PACKED_CASE, packed)):
        t = tensors(case, "cuda")
        runs: dict[str, Run | str] = dict(ours(case, t))
        for name in PEERS:
            label = f"{name} {case.kind}"
            reason = missing(name, "cuda")
            try:
                runs[label] = reason or PEERS[name].make(replace(case, direction="fwd"), t)
            except Exception as error:  # the peer's reason
                runs[label] = str(error)
        for label, run in runs.items():
            try:
                found[label] = run if isinstance(run, str) else round(host_microseconds(run), 2)
            except Exception as error:
                found[label] = f"{type(error).__name__}: {error}"[:150]
            print(f"{label:28} {found[label]}{'' if isinstance(found[label], str) else ' us'}", flush=True)
    with mock.patch.object(repeated, "key", lambda *_: None):  # no call is like an earlier one: operator, checks, planning
        q, k, v = tensors(DENSE_CASE, "cuda").qkv
        found["tandem, the whole way"] = round(host_microseconds(lambda: attention(q, k, v, causal=True, backend="tandem")), 2)
    print(f"{'tandem, the whole way':28} {found['tandem, the whole way']} us")
    if len(sys.argv) > 1:
        result = {"environment": environment([peer.package for peer in PEERS.values()]), "microseconds": found}
        Path(sys.argv[1]).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
