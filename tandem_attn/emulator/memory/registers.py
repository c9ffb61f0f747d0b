"""The registers of one warp: one array of 32 lanes per register, kept by width, with views of each element type."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

WARP = 32


class RegisterFile:
    """`h`, `r`, `d` and `q` hold 16, 32, 64 and 128-bit registers as unsigned integers, `p` predicates."""

    def __init__(self, slots: dict[str, int]) -> None:
        self.p: NDArray[np.bool_] = np.zeros((slots["p"], WARP), np.bool_)
        self.h: NDArray[np.uint16] = np.zeros((slots["h"], WARP), np.uint16)
        self.r: NDArray[np.uint32] = np.zeros((slots["r"], WARP), np.uint32)
        self.d: NDArray[np.uint64] = np.zeros((slots["d"], WARP), np.uint64)
        self.q: NDArray[np.uint64] = np.zeros((slots["q"], WARP, 2), np.uint64)
        self.arrays = (self.p, self.h, self.r, self.d, self.q)
        self.addresses = np.array([a.ctypes.data for a in (self.p, self.h, self.r, self.d)], np.uint64)
        self.views: dict[str, NDArray[Any]] = {
            **{"p": self.p, "hu": self.h, "hi": self.h.view(np.int16), "hf": self.h.view(np.float16)},
            **{"ru": self.r, "ri": self.r.view(np.int32), "rf": self.r.view(np.float32)},
            **{"du": self.d, "di": self.d.view(np.int64), "df": self.d.view(np.float64)},
        }

    def clear(self) -> RegisterFile:
        """All zeros, for another warp."""
        for array in self.arrays:
            array.fill(0)
        return self
