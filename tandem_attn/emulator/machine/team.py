"""Warps of a warpgroup that stand at the same instruction with all their lanes, executed together.

Generated code sees a team as it sees a warp, with arrays of shape (warps, 32) in place of (32,): most of the time of a NumPy operation on
32 lanes, and of a call of native code, goes to getting there. What happens in one warp is what would happen if it ran alone: memory
accesses whose checks fail are made again warp by warp, so that the right one is reported.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tandem_attn.emulator.machine.warp import Warp
from tandem_attn.emulator.memory.addresses import RANK_SHIFT, SHARED_WINDOW
from tandem_attn.emulator.memory.faults import Fault
from tandem_attn.emulator.memory.registers import WARP, RegisterFile

Array = NDArray[Any]
_SELDOM = ("load_local", "store_local", "load_generic", "store_generic")


class Team:
    """The warps of one register file. The attributes that generated code reads are those of `Warp`."""

    def __init__(self, warps: list[Warp], file: RegisterFile) -> None:
        self.warps, self.count = warps, len(warps)
        self.first = warps[0]
        self.cta = self.first.cta
        for name, view in file.all.items():
            setattr(self, name, view[:, : self.count])
        self.files = self.first.files
        self.acting = self.first  # whose turn it is where warps take turns

    def at(self, segment: int) -> bool:
        """Whether every warp can run, and stands at that segment with all its lanes."""
        for warp in self.warps:
            if not warp.queued or len(warp.stack) != 1:
                return False
            frame = warp.stack[0]
            if frame.segment != segment or frame.mask is not None or frame.waits:
                return False
        return True

    def each(self, handler: Callable[[Any, Any], Any], guard: Array | None) -> None:
        """A machine instruction, warp by warp, or by its form for several (`ops.registry.together`)."""
        if guard is None:
            form = getattr(handler, "together", None)
            if form is not None and form(self) is True:
                return
            for warp in self.warps:
                self.acting = warp
                handler(warp, None)
            return
        raw = guard.tobytes() if guard.ndim == 2 else guard.tobytes() * self.count
        at = raw.find(1)
        while at >= 0:  # the next warp with an active lane
            i = at // WARP
            self.acting = self.warps[i]
            handler(self.acting, np.frombuffer(raw, np.bool_, WARP, i * WARP))
            at = raw.find(1, (i + 1) * WARP)

    # ---- shared memory
    def load_shared(self, address: Array, offset: int, dtype: Any, count: int, mask: Array | None, index: int) -> Array:
        shared, size = self.cta.shared, dtype.itemsize * count
        chosen = None if mask is None else self._rows(mask)
        where = self._own(address, offset, size, chosen)
        if where is not None:
            try:
                if self.cta.machine.check_uninitialised:
                    shared.require_written(where, size)
                got = shared.load(where, dtype, count)
            except Fault:
                return self._each_load("load_shared", address, offset, dtype, count, chosen, index)
            return self._spread(got, chosen, count)
        return self._each_load("load_shared", address, offset, dtype, count, chosen, index)

    def store_shared(self, address: Array, offset: int, values: tuple[Array, ...], mask: Array | None, index: int) -> None:
        chosen = None if mask is None else self._rows(mask)
        where = self._own(address, offset, values[0].itemsize * len(values), chosen)
        if where is None:
            self._each_store("store_shared", address, offset, values, chosen, index)
        elif len(where):
            self.cta.shared.store(where, self._flat(values, chosen))

    def _own(self, address: Array, offset: int, size: int, mask: Array | None) -> Array | None:
        """Offsets in the CTA's own shared memory, in bounds and aligned; None where they are not."""
        rank = self.cta.rank << RANK_SHIFT
        full = self._rows(address)
        where = (full.reshape(-1) if mask is None else full[mask]).astype(np.int64) + (offset - rank)
        shared = self.cta.shared
        if len(where) and (int(where.min()) < shared.base or int(where.max()) + size > shared.end or (where & (size - 1)).any()):
            return None
        return where

    # ---- global memory
    def load_global(self, address: Array, offset: int, dtype: Any, count: int, mask: Array | None, index: int) -> Array:
        chosen = None if mask is None else self._rows(mask)
        where = self._global(address, offset, dtype.itemsize * count, chosen)
        if where is None:
            return self._each_load("load_global", address, offset, dtype, count, chosen, index)
        try:
            got = self.cta.machine.memory.load(where, dtype, count)
        except Fault:
            return self._each_load("load_global", address, offset, dtype, count, chosen, index)
        return self._spread(got, chosen, count)

    def store_global(self, address: Array, offset: int, values: tuple[Array, ...], mask: Array | None, index: int) -> None:
        self._each_store(
            "store_global", address, offset, values, None if mask is None else np.broadcast_to(mask, (self.count, WARP)), index
        )

    def _global(self, address: Array, offset: int, size: int, mask: Array | None) -> Array | None:
        full = self._rows(address)
        where = (full.reshape(-1) if mask is None else full[mask]).astype(np.int64) + offset
        return None if not len(where) or (where & (size - 1)).any() or int(where.max()) >= SHARED_WINDOW else where

    def load_param(self, address: Array, offset: int, dtype: Any, count: int, mask: Array | None, index: int) -> Array:
        """Mostly all lanes read one parameter."""
        rows = self._rows(address)
        if mask is not None or (rows != rows[0, 0]).any():
            return self._each_load("load_param", address, offset, dtype, count, mask, index)
        self.acting = self.first
        return self.first.load_param(rows[0], offset, dtype, count, None, index)[:, None].repeat(self.count, 1)

    # ---- warp by warp
    def __getattr__(self, name: str) -> Any:
        """Seldom used memories have no form for several warps."""
        if name not in _SELDOM:
            raise AttributeError(name)
        if name.startswith("load"):
            return lambda address, offset, dtype, count, mask, index: self._each_load(name, address, offset, dtype, count, mask, index)
        return lambda address, offset, values, mask, index: self._each_store(name, address, offset, values, mask, index)

    def _each_load(self, name: str, address: Array, offset: int, dtype: Any, count: int, mask: Array | None, index: int) -> Array:
        out = np.empty((count, self.count, WARP), dtype)
        places, masks = self._rows(address), self._masks(mask)
        for i, warp in enumerate(self.warps):
            self.acting = warp
            out[:, i] = getattr(warp, name)(places[i], offset, dtype, count, masks[i], index)
        return out

    def _each_store(self, name: str, address: Array, offset: int, values: tuple[Array, ...], mask: Array | None, index: int) -> None:
        places, masks, data = self._rows(address), self._masks(mask), [self._rows(v) for v in values]
        for i, warp in enumerate(self.warps):
            self.acting = warp
            getattr(warp, name)(places[i], offset, tuple(v[i] for v in data), masks[i], index)

    def _rows(self, value: Array) -> Array:
        return value if value.ndim > 1 else np.broadcast_to(value, (WARP,))[None].repeat(self.count, 0)

    def _masks(self, mask: Array | None) -> Any:
        return [None] * self.count if mask is None else self._rows(mask)

    def _flat(self, values: tuple[Array, ...], mask: Array | None) -> list[Array]:
        full = [self._rows(v) for v in values]
        return [v.reshape(-1) for v in full] if mask is None else [v[mask] for v in full]

    def _spread(self, got: Array, mask: Array | None, count: int) -> Array:
        """Values of the active lanes -> (count, warps, 32)."""
        if mask is None:
            return got.reshape(count, self.count, WARP)
        out = np.zeros((count, self.count, WARP), got.dtype)
        out[:, mask] = got
        return out
