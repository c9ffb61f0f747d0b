"""Small PTX kernels for the emulator's tests."""

from __future__ import annotations

import numpy as np

from tandem_attn.emulator import run

HEAD = """.version 9.0
.target {target}
.address_size 64
.extern .shared .align 128 .b8 smem[];
.visible .entry kernel({params})
{{
    .reg .pred %p<8>;
    .reg .b16 %h<16>;
    .reg .b32 %r<64>;
    .reg .f32 %f<64>;
    .reg .b64 %rd<32>;
    .reg .b32 %tid;
    mov.u32 %tid, %tid.x;
"""


def kernel(body: str, params: int = 0, target: str = "sm_90a") -> str:
    """A kernel with `params` 64-bit parameters p0, p1, ... around a body of PTX statements."""
    names = ", ".join(f".param .u64 p{i}" for i in range(params))
    return HEAD.format(target=target, params=names) + body + "\n    ret;\n}\n"


def launch(
    body: str, *args: object, target: str = "sm_90a", threads: int = 32, grid: int | tuple[int, ...] = 1, **options: object
) -> object:
    """Run `body` as a kernel; `args` are its parameters."""
    return run(kernel(body, len(args), target), list(args), grid, block=(threads,), **options)


def store_lanes(register: str, kind: str = "b32", size: int = 4) -> str:
    """Statements that store a register of every thread to the array p0."""
    return f"""
    ld.param.u64 %rd30, [p0];
    mad.wide.u32 %rd31, %tid, {size}, %rd30;
    st.global.{kind} [%rd31], {register};
"""


def kinds(result: object) -> list[str]:
    return [report.kind for report in result.reports]


def lanes(dtype: type = np.uint32, count: int = 32) -> np.ndarray:
    return np.zeros(count, dtype)
