"""The kernels as backends without a GPU: compiled for a chip's architecture, executed and judged by the emulator, on CPU tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tandem_attn.kernels.compile import Kernel
from tandem_attn.kernels.description import LaunchDescription

if TYPE_CHECKING:
    from tandem_attn.emulator import Result

_SWIZZLE_BYTES = (0, 32, 64, 128)  # by CUtensorMapSwizzle


def execute(launch: LaunchDescription, **options: Any) -> Result:
    """Runs a launch in the emulator, with those before and after it; ``options`` are those of ``emulator.run``.

    The tensors are changed in place. The result is the launch's own, or that of the first one beside it that is not ok.
    """
    for each in launch.before:
        first = execute(each, **options)
        if not first.ok:
            return first
    own = _execute_one(launch, **options)
    if not own.ok:
        return own
    return next((result for result in (execute(each, **options) for each in launch.after) if not result.ok), own)


def _execute_one(launch: LaunchDescription, **options: Any) -> Result:
    from tandem_attn import emulator

    kernel = launch.kernel
    return emulator.run(
        kernel.ptx,
        arguments(launch),
        launch.grid * kernel.ctas,
        block=kernel.threads,
        cluster=kernel.ctas,
        shared=kernel.shared_bytes,
        **options,
    )


def arguments(launch: LaunchDescription) -> list[Any]:
    """Values of the PTX parameters. After each descriptor come its shape and strides, which our kernels do not read; scratch comes last."""
    from tandem_attn.emulator.launch.tensormap import TensorDescriptor

    values: list[Any] = []
    for tensor, x in zip(launch.described, launch.maps, strict=True):
        element = tensor.element_size()
        strides = [*(stride // element for stride in reversed(x.strides)), 1]
        swizzle = _SWIZZLE_BYTES[x.swizzle]
        offset = x.address - tensor.data_ptr()
        values += [TensorDescriptor(tensor, x.sizes[::-1], strides, x.box[::-1], swizzle=swizzle, offset=offset), *[0] * (2 * len(x.sizes))]
    return [*values, *launch.pointers, *launch.numbers, *launch.extras, *_scratch(launch.kernel, launch.grid)]


def _scratch(kernel: Kernel, grid: int) -> list[Tensor | None]:
    sizes = (size * kernel.ctas * grid for size in kernel.scratch_bytes)
    return [torch.zeros(size, dtype=torch.uint8) if size else None for size in sizes]
