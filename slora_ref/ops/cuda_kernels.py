"""CudaKernels: compiles the .cu files with NVRTC through CuPy and launches them on the current stream.

Every argument is checked and packed once; then a launch is one call of the driver, which allocates nothing and waits
for nothing. How that is packed is in ops/cuda_call.py.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Hashable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import cupy
import numpy as np

from slora_ref.errors import KernelError
from slora_ref.ops.cuda_call import PackedCall, launch_config
from slora_ref.ops.kernel_source import dtype_macro, whole_source
from slora_ref.ops.launch import Launch
from slora_ref.ops.layouts import MOST_LAYOUTS, LaidOut

ALIGNMENT = 16  # bytes; what one vector load needs
PLAIN_SHARED = 48 << 10  # bytes of shared memory that a kernel may use without asking
HOST_MEMORY = 1  # cudaMemoryTypeHost: pinned


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
        self._calls: dict[Hashable, PackedCall] = {}
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
        if 0 in launch.grid:
            return _nothing
        call, arguments = self._call(launch), launch.arguments
        addresses = [self._address(name, arguments[name]) for name in call.arrays]
        return partial(_start, call.call, call.block(addresses), launch)

    def _call(self, launch: Launch) -> PackedCall:
        """The driver's call for a launch, and for all that differ from it in addresses alone."""
        stream = cupy.cuda.get_current_stream().ptr
        if not isinstance(launch.arguments, LaidOut):
            return self._pack(launch, stream)
        how = (launch.kernel, launch.dtype, launch.grid, launch.threads, launch.shared, launch.after_start)
        key = (*how, launch.arguments.layout, stream)
        call = self._calls.get(key)
        if call is None:
            if len(self._calls) == MOST_LAYOUTS:
                self._calls.clear()
            call = self._calls[key] = self._pack(launch, stream)
        return call

    def _pack(self, launch: Launch, stream: int) -> PackedCall:
        function = self.function(launch.kernel, launch.dtype)
        if launch.shared > PLAIN_SHARED and function.max_dynamic_shared_size_bytes < launch.shared:
            function.max_dynamic_shared_size_bytes = launch.shared
        config = launch_config(launch, stream, early=launch.after_start and self.early_start)
        handle = ctypes.c_void_p(function.kernel.ptr)
        return PackedCall(partial(self._driver.cuLaunchKernelEx, ctypes.byref(config), handle), launch.arguments)

    def _address(self, name: str, array: Any) -> int:
        """Where an array lies, if a kernel can take it."""
        if isinstance(array, np.ndarray):
            if not is_pinned(array):
                raise KernelError(f"argument {name}: is in pageable host memory; put it on the GPU, or pin it")
            address = array.ctypes.data
        elif array.data.device_id != self.device.id:
            raise KernelError(f"argument {name}: is on device {array.device.id}, the kernels on {self.device.id}")
        else:
            address = array.data.ptr
        if address % ALIGNMENT:
            raise KernelError(f"argument {name}: starts at {address:#x}, not at a multiple of {ALIGNMENT} bytes")
        return int(address)


def is_pinned(array: np.ndarray[Any, Any]) -> bool:
    """Whether a kernel can read this NumPy array over the link."""
    return bool(cupy.cuda.runtime.pointerGetAttributes(array.ctypes.data).type == HOST_MEMORY)


def _nothing() -> None:
    """A launch of no blocks."""


def _start(call: Callable[..., int], block: Any, launch: Launch) -> None:
    """Starts a launch, whose arrays stay where they are as long as this is kept."""
    failed = call(block, None)
    if failed:
        raise KernelError(f"{launch.kernel}: the driver refuses the launch with error {failed}")
