"""What a measurement must carry to mean anything: the machine and the versions."""

from __future__ import annotations

import os
import platform
import time
from pathlib import Path
from typing import Any

import numpy as np


def machine_facts(gpu: bool = False) -> dict[str, Any]:
    """The fields `machine` of every result; GPU fields are null where no GPU took part."""
    return {
        **(_gpu() if gpu else dict.fromkeys(("gpu", "driver", "cuda", "cupy"))),
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "numpy": np.__version__,
    }


def _gpu() -> dict[str, Any]:
    """The current device, and the versions that CuPy works with."""
    import cupy

    runtime = cupy.cuda.runtime
    return {
        "gpu": runtime.getDeviceProperties(cupy.cuda.Device().id)["name"].decode(),
        "driver": runtime.driverGetVersion(),
        "cuda": runtime.runtimeGetVersion(),
        "cupy": cupy.__version__,
    }


def copy_gb_s(bytes_copied: int = 4_000_000_000, repeats: int = 10) -> float:
    """GB/s of a copy within the current device, bytes read and written counted; the best of `repeats`."""
    import cupy

    source, target = (cupy.ones(bytes_copied, np.uint8) for _ in range(2))
    best = 0.0
    for _ in range(repeats):
        start, end = cupy.cuda.Event(), cupy.cuda.Event()
        start.record()
        target[...] = source
        end.record()
        end.synchronize()
        best = max(best, 2 * bytes_copied / cupy.cuda.get_elapsed_time(start, end) / 1e6)
    return best


def link_gb_s(gpu: bool, nbytes: int = 1 << 28, repeats: int = 8) -> float:
    """GB/s of one large copy from host memory to where the pool is, bytes counted once; the best of `repeats`.

    On a GPU this is the link's peak, from pinned memory; on the CPU it is a copy within main memory.
    """
    if not gpu:
        return max(_host_copy_gb_s(nbytes) for _ in range(repeats))
    import cupy
    import cupyx

    source, target = cupyx.zeros_pinned(nbytes, np.uint8), cupy.zeros(nbytes, np.uint8)
    best = 0.0
    for _ in range(repeats):
        start, end = cupy.cuda.Event(), cupy.cuda.Event()
        start.record()
        target.set(source)
        end.record()
        end.synchronize()
        best = max(best, nbytes / cupy.cuda.get_elapsed_time(start, end) / 1e6)
    return best


def _host_copy_gb_s(nbytes: int) -> float:
    source, target = np.ones(nbytes, np.uint8), np.ones(nbytes, np.uint8)
    started = time.perf_counter()
    target[...] = source
    return nbytes / (time.perf_counter() - started) / 1e9


def matmul_tflops(size: int = 8192, repeats: int = 10) -> float:
    """TFLOP/s of a product of two float16 matrices by cuBLAS, on random numbers; the best of `repeats`."""
    import cupy

    random = cupy.random.default_rng(0)
    left, right = (random.standard_normal((size, size), dtype=np.float32).astype(np.float16) for _ in range(2))
    best = 0.0
    for _ in range(repeats):
        start, end = cupy.cuda.Event(), cupy.cuda.Event()
        start.record()
        cupy.matmul(left, right)
        end.record()
        end.synchronize()
        best = max(best, 2 * size**3 / cupy.cuda.get_elapsed_time(start, end) / 1e9)
    return best


def _cpu() -> str:
    """The processor's name, from Linux where it tells."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or "unknown"
