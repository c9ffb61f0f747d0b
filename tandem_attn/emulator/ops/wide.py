"""128-bit registers. PTX manual, "mov" (.b128), "ld", "st" (.b128)."""

from __future__ import annotations

import numpy as np

from tandem_attn.emulator.errors import UnsupportedInstruction
from tandem_attn.emulator.machine.warp import Warp
from tandem_attn.emulator.ops.access import Array, items, reader, writer
from tandem_attn.emulator.ops.move import space_of
from tandem_attn.emulator.ops.registry import Handler, machine
from tandem_attn.emulator.ptx.nodes import Instruction, Memory, Reg, Vector


@machine("mov.b128", section="Data Movement and Conversion Instructions: mov")
def mov(ins: Instruction) -> Handler:
    """Between a 128-bit register and two 64-bit ones, or two 128-bit registers."""
    target, source = ins.operands
    if isinstance(target, Vector) and isinstance(source, Reg):
        outputs = [writer(o) for o in target.items]

        def unpack(w: Warp, m: Array | None) -> None:
            for i, out in enumerate(outputs):
                out(w, np.ascontiguousarray(w.Q[source.slot][:, i]), m)

        return unpack
    if not isinstance(target, Reg):
        raise UnsupportedInstruction("this form of mov.b128 is not executed", ins.line, ins.text)
    parts = [reader(o, np.uint64) for o in items(source)] if isinstance(source, Vector) else []

    def pack(w: Warp, m: Array | None) -> None:
        value = np.stack([p(w) for p in parts], axis=1) if parts else w.get(source)  # type: ignore[arg-type]
        w.put(target, value, m)

    return pack


@machine("ld.shared.b128", "ld.global.b128", "ld.b128", section="Data Movement and Conversion Instructions: ld")
def ld(ins: Instruction) -> Handler:
    target, cell = ins.operands
    assert isinstance(target, Reg) and isinstance(cell, Memory)
    space, offset = space_of(ins), cell.offset
    address = reader(cell.base, np.uint32 if space == "shared" else np.uint64)

    def run(w: Warp, m: Array | None) -> None:
        got = getattr(w, f"load_{space}")(address(w), offset, np.dtype(np.uint64), 2, m, ins.index)
        w.put(target, np.ascontiguousarray(got.T), m)

    return run


@machine("st.shared.b128", "st.global.b128", "st.b128", section="Data Movement and Conversion Instructions: st")
def st(ins: Instruction) -> Handler:
    cell, source = ins.operands
    assert isinstance(source, Reg) and isinstance(cell, Memory)
    space, offset = space_of(ins), cell.offset
    address = reader(cell.base, np.uint32 if space == "shared" else np.uint64)

    def run(w: Warp, m: Array | None) -> None:
        value = w.get(source)
        getattr(w, f"store_{space}")(address(w), offset, (value[:, 0].copy(), value[:, 1].copy()), m, ins.index)

    return run
