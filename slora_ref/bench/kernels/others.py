"""The rows of `bench kernels` besides LoRA: attention, the operations on rows, loading pages.

In one case of each operation all rungs of its ladder are timed: the ladder of kernels_cu/README.md is made from that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cupy
import numpy as np

from slora_ref.bench.kernels.attention import PagedAttention
from slora_ref.bench.kernels.attention_cases import AttentionCase, attention_cases
from slora_ref.bench.kernels.load import load_row
from slora_ref.bench.kernels.rows import RowCase, RowLaunches, row_cases
from slora_ref.bench.kernels.step import step_cases
from slora_ref.bench.kernels.timing import REPEATS, Graph
from slora_ref.bench.kernels.torch_attention import torch_sdpa_us
from slora_ref.ops.cuda_kernels import CudaKernels
from slora_ref.ops.ladder import fastest, ladder, make_launch
from slora_ref.ops.launch import Arguments

Say = Callable[[str], None]
Row = dict[str, Any]
SLOW_REPEATS = 3  # of a rung that is not the fastest
# Where all rungs are timed: case, batch and context of an attention, or operation and rows
ATTENTION_LADDERS = {
    ("attention_decode", 64, 512): "paged_attention_decode",
    ("attention_decode", 4, 4096): "paged_attention_merge",
    ("attention_prefill", 16, 512): "paged_attention_prefill",
}
LADDER_ROWS = 64


def measure_attention(pool: Any, kernels: CudaKernels, say: Say) -> list[Row]:
    """Every case of the pool's dtype: microseconds, floor, error of the replayed graph, and PyTorch beside it."""
    numbers = f"{'us':>8} {'floor':>7} {'part':>5} {'error':>8}"
    say(f"\n{'attention':18} {'batch':>5} {'context':>7} {'heads':>8} {numbers}  torch")
    rows, timed = [], set[tuple[str, int, int]]()
    for case in attention_cases():
        if case.dtype == pool.dtype.name:
            key = (case.case, case.batch, case.context)
            all_rungs = case.dtype == "float16" and key in ATTENTION_LADDERS and key not in timed
            timed.add(key)
            rows.append(_attention_row(case, pool, kernels, ATTENTION_LADDERS[key] if all_rungs else None))
            say(_attention_line(rows[-1]))
    return rows


def _attention_row(case: AttentionCase, pool: Any, kernels: CudaKernels, operation: str | None) -> Row:
    us, error, attention = _time_attention(case, pool, kernels, {}, REPEATS)
    row = case.describe() | {"us": us, "fraction": case.floor_us / us, "rel_error": error}
    row |= {"tflops": case.flops / us / 1e6, "splits": attention.splits, "launches_rotated": attention.sets}
    row["baselines"] = {"torch_sdpa": torch_sdpa_us(case, pool, attention.q, attention.count)}
    del attention
    if operation is not None:
        rungs = {}
        for kernel in ladder(operation, case.dtype)[:-1]:
            rungs[kernel] = _time_attention(case, pool, kernels, {operation: kernel}, SLOW_REPEATS)[0]
        row["rungs"] = rungs | {ladder(operation, case.dtype)[-1]: us}
    cupy.get_default_memory_pool().free_all_blocks()
    return row


def _time_attention(
    case: AttentionCase, pool: Any, kernels: CudaKernels, rungs: dict[str, str], repeats: int
) -> tuple[float, float, PagedAttention]:
    attention = PagedAttention(case, pool, kernels, rungs)
    attention.launch_all()  # compiles, and raises what a launch can raise
    graph = Graph(attention.launch_all, attention.count)
    error = attention.error_of(graph.replay)
    return graph.median_us(repeats), error, attention


def _attention_line(row: Row) -> str:
    torch = row["baselines"]["torch_sdpa"]
    heads = f"{row['heads']}/{row['kv_heads']}x{row['head_dim']}"
    shape = f"{row['case']:18} {row['batch']:5} {row['context']:7} {heads:>8}"
    numbers = f"{row['us']:8.1f} {row['floor_us']:7.1f} {row['fraction']:5.2f} {row['rel_error']:8.1e}"
    return f"{shape} {numbers}  {'-' if torch is None else f'{torch:.1f}'}"


def measure_rows(pool: Any, kernels: CudaKernels, say: Say) -> list[Row]:
    """The operations on rows, then load_pages beside one copy over the link; of 16-bit numbers."""
    say(f"\n{'operation':18} {'rows':>5} {'us':>8} {'floor':>7} {'part':>5} {'error':>8}")
    rows = [_row(case, kernels) for case in (*row_cases(), *step_cases(LADDER_ROWS))]
    rungs = {kernel: load_row(pool, kernels, kernel) for kernel in ladder("load_pages", np.float16)}
    last = list(rungs.values())[-1]
    rows.append(last | {"rungs": {kernel: row["us"] for kernel, row in rungs.items()}})
    for row in rows:
        numbers = f"{row['us']:8.2f} {row['floor_us']:7.2f} {row['fraction']:5.2f} {row['rel_error']:8.1e}"
        say(f"{row['operation']:18} {row['rows']:5} {numbers}")
    return rows


def _row(case: RowCase, kernels: CudaKernels) -> Row:
    times = {}
    for kernel in ladder(case.operation, case.dtype) if case.rows == LADDER_ROWS else (None,):

        def run(operation: str, arguments: Arguments, chosen: str | None = kernel) -> None:
            name = chosen or fastest(operation, case.dtype, arguments)
            kernels.run(make_launch(name, case.dtype, arguments))

        launches = RowLaunches(case, run)
        launches.launch_all()
        graph = Graph(launches.launch_all, case.count)
        error = launches.error_of(graph.replay)
        times[kernel] = us = graph.median_us()
        del launches, graph
        cupy.get_default_memory_pool().free_all_blocks()
    row = case.describe() | {"us": us, "fraction": case.floor_us / us, "rel_error": error}
    row["launches_rotated"] = case.count
    return row | ({"rungs": times} if None not in times else {})
