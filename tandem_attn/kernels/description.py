"""What a launch needs, whoever carries it out: the CUDA launcher (``launch``) and the emulator (``emulated``) read the same description."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from tandem_attn.kernels.compile import Kernel


@dataclass(frozen=True, eq=False)  # equal by identity: a description stands for its place in the cache that made it
class TensorMap:
    """What a TMA descriptor says; all tuples run from the innermost dimension out.

    Attributes:
        dtype: element type, by torch's name.
        address: of the element at coordinates 0, a multiple of 16; it need not lie in the tensor (see ``kernels.common.packing``).
        sizes: elements of each dimension.
        strides: bytes from one element to the next, of every dimension but the innermost.
        box: elements of each dimension that one copy moves.
        swizzle: CUtensorMapSwizzle (CUDA Driver API): 0 none, 1, 2, 3 for 32, 64, 128 bytes.
    """

    dtype: str
    address: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int


Extra = Tensor | int | float | None


class LaunchDescription(NamedTuple):
    """A kernel and its arguments, in the kernel's order: descriptors, pointers, numbers, extras.

    Attributes:
        kernel: what to run.
        grid: clusters (CTAs where a cluster is one), along x.
        maps: a description for each of the kernel's TMA descriptors.
        described: the tensor behind each of them, in the same order.
        pointers: a tensor each, or None for a null pointer.
        numbers: int32 and float32 arguments.
        extras: tensors and numbers that only some plans have, see ``kernels.extras``.
        before: launches whose results this one reads, in order.
        after: launches that read this one's.
    """

    kernel: Kernel
    grid: int
    maps: tuple[TensorMap, ...]
    described: tuple[Tensor, ...]
    pointers: tuple[Tensor | None, ...]
    numbers: tuple[int | float, ...]
    extras: tuple[Extra, ...] = ()
    before: tuple[LaunchDescription, ...] = ()
    after: tuple[LaunchDescription, ...] = ()


def in_order(launch: LaunchDescription) -> Iterator[LaunchDescription]:
    """A launch, with those it needs before it and after it."""
    for each in launch.before:
        yield from in_order(each)
    yield launch
    for each in launch.after:
        yield from in_order(each)
