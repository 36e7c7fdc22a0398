"""CudaKernels: compiles the .cu files with NVRTC through CuPy and launches them on the current stream.

Every argument is checked and packed once; then a launch is one call of the driver, which allocates nothing and waits
for nothing. It is cuLaunchKernelEx, for which CuPy has no call: on sm_90 a kernel that begins with wait_for_previous()
may start before the kernel before it has ended (programmatic dependent launch).
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
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
        self._coming: dict[tuple[str, str], Future[Any]] = {}
        self._driver = ctypes.CDLL("libcuda.so.1")

    def compile_ahead(self, kernels: Iterable[tuple[str, Any]]) -> None:
        """Starts to compile kernels, each for a dtype, on a thread for each core: NVRTC lets other threads run."""
        compilers = ThreadPoolExecutor(len(os.sched_getaffinity(0)), thread_name_prefix="compiler")
        for kernel, dtype in kernels:
            self._coming[kernel, np.dtype(dtype).name] = compilers.submit(self._compile, kernel, dtype)
        compilers.shutdown(wait=False)  # the threads end with their work

    def function(self, kernel: str, dtype: Any) -> Any:
        """A kernel, compiled when first used; waits for the thread that compiles it ahead, if there is one."""
        key = (kernel, np.dtype(dtype).name)
        if key not in self._functions:
            coming = self._coming.pop(key, None)
            self._functions[key] = self._compile(kernel, dtype) if coming is None else coming.result()
        return self._functions[key]

    def _compile(self, kernel: str, dtype: Any) -> Any:
        """CuPy keeps the machine code in a folder of its own, by source, options and architecture."""
        options = ("--std=c++17", f"-D{dtype_macro(dtype)}")
        with self.device:
            module = cupy.RawModule(code=whole_source(kernel, self.folder), options=options, backend="nvrtc")
            return module.get_function(kernel)

    def run(self, launch: Launch) -> None:
        """Launches on the current stream, once."""
        self.prepare(launch)()

    def prepare(self, launch: Launch) -> Callable[[], None]:
        """Checks and packs a launch; what comes back starts it, on the stream that is current now, and checks no more.

        Raises:
            KernelError: an argument does not fit, or (when it is called) the driver refuses the launch.
        """
        for name, value in launch.arguments.items():
            self._check(name, value)
        if 0 in launch.grid:
            return _nothing
        function = self.function(launch.kernel, launch.dtype)
        if launch.shared > PLAIN_SHARED and function.max_dynamic_shared_size_bytes < launch.shared:
            function.max_dynamic_shared_size_bytes = launch.shared
        values = [_ctype(value) for value in launch.arguments.values()]
        pointers = (ctypes.c_void_p * len(values))(*[ctypes.addressof(value) for value in values])
        config = _config(launch, early=launch.after_start and self.early_start)
        handle = ctypes.c_void_p(function.kernel.ptr)
        start = partial(self._driver.cuLaunchKernelEx, ctypes.byref(config), handle, pointers, None)

        def run(keep: tuple[Any, ...] = (launch, values)) -> None:
            failed = start()
            if failed:
                raise KernelError(f"{launch.kernel}: the driver refuses the launch with error {failed}")

        return run

    def _check(self, name: str, value: Any) -> None:
        if value is None or isinstance(value, np.generic):
            return
        if isinstance(value, np.ndarray):
            if not is_pinned(value):
                raise KernelError(f"argument {name}: is in pageable host memory; put it on the GPU, or pin it")
            address = value.ctypes.data
        elif value.device.id != self.device.id:
            raise KernelError(f"argument {name}: is on device {value.device.id}, the kernels on {self.device.id}")
        else:
            address = value.data.ptr
        if address % ALIGNMENT:
            raise KernelError(f"argument {name}: starts at {address:#x}, not at a multiple of {ALIGNMENT} bytes")


def is_pinned(array: np.ndarray[Any, Any]) -> bool:
    """Whether a kernel can read this NumPy array over the link."""
    return bool(cupy.cuda.runtime.pointerGetAttributes(array.ctypes.data).type == HOST_MEMORY)


def _nothing() -> None:
    """A launch of no blocks."""


def _config(launch: Launch, early: bool) -> _Config:
    """The launch's sizes, and the one attribute that CuPy cannot give it."""
    return _Config(
        grid=launch.grid,
        block=(launch.threads, 1, 1),
        shared=launch.shared,
        stream=cupy.cuda.get_current_stream().ptr,
        attributes=ctypes.pointer(_Attribute(id=SERIALIZATION, value=1)),
        count=int(early),
    )


def _ctype(value: Any) -> Any:
    """An argument as the driver takes it."""
    if isinstance(value, np.generic):
        return SCALARS[value.dtype.name](value.item())
    if value is None:
        return ctypes.c_void_p(0)
    return ctypes.c_void_p(value.ctypes.data if isinstance(value, np.ndarray) else value.data.ptr)
