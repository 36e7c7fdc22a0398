"""Loading adapters on the GPU: load_pages from pinned host memory, against one plain copy over the same link."""

from __future__ import annotations

import statistics
from typing import Any

import cupy
import numpy as np

from slora_ref.bench.kernels.rows import ADAPTER_PAGES, LAYERS
from slora_ref.ops import row_arguments
from slora_ref.ops.cuda_kernels import CudaKernels
from slora_ref.ops.ladder import fastest, make_launch

ADAPTERS, REPEATS = 8, 10  # adapters of rank 8 in a measurement


def pinned(shape: tuple[int, ...]) -> Any:
    """float16 numbers in pinned host memory."""
    size = int(np.prod(shape))
    memory = cupy.cuda.alloc_pinned_memory(2 * size)
    array = np.frombuffer(memory, np.float16, size).reshape(shape)
    array[...] = np.random.default_rng(8).standard_normal(shape, dtype=np.float32)
    return array


def median_us(work: Any) -> float:
    """Median microseconds of `work` on a stream, by the device's clock."""
    times, stream = [], cupy.cuda.Stream(non_blocking=True)
    with stream:
        for _ in range(REPEATS):
            start, end = cupy.cuda.Event(), cupy.cuda.Event()
            start.record()
            work()
            end.record()
            end.synchronize()
            times.append(1e3 * cupy.cuda.get_elapsed_time(start, end))
    return statistics.median(times[2:])


def load_row(pool: Any, kernels: CudaKernels, rung: str | None = None) -> dict[str, Any]:
    """A row of the result: one adapter's pages in all layers, and the rate of the link."""
    width = 4096
    shape = (ADAPTERS, LAYERS, ADAPTER_PAGES, width)
    images = pinned(shape)
    layer_pages = 4 * ADAPTERS * ADAPTER_PAGES
    storage = pool[: LAYERS * layer_pages * width].reshape(LAYERS, layer_pages, width).view(np.float16)
    order = np.random.default_rng(9).permutation(layer_pages)[: ADAPTERS * ADAPTER_PAGES].astype(np.int32)
    ids = cupy.asarray(order.reshape(ADAPTERS, ADAPTER_PAGES))
    target = cupy.empty(shape, np.float16)

    def load() -> None:
        for image, pages in zip(images, ids, strict=True):
            arguments = row_arguments.load_pages(storage, image, pages)
            kernel = rung or fastest("load_pages", np.float16, arguments)
            kernels.run(make_launch(kernel, np.float16, arguments))

    def copy() -> None:
        target.data.copy_from_host_async(images.ctypes.data, images.nbytes)

    loaded, copied = median_us(load) / ADAPTERS, median_us(copy) / ADAPTERS
    wrong = int((storage[:, ids.ravel()].get() != images.transpose(1, 0, 2, 3).reshape(LAYERS, -1, width)).sum())
    size = images[0].nbytes
    return {
        "operation": "load_pages",
        "case": "adapter",
        "dtype": "float16",
        "rows": LAYERS * ADAPTER_PAGES,
        "bytes": size,
        "us": loaded,
        "floor_us": copied,
        "fraction": copied / loaded,
        "rel_error": float(wrong > 0),
        "gb_s": size / loaded / 1e3,
        "link_gb_s": size / copied / 1e3,
        "baselines": {"one_copy": copied},
    }
