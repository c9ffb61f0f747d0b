"""Launch descriptions: arguments in the order of the kernel that takes them, and descriptors that TMA accepts."""

from __future__ import annotations

import importlib

import pytest
import torch
from problems import PROBLEMS, packed

from tandem_attn.kernels import backend, extras
from tandem_attn.kernels.compile import CODES, ENTRIES, compiled
from tandem_attn.kernels.prepare import DESCRIPTORS, NUMBERS, POINTERS, LaunchDescription, aligned, prepare
from tandem_attn.spec.inputs import Inputs
from tandem_attn.spec.masks import Full

pytest.importorskip("triton", reason="kernels are compiled by Triton: pip install tandem-attn[cuda]")


@pytest.mark.parametrize("module", ENTRIES.values())
def test_arguments_are_in_the_order_of_the_kernel(module: str) -> None:
    assert importlib.import_module(module).forward.arg_names == [*DESCRIPTORS, *POINTERS, *NUMBERS, *extras.NAMES, "plan", "plain"]


def described(*, ragged: bool) -> LaunchDescription:
    """Two sequences of 300 rows, padded, or seven packed ones."""
    problem = packed(Full()) if ragged else PROBLEMS["full"]
    plan = backend.plan(problem)
    make = lambda rows, heads: torch.zeros(*rows, heads, 128, dtype=torch.bfloat16)  # noqa: E731
    rows = (problem.total_q,) if ragged else (2, 300)
    lengths = torch.arange(8, dtype=torch.int32) if ragged else None
    inputs = Inputs(
        q=make(rows, 4), k=make(rows, problem.heads_kv), v=make(rows, problem.heads_kv), cu_seqlens_q=lengths, cu_seqlens_k=lengths
    )
    out, lse = torch.empty_like(inputs.q), torch.zeros(*rows[:-1], 4, rows[-1])
    return prepare(compiled(plan), problem, plan, inputs, out, lse, sms=5, counter=torch.zeros(1, dtype=torch.int32))


def test_kernel_takes_what_is_described() -> None:
    launch = described(ragged=False)
    assert launch.kernel.codes == CODES["*"] * len(launch.pointers) + "iiiiff" + "i" * 11
    assert (len(launch.maps), len(launch.pointers), len(launch.numbers)) == (len(DESCRIPTORS), len(POINTERS), len(NUMBERS))
    assert len(launch.kernel.descriptors) == len(launch.maps)


def test_grid_is_bounded_by_the_chip() -> None:
    assert described(ragged=True).grid == 5


@pytest.mark.parametrize("ragged", [False, True])
def test_descriptors_place_their_tensors(ragged: bool) -> None:
    first = described(ragged=ragged)
    for x, tensor in zip(first.maps, first.described, strict=True):
        before = tensor.shape[-3] * tensor.stride(-3) * 2 if ragged else 0  # row 0 of a ragged tensor lies one tensor behind the origin
        assert x.address == tensor.data_ptr() - before
        assert x.sizes[0] == 128 and x.strides[0] == tensor.stride(-3) * 2
        assert len(x.sizes) == len(x.box) == len(x.strides) + 1


def test_misplaced_tensors_are_copied() -> None:
    whole = torch.zeros(2 * 300 * 4 * 128 + 1, dtype=torch.bfloat16)
    assert aligned(whole[:-1].view(2, 300, 4, 128)).data_ptr() == whole.data_ptr()
    assert aligned(whole[1:].view(2, 300, 4, 128)).data_ptr() % 16 == 0
