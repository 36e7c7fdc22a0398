"""PyTorch's attention on the same case, where PyTorch is installed: keys and values contiguous, as paging avoids."""

from __future__ import annotations

import importlib
import importlib.util
import statistics
from typing import Any

import cupy

from slora_ref.bench.kernels.attention_cases import AttentionCase
from slora_ref.bench.kernels.timing import REPEATS, WARM_UP


def torch_sdpa_us(case: AttentionCase, pool: Any, q: Any, count: int) -> float | None:
    """Median microseconds of scaled_dot_product_attention, with the backend that PyTorch chooses.

    Args:
        pool: memory from which keys and values are taken, in order.
        q: [sets, rows, heads * head_dim] queries.
        count: calls in a replay, which go through the sets.

    Returns:
        None where PyTorch is not installed, or has no such case: its causal mask knows no cached prefix.
    """
    if importlib.util.find_spec("torch") is None or case.cached:
        return None
    torch = importlib.import_module("torch")
    attend = torch.nn.functional.scaled_dot_product_attention
    dtype = getattr(torch, case.dtype)

    def tensor(array: Any) -> Any:
        return torch.as_tensor(array.view(cupy.int16), device="cuda").view(dtype)

    size = case.batch * case.context * case.kv_heads * case.head_dim
    kv = tensor(pool[: 2 * len(q) * size]).view(-1, 2, case.batch, case.context, case.kv_heads, case.head_dim)
    queries = tensor(q).view(-1, case.batch, case.length, case.heads, case.head_dim)
    options = {"is_causal": case.length > 1, "enable_gqa": case.heads != case.kv_heads}

    def work() -> None:
        for number in range(count):
            keys, values = kv[number % len(q)].transpose(2, 3)
            attend(queries[number % len(q)].transpose(1, 2), keys, values, **options)

    work()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    times = []
    for _ in range(WARM_UP + REPEATS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1e3 * start.elapsed_time(end) / count)
    return statistics.median(times[WARM_UP:])
