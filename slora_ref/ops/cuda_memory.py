"""The GPU's memory, and host memory that it reads: copies to it, what is left of it, pinned memory, random numbers."""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import cupy
import ml_dtypes
import numpy as np

from slora_ref.shapes import Array

BLOCK = 1 << 26  # random numbers drawn at once
PORTABLE_AND_MAPPED = 3  # cudaHostRegisterPortable | cudaHostRegisterMapped: for all GPUs, and for kernels


def use_gpu(index: int) -> None:
    """From here on this thread works on this GPU of the host; counted from 0 again where there are fewer."""
    cupy.cuda.Device(index % cupy.cuda.runtime.getDeviceCount()).use()


def to_device(array: Array) -> Array:
    """A copy on the current device."""
    copied: Array = cupy.asarray(array)
    return copied


def to_host(array: Array) -> Array:
    """A copy in host memory."""
    copied: Array = cupy.asnumpy(array)
    return copied


def empty(shape: tuple[int, ...], dtype: Any) -> Array:
    """An array on the device, or MemoryError."""
    try:
        return cupy.empty(shape, dtype)
    except cupy.cuda.memory.OutOfMemoryError as error:
        raise MemoryError(str(error)) from None


def pinned_bytes(nbytes: int) -> Array:
    """Host memory that a kernel can read over the link, or MemoryError.

    All cores touch its pages before it is registered: the driver would do that on one, in a second for some GB.
    """
    try:
        memory = mmap.mmap(-1, nbytes)
        with contextlib.suppress(OSError):  # a system without large pages
            memory.madvise(mmap.MADV_HUGEPAGE)
        pinned = np.frombuffer(memory, np.uint8)
        _touch(pinned)
        cupy.cuda.runtime.hostRegister(pinned.ctypes.data, nbytes, PORTABLE_AND_MAPPED)
    except (OSError, cupy.cuda.runtime.CUDARuntimeError) as error:
        raise MemoryError(str(error)) from None
    weakref.finalize(pinned, cupy.cuda.runtime.hostUnregister, pinned.ctypes.data).atexit = False
    return pinned


def _touch(memory: Array) -> None:
    """Has the system back every page, from all cores."""
    cores = len(os.sched_getaffinity(0))
    with ThreadPoolExecutor(cores) as threads:
        for _ in threads.map(lambda part: part[:: mmap.PAGESIZE].fill(0), np.array_split(memory, cores)):
            pass


def use_own_stream() -> Any:
    """From here on this thread works on a new stream, so that nothing waits for what others do on the default one.

    Returns:
        The stream: CuPy forgets it, and goes back to the default one, when nobody holds it any more.
    """
    return cupy.cuda.Stream(non_blocking=True).use()


def total_bytes() -> int:
    """Memory of the device."""
    return int(cupy.cuda.runtime.memGetInfo()[1])


def used_bytes() -> int:
    """What is taken of it, by this process and others; blocks that CuPy keeps for reuse are given back first."""
    cupy.get_default_memory_pool().free_all_blocks()
    free, total = cupy.cuda.runtime.memGetInfo()
    return int(total - free)


def kernels_kept() -> int:
    """Kernels whose machine code lies in the folder where CuPy keeps it."""
    folder = Path(os.environ.get("CUPY_CACHE_DIR") or Path.home() / ".cupy" / "kernel_cache")
    return sum(1 for _ in folder.glob("*.cubin"))


class Normals:
    """Normal numbers from a seed, made on the device.

    Args:
        dtype: of the arrays.
    """

    def __init__(self, seed: int, dtype: Any) -> None:
        self._random, self._dtype = cupy.random.default_rng(seed), np.dtype(dtype)

    def draw(self, shape: tuple[int, ...], sd: float, mean: float = 0.0) -> Array:
        """Numbers of this standard deviation and mean, drawn in blocks, so that a large array needs no second one."""
        out = cupy.empty(math.prod(shape), self._dtype)
        for start in range(0, out.size, BLOCK):
            part = out[start : start + BLOCK]
            numbers = self._random.standard_normal(part.size, dtype=np.float32)
            copy_rounded(numbers * np.float32(sd) + np.float32(mean), part)
        return out.reshape(shape)

    def norm(self, width: int) -> Array:
        """A norm's weight: 1 and a little noise."""
        return self.draw((width,), 0.1, mean=1.0)


def copy_rounded(values: Any, out: Any) -> None:
    """float32 numbers into any of the dtypes of storage; CuPy rounds to bfloat16 by no means of its own."""
    if out.dtype == ml_dtypes.bfloat16:
        bits = values.view(np.uint32)
        out.view(np.uint16)[...] = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
    else:
        out[...] = values


def to_float32(array: Any) -> Any:
    """Exact, from any of the dtypes of storage."""
    if array.dtype == ml_dtypes.bfloat16:
        return (array.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.float32)
