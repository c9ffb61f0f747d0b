"""Launch descriptions: arguments in the order of the kernel that takes them, and descriptors that TMA accepts."""

from __future__ import annotations

import importlib

import pytest
import torch
from problems import PROBLEMS, packed

from tandem_attn.kernels import backend, extras
from tandem_attn.kernels.compile import CODES, ENTRIES, compiled
from tandem_attn.kernels.prepare import DESCRIPTORS, NUMBERS, POINTERS, LaunchDescription, aligned, pitch, prepare
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
    assert launch.kernel.codes == CODES["*"] * len(launch.pointers) + "iiiiff" + "i" * 12
    assert (len(launch.maps), len(launch.pointers), len(launch.numbers)) == (len(DESCRIPTORS), len(POINTERS), len(NUMBERS))
    assert len(launch.kernel.descriptors) == len(launch.maps)


def test_grid_is_bounded_by_the_chip() -> None:
    assert described(ragged=True).grid == 5


@pytest.mark.parametrize("ragged", [False, True])
def test_descriptors_place_their_tensors(ragged: bool) -> None:
    first = described(ragged=ragged)
    for x, tensor in zip(first.maps, first.described, strict=True):
        by_row = tensor.stride(-3) * 2
        assert x.address == tensor.data_ptr()
        assert x.sizes[0] == 128 and x.strides[0] == by_row
        if ragged:  # END rows too far, which the outermost dimension takes back
            assert x.sizes[1] * by_row + x.strides[-1] * (x.sizes[-1] - 1) == 2**64
        assert len(x.sizes) == len(x.box) == len(x.strides) + 1


@pytest.mark.parametrize(("shape", "strides", "copied"), [
    ((3, 20, 4, 64), (20 * 256, 256, 64, 1), False),
    ((3, 20, 4, 64), (20 * 256, 64, 20 * 64, 1), False),  # heads before rows
    ((3, 20, 4, 64), (0, 256, 64, 1), False),
    ((3, 1, 4, 64), (256, 7, 64, 1), False),  # from row to row nothing moves
    ((3, 20, 4, 64), (256, 3 * 256, 64, 1), True),  # rows before sequences: they are no whole rows of a sequence apart
    ((3, 20, 4, 64), (256, 0, 64, 1), True),
])  # fmt: skip
def test_sequences_of_ragged_tensors_lie_whole_rows_apart(shape: tuple[int, ...], strides: tuple[int, ...], copied: bool) -> None:
    memory = torch.arange(20 * 3 * 4 * 64, dtype=torch.float32).to(torch.bfloat16)
    x = memory.as_strided(shape, strides)
    found = aligned(x, ragged=True)
    assert (found is not x) == copied and torch.equal(found, x)
    by_row = found.stride(1) if shape[1] > 1 else found.stride(0)
    assert pitch(found.shape, found.stride()) * by_row == found.stride(0)
    assert aligned(x) is x


def test_misplaced_tensors_are_copied() -> None:
    whole = torch.zeros(2 * 300 * 4 * 128 + 1, dtype=torch.bfloat16)
    assert aligned(whole[:-1].view(2, 300, 4, 128)).data_ptr() == whole.data_ptr()
    assert aligned(whole[1:].view(2, 300, 4, 128)).data_ptr() % 16 == 0
