"""One layer's attention on the GPU: keys and values in pages in random order, more of them than the cache holds.

A case takes as many sets of sequences from the pool as it needs to move several times the cache's size between two uses
of the same numbers; launch k uses the set of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cupy
import numpy as np

from slora_ref.bench.kernels.attention_cases import AttentionCase
from slora_ref.bench.kernels.lora import MOST_LAUNCHES, ROTATED_BYTES, to_bits, to_float64
from slora_ref.ops import attention_arguments
from slora_ref.ops.cuda_kernels import CudaKernels
from slora_ref.ops.ladder import fastest, make_launch
from slora_ref.ops.launch import Arguments
from slora_ref.ops.plan import context_chunk, plan_attention
from slora_ref.shapes import Array

QUERY_SIZE = 64.0  # deviation of queries: that of the pool's keys is 1 / 64, so scores have a deviation of about 1
CHECKED_ROWS = 5
FEWEST_LAUNCHES = 8  # in a graph, whose own start takes microseconds


class PagedAttention:
    """The launches of a case.

    Args:
        case: what to measure.
        pool: make_pool's memory.
        kernels: the launcher.
        rungs: the kernel of an operation, where it is not the fastest.
    """

    def __init__(
        self, case: AttentionCase, pool: Any, kernels: CudaKernels, rungs: dict[str, str] | None = None
    ) -> None:
        self.case, self.kernels, self.rungs = case, kernels, rungs or {}
        width = case.kv_heads * case.head_dim
        self.pages = pool[: len(pool) // width * width].reshape(-1, width)
        sets = min(-(-ROTATED_BYTES // case.bytes_moved), MOST_LAUNCHES, len(self.pages) // self._needed)
        self.sets, self.count = sets, max(sets, FEWEST_LAUNCHES)
        ids = np.random.default_rng(3).permutation(len(self.pages))[: self.sets * self._needed].astype(np.int32)
        self.tables = ids.reshape(self.sets * case.batch, 2, case.context)
        self.sequence_pages = cupy.asarray(self.tables)
        plans = [plan_attention(case.spans(number * case.batch), case.rows) for number in range(self.sets)]
        self.queries, self.tiles = ([cupy.asarray(getattr(p, n)) for p in plans] for n in ("queries", "tiles"))
        q_width = case.heads * case.head_dim
        random = cupy.random.default_rng(4).standard_normal((self.sets, case.rows, q_width), dtype=np.float32)
        self.q = to_bits(QUERY_SIZE * random, pool.dtype).view(pool.dtype)
        self.out = cupy.full(self.q.shape, 0xFFFF, np.uint16).view(pool.dtype)  # NaN
        self.chunk = context_chunk(case.rows, case.kv_heads, case.context)
        self.splits = -(-case.context // self.chunk) if case.length == 1 else 1
        shape = (case.rows if case.length == 1 else 0, case.heads, self.splits)
        self.partial, self.stats = (cupy.full((*shape, n), np.nan, np.float32) for n in (case.head_dim, 2))

    @property
    def _needed(self) -> int:
        """Pages of a set."""
        return 2 * self.case.batch * self.case.context

    def _run(self, operation: str, arguments: Arguments) -> None:
        kernel = self.rungs.get(operation) or fastest(operation, self.pages.dtype, arguments)
        self.kernels.run(make_launch(kernel, self.pages.dtype, arguments))

    def launch(self, number: int) -> None:
        """Attention of set `number`, as KernelOps would launch it."""
        out, q, places = self.out[number], self.q[number], (self.pages, self.sequence_pages)
        if self.case.length > 1:
            prefill = (out, q, *places, self.tiles[number], self.case.head_dim)
            return self._run("paged_attention_prefill", attention_arguments.paged_attention_prefill(*prefill))
        queries, parts = self.queries[number], (self.partial, self.stats)
        decode = attention_arguments.paged_attention_decode(out, *parts, q, *places, queries, self.chunk)
        self._run("paged_attention_decode", decode)
        if self.splits > 1:
            merge = attention_arguments.paged_attention_merge(out, *parts, queries, self.chunk)
            self._run("paged_attention_merge", merge)
        return None

    def launch_all(self) -> None:
        """Every launch, one after the other."""
        for number in range(self.count):
            self.launch(number % self.sets)

    def error_of(self, replay: Callable[[], None]) -> float:
        """max |error| / max |reference| of some rows of the last set, against float64, for one run of `replay`."""
        number, errors = self.sets - 1, []
        self.out.view(np.uint16).fill(0xFFFF)
        replay()
        for row in np.linspace(0, self.case.rows - 1, CHECKED_ROWS).astype(int).tolist():
            want = self._reference(number, row)
            got = to_float64(self.out[number, row]).reshape(want.shape)
            errors.append(float(cupy.abs(got - want).max() / cupy.abs(want).max()))
        return max(errors) if np.isfinite(errors).all() else float("nan")

    def _reference(self, number: int, row: int) -> Array:
        """[heads, head_dim] attention of one row in float64."""
        case = self.case
        sequence, place = divmod(row, case.length)
        seen = case.context - case.length + place + 1
        pages = cupy.asarray(self.tables[number * case.batch + sequence, :, :seen])
        keys, values = (to_float64(self.pages[ids]).reshape(seen, case.kv_heads, -1) for ids in pages)
        q = to_float64(self.q[number, row]).reshape(case.kv_heads, -1, case.head_dim)
        scores = cupy.einsum("kgd,skd->kgs", q, keys) / case.head_dim**0.5
        weights = cupy.exp(scores - scores.max(axis=2, keepdims=True))
        weights /= weights.sum(axis=2, keepdims=True)
        return cupy.einsum("kgs,skd->kgd", weights, values).reshape(case.heads, case.head_dim)
