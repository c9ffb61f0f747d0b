"""Which unit of an SM executes an instruction."""

from __future__ import annotations

from functools import lru_cache

# By the first matching prefix of the opcode; whatever matches none computes.
UNITS = {
    "tensor": ("tcgen05.mma", "wgmma.mma", "mma.", "tcgen05.cp", "tcgen05.shift", "tcgen05.commit"),
    "tmem": ("tcgen05.ld", "tcgen05.st"),
    "tma": ("cp.async.bulk", "cp.reduce", "tensormap"),
    "sync": ("mbarrier", "bar", "fence", "membar", "wgmma", "tcgen05"),
    "lsu": ("cp.async", "ld", "st", "atom", "red."),
    "mufu": ("ex2", "lg2", "rcp", "rsqrt", "sqrt", "sin", "cos", "tanh"),
    "shuffle": ("shfl", "vote", "redux", "match", "elect"),
    "control": ("bra", "brx", "ret", "exit", "call", "setmaxnreg"),
}
_FLOATING = ("f32", "f32x2", "f16x2", "bf16x2", "f16", "bf16", "f64")


@lru_cache(maxsize=4096)
def unit(opcode: str) -> str:
    """The unit of an instruction, by its dotted name: "fma" for floating-point arithmetic, "alu" for everything else that computes."""
    for name, prefixes in UNITS.items():
        if opcode.startswith(prefixes):
            return name
    first, *_, last = opcode.split(".") if "." in opcode else (opcode, "")
    return "fma" if last in _FLOATING and first in ("add", "sub", "mul", "fma") else "alu"
