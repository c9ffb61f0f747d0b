"""PyTorch's fused attention (scaled_dot_product_attention's flash kernels) as a backend, LSE included.

The operators behind the public function are called, since only they return LSE. They serve dense calls: one mask (full, or causal where
both alignments agree), no extras.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tandem_attn.reference import tiled
from tandem_attn.spec.inputs import Gradients, Inputs
from tandem_attn.spec.masks import Full, Window
from tandem_attn.spec.plan import Plan
from tandem_attn.spec.problem import FLOAT8, Problem

_aten = torch.ops.aten
_LARGEST_LSE = 512.0  # PyTorch's CPU backward sums logits in another order than its forward; where they are large, P = exp(S - LSE) is off
_EXTRAS = {
    "varlen": "packed variable length",
    "seqused": "seqused",
    "cache": "a KV cache",
    "sink": "a sink",
    "alibi": "ALiBi",
    "bias": "a bias",
}


def missing(problem: Problem) -> str | None:
    """What the problem asks for that these kernels lack; None: they serve it."""
    lacks = [words for name, words in _EXTRAS.items() if getattr(problem, name)]
    if problem.dtype in FLOAT8:
        lacks.append(f"dtype {problem.dtype}")
    if problem.softcap:
        lacks.append("softcap")
    if not problem.scale_value > 0:
        lacks.append(f"scale={problem.scale_value:g} (only positive scales)")
    if problem.head_dim != problem.head_dim_v:
        lacks.append(f"head_dim_v={problem.head_dim_v} beside head_dim={problem.head_dim}")
    if 0 in (problem.batch, problem.seqlen_q, problem.seqlen_k):
        lacks.append("empty tensors")
    elif _mode(problem) is None:
        lacks.append(f"the mask {problem.mask.code} for seqlen_q={problem.seqlen_q}, seqlen_k={problem.seqlen_k}")
    if problem.backward and problem.return_lse:
        lacks.append("the gradient of LSE")
    if problem.device == "cuda":
        lacks += _missing_on_cuda(problem)
    return ", ".join(lacks) or None


def _missing_on_cuda(problem: Problem) -> list[str]:
    lacks = []
    if problem.dtype not in ("float16", "bfloat16"):
        lacks.append(f"{problem.dtype} on CUDA")
    if problem.head_dim % 8 or problem.head_dim > 256:
        lacks.append(f"head_dim={problem.head_dim} on CUDA (multiples of 8 up to 256)")
    if problem.backward and problem.deterministic:
        lacks.append("a deterministic backward on CUDA")
    return lacks


def _mode(problem: Problem) -> bool | None:
    """is_causal for the kernel, or None where it has no such mask."""
    mask = problem.mask
    if isinstance(mask, Full):
        return False
    if not isinstance(mask, Window) or mask.left is not None:
        return None
    if mask.right is None:
        return False
    if mask.right == 0 and problem.seqlen_q == problem.seqlen_k:
        return True
    return False if _sees_all(problem, mask) else None


def _sees_all(problem: Problem, mask: Window) -> bool:
    """A single query at the end, say: its causal mask hides nothing."""
    band = mask.bounds(problem.seqlen_q, problem.seqlen_k).outer
    return band.hi is not None and band.hi >= problem.seqlen_k - 1


def forward(problem: Problem, plan: Plan, inputs: Inputs) -> tuple[Tensor, Tensor]:  # noqa: ARG001
    """O (B, Sq, H, Dv) in the inputs' dtype and LSE (B, H, Sq), float32 (float64 for float64 inputs)."""
    q, k, v = _heads_first(inputs.q, inputs.k, inputs.v)
    causal = bool(_mode(problem))
    if q.device.type == "cpu":
        out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=problem.scale_value)
        _spread_nan(q, out, lse)
    else:
        out, lse = _aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, scale=problem.scale_value)[:2]
    return out.transpose(1, 2).contiguous(), lse.contiguous()


def _heads_first(*tensors: Tensor) -> list[Tensor]:
    """(B, S, H, D) -> (B, H, S, D) without a copy where PyTorch's kernels can read the tensor as it lies."""
    return [(x if _readable(x) else x.clone(memory_format=torch.contiguous_format)).transpose(1, 2) for x in tensors]


def _readable(x: Tensor) -> bool:
    """The CPU kernel takes any last stride for 1; the CUDA kernels read 16 bytes at a time wherever a row begins."""
    if x.stride(-1) != 1:
        return False
    at_16 = all(n * x.element_size() % 16 == 0 for n in (x.storage_offset(), *x.stride()[:-1]))
    return x.device.type == "cpu" or (at_16 and x.data_ptr() % 16 == 0)


def _spread_nan(q: Tensor, out: Tensor, lse: Tensor) -> None:
    """PyTorch's CPU kernel takes a row's maximum without its NaN: a query with NaN or infinity would get O = 0, LSE = 0."""
    if bool(q.sum(dtype=lse.dtype).isfinite()):  # one cheap pass; a sum that overflows only costs the closer look
        return
    bad = ~q.isfinite().all(-1)
    out.masked_fill_(bad[..., None], float("nan"))
    lse.masked_fill_(bad, float("nan"))


def backward(
    problem: Problem,
    plan: Plan,
    inputs: Inputs,
    out: Tensor,
    lse: Tensor,
    grad_out: Tensor,
    grad_lse: Tensor | None,
) -> Gradients:
    """Gradients of q, k and v. ``grad_lse`` must be None: ``missing`` refuses problems that could have one."""
    if grad_lse is not None:
        raise ValueError("grad_lse must be None for PyTorch's attention, got a tensor")
    if lse.device.type == "cpu" and bool((lse.abs() > _LARGEST_LSE).any()):
        out, lse = tiled.forward(problem, plan, inputs)  # the LSE of its own order of sums
        return tiled.backward(problem, plan, inputs, out, lse, grad_out, None)
    q, k, v, out, grad_out = _heads_first(inputs.q, inputs.k, inputs.v, out, grad_out)
    causal, scale = bool(_mode(problem)), problem.scale_value
    if q.device.type == "cpu":
        grads = _aten._scaled_dot_product_flash_attention_for_cpu_backward(grad_out, q, k, v, out, lse, 0.0, causal, scale=scale)
    else:
        zero = torch.zeros((), dtype=torch.uint64, device=q.device)  # the random state of a dropout that is off
        grads = _aten._scaled_dot_product_flash_attention_backward(
            grad_out, q, k, v, out, lse, None, None, problem.seqlen_q, problem.seqlen_k, 0.0, causal, zero, zero, scale=scale
        )
    return Gradients(
        q=grads[0].transpose(1, 2).contiguous(), k=grads[1].transpose(1, 2).contiguous(), v=grads[2].transpose(1, 2).contiguous()
    )
