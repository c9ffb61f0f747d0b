"""The few calls of the CUDA driver API that launching a micro kernel needs, by ctypes: no CUDA toolkit, no torch.

Enumeration values are those of cuda.h (CUDA 12 and 13).
"""

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np

from tests.emulator.ptx.case import Case, TensorMap

ARENA_BYTES = 256 << 20
ALIGNMENT = 1024
MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
NON_PORTABLE_CLUSTER = 14  # CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
CLUSTER_DIMENSION = 4  # CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
ERROR_LOG_BUFFER, ERROR_LOG_SIZE = 5, 6  # CU_JIT_ERROR_LOG_BUFFER, ..._SIZE_BYTES
DATA_TYPES = ("u8", "u16", "u32", "s32", "u64", "s64", "f16", "f32", "f64", "bf16", "f32_ftz", "tf32", "tf32_ftz")
SWIZZLES = {0: 0, 32: 1, 64: 2, 128: 3}
INTERLEAVES = {0: 0, 16: 1, 32: 2}


class CudaError(RuntimeError):
    """A driver call failed; the context may be unusable."""


class LaunchAttribute(ctypes.Structure):
    """CUlaunchAttribute with its cluster dimensions member."""

    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_char * 4), ("dims", ctypes.c_uint * 3), ("rest", ctypes.c_char * 52))


class LaunchConfig(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(LaunchAttribute)),
        ("attribute_count", ctypes.c_uint),
    )


class Device:
    """GPU 0 with one arena of device memory in which each launch places its buffers anew."""

    def __init__(self) -> None:
        self.cuda = ctypes.CDLL("libcuda.so.1")
        self.call("cuInit", 0)
        self.device = ctypes.c_int()
        self.call("cuDeviceGet", ctypes.byref(self.device), 0)
        context = ctypes.c_void_p()
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), self.device)
        self.call("cuCtxSetCurrent", context)
        self.arena = ctypes.c_uint64()
        self.call("cuMemAlloc_v2", ctypes.byref(self.arena), ctypes.c_size_t(ARENA_BYTES))

    def call(self, name: str, *args: object) -> None:
        status = getattr(self.cuda, name)(*args)
        if status:
            text = ctypes.c_char_p()
            self.cuda.cuGetErrorName(status, ctypes.byref(text))
            raise CudaError(f"{name}: {(text.value or b'?').decode()} ({status})")

    def describe(self) -> dict[str, object]:
        name = ctypes.create_string_buffer(256)
        self.call("cuDeviceGetName", name, 256, self.device)
        version = ctypes.c_int()
        self.call("cuDriverGetVersion", ctypes.byref(version))
        attributes = {"major": 75, "minor": 76, "multiprocessors": 16, "clock_khz": 13}
        values = {}
        for key, attribute in attributes.items():
            value = ctypes.c_int()
            self.call("cuDeviceGetAttribute", ctypes.byref(value), attribute, self.device)
            values[key] = value.value
        return {"chip": name.value.decode(), "cuda_version": version.value, **values}

    def launch(self, case: Case, times: int = 1) -> list[np.ndarray]:
        """Run the case on fresh buffers so many times; what each run left in "out"."""
        module, function = self._load(case)
        outputs = [self._run(case, function, case.make_buffers()) for _ in range(times)]
        self.call("cuModuleUnload", module)
        return outputs

    def _run(self, case: Case, function: ctypes.c_void_p, buffers: dict[str, np.ndarray]) -> np.ndarray:
        addresses = self._place(buffers)
        values: list[Any] = [ctypes.c_uint64(address) for address in addresses.values()]
        values += [self._encode(tensor_map, addresses) for tensor_map in case.maps]
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        self.call("cuLaunchKernelEx", ctypes.byref(_config(case)), function, pointers, None)
        self.call("cuCtxSynchronize")
        out = np.empty_like(buffers["out"])
        self.call("cuMemcpyDtoH_v2", out.ctypes.data_as(ctypes.c_void_p), ctypes.c_uint64(addresses["out"]), ctypes.c_size_t(out.nbytes))
        return out

    def _load(self, case: Case) -> tuple[ctypes.c_void_p, ctypes.c_void_p]:
        log = ctypes.create_string_buffer(4096)
        options = (ctypes.c_int * 2)(ERROR_LOG_BUFFER, ERROR_LOG_SIZE)
        values = (ctypes.c_void_p * 2)(ctypes.addressof(log), 4096)
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        try:
            self.call("cuModuleLoadDataEx", ctypes.byref(module), case.ptx.encode(), 2, options, values)
        except CudaError as error:
            raise CudaError(f"{error}: {log.value.decode(errors='replace')}") from None
        self.call("cuModuleGetFunction", ctypes.byref(function), module, b"kernel")
        if case.shared:
            self.call("cuFuncSetAttribute", function, MAX_DYNAMIC_SHARED, case.shared)
        if case.cluster > 8:  # the portable limit
            self.call("cuFuncSetAttribute", function, NON_PORTABLE_CLUSTER, 1)
        return module, function

    def _place(self, buffers: dict[str, np.ndarray]) -> dict[str, int]:
        addresses, offset = {}, 0
        for name, array in buffers.items():
            addresses[name] = self.arena.value + offset
            source = np.ascontiguousarray(array)
            pointer = source.ctypes.data_as(ctypes.c_void_p)
            self.call("cuMemcpyHtoD_v2", ctypes.c_uint64(addresses[name]), pointer, ctypes.c_size_t(source.nbytes))
            offset += -(-source.nbytes // ALIGNMENT) * ALIGNMENT
        if offset > ARENA_BYTES:
            raise CudaError(f"buffers of {offset} bytes do not fit the arena of {ARENA_BYTES}")
        return addresses

    def _encode(self, tensor_map: TensorMap, addresses: dict[str, int]) -> ctypes.Array:
        storage = ctypes.create_string_buffer(128 + 64)
        start = -ctypes.addressof(storage) % 64  # a CUtensorMap is 64-byte aligned
        aligned = (ctypes.c_char * 128).from_buffer(storage, start)
        rank = len(tensor_map.shape)
        self.call(
            "cuTensorMapEncodeTiled",
            aligned,
            DATA_TYPES.index(tensor_map.dtype),
            ctypes.c_uint32(rank),
            ctypes.c_void_p(addresses[tensor_map.buffer]),
            _array(ctypes.c_uint64, tensor_map.shape),
            _array(ctypes.c_uint64, tensor_map.strides or (0,)),
            _array(ctypes.c_uint32, tensor_map.box),
            _array(ctypes.c_uint32, tensor_map.steps),
            INTERLEAVES[tensor_map.interleave],
            SWIZZLES[tensor_map.swizzle],
            0,
            int(tensor_map.nan_fill),
        )
        return aligned


def _array(ctype: Any, values: Sequence[int]) -> ctypes.Array:
    return (ctype * len(values))(*values)


def _config(case: Case) -> LaunchConfig:
    config = LaunchConfig(grid=(case.grid, 1, 1), block=(case.threads, 1, 1), shared=case.shared)
    if case.cluster > 1:
        attribute = LaunchAttribute(id=CLUSTER_DIMENSION, dims=(case.cluster, 1, 1))
        config.attributes = ctypes.pointer(attribute)
        config.attribute_count = 1
    return config
