"""The registers of up to four warps: one row of 32 lanes per register and warp, kept by width, with views of each element type.

The rows of one register lie side by side, so that warps that are at the same instruction can be executed by one operation on 128 lanes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

WARP, WARPS = 32, 4


class RegisterFile:
    """`h`, `r`, `d` and `q` hold 16, 32, 64 and 128-bit registers as unsigned integers, `p` predicates: [slot, warp, lane]."""

    def __init__(self, slots: dict[str, int]) -> None:
        self.p: NDArray[np.bool_] = np.zeros((slots["p"], WARPS, WARP), np.bool_)
        self.h: NDArray[np.uint16] = np.zeros((slots["h"], WARPS, WARP), np.uint16)
        self.r: NDArray[np.uint32] = np.zeros((slots["r"], WARPS, WARP), np.uint32)
        self.d: NDArray[np.uint64] = np.zeros((slots["d"], WARPS, WARP), np.uint64)
        self.q: NDArray[np.uint64] = np.zeros((slots["q"], WARPS, WARP, 2), np.uint64)
        self.arrays = (self.p, self.h, self.r, self.d, self.q)
        views = {
            **{"P": self.p, "Hu": self.h, "Hi": self.h.view(np.int16), "Hf": self.h.view(np.float16)},
            **{"Ru": self.r, "Ri": self.r.view(np.int32), "Rf": self.r.view(np.float32)},
            **{"Du": self.d, "Di": self.d.view(np.int64), "Df": self.d.view(np.float64), "Q": self.q},
        }
        self.rows = [{name: view[:, i] for name, view in views.items()} for i in range(WARPS)]
        self.all: dict[str, NDArray[Any]] = views

    def addresses(self, warp: int) -> NDArray[np.uint64]:
        """Where the arrays of a warp begin: what native code gets."""
        return np.array([a.ctypes.data + warp * a.strides[1] for a in (self.p, self.h, self.r, self.d)], np.uint64)

    def clear(self) -> RegisterFile:
        """All zeros, for other warps."""
        for array in self.arrays:
            array.fill(0)
        return self
