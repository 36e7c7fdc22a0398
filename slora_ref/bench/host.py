"""What a step costs on the host beside the model: policy, scheduler, allocator and tables; and the allocator alone.

The engine's own parts run on toy adapters without a model: a token is simply appended to every sequence that would have
sampled one. So the numbers hold for any model.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from slora_ref.allocator import PageAllocator
from slora_ref.batch import Batch, arrange
from slora_ref.config import EngineConfig, ModelConfig
from slora_ref.errors import LoadFailed
from slora_ref.pager import PageLayout, PagePool
from slora_ref.policy import FCFS
from slora_ref.prefetch import Prefetcher
from slora_ref.request import FinishReason, Request, SamplingParams, Sequence
from slora_ref.scheduler import Scheduler
from slora_ref.store import AdapterStore
from slora_ref.toy import ADAPTERS_FOLDER, MODEL_FOLDER, TASKS

Say = Callable[[str], None]
SHORTEST, LONGEST = 8, 200  # tokens of prompts and of answers


def bench_host(say: Say, steps: int = 1000) -> list[dict[str, Any]]:
    """All rows: allocation at four pool sizes, and the step at 128 running requests with few and with many adapters.

    With many adapters registered, requests ask for the same few, or for all of them, so that most find theirs missing;
    that is also measured in a pool that is the limit, so that each step must forecast the peak for the request at the
    head of the queue.
    """
    rows = [_allocation(10**power) for power in (4, 5, 6, 7)]
    for row in rows:
        say(f"{row['pool_pages']:>10,} pages: allocate 1,000 in {row['us']:.1f} us, free in {row['free_us']:.1f} us")
    few, many = new_store(10), new_store(10_000)
    large, tight = 120_000, 40_000
    for store, asked, pool_pages in ((few, 10, large), (many, 10, large), (many, 10_000, large), (many, 10_000, tight)):
        row = step_row(store, asked, pool_pages, steps)
        rows.append(row)
        say(
            f"{row['adapters']:>10,} adapters, {asked:,} asked for, pool of {pool_pages:,}: {row['us']:.0f} us a step "
            f"at {row['running']:.0f} running (p99 {row['p99_us']:.0f} us)"
        )
    return rows


def _allocation(pool_pages: int, count: int = 1000, repeats: int = 500) -> dict[str, Any]:
    """Median time to take `count` scattered pages and to give them back."""
    allocator = PageAllocator(pool_pages, shuffle_seed=0)
    taken, freed = [], []
    for _ in range(repeats):
        start = time.perf_counter()
        pages = allocator.allocate(count)
        between = time.perf_counter()
        allocator.free(pages)
        freed.append(time.perf_counter() - between)
        taken.append(between - start)
    median = statistics.median
    return {
        "operation": "allocate",
        "pool_pages": pool_pages,
        "pages": count,
        "us": 1e6 * median(taken),
        "free_us": 1e6 * median(freed),
    }


def new_store(registered: int) -> AdapterStore:
    """So many names of the toy's adapters: 0, 1, 2, ..."""
    model, tasks = ModelConfig.from_folder(MODEL_FOLDER), list(TASKS)
    store = AdapterStore(model, PageLayout(model))
    for i in range(registered):
        store.add(str(i), ADAPTERS_FOLDER / tasks[i % len(tasks)])
    return store


class _NoLoader:
    """Loads that cost the host nothing: what a copy engine does beside the steps is not measured here."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._started: list[int] = []

    def start(self, adapter_id: int) -> None:
        """It is there at the next poll."""
        self._started.append(adapter_id)

    def completed(self) -> list[tuple[int, LoadFailed | None]]:
        """All that were started."""
        started, self._started = self._started, []
        return [(adapter_id, None) for adapter_id in started]

    def wait(self) -> None:
        """Nothing is ever under way."""


def step_row(store: AdapterStore, asked: int, pool_pages: int, steps: int) -> dict[str, Any]:
    """Host time of a step with 128 running requests and a long queue that asks for the first `asked` adapters."""
    layout, registered = store.layout, len(store.names)
    config = EngineConfig(max_running=128, max_batched_tokens=512, max_adapters=192)
    pool = PagePool(layout, pool_pages, config.max_running, 2 * LONGEST, config.max_adapters)
    versions = [store.lookup(str(i)) for i in range(asked)]
    prefetcher = Prefetcher(pool, store, _NoLoader(), config.eviction, config.prefetch)
    scheduler = Scheduler(pool, prefetcher, FCFS(), config)
    rng = np.random.default_rng(0)
    for number in range(8 * steps):
        prompt, output = rng.integers(SHORTEST, LONGEST, 2).tolist()
        request = Request(prompt_ids=(1,) * prompt, params=SamplingParams(max_tokens=output))
        scheduler.add(Sequence(number, request, versions[int(rng.integers(asked))].adapter_id, seed=0))
    times, running = [], []
    for _ in range(steps):
        times.append(_one_step(scheduler))
        running.append(len(scheduler.running))
    settled = slice(steps // 5, None)
    return {
        "operation": "step",
        "adapters": registered,
        "asked": asked,
        "pool_pages": pool_pages,
        "running": statistics.mean(running[settled]),
        "us": 1e6 * statistics.median(times[settled]),
        "p99_us": 1e6 * float(np.percentile(times[settled], 99)),
    }


def _one_step(scheduler: Scheduler) -> float:
    """Runs one step without a model; the seconds that the host's own work took."""
    start = time.perf_counter()
    scheduler.prefetcher.poll()
    step, _ = scheduler.schedule(now=0.0)
    work = arrange(step.work)
    Batch.build(work, scheduler.pool)
    scheduler.commit(step)
    decided = time.perf_counter() - start
    samples = [item.sequence for item in work if item.samples]
    for sequence in samples:
        sequence.tokens.append(1)
    start = time.perf_counter()
    for sequence in samples:
        if not sequence.tokens_left:
            scheduler.finish(sequence, FinishReason.LENGTH, now=0.0)
    return decided + time.perf_counter() - start
