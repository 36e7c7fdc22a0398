"""CudaKernels: compiles the .cu files with NVRTC through CuPy and launches them on the current stream.

Every argument is checked before a launch. Launching allocates nothing and waits for nothing. On sm_90 a kernel that
begins with wait_for_previous() is launched by the driver's cuLaunchKernelEx, so that it may start before the kernel
before it has ended (programmatic dependent launch); CuPy has no call for that. Everywhere else it is a plain launch.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import cupy
import numpy as np

from slora_ref.errors import KernelError
from slora_ref.ops.kernel_source import dtype_macro, whole_source
from slora_ref.ops.launch import Launch

ALIGNMENT = 16  # bytes; what one vector load needs
PLAIN_SHARED = 48 << 10  # bytes of shared memory that a kernel may use without asking
SERIALIZATION = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
SCALARS: dict[str, Any] = {"int32": ctypes.c_int, "int64": ctypes.c_longlong, "float32": ctypes.c_float}
HOST_MEMORY = 1  # cudaMemoryTypeHost: pinned


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute: a number and a union of 64 bytes, of which one int is used."""

    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_int), ("rest", ctypes.c_int * 15))


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint),
    )


class CudaKernels:
    """The kernels of a folder on the current device.

    Args:
        folder: of the .cu files; default: the project's.
        early_start: use programmatic dependent launch where there is such; False: plain launches, to compare.
    """

    def __init__(self, folder: Path | None = None, early_start: bool = True) -> None:
        self.folder = folder
        self.device = cupy.cuda.Device()
        self.early_start = early_start and int(self.device.compute_capability) >= 90
        self._functions: dict[tuple[str, str], Any] = {}
        self._driver = ctypes.CDLL("libcuda.so.1") if self.early_start else None

    def function(self, kernel: str, dtype: Any) -> Any:
        """A kernel, compiled when first used; CuPy keeps the machine code in its own cache folder."""
        key = (kernel, np.dtype(dtype).name)
        if key not in self._functions:
            options = ("--std=c++17", f"-D{dtype_macro(dtype)}")
            module = cupy.RawModule(code=whole_source(kernel, self.folder), options=options, backend="nvrtc")
            self._functions[key] = module.get_function(kernel)
        return self._functions[key]

    def run(self, launch: Launch) -> None:
        """Launches on the current stream.

        Raises:
            KernelError: an argument does not fit, or the driver refuses the launch.
        """
        for name, value in launch.arguments.items():
            self._check(name, value)
        if 0 in launch.grid:
            return
        function = self.function(launch.kernel, launch.dtype)
        if launch.shared > PLAIN_SHARED and function.max_dynamic_shared_size_bytes < launch.shared:
            function.max_dynamic_shared_size_bytes = launch.shared
        if launch.after_start and self._driver is not None:
            self._run_early(launch, function)
        else:
            values = tuple(_pointer(value) for value in launch.arguments.values())
            function(launch.grid, (launch.threads,), values, shared_mem=launch.shared)

    def _check(self, name: str, value: Any) -> None:
        if value is None or isinstance(value, np.generic):
            return
        if isinstance(value, np.ndarray):
            kind = cupy.cuda.runtime.pointerGetAttributes(value.ctypes.data).type
            if kind != HOST_MEMORY:
                raise KernelError(f"argument {name}: is in pageable host memory; put it on the GPU, or pin it")
            address = value.ctypes.data
        elif value.device.id != self.device.id:
            raise KernelError(f"argument {name}: is on device {value.device.id}, the kernels on {self.device.id}")
        else:
            address = value.data.ptr
        if address % ALIGNMENT:
            raise KernelError(f"argument {name}: starts at {address:#x}, not at a multiple of {ALIGNMENT} bytes")

    def _run_early(self, launch: Launch, function: Any) -> None:
        """The launch with one attribute more than CuPy can give it."""
        values = [_ctype(value) for value in launch.arguments.values()]
        pointers = (ctypes.c_void_p * len(values))(*[ctypes.addressof(value) for value in values])
        attribute = _Attribute(id=SERIALIZATION, value=1)
        config = _Config(
            grid=launch.grid,
            block=(launch.threads, 1, 1),
            shared=launch.shared,
            stream=cupy.cuda.get_current_stream().ptr,
            attributes=ctypes.pointer(attribute),
            count=1,
        )
        handle = ctypes.c_void_p(function.kernel.ptr)
        assert self._driver is not None
        failed = self._driver.cuLaunchKernelEx(ctypes.byref(config), handle, pointers, None)
        if failed:
            raise KernelError(f"{launch.kernel}: the driver refuses the launch with error {failed}")


def _pointer(value: Any) -> Any:
    """An argument as CuPy takes it: pinned host memory and an absent array are addresses."""
    if value is None:
        return np.uintp(0)
    return np.uintp(value.ctypes.data) if isinstance(value, np.ndarray) else value


def _ctype(value: Any) -> Any:
    """An argument as the driver takes it."""
    if isinstance(value, np.generic):
        return SCALARS[value.dtype.name](value.item())
    if value is None:
        return ctypes.c_void_p(0)
    return ctypes.c_void_p(value.ctypes.data if isinstance(value, np.ndarray) else value.data.ptr)
