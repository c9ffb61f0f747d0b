"""A warp: registers, divergence stack, and the memory accesses that generated code makes through it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tandem_attn.emulator.events import AccessKind, Proxy, Space, WarpAgent
from tandem_attn.emulator.machine.in_flight import Flight
from tandem_attn.emulator.memory.addresses import LOCAL_WINDOW, OFFSET_MASK, PARAM_WINDOW, RANK_SHIFT, SHARED_WINDOW, WINDOW_MASK
from tandem_attn.emulator.memory.faults import Fault
from tandem_attn.emulator.memory.registers import WARP, WARPS, RegisterFile
from tandem_attn.emulator.ptx.nodes import Reg

if TYPE_CHECKING:
    from tandem_attn.emulator.machine.cta import CTA
    from tandem_attn.emulator.machine.team import Team

Array = NDArray[Any]
ALL_LANES = np.arange(WARP)
_BITS = np.uint64(1) << np.arange(WARP, dtype=np.uint64)


@dataclass(slots=True)
class Frame:
    """One path of a warp: `segment` is next, until `stop`; `mask` None is all lanes. `call`: the bottom frame of a function call."""

    segment: int
    stop: int
    mask: Array | None
    call: bool = False
    waits: bool = False  # its next instruction found nothing to go on with; tried again when the warp is woken
    arrived: tuple[int, int] | None = None  # (instruction, phase) of a named barrier at which this path has arrived and waits
    returns: list[Any] = field(default_factory=list)  # of a call: (variable of the callee, variable of the caller, bytes)


@dataclass(slots=True)
class Blocked:
    """Why a warp waits. What it waits for wakes it (`Machine.wake`); the instruction is then executed again."""

    reason: str
    detail: dict[str, Any] = field(default_factory=dict)


class Warp:
    """State of one warp. Upper-case attributes are the register file's views, under the names generated code uses."""

    def __init__(self, cta: CTA, index: int, file: RegisterFile, entry: int) -> None:
        self.cta, self.index = cta, index
        views: dict[str, Any] = file.rows[index % WARPS]
        self.P, self.Hu, self.Hi, self.Hf = views["P"], views["Hu"], views["Hi"], views["Hf"]
        self.Ru, self.Ri, self.Rf = views["Ru"], views["Ri"], views["Rf"]
        self.Du, self.Di, self.Df, self.Q = views["Du"], views["Di"], views["Df"], views["Q"]
        self.addresses = file.addresses(index % WARPS)
        self.files = self.addresses.ctypes.data  # what native code gets
        self.count = 1  # warps that generated code acts on: a `Team` has more
        self.alive: Array | None = None  # lanes that exist and have not exited; None is all
        self.stack = [Frame(entry, -1, None)]
        self.team: Team | None = None  # the warps that it may be executed together with
        self.queued = False  # in the machine's list of warps that can run
        self.blocked: Blocked | None = None
        self.done = False
        self.yielding = False
        self.local = np.zeros((WARP, cta.launch.local_bytes), np.uint8)
        self.local_views: dict[Any, Array] = {}
        self.agent = WarpAgent(cta.linear, cta.rank, index)
        self.groups: dict[tuple[str, int], Any] = {}  # open and committed groups of asynchronous operations, by kind and lane
        self.unwritten: set[tuple[str, int]] = set(cta.machine.exposed)  # registers to be reported when read, until written
        self.flight = Flight()  # registers that asynchronous operations read or write
        self.tmem_loads: list[Any] = []  # tcgen05.ld since the last wait::ld
        self.tmem_stores: list[Any] = []
        self.cp_async: list[Any] = []  # cp.async since the last cp.async.mbarrier.arrive
        self.wgmma_open: list[Any] = []  # issued, not committed
        self.wgmma_ready: list[Any] = []  # committed, waiting for the other warps of the warpgroup
        self.mma_chain = 0  # numbers the accumulations of tcgen05.mma that this warp has begun
        self.max_registers = cta.launch.registers
        self.time_out = False  # the blocked try_wait returns false now
        self.waits_in_phase: tuple[int, int, int, int] | None = None  # (CTA, offset, instruction, phase) of the blocked try_wait
        self.timed_out_at = -1  # the machine's progress when this warp's waits last timed out
        self.timed_out: dict[int, tuple[int, bytes]] = {}  # instruction that did -> how often, and the registers' digest then
        self.cluster_phase: int | None = None  # of its arrival at the cluster barrier, until it has waited
        self.current = -1  # the machine instruction in execution
        self.instructions = 0

    # ---- registers, for handlers
    def get(self, reg: Reg) -> Array:
        """A register's lanes as unsigned integers (predicates as bool); the file's own storage."""
        return self.storage(reg.cls)[reg.slot]

    def storage(self, cls: str) -> Array:
        return {"p": self.P, "h": self.Hu, "r": self.Ru, "d": self.Du, "q": self.Q}[cls]

    def put(self, reg: Reg, value: Array, mask: Array | None) -> None:
        """Write the active lanes of a register (bits, already of its width)."""
        place = self.storage(reg.cls)[reg.slot]
        if mask is None:
            place[...] = value
        elif reg.cls == "q":
            place[mask] = value[mask]
        else:
            np.copyto(place, value, where=mask)

    def digest(self) -> bytes:
        """Of all registers: the same for the same contents."""
        whole = hashlib.blake2b(digest_size=16)
        for array in (self.P, self.Hu, self.Ru, self.Du, self.Q):
            whole.update(array.tobytes())
        return whole.digest()

    def lane_bits(self, mask: Array | None) -> int:
        return 0xFFFFFFFF if mask is None else int(_BITS[mask].sum())

    # ---- shared memory
    def shared_target(self, addresses: Array) -> tuple[CTA, Array]:
        """The CTA and the offsets of shared addresses that must lie in one CTA."""
        ranks = addresses >> RANK_SHIFT
        first = int(ranks[0])
        if (ranks != first).any():
            raise Fault("undefined", "one instruction addresses the shared memory of several CTAs")
        return self.cta.peer(first), addresses & OFFSET_MASK

    def load_shared(self, address: Array, offset: int, dtype: Any, count: int, mask: Array | None, index: int) -> Array:
        lanes = ALL_LANES if mask is None else np.flatnonzero(mask)
        if not len(lanes):
            return np.zeros((count, WARP), dtype)
        where = (address if mask is None else address[mask]).astype(np.int64) + offset
        self.current = index
        low, high = int(where.min()), int(where.max())
        if low >> RANK_SHIFT == high >> RANK_SHIFT:
            got = self._load_one(low, high, where, lanes, dtype, count)
        else:
            got = np.empty((count, len(lanes)), dtype)
            for rank in np.unique(where >> RANK_SHIFT):
                at = where >> RANK_SHIFT == rank
                part = where[at]
                got[:, at] = self._load_one(int(part.min()), int(part.max()), part, lanes[at], dtype, count)
        return got if mask is None else scatter(got, mask, count)

    def _load_one(self, low: int, high: int, where: Array, lanes: Array, dtype: Any, count: int) -> Array:
        """From addresses of one CTA that run from `low` to `high`."""
        cta, offsets = self._shared_part(low, high, where, dtype.itemsize * count)
        machine = cta.machine
        size = dtype.itemsize * count
        if machine.check_uninitialised:
            try:
                cta.shared.require_written(offsets, size)
            except Fault as fault:
                machine.report(fault, self, self.current)
        if machine.observed:
            machine.access(self, self.current, Space.SHARED, cta.linear, AccessKind.READ, Proxy.GENERIC, offsets, size, lanes)
        return cta.shared.load(offsets, dtype, count)

    def _shared_part(self, low: int, high: int, where: Array, size: int) -> tuple[CTA, Array]:
        """Owner and offsets of shared addresses of one CTA, checked."""
        rank = low >> RANK_SHIFT
        cta = self.cta if rank == self.cta.rank else self.cta.peer(rank)
        base = rank << RANK_SHIFT
        offsets = where - base if base else where
        cta.shared.check_span(low - base, high - base, size)
        if size > 1 and (offsets & (size - 1)).any():
            cta.shared.check(offsets, size, size)
        return cta, offsets

    def store_shared(self, address: Array, offset: int, values: tuple[Array, ...], mask: Array | None, index: int) -> None:
        lanes = ALL_LANES if mask is None else np.flatnonzero(mask)
        if not len(lanes):
            return
        where = (address if mask is None else address[mask]).astype(np.int64) + offset
        data = values if mask is None else [v[mask] for v in values]
        self.current = index
        low, high = int(where.min()), int(where.max())
        if low >> RANK_SHIFT == high >> RANK_SHIFT:
            self._store_one(low, high, where, lanes, data)
            return
        for rank in np.unique(where >> RANK_SHIFT):
            at = where >> RANK_SHIFT == rank
            part = where[at]
            self._store_one(int(part.min()), int(part.max()), part, lanes[at], [v[at] for v in data])

    def _store_one(self, low: int, high: int, where: Array, lanes: Array, data: Sequence[Array]) -> None:
        size = data[0].itemsize * len(data)
        cta, offsets = self._shared_part(low, high, where, size)
        if cta.machine.observed:
            silent = unchanged(cta.shared.load(offsets, data[0].dtype, len(data)), np.array(data))
            cta.machine.access(
                self, self.current, Space.SHARED, cta.linear, AccessKind.WRITE, Proxy.GENERIC, offsets, size, lanes, silent=silent
            )
        cta.shared.store(offsets, data)

    # ---- global memory
    def load_global(self, address: Array, offset: int, dtype: Any, count: int, mask: Array | None, index: int) -> Array:
        lanes = ALL_LANES if mask is None else np.flatnonzero(mask)
        if not len(lanes):
            return np.zeros((count, WARP), dtype)
        where = (address if mask is None else address[mask]).astype(np.int64) + offset
        size = dtype.itemsize * count
        self.current = index
        aligned(where, size)
        machine = self.cta.machine
        if machine.observed:
            machine.access(self, index, Space.GLOBAL, -1, AccessKind.READ, Proxy.GENERIC, where, size, lanes)
        got = machine.memory.load(where, dtype, count)
        return got if mask is None else scatter(got, mask, count)

    def store_global(self, address: Array, offset: int, values: tuple[Array, ...], mask: Array | None, index: int) -> None:
        lanes = ALL_LANES if mask is None else np.flatnonzero(mask)
        if not len(lanes):
            return
        where = (address if mask is None else address[mask]).astype(np.int64) + offset
        data = np.array(values) if mask is None else np.array([v[mask] for v in values])
        size = data.itemsize * len(values)
        self.current = index
        aligned(where, size)
        machine = self.cta.machine
        if machine.observed:
            silent = unchanged(machine.memory.load(where, data.dtype, len(values)), data)
            machine.access(self, index, Space.GLOBAL, -1, AccessKind.WRITE, Proxy.GENERIC, where, size, lanes, silent=silent)
        machine.memory.store(where, data)
        machine.progress += 1

    # ---- local memory, parameters of calls and of the kernel
    def _local(self, dtype: Any) -> Array:
        found = self.local_views.get(dtype)
        if found is None:
            found = self.local_views[dtype] = self.local.view(dtype)
        return found

    def load_local(self, address: Array, offset: int, dtype: Any, count: int, mask: Array | None, index: int) -> Array:
        where = ((address & np.uint64(WINDOW_MASK)).astype(np.int64) + offset) // dtype.itemsize
        self.current = index
        view = self._local(dtype)
        if mask is not None:
            where = np.where(mask, where, 0)
        if int(where.min()) < 0 or int(where.max()) + count > view.shape[1]:
            raise Fault(
                "out-of-bounds", f"local offset {int(where.max()) * dtype.itemsize:#x} is outside the thread's {self.local.shape[1]} bytes"
            )
        return np.array([view[ALL_LANES, where + j] for j in range(count)])

    def store_local(self, address: Array, offset: int, values: tuple[Array, ...], mask: Array | None, index: int) -> None:
        dtype = values[0].dtype
        lanes = ALL_LANES if mask is None else np.flatnonzero(mask)
        where = (((address & np.uint64(WINDOW_MASK)).astype(np.int64) + offset) // dtype.itemsize)[lanes]
        self.current = index
        view = self._local(dtype)
        if len(lanes) and (int(where.min()) < 0 or int(where.max()) + len(values) > view.shape[1]):
            raise Fault(
                "out-of-bounds", f"local offset {int(where.max()) * dtype.itemsize:#x} is outside the thread's {self.local.shape[1]} bytes"
            )
        for j, value in enumerate(values):
            view[lanes, where + j] = value[lanes]

    def load_param(self, address: Array, offset: int, dtype: Any, count: int, mask: Array | None, index: int) -> Array:
        self.current = index
        block = self.cta.launch.parameters
        lanes = ALL_LANES if mask is None else np.flatnonzero(mask)
        out = np.zeros((count, WARP), dtype)
        for lane in lanes[:1] if (address == address[0]).all() else lanes:
            at = int(address[lane]) % PARAM_WINDOW + offset
            if at < 0 or at + dtype.itemsize * count > len(block):
                raise Fault("out-of-bounds", f"parameter offset {at} is outside the {len(block)} bytes of arguments")
            got = np.frombuffer(block, dtype, count, at)
            if len(lanes) and lane == lanes[0]:
                out[:] = got[:, None]
            else:
                out[:, lane] = got
        return out

    # ---- generic addresses
    def load_generic(self, address: Array, offset: int, dtype: Any, count: int, mask: Array | None, index: int) -> Array:
        out = np.zeros((count, WARP), dtype)
        for load, part, chosen in self._windows(address, mask, "load"):
            got = load(part, offset, dtype, count, chosen, index)
            out[:, chosen] = got[:, chosen]
        return out

    def store_generic(self, address: Array, offset: int, values: tuple[Array, ...], mask: Array | None, index: int) -> None:
        for store, part, chosen in self._windows(address, mask, "store"):
            store(part, offset, values, chosen, index)

    def _windows(self, address: Array, mask: Array | None, verb: str) -> list[tuple[Any, Array, Array]]:
        active = np.ones(WARP, np.bool_) if mask is None else mask
        parts = []
        kinds = ((SHARED_WINDOW, "shared"), (LOCAL_WINDOW, "local"), (PARAM_WINDOW, "param"))
        left = active.copy()
        for base, name in reversed(kinds):
            chosen = left & (address >= np.uint64(base))
            if chosen.any():
                inside = address & np.uint64(WINDOW_MASK)
                parts.append((getattr(self, f"{verb}_{name}"), inside.astype(np.uint32) if name == "shared" else inside, chosen))
                left &= ~chosen
        if left.any():
            parts.append((getattr(self, f"{verb}_global"), address, left))
        return parts


def scatter(got: Array, mask: Array, count: int) -> Array:
    """Values of the active lanes -> 32 lanes, zero elsewhere."""
    out = np.zeros((count, WARP), got.dtype)
    out[:, mask] = got
    return out


def unchanged(old: Array, new: Array) -> Array:
    """Which columns of `new` (bit for bit) are what memory holds already."""
    bits = f"u{new.itemsize}"
    same: Array = (np.ascontiguousarray(old).view(bits) == np.ascontiguousarray(new).view(bits)).all(axis=0)
    return same


def aligned(where: Array, size: int) -> None:
    """Raise Fault unless every address is a multiple of the access size."""
    if size > 1 and (where & (size - 1)).any():
        bad = int(where[((where & (size - 1)) != 0).argmax()])
        raise Fault("misaligned", f"global address {bad:#x} is not a multiple of {size}")
