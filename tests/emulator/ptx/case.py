"""A micro kernel in PTX with everything needed to launch it: on a GPU through the driver API, or in the emulator.

Standard library and NumPy only, so that it also runs on a bare GPU machine.
"""

from dataclasses import dataclass

import numpy as np

from tests.emulator.ptx.inputs import Input

HEADER = ".version 8.7\n.target sm_90a\n.address_size 64\n"  # 8.7 is the oldest version that has every form used here


@dataclass(frozen=True)
class TensorMap:
    """A tiled TMA descriptor (CUDA driver API, cuTensorMapEncodeTiled) over one of the case's buffers.

    shape, box and element_strides are innermost first, in elements; strides are in bytes and leave out the innermost dimension.
    """

    buffer: str
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int = 0
    nan_fill: bool = False
    interleave: int = 0
    element_strides: tuple[int, ...] = ()

    @property
    def steps(self) -> tuple[int, ...]:
        return self.element_strides or (1,) * len(self.shape)


@dataclass(frozen=True)
class Tolerance:
    """How far a result may be from the hardware's and still count as equal; `fmt` says how the output's bits are read.

    ulps: units in the last place of the hardware's value. absolute: in the format's own units, for values near zero.
    """

    fmt: str
    ulps: float = 0
    absolute: float = 0.0


@dataclass(frozen=True)
class Case:
    """One launch of one kernel, whose entry is `kernel(out, one pointer per input..., one 128-byte map per tensor map...)`.

    out holds the output buffer's bytes before the launch. section names the part of the PTX ISA manual that the case checks.
    faults: the kernel does what is not allowed: a GPU stops it, the emulator reports it.
    """

    name: str
    family: str
    ptx: str
    inputs: dict[str, Input]
    out: Input
    section: str
    grid: int = 1
    threads: int = 128
    cluster: int = 1
    shared: int = 0
    maps: tuple[TensorMap, ...] = ()
    tolerance: Tolerance | None = None
    faults: bool = False

    def make_buffers(self) -> dict[str, np.ndarray]:
        """Fresh bytes of every buffer, `out` first; the same on every machine."""
        arrays = {"out": self.out.make(f"{self.name}/out")}
        for name, spec in self.inputs.items():
            arrays[name] = spec.make(f"{self.name}/{name}")
        return arrays


def module(body: str, params: list[str], maps: int = 0, directives: str = "", prologue: str = "") -> str:
    """A PTX module with one entry; its pointer parameters are loaded into %<name> as generic addresses in global space.

    body holds instructions, each closed by a semicolon, with any white space between them.
    """
    declarations = [f".param .u64 p_{name}" for name in params]
    declarations += [f".param .align 64 .b8 map{i}[128]" for i in range(maps)]
    loads = "".join(f".reg .b64 %{name}; ld.param.u64 %{name}, [p_{name}]; " for name in params)
    lines = "\n".join(f"    {line.strip()};" for line in f"{loads}{body}ret;".split(";")[:-1])
    return f"{HEADER}{prologue}.visible .entry kernel({', '.join(declarations)}){directives}\n{{\n{lines}\n}}\n"
