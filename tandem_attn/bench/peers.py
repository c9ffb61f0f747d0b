"""Other libraries' attention as functions of a case. A peer that is not installed or refuses a case is reported, never skipped."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from tandem_attn.bench.cases import DECODE, Case, Tensors

Run = Callable[[], Tensor]


@dataclass(frozen=True)
class Peer:
    """One implementation.

    Attributes:
        title: what it is.
        module: whose import tells whether it is there.
        package: distribution that carries it, for its version.
        devices: kinds of devices it runs on.
        make: O, in our layout, as a function of nothing; raises where the peer lacks something.
    """

    title: str
    module: str
    package: str
    devices: tuple[str, ...]
    make: Callable[[Case, Tensors], Run]


def missing(name: str, device: str) -> str:
    """Why a peer cannot run on this machine; empty where it can."""
    peer = PEERS[name]
    if device not in peer.devices:
        return f"runs on {', '.join(peer.devices)} only"
    try:
        importlib.import_module(peer.module)
    except Exception as error:  # a peer's import may fail in any way
        return f"import {peer.module} fails: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:200]
    return ""


def _first(x: Tensor | tuple[Tensor, ...]) -> Tensor:
    return x[0] if isinstance(x, tuple) else x


def _sdpa(backend: SDPBackend | None, case: Case, t: Tensors) -> Run:
    if t.cu_seqlens is not None:
        raise NotImplementedError("scaled_dot_product_attention takes no packed sequences")
    q, k, v = (x.transpose(1, 2) for x in t.qkv)
    gqa, causal = case.heads != case.heads_kv, case.causal and case.queries > 1

    def run() -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=gqa).transpose(1, 2)

    if backend is None:
        return run

    def chosen(backend: SDPBackend = backend) -> Tensor:
        with sdpa_kernel(backend):
            return run()

    return chosen


def _fa3(case: Case, t: Tensors) -> Run:
    fa3 = importlib.import_module("flash_attn_interface")
    q, k, v = t.qkv
    if case.kind == DECODE:
        used = torch.full((case.batch,), case.seqlen, dtype=torch.int32, device=q.device)
        return lambda: _first(fa3.flash_attn_with_kvcache(q, k, v, cache_seqlens=used))
    if t.cu_seqlens is not None:
        cu, longest = t.cu_seqlens, case.seqlen
        return lambda: _first(fa3.flash_attn_varlen_func(q, k, v, cu, cu, longest, longest, causal=case.causal))
    return lambda: _first(fa3.flash_attn_func(q, k, v, causal=case.causal))


def _fa4(case: Case, t: Tensors) -> Run:
    fa4 = importlib.import_module("flash_attn.cute")
    q, k, v = t.qkv
    if t.cu_seqlens is not None:
        cu, longest = t.cu_seqlens, case.seqlen
        sizes = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": longest, "max_seqlen_k": longest}
        return lambda: _first(fa4.flash_attn_varlen_func(q, k, v, causal=case.causal, **sizes))
    return lambda: _first(fa4.flash_attn_func(q, k, v, causal=case.causal))


@functools.cache
def _flex() -> Any:
    module = importlib.import_module("torch.nn.attention.flex_attention")
    return torch.compile(module.flex_attention, dynamic=False)


def _flex_attention(case: Case, t: Tensors) -> Run:
    if t.cu_seqlens is not None:
        raise NotImplementedError("no form for packed sequences is written here")
    module = importlib.import_module("torch.nn.attention.flex_attention")
    q, k, v = (x.transpose(1, 2) for x in t.qkv)
    mask = None
    if case.causal:
        mask = module.create_block_mask(_causal, None, None, case.queries, case.seqlen, device=t.q.device)
    return lambda: _flex()(q, k, v, block_mask=mask, enable_gqa=case.heads != case.heads_kv).transpose(1, 2)


def _causal(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:  # noqa: ARG001
    return q_idx >= kv_idx


def _torch(title: str, backend: SDPBackend | None, *devices: str) -> Peer:
    return Peer(title, "torch", "torch", devices, functools.partial(_sdpa, backend))


PEERS: dict[str, Peer] = {
    "sdpa": _torch("PyTorch SDPA, as it chooses", None, "cpu"),
    "fa2": _torch("PyTorch SDPA, flash (FlashAttention-2)", SDPBackend.FLASH_ATTENTION, "cuda"),
    "cudnn": _torch("PyTorch SDPA, cuDNN", SDPBackend.CUDNN_ATTENTION, "cuda"),
    "fa3": Peer("FlashAttention-3", "flash_attn_interface", "tokenspeed-fa3", ("cuda",), _fa3),
    "fa4": Peer("FlashAttention-4 (CuTe-DSL)", "flash_attn.cute", "flash-attn-4", ("cuda",), _fa4),
    "flex": Peer("FlexAttention, compiled", "torch.nn.attention.flex_attention", "torch", ("cuda",), _flex_attention),
}
