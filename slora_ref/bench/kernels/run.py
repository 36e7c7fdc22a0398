"""All rows of `bench kernels`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cupy

from slora_ref.bench.kernels.cases import LoraCase, lora_cases
from slora_ref.bench.kernels.ladder import measure_ladders
from slora_ref.bench.kernels.library import Grouped, Padded
from slora_ref.bench.kernels.lora import LoraProjection, make_pool
from slora_ref.bench.kernels.others import measure_attention, measure_rows
from slora_ref.bench.kernels.timing import Graph
from slora_ref.ops.cuda_blas import Cublas
from slora_ref.ops.cuda_kernels import CudaKernels
from slora_ref.ops.kernel_source import DTYPES

Say = Callable[[str], None]
BASELINES: dict[str, type[Padded] | type[Grouped]] = {"cublas_batched_padded": Padded, "cublas_grouped": Grouped}


def bench_kernels(say: Say) -> list[dict[str, Any]]:
    """Shrink + expand of every case, beside two libraries; attention; the others. Errors are of the replayed graphs."""
    kernels, library, rows = CudaKernels(), Cublas(), []
    columns = f"{'us':>8} {'floor':>7} {'part':>5} {'error':>8}"
    say(f"{'case':12} {'rows':>5} {'adapters':>8} {'rank':>4} {columns}  library: padded, grouped")
    for dtype in ("float16", "bfloat16"):
        pool = make_pool(DTYPES[dtype])
        for case in lora_cases():
            if case.dtype == dtype:
                rows.append(measure(case, pool, kernels, library))
                say(line(rows[-1]))
        rows += measure_attention(pool, kernels, say)
        if dtype == "float16":
            rows += measure_ladders(pool, kernels, say)
            rows += measure_rows(pool, kernels, say)
        del pool
        cupy.get_default_memory_pool().free_all_blocks()
    return rows


def measure(case: LoraCase, pool: Any, kernels: CudaKernels, library: Cublas) -> dict[str, Any]:
    """A row of the result."""
    projection = LoraProjection(case, pool, kernels)
    projection.launch_all()  # compiles, and raises what a launch can raise
    graph = Graph(projection.launch_all, projection.count)
    error = projection.error_of(graph.replay)
    us, count = graph.median_us(), projection.count
    del projection, graph
    measured = {"us": us, "fraction": case.floor_us / us, "rel_error": error, "launches_rotated": count}
    return case.describe() | measured | {"baselines": baselines(case, pool, count, library)}


def baselines(case: LoraCase, pool: Any, count: int, library: Cublas) -> dict[str, float | None]:
    """Microseconds of the library, null where it refuses."""
    times: dict[str, float | None] = {}
    for name, kind in BASELINES.items():
        try:
            work = kind(library, case, pool, count)
            work.launch_all()
            cupy.cuda.get_current_stream().synchronize()
            times[name] = Graph(work.launch_all, count).median_us(8)
        except RuntimeError:
            times[name] = None
    return times


def line(row: dict[str, Any]) -> str:
    """A row as the table shows it."""
    library = " ".join("-" if us is None else f"{us:.1f}" for us in row["baselines"].values())
    shape = f"{row['case']:12} {row['rows']:5} {row['adapters']:8} {row['rank']:4}"
    return f"{shape} {row['us']:8.2f} {row['floor_us']:7.2f} {row['fraction']:5.2f} {row['rel_error']:8.1e}  {library}"
