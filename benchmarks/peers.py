"""Other libraries' forwards as functions of a case. A peer that is not installed or refuses a case is reported, never skipped."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.cases import Case

Run = Callable[[], Tensor]
Make = Callable[[Case, Tensor, Tensor, Tensor], Run]


def _sdpa(backend: SDPBackend, case: Case, q: Tensor, k: Tensor, v: Tensor) -> Run:
    heads_first = [x.transpose(1, 2) for x in (q, k, v)]

    def run() -> Tensor:
        with sdpa_kernel(backend):
            out = torch.nn.functional.scaled_dot_product_attention(*heads_first, is_causal=case.causal, enable_gqa=bool(case.heads_kv))
        return out.transpose(1, 2)

    return run


def _first(x: Tensor | tuple[Tensor, ...]) -> Tensor:
    return x[0] if isinstance(x, tuple) else x


def _fa3(case: Case, q: Tensor, k: Tensor, v: Tensor) -> Run:
    import flash_attn_interface

    return lambda: _first(flash_attn_interface.flash_attn_func(q, k, v, causal=case.causal))


def _fa4(case: Case, q: Tensor, k: Tensor, v: Tensor) -> Run:
    from flash_attn.cute import flash_attn_func

    return lambda: _first(flash_attn_func(q, k, v, causal=case.causal))


PEERS: dict[str, Make] = {
    "cudnn": functools.partial(_sdpa, SDPBackend.CUDNN_ATTENTION),
    "fa2": functools.partial(_sdpa, SDPBackend.FLASH_ATTENTION),
    "fa3": _fa3,
    "fa4": _fa4,
}
