"""What a test subject is, and how one is compiled without a GPU."""

from dataclasses import dataclass
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon import GluonASTSource
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

TRITON_TYPE = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.int32: "i32",
}


@dataclass(frozen=True)
class Subject:
    """A compiled kernel (or PTX text) with CPU tensors to run it on and the fp64 truth of what it must leave in `out`.

    args: run-time arguments in the kernel's order (constexprs left out); a TMA operand is a host `TensorDescriptor`.
    grid: programs in x, y, z; each program of a compiled kernel is a cluster of `kernel.metadata.num_ctas` CTAs along x.
    block, shared: threads and bytes of dynamic shared memory of a CTA when the kernel is PTX text; a compiled kernel knows its own.
    tolerance: largest |out - expected| of a correct run.
    """

    name: str
    kernel: Any
    args: tuple[Any, ...]
    grid: tuple[int, int, int]
    out: torch.Tensor
    expected: torch.Tensor
    tolerance: float
    block: tuple[int, int, int] | None = None
    shared: int | None = None

    @property
    def options(self) -> dict[str, Any]:
        """What `tandem_attn.emulator.run` must be told besides kernel, arguments and grid."""
        return {name: value for name, value in (("block", self.block), ("shared", self.shared)) if value is not None}

    def check(self) -> None:
        """Raise AssertionError naming the worst element when `out` is not within `tolerance` of `expected`."""
        error = (self.out.double() - self.expected).abs()
        error = torch.where(error.isnan(), torch.inf, error)
        worst = int(error.argmax())
        index = tuple(int(i) for i in torch.unravel_index(torch.tensor(worst), error.shape))
        assert error.flatten()[worst] <= self.tolerance, (
            f"{self.name}: out{list(index)} = {self.out[index].item()}, expected {self.expected[index].item()}, "
            f"error {error.flatten()[worst]:.3e} > {self.tolerance:.3e}"
        )


def compile_kernel(kernel: Any, args: tuple[Any, ...], constexprs: dict[str, Any], arch: int, **options: Any) -> Any:
    """Compile a `@gluon.jit` or `@triton.jit` kernel for sm_<arch>a; no GPU is needed.

    args are the run-time arguments in order; every other parameter of the kernel is named in `constexprs`.
    """
    names = [name for name in kernel.arg_names if name not in constexprs]
    if len(names) != len(args):
        raise ValueError(f"args: {len(args)} given, the kernel takes {names}")
    signature = dict.fromkeys(constexprs, "constexpr")
    attrs = {}
    for name, arg in zip(names, args, strict=True):
        signature[name] = _type_of(arg)
        if isinstance(arg, torch.Tensor):
            attrs[(kernel.arg_names.index(name),)] = [["tt.divisibility", 16]]
    signature = {name: signature[name] for name in kernel.arg_names}
    source = GluonASTSource if kernel.is_gluon() else ASTSource
    return triton.compile(
        source(kernel, signature, constexprs=constexprs, attrs=attrs), target=GPUTarget("cuda", arch, 32), options=options
    )


def _type_of(arg: Any) -> str:
    if isinstance(arg, TensorDescriptor):
        return arg.__mangle__()
    if isinstance(arg, torch.Tensor):
        return "*" + TRITON_TYPE[arg.dtype]
    return "fp32" if isinstance(arg, float) else "i32"


def random_tensor(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Standard normal values rounded to dtype."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def unwritten(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """An output tensor full of NaN, so that an element the kernel never writes fails the check."""
    return torch.full(shape, float("nan"), dtype=dtype)
