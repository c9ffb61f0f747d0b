"""The few calls of the CUDA driver that a launch needs, through ctypes: load a module, describe a tensor for TMA, launch.

Names, argument order and enumeration values: CUDA Driver API, sections Module Management, Tensor Map Object Management, Execution Control.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence

DTYPES = {"float8_e4m3fn": 0, "float8_e5m2": 0, "float16": 6, "bfloat16": 9}  # CUtensorMapDataType; 8 bits as UINT8
TENSOR_MAP_BYTES = 128
TENSOR_MAP_ALIGN = 64
_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_CLUSTER_DIMENSION = 4  # CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
_L2_PROMOTION_128B = 2  # CUtensorMapL2promotion
_FREE_SHARED_BYTES = 48 * 1024  # without opting in


class CudaError(RuntimeError):
    """A driver call failed; the message names it and the driver's words."""


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _check(status: int, call: str) -> None:
    if status:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(status, ctypes.byref(text))
        raise CudaError(f"{call} failed with {status}: {(text.value or b'unknown error').decode()}")


def load_function(cubin: bytes, name: str, shared_bytes: int) -> int:
    """Handle of a kernel in the current context."""
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    _check(_driver().cuModuleLoadData(ctypes.byref(module), cubin), "cuModuleLoadData")
    _check(_driver().cuModuleGetFunction(ctypes.byref(function), module, name.encode()), "cuModuleGetFunction")
    if shared_bytes > _FREE_SHARED_BYTES:
        _check(_driver().cuFuncSetAttribute(function, _MAX_DYNAMIC_SHARED, ctypes.c_int(shared_bytes)), "cuFuncSetAttribute")
    return function.value or 0


def tensor_map(dtype: str, address: int, shape: Sequence[int], strides: Sequence[int], box: Sequence[int], swizzle: int) -> bytes:
    """A TMA descriptor. ``shape`` and ``box`` run from the innermost dimension out, ``strides`` (bytes) from the second one out."""
    rank = len(shape)
    out = ctypes.create_string_buffer(TENSOR_MAP_BYTES + TENSOR_MAP_ALIGN)
    aligned = -(-ctypes.addressof(out) // TENSOR_MAP_ALIGN) * TENSOR_MAP_ALIGN
    status = _driver().cuTensorMapEncodeTiled(
        ctypes.c_void_p(aligned), DTYPES[dtype], rank, ctypes.c_void_p(address), (ctypes.c_uint64 * rank)(*shape),
        (ctypes.c_uint64 * (rank - 1))(*strides), (ctypes.c_uint32 * rank)(*box), (ctypes.c_uint32 * rank)(*[1] * rank),
        0, swizzle, _L2_PROMOTION_128B, 0,
    )  # fmt: skip
    if status:
        raise CudaError(f"cuTensorMapEncodeTiled failed with {status}: shape {shape}, strides {strides} bytes, box {box}, {dtype}")
    return ctypes.string_at(aligned, TENSOR_MAP_BYTES)


class _Config(ctypes.Structure):
    """CUlaunchConfig (CUDA Driver API, Data types)."""

    _fields_ = (
        *((f"{what}Dim{axis}", ctypes.c_uint) for what in ("grid", "block") for axis in "XYZ"),
        ("sharedMemBytes", ctypes.c_uint),
        ("hStream", ctypes.c_void_p),
        ("attrs", ctypes.c_void_p),
        ("numAttrs", ctypes.c_uint),
    )


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute with a cluster's size (CUDA Driver API, Data types: id, 4 bytes of padding, a union of 64)."""

    _fields_ = (("id", ctypes.c_uint), ("pad", ctypes.c_uint), ("size", ctypes.c_uint * 3), ("rest", ctypes.c_uint * 13))


class Launch:
    """Launches of one function whose parameters lie in one place; all but grid and stream is laid out once.

    Args:
        function: handle of ``load_function``.
        threads: of a CTA.
        cluster: CTAs of a cluster.
        shared_bytes: dynamic shared memory of a CTA.
        params: addresses of the parameters, which are read during each call.
    """

    def __init__(self, function: int, threads: int, cluster: int, shared_bytes: int, params: ctypes.Array[ctypes.c_void_p]) -> None:
        self._config = _Config(1, 1, 1, threads, 1, 1, shared_bytes, None, None, 0)
        if cluster > 1:
            self._attribute = _Attribute(_CLUSTER_DIMENSION, 0, (cluster, 1, 1))
            self._config.attrs = ctypes.addressof(self._attribute)
            self._config.numAttrs = 1
        self._arguments = (ctypes.byref(self._config), ctypes.c_void_p(function), params, None)
        self._call = _driver().cuLaunchKernelEx

    def __call__(self, grid: int, stream: int) -> None:
        """``grid`` CTAs on a stream, given by its handle."""
        self._config.gridDimX = grid
        self._config.hStream = stream
        status = self._call(*self._arguments)
        if status:
            _check(status, "cuLaunchKernelEx")
