"""FLOPs of the operators for torch.utils.flop_counter, counted as PyTorch counts its own attention: products only, masks not deducted.

Importing torch.utils.flop_counter loads triton wherever it is installed, so the formulas are registered when somebody else imports it.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from tandem_attn.api.ops import ARGUMENTS

_COUNTER = "torch.utils.flop_counter"
_SIZES = ("cu_seqlens_q", "cu_seqlens_k")


def _forward(*args: Any, out_val: Any = None, **_: Any) -> int:  # noqa: ARG001
    named = dict(zip(ARGUMENTS, args, strict=True))
    return _pairs(named) * 2 * (named["q"].shape[-1] + named["v"].shape[-1])


def _backward(*args: Any, out_val: Any = None, **_: Any) -> int:  # noqa: ARG001
    """Five products: S, dQ and dK with head_dim, dP and dV with head_dim_v."""
    named = dict(zip(ARGUMENTS, args[4:], strict=True))
    return _pairs(named) * 2 * (3 * named["q"].shape[-1] + 2 * named["v"].shape[-1])


def _pairs(named: dict[str, Any]) -> int:
    """Query-key pairs over all heads and sequences, from the true lengths where they can be read without waiting."""
    heads = named["q"].shape[-2]
    batch = named["q"].shape[0] if named["cu_seqlens_q"] is None else named["cu_seqlens_q"].shape[0] - 1
    lengths = [named[name] for name in _SIZES]
    if all(isinstance(x, Tensor) and x.device.type == "cpu" and not torch._subclasses.fake_tensor.is_fake(x) for x in lengths):
        q_lengths, k_lengths = (x.diff().long() for x in lengths)
        return heads * int((q_lengths * k_lengths).sum())
    return heads * batch * named["max_seqlen_q"] * named["max_seqlen_k"]


def _register(counter: ModuleType) -> None:
    counter.register_flop_formula(torch.ops.tandem_attn.attention, get_raw=True)(_forward)
    counter.register_flop_formula(torch.ops.tandem_attn.attention_backward, get_raw=True)(_backward)


class _Registering(Loader):
    """Loads the counter as its own loader does, then registers the formulas."""

    def __init__(self, own: Loader) -> None:
        self.own = own

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.own.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self.own
        if module.__spec__ is not None:
            module.__spec__.loader = self.own
        self.own.exec_module(module)
        _register(module)


class _Finder(MetaPathFinder):
    """Waits for the first import of the counter."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:  # noqa: ARG002
        if fullname != _COUNTER:
            return None
        sys.meta_path.remove(self)  # so that the search below asks the others
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Registering(spec.loader)
        return spec


if _COUNTER in sys.modules:
    _register(sys.modules[_COUNTER])
else:
    sys.meta_path.insert(0, _Finder())
