"""A backend that binds, for tests of repeated calls."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from tandem_attn.api import backends
from tandem_attn.spec.inputs import Inputs

Q = (2, 7, 4, 8)  # (batch, seqlen, heads, head_dim)
NAMES = [field.name for field in dataclasses.fields(Inputs)]


def qkv(**options: Any) -> list[torch.Tensor]:
    return [torch.randn(Q, **options) for _ in range(3)]


class Recorder:
    """A backend that binds: its bound calls are counted, and compute what the reference computes."""

    def __init__(self) -> None:
        self.binds = self.calls = 0
        self.declines = False

    def bind(self, problem: Any, plan: Any, inputs: Inputs) -> backends.Bound:  # noqa: ARG002
        self.binds += 1

        def call(tensors: tuple[Any, ...]) -> Any:
            if self.declines:
                return None
            self.calls += 1
            given = Inputs(**dict(zip(NAMES, tensors, strict=True)))
            return backends.BACKENDS["reference"].forward(problem, plan, given)

        return call
