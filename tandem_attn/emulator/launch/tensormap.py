"""TMA descriptors. PTX manual, "Tensors: Tensor Dimension, Size and Format; Tiled Mode; Swizzling Modes" and "tensormap.replace".

The 128 bytes of a descriptor are opaque to a kernel, so they are laid out here as suits the emulator; `tensormap.replace` writes the same
fields. Offsets: magic 0, address 8, rank 16, element type 17, interleave 18, swizzle 19, fill 20, atomicity 21, im2col 22, box 24
(5 x u32), dims 44 (5 x u32), element strides 64 (5 x u32), strides in bytes 88 (4 x u64, of dims 1 .. 4). In im2col mode the box is
channels per pixel, pixels per column, and for W, H and D the lower and upper corner of the bounding box (2 x i16).
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tandem_attn.emulator.errors import LaunchError
from tandem_attn.emulator.launch.tensors import address, element_size, shape_strides
from tandem_attn.emulator.memory.faults import Fault

MAGIC = b"TMAP"
SIZE = 128
ADDRESS, RANK, ELEMENT, INTERLEAVE, SWIZZLE, FILL, ATOMICITY, IM2COL = 8, 16, 17, 18, 19, 20, 21, 22
BOX, DIMS, STEPS, STRIDES = 24, 44, 64, 88

# Element types by number (PTX manual, "tensormap.replace", .elemtype; the driver API's enumeration differs from 8 to 10): name and bytes.
ELEMENTS: tuple[tuple[str, int], ...] = (
    ("u8", 1), ("u16", 2), ("u32", 4), ("s32", 4), ("u64", 8), ("s64", 8), ("f16", 2), ("f32", 4), ("f32", 4), ("f64", 8),
    ("bf16", 2), ("tf32", 4), ("tf32", 4), ("b4x16", 1), ("b4x16p64", 1), ("b6p2x16", 1),
)  # fmt: skip
_TF32 = 11
# CUtensorMapSwizzle -> bytes of the swizzle's span; 4 .. 6 are the 128-byte modes with other atoms.
SWIZZLE_BYTES = {0: 0, 1: 32, 2: 64, 3: 128, 4: 128, 5: 128, 6: 128}
_NAN_TYPES = frozenset(("f16", "f32", "bf16", "f64", "tf32"))


@dataclass(frozen=True, slots=True)
class TensorMap:
    """A decoded descriptor. `dims`, `box` and `steps` are innermost first; `strides` are bytes of dims 1 and up.

    In im2col mode the box is (channels per pixel, pixels per column), and `corners` are the lower and upper ones of W, H and D.
    """

    address: int
    element: str
    size: int
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    steps: tuple[int, ...]
    swizzle: int
    interleave: int
    nan_fill: bool
    corners: tuple[tuple[int, int], ...] = ()

    @property
    def rank(self) -> int:
        return len(self.dims)


@dataclass(frozen=True, slots=True)
class TensorDescriptor:
    """What a TMA descriptor is made from: a tensor, or a view of one, and the block that one copy moves (outermost dimension first).

    swizzle is in bytes (0, 32, 64, 128); None lets the kernel's metadata decide. padding is "zero" or "nan". offset: bytes from the
    tensor's first element to the element at coordinates 0, which may lie before or behind the tensor; only what a copy touches must not.
    With corners it is a descriptor for im2col mode: a tensor (N, [D,] [H,] W, C), block_shape is [pixels per column, channels per pixel].
    """

    base: Any
    shape: Sequence[int]
    strides: Sequence[int]
    block_shape: Sequence[int]
    padding: str = "zero"
    swizzle: int | None = None
    offset: int = 0
    pixel_box_lower_corner: Sequence[int] | None = None  # im2col mode, with the two below as Triton's TensorDescriptorIm2Col has them
    pixel_box_upper_corner: Sequence[int] | None = None
    element_strides: Sequence[int] | None = None

    @classmethod
    def of(cls, tensor: Any, block_shape: Sequence[int], **options: Any) -> TensorDescriptor:
        """The descriptor of a whole tensor."""
        shape, strides = shape_strides(tensor)
        return cls(tensor, shape, strides, list(block_shape), **options)


def encode(
    base: int, element: int, shape: Sequence[int], strides: Sequence[int], box: Sequence[int], swizzle: int, nan_fill: bool = False
) -> bytes:
    """The 128 bytes. Shape, strides (bytes) and box are outermost first; `element` and `swizzle` are the manual's numbers.

    Raises LaunchError for what the driver refuses: rank, alignment of address and strides, box over 256, inner box over the swizzle span.
    """
    rank = len(shape)
    size = ELEMENTS[element][1]
    checks = (
        (1 <= rank <= 5, f"rank {rank} is not in 1 .. 5"),
        (len(strides) == rank and len(box) == rank, "shape, strides and box differ in rank"),
        (base % 16 == 0, f"address {base:#x} is not a multiple of 16"),
        (all(1 <= n <= 256 for n in box), f"box {list(box)} has a dimension outside 1 .. 256"),
        (all(n >= 1 for n in shape), f"shape {list(shape)} has an empty dimension"),
        (all(s % 16 == 0 for s in strides[:-1]), f"strides {list(strides)} (bytes) are not multiples of 16"),
        (strides[-1:] == [size] or tuple(strides[-1:]) == (size,), f"the innermost stride is {strides[-1]} bytes, not {size}"),
        (not swizzle or box[-1] * size <= SWIZZLE_BYTES[swizzle], f"inner box of {box[-1] * size} bytes exceeds the swizzle span"),
    )
    for good, why in checks:
        if not good:
            raise LaunchError(f"tensor descriptor: {why}")
    out = bytearray(SIZE)
    out[:4] = MAGIC
    struct.pack_into("<QBBBBB", out, ADDRESS, base, rank, element, 0, swizzle, int(nan_fill))
    pad = [1] * (5 - rank)
    struct.pack_into("<5I", out, BOX, *reversed(box), *pad)
    struct.pack_into("<5I", out, DIMS, *reversed(shape), *pad)
    struct.pack_into("<5I", out, STEPS, *[1] * 5)
    struct.pack_into("<4Q", out, STRIDES, *list(reversed(strides))[1:], *[0] * (5 - rank))
    return bytes(out)


def decode(raw: bytes) -> TensorMap:
    """Bytes -> descriptor. Raises Fault for bytes that are none."""
    if raw[:4] != MAGIC:
        raise Fault("undefined", "the address of a tensor map does not hold one")
    (base, rank, element, interleave, swizzle, fill) = struct.unpack_from("<QBBBBB", raw, ADDRESS)
    box, dims, steps = (struct.unpack_from("<5I", raw, at)[:rank] for at in (BOX, DIMS, STEPS))
    strides = struct.unpack_from("<4Q", raw, STRIDES)[: rank - 1]
    name, size = ELEMENTS[element]
    corners: tuple[tuple[int, int], ...] = ()
    if raw[IM2COL]:
        corners = tuple(struct.iter_unpack("<hh", raw[BOX + 8 : BOX + 8 + 4 * (rank - 2)]))
        box = box[:2]
    return TensorMap(base, name, size, dims, strides, box, steps, swizzle, interleave, bool(fill) and name in _NAN_TYPES, corners)


def encode_im2col(
    base: int, element: int, shape: Sequence[int], strides: Sequence[int], box: Sequence[int], swizzle: int, nan_fill: bool,
    lower: Sequence[int], upper: Sequence[int], steps: Sequence[int] | None = None,
) -> bytes:  # fmt: skip
    """The 128 bytes of a descriptor for im2col mode (driver API, cuTensorMapEncodeIm2col).

    Shape, strides (bytes), corners and steps are outermost first: (N, [D,] [H,] W, C) and ([D,] [H,] W); box is [pixels per column,
    channels per pixel]. Raises LaunchError for what the driver refuses.
    """
    rank = len(shape)
    limit = {3: 1 << 15, 4: 1 << 7, 5: 1 << 4}.get(rank)
    if limit is None:
        raise LaunchError(f"tensor descriptor: rank {rank} in im2col mode, not 3 .. 5")
    corners = [*lower, *upper]
    if len(lower) != rank - 2 or len(upper) != rank - 2 or any(not -limit <= c < limit for c in corners):
        raise LaunchError(f"tensor descriptor: im2col corners {list(lower)}, {list(upper)} of rank {rank}, each in {-limit} .. {limit - 1}")
    pixels, channels = box
    if not (1 <= pixels <= 1024 and 1 <= channels <= 256):
        raise LaunchError(f"tensor descriptor: {pixels} pixels per column (at most 1024), {channels} channels per pixel (at most 256)")
    raw = bytearray(encode(base, element, shape, strides, [1] * (rank - 1) + [channels], swizzle, nan_fill))
    raw[IM2COL] = 1
    struct.pack_into("<II", raw, BOX, channels, pixels)
    for i, pair in enumerate(zip(reversed(lower), reversed(upper), strict=True)):
        struct.pack_into("<hh", raw, BOX + 8 + 4 * i, *pair)
    struct.pack_into(f"<{rank}I", raw, STEPS, *reversed(steps if steps is not None else [1] * rank))
    return bytes(raw)


# Element types by name, for descriptors made from tensors.
_BY_DTYPE = {
    "float16": 6,
    "float32": 7,
    "float64": 9,
    "bfloat16": 10,
    "uint8": 0,
    "int8": 0,
    "uint16": 1,
    "int16": 1,
    "uint32": 2,
    "int32": 3,
}
_BY_DTYPE |= {"uint64": 4, "int64": 5, "float8_e4m3fn": 0, "float8_e5m2": 0, "bool": 0}


def element_of(tensor: Any) -> int:
    """The number of a tensor's element type."""
    name = str(tensor.dtype).rsplit(".", 1)[-1]
    if name not in _BY_DTYPE:
        raise LaunchError(f"tensor descriptor: element type {tensor.dtype} is not supported")
    return _BY_DTYPE[name]


def from_descriptor(descriptor: Any, meta: dict[str, Any] | None = None) -> bytes:
    """The bytes for a TensorDescriptor, ours or Triton's; `meta` is the compiled kernel's record of it (block, swizzle, element type)."""
    tensor = descriptor.base
    size = element_size(tensor)
    shape, strides = [int(n) for n in descriptor.shape], [int(s) * size for s in descriptor.strides]
    element = element_of(tensor)
    box = [int(n) for n in descriptor.block_shape]
    swizzle = {0: 0, 32: 1, 64: 2, 128: 3}[getattr(descriptor, "swizzle", None) or 0]
    if meta is not None:
        element, box, swizzle = int(meta["elem_type"]), [int(n) for n in meta["block_size"]], int(meta["swizzle"])
        if meta.get("fp4_padded"):
            shape[-1] *= 2
            if ELEMENTS[element][0] == "b4x16p64":
                size = 1
        if ELEMENTS[element][1] != size:
            raise LaunchError(f"tensor descriptor: elements of {size} bytes where the kernel was compiled for {ELEMENTS[element][0]}")
    if getattr(descriptor, "round_f32_to_tf32", False):  # Triton's, of float32 tensors
        element = _TF32
    origin = address(tensor) + getattr(descriptor, "offset", 0)
    nan = getattr(descriptor, "padding", "zero") == "nan"
    lower, upper = (getattr(descriptor, f"pixel_box_{name}_corner", None) for name in ("lower", "upper"))
    if lower is not None and upper is not None:
        steps = getattr(descriptor, "element_strides", None)
        return encode_im2col(origin, element, shape, strides, box, swizzle, nan, lower, upper, steps)
    return encode(origin, element, shape, strides, box, swizzle, nan)
