"""Every rung of the LoRA kernels by itself, on fixed shapes: kernels_cu/README.md has their times.

A rung is timed alone, shrink or expand, where the other rows of `bench kernels` have both; its error is that of the
whole projection with this rung in it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import cupy

from slora_ref.bench.kernels.cases import LoraCase, distinct, floor_us, prefill, zipf
from slora_ref.bench.kernels.lora import LoraProjection
from slora_ref.bench.kernels.timing import Graph
from slora_ref.ops.cuda_kernels import CudaKernels
from slora_ref.ops.ladder import ladder

Row = dict[str, Any]
REPEATS = 5  # the first rungs take their time
SHARED = LoraCase("shared", (8,) * 32, (64,) * 32)  # 8 rows an adapter
LADDERS = {"mbgmv": (distinct(64, 64), distinct(64, 8)), "mbgmm": (SHARED, prefill(64)), "lora": (zipf(256, 64),)}


def measure_ladders(pool: Any, kernels: CudaKernels, say: Callable[[str], None]) -> list[Row]:
    """A row for each operation and shape, with the microseconds of all rungs."""
    rows = []
    for kind, cases in LADDERS.items():
        for operation in (f"{kind}_shrink", f"{kind}_expand"):
            for case in cases:
                rows.append(_row(operation, case, pool, kernels))
                times = ", ".join(f"{us:.1f}" for us in rows[-1]["rungs"].values())
                say(f"{operation:14} {case.rows:5} rows: {times} us, error {rows[-1]['rel_error']:.1e}")
    return rows


def _row(operation: str, case: LoraCase, pool: Any, kernels: CudaKernels) -> Row:
    """The row; its `us` is the time of the fastest rung."""
    times, error = {}, 0.0
    for kernel in ladder(operation, case.dtype):
        projection = LoraProjection(case, pool, kernels, {operation: kernel})
        projection.launch_all()  # compiles; and t is there for an expand by itself
        error = max(error, projection.error_of(projection.launch_all))
        graph = Graph(partial(projection.launch_all, operation), projection.count)
        times[kernel] = graph.median_us(REPEATS)
        count = projection.count
        del projection, graph
        cupy.get_default_memory_pool().free_all_blocks()
    nbytes, us = case.shrink_bytes if operation.endswith("shrink") else case.expand_bytes, min(times.values())
    moved = {"bytes": nbytes, "floor_us": floor_us(nbytes), "fraction": floor_us(nbytes) / us}
    measured = {"us": us, "rel_error": error, "launches_rotated": count, "baselines": {}, "rungs": times}
    return case.describe() | moved | measured | {"operation": operation}
