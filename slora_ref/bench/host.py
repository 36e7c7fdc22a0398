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
from slora_ref.pager import PageLayout, PagePool
from slora_ref.policy import FCFS
from slora_ref.prefetch import ImmediateLoader, Prefetcher
from slora_ref.request import FinishReason, Request, SamplingParams, Sequence
from slora_ref.scheduler import Scheduler
from slora_ref.store import AdapterStore
from slora_ref.toy import ADAPTERS_FOLDER, MODEL_FOLDER, TASKS

Say = Callable[[str], None]
SHORTEST, LONGEST = 8, 200  # tokens of prompts and of answers


def bench_host(say: Say, steps: int = 1000) -> list[dict[str, Any]]:
    """All rows: allocation at four pool sizes, and the step at 128 running requests with few and with many adapters.

    With many adapters the step is also measured in a pool that is the limit, so that each step must forecast the peak
    for the request at the head of the queue.
    """
    rows = [_allocation(10**power) for power in (4, 5, 6, 7)]
    for row in rows:
        say(f"{row['pool_pages']:>10,} pages: allocate 1,000 in {row['us']:.1f} us, free in {row['free_us']:.1f} us")
    for registered, pool_pages in ((10, 120_000), (10_000, 120_000), (10_000, 40_000)):
        row = _step(registered, pool_pages, steps)
        rows.append(row)
        say(
            f"{registered:>10,} adapters, pool of {pool_pages:,}: {row['us']:.0f} us a step at "
            f"{row['running']:.0f} running (p99 {row['p99_us']:.0f} us)"
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


def _step(registered: int, pool_pages: int, steps: int) -> dict[str, Any]:
    """Host time of a step with 128 running requests, a long queue, and `registered` adapters drawn uniformly."""
    model = ModelConfig.from_folder(MODEL_FOLDER)
    layout = PageLayout(model)
    config = EngineConfig(max_running=128, max_batched_tokens=512, max_adapters=192)
    pool = PagePool(layout, pool_pages, config.max_running, 2 * LONGEST, config.max_adapters)
    store = AdapterStore(model, layout)
    tasks = list(TASKS)
    versions = [store.add(f"adapter-{i}", ADAPTERS_FOLDER / tasks[i % len(tasks)]) for i in range(registered)]
    prefetcher = Prefetcher(pool, store, ImmediateLoader(pool, store))
    scheduler = Scheduler(pool, prefetcher, FCFS(), config)
    rng = np.random.default_rng(0)
    for number in range(8 * steps):
        prompt, output = rng.integers(SHORTEST, LONGEST, 2).tolist()
        request = Request(prompt_ids=(1,) * prompt, params=SamplingParams(max_tokens=output))
        scheduler.add(Sequence(number, request, versions[int(rng.integers(registered))].adapter_id, seed=0))
    times, running = [], []
    for _ in range(steps):
        times.append(_one_step(scheduler))
        running.append(len(scheduler.running))
    settled = slice(steps // 5, None)
    return {
        "operation": "step",
        "adapters": registered,
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
