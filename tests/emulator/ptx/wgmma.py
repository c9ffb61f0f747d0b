"""wgmma.mma_async: every type and N, A from shared memory or registers, majorness, swizzles, scales, chains.

The operands' shared memory is filled with random elements as one block of bytes. Which of them an MMA reads follows from its matrix
descriptors alone, so a wrong idea of a layout or a swizzle gives wrong sums.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from tests.emulator.ptx.case import Case, module
from tests.emulator.ptx.fragments import THREADS, braces, elements, load, store, thread_index
from tests.emulator.ptx.inputs import Input
from tests.emulator.ptx.matrix import INTEGER, MODERATE, SPECIAL, WIDE

FAMILY = "wgmma"
A_BYTES = 16384
K = {"f16": 16, "bf16": 16, "tf32": 8, "e4m3": 32, "e5m2": 32, "s8": 32, "u8": 32, "b1": 256}
SWIZZLE_BITS = {0: 0, 128: 1, 64: 2, 32: 3}  # PTX ISA, "Matrix descriptor format" of wgmma, bits 62-63


@dataclass(frozen=True)
class Operand:
    """A matrix in shared memory: K-major or (for 16-bit types) MN-major, its swizzle in bytes, the descriptor's two strides in bytes."""

    swizzle: int = 128
    mn_major: bool = False
    leading: int = 0
    stride: int = 0
    offset: int = 0

    def strides(self) -> tuple[int, int]:
        """Leading and stride byte offsets; by default those of tightly packed 8-row groups."""
        if self.leading or self.stride:
            return self.leading, self.stride
        if not self.swizzle:
            return 128, 256
        return (2 * 8 * self.swizzle, 8 * self.swizzle) if self.mn_major else (16, 8 * self.swizzle)

    def constant(self) -> int:
        """The descriptor without its address."""
        leading, stride = self.strides()
        return (leading >> 4) << 16 | (stride >> 4) << 32 | SWIZZLE_BITS[self.swizzle] << 62

    def label(self) -> str:
        major = "mn" if self.mn_major else "k"
        strides = f" {self.leading}/{self.stride}" if self.leading or self.stride else ""
        return f"{major}{self.swizzle}{strides}" + (f"+{self.offset}" if self.offset else "")


@dataclass(frozen=True)
class Wgmma:
    """One wgmma and how it is called."""

    n: int
    a: str
    b: str
    acc: str
    tile_a: Operand | None = Operand()  # None: A from registers
    tile_b: Operand = Operand()
    scales: tuple[int, int] = (1, 1)
    use_acc: bool = True
    saturate: bool = False
    repeat: int = 1
    values: str = "moderate"

    def form(self) -> str:
        shape = f"m64n{self.n}k{K[self.a]}"
        if self.acc == "s32":
            saturate = ".satfinite" if self.saturate else ""
            types = f"{saturate}.s32.{self.a}.{self.b}" + (".and.popc" if self.a == "b1" else "")
        else:
            types = f".{self.acc}.{self.a}.{self.b}"
        return f"wgmma.mma_async.sync.aligned.{shape}{types}"

    def name(self) -> str:
        marks = ["A=registers" if self.tile_a is None else f"A={self.tile_a.label()}", f"B={self.tile_b.label()}"]
        marks += [f"scales {self.scales}"] if self.scales != (1, 1) else []
        marks += [] if self.use_acc else ["no acc"]
        marks += [f"x{self.repeat}"] if self.repeat > 1 else []
        marks += [f"{self.values} values"] if self.values != "moderate" else []
        return f"{self.form()} {' '.join(marks)}"

    def immediates(self) -> str:
        """The operands after scale-d."""
        if self.acc == "s32":
            return ""
        values = list(self.scales)
        if self.a in ("f16", "bf16"):
            values += [] if self.tile_a is None else [int(self.tile_a.mn_major)]
            values += [int(self.tile_b.mn_major)]
        return "".join(f", {value}" for value in values)

    @property
    def acc_registers(self) -> int:
        return self.n // 4 if self.acc == "f16" else self.n // 2

    @property
    def b_bytes(self) -> int:
        return max(4096, self.n * 128) + 4096


def descriptor(name: str, offset: int, operand: Operand) -> str:
    """%<name>: the descriptor of the tile at shared-memory offset `offset`."""
    return (
        f".reg .b64 %{name}; .reg .b32 %{name}_at; add.u32 %{name}_at, %base, {offset + operand.offset}; "
        f"and.b32 %{name}_at, %{name}_at, 0x3ffff; shr.u32 %{name}_at, %{name}_at, 4; cvt.u64.u32 %{name}, %{name}_at; "
        f"or.b64 %{name}, %{name}, {operand.constant():#x}; "
    )


def copy_in(buffer: str, offset: int, size: int, label: str) -> str:
    """128 threads copy `size` bytes of a buffer to shared memory, 16 bytes each at a time."""
    return (
        f".reg .b32 %{label}_i, %{label}_to, %{label}_v<4>; .reg .b64 %{label}_from; .reg .pred %{label}_more; "
        f"shl.b32 %{label}_i, %t, 4; {label}: cvt.u64.u32 %{label}_from, %{label}_i; "
        f"add.u64 %{label}_from, %{label}_from, %{buffer}; add.u32 %{label}_to, %{label}_i, %base; "
        f"ld.global.v4.b32 {braces(label + '_v', 4)}, [%{label}_from]; "
        f"st.shared.v4.b32 [%{label}_to+{offset}], {braces(label + '_v', 4)}; "
        f"add.u32 %{label}_i, %{label}_i, 2048; setp.lt.u32 %{label}_more, %{label}_i, {size}; @%{label}_more bra {label}; "
    )


def kernel(w: Wgmma) -> str:
    body = thread_index() + ".reg .b32 %base; mov.u32 %base, smem; "
    if w.tile_a is None:
        body += load("a", 4, "in_a")
        a_operand = braces("a", 4)
    else:
        body += copy_in("in_a", 0, A_BYTES, "COPY_A") + descriptor("desc_a", 0, w.tile_a)
        a_operand = "%desc_a"
    body += copy_in("in_b", A_BYTES, w.b_bytes, "COPY_B") + descriptor("desc_b", A_BYTES, w.tile_b)
    body += load("c", w.acc_registers, "in_c")
    body += f".reg .pred %use; setp.ne.s32 %use, {int(w.use_acc)}, 0; fence.proxy.async.shared::cta; bar.sync 0; wgmma.fence.sync.aligned; "
    call = f"{w.form()} {braces('c', w.acc_registers)}, {a_operand}, %desc_b, %use{w.immediates()}; "
    body += "add.u64 %desc_b, %desc_b, 2; ".join([call] * w.repeat)  # the next 32 bytes along K
    body += "wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0; " + store("c", w.acc_registers)
    prologue = ".extern .shared .align 1024 .b8 smem[]; "
    return module(body, ["out", "in_a", "in_b", "in_c"], prologue=prologue)


def case(w: Wgmma) -> Case:
    kinds = {"moderate": MODERATE, "special": SPECIAL, "wide": WIDE}[w.values] | INTEGER
    a_words = THREADS * 4 if w.tile_a is None else A_BYTES // 4
    c_words = THREADS * w.acc_registers
    return Case(
        name=w.name(),
        family=FAMILY,
        ptx=kernel(w),
        inputs={
            "in_a": Input(kinds[w.a], elements(kinds[w.a], a_words)),
            "in_b": Input(kinds[w.b], elements(kinds[w.b], w.b_bytes // 4)),
            "in_c": Input(kinds[w.acc], elements(kinds[w.acc], c_words)),
        },
        out=Input("fill", c_words * 4),
        section="Asynchronous Warpgroup Level Matrix Instructions: wgmma.mma_async",
        threads=THREADS,
        shared=A_BYTES + w.b_bytes,
    )


def shapes() -> Iterator[Wgmma]:
    for n in range(8, 257, 8):
        yield Wgmma(n, "bf16", "bf16", "f32")
    for n in (8, 24, 64, 136, 256):
        for acc in ("f32", "f16"):
            yield Wgmma(n, "f16", "f16", acc)
        yield Wgmma(n, "tf32", "tf32", "f32")
    for n in (8, 40, 96, 192):
        for a in ("e4m3", "e5m2"):
            for b in ("e4m3", "e5m2"):
                for acc in ("f32", "f16"):
                    yield Wgmma(n, a, b, acc)
    for n in (8, 24, 64, 208):
        for a in ("s8", "u8"):
            for b in ("s8", "u8"):
                yield Wgmma(n, a, b, "s32")
        yield Wgmma(n, "b1", "b1", "s32")
    yield Wgmma(16, "s8", "s8", "s32", saturate=True)
    yield Wgmma(16, "u8", "u8", "s32", saturate=True)


def register_operands() -> Iterator[Wgmma]:
    for a, b, acc in (("bf16", "bf16", "f32"), ("f16", "f16", "f32"), ("f16", "f16", "f16"), ("tf32", "tf32", "f32")):
        for n in (8, 64):
            yield Wgmma(n, a, b, acc, tile_a=None)
    for a, b, acc in (("e4m3", "e4m3", "f32"), ("e5m2", "e4m3", "f32"), ("e4m3", "e5m2", "f16"), ("s8", "u8", "s32"), ("u8", "s8", "s32")):
        yield Wgmma(32, a, b, acc, tile_a=None)
    yield Wgmma(32, "b1", "b1", "s32", tile_a=None)
    yield Wgmma(64, "bf16", "bf16", "f32", tile_a=None, tile_b=Operand(128, True))


def layouts() -> Iterator[Wgmma]:
    for swizzle_a in (0, 32, 64, 128):
        for swizzle_b in (0, 32, 64, 128):
            for major_a in (False, True):
                for major_b in (False, True):
                    yield Wgmma(72, "f16", "f16", "f32", Operand(swizzle_a, major_a), Operand(swizzle_b, major_b))
        yield Wgmma(72, "e4m3", "e4m3", "f32", Operand(swizzle_a), Operand(swizzle_a))
        yield Wgmma(72, "tf32", "tf32", "f32", Operand(swizzle_a), Operand(swizzle_a))
    for offset in (32, 64, 96):  # the second to fourth K step of a 128-byte row
        yield Wgmma(32, "bf16", "bf16", "f32", Operand(128, offset=offset), Operand(128, offset=offset))
    yield Wgmma(32, "bf16", "bf16", "f32", Operand(64, offset=32), Operand(64, offset=32))
    for mn_major in (False, True):
        for leading, stride in ((512, 128), (128, 512), (1024, 256), (2048, 1024), (1024, 2048)):
            swizzles = (0,) if leading < 1024 or stride < 1024 else (0, 32, 64, 128)
            for swizzle in swizzles:
                yield Wgmma(64, "f16", "f16", "f32", Operand(swizzle, mn_major, leading, stride), Operand(128))
                yield Wgmma(32, "f16", "f16", "f32", Operand(128), Operand(swizzle, mn_major, leading, stride))


def modes() -> Iterator[Wgmma]:
    for scales in ((-1, 1), (1, -1), (-1, -1)):
        yield Wgmma(16, "f16", "f16", "f32", scales=scales)
        yield Wgmma(16, "tf32", "tf32", "f32", scales=scales)
    yield Wgmma(16, "f16", "f16", "f16", scales=(-1, 1))
    for a, acc in (("bf16", "f32"), ("f16", "f16"), ("e4m3", "f32"), ("tf32", "f32"), ("s8", "s32")):
        yield Wgmma(16, a, a, acc, use_acc=False)
        yield Wgmma(16, a, a, acc, repeat=4)
    for a, acc in (("bf16", "f32"), ("f16", "f32"), ("f16", "f16"), ("e4m3", "f32"), ("e5m2", "f32"), ("e5m2", "f16"), ("tf32", "f32")):
        for values in ("special", "wide"):
            yield Wgmma(16, a, a, acc, values=values)
            yield Wgmma(16, a, a, acc, values=values, tile_a=None)


def cases() -> Iterator[Case]:
    for group in (shapes, register_operands, layouts, modes):
        for w in group():
            yield case(w)
