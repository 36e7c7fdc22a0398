"""A server without a model, for chapters about who runs when: real scheduler, pool and page tables, simulated time.

A step takes as long as the chapter says and gives the same token to everybody; a load takes as long as its pages. What
remains is real: slora_ref's own scheduler, prefetcher, pool and page tables, with the toy model's adapters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from slora_ref import Completion, Engine, EngineConfig, ModelConfig, SamplingParams
from slora_ref.batch import Batch
from slora_ref.clock import SimulatedClock
from slora_ref.errors import LoadFailed
from slora_ref.executor import StepResult
from slora_ref.pager import PageLayout, PagePool
from slora_ref.policy import FCFS, Policy
from slora_ref.prefetch import Prefetcher
from slora_ref.sampler import Sampling
from slora_ref.scheduler import Scheduler
from slora_ref.store import AdapterStore
from slora_ref.toy import ADAPTERS_FOLDER, MODEL_FOLDER, TASKS
from slora_ref.workload import Arrival

TOKEN = 5  # what every step answers


class NoModel:
    """An executor that lets time pass.

    Args:
        seconds: from a step's batch to its time.
    """

    def __init__(self, clock: SimulatedClock, seconds: Callable[[Batch], float]) -> None:
        self.clock, self.seconds = clock, seconds

    def start(self, batch: Batch, sampling: Sampling) -> StepResult:
        self.clock.advance(self.seconds(batch))
        tokens = np.full(len(batch.sampled), TOKEN)
        return StepResult(tokens, tokens > 0, np.zeros((len(batch.logit_rows), 1), np.float32))


class Recorder:
    """Stands before an executor and writes down each step: its start, and the rows of each request by number."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.inner = engine, engine.executor
        self.steps: list[tuple[float, dict[int, int]]] = []
        engine.executor = self

    def start(self, batch: Batch, sampling: Sampling) -> StepResult:
        rows = dict(zip(batch.spans.slot.tolist(), batch.spans.length.tolist(), strict=True))
        running = self.engine.scheduler.running
        work = {sequence.number: rows[sequence.slot] for sequence in running if sequence.slot in rows}
        self.steps.append((self.engine.clock.now(), work))
        return self.inner.start(batch, sampling)


class Link:
    """A loader whose copies take time, one after the other, beside the steps.

    Args:
        seconds_a_page: 0: a load is over as soon as it is asked for.
    """

    def __init__(self, clock: SimulatedClock, store: AdapterStore, seconds_a_page: float) -> None:
        self.clock, self.store, self.seconds_a_page = clock, store, seconds_a_page
        self.seconds = 0.0
        self.log: list[tuple[int, float, float]] = []  # adapter id, start and end of every load
        self.under_way: list[tuple[int, float]] = []

    def start(self, adapter_id: int) -> None:
        begin = max(self.clock.now(), self.log[-1][2] if self.log else 0.0)
        took = self.store.version(adapter_id).pages * self.seconds_a_page
        self.seconds += took
        self.log.append((adapter_id, begin, begin + took))
        self.under_way.append((adapter_id, begin + took))

    def completed(self) -> list[tuple[int, LoadFailed | None]]:
        done = [adapter_id for adapter_id, end in self.under_way if end <= self.clock.now()]
        self.under_way = [(adapter_id, end) for adapter_id, end in self.under_way if adapter_id not in done]
        return [(adapter_id, None) for adapter_id in done]

    def wait(self) -> None:
        self.clock.advance(max(0.0, self.under_way[0][1] - self.clock.now()))


def bare_engine(
    pages: int,
    seconds: Callable[[Batch], float] = lambda batch: 0.1,
    policy: Policy | None = None,
    seconds_a_page: float = 0.0,
    **options: Any,
) -> Engine:
    """An engine with a pool of so many pages and no model. Nothing is loaded ahead unless `prefetch` says so."""
    config, model = EngineConfig(**{"prefetch": 0, **options}), ModelConfig.from_folder(MODEL_FOLDER)
    clock, layout = SimulatedClock(), PageLayout(model)
    pool = PagePool(layout, pages, config.max_running, 256, config.max_adapters, dtype=None)
    store = AdapterStore(model, layout)
    prefetcher = Prefetcher(pool, store, Link(clock, store, seconds_a_page), config.eviction, config.prefetch)
    scheduler = Scheduler(pool, prefetcher, policy or FCFS(), config)
    return Engine(scheduler, prefetcher, NoModel(clock, seconds), clock, model)


def serve(
    engine: Engine, trace: Iterable[Arrival], watch: Callable[[Engine], Any] = lambda engine: None
) -> tuple[list[Completion], list[Any]]:
    """Serves a trace to its end. Returns the completions in order of arrival, and what `watch` saw after each step."""
    pending, ids, done, seen = sorted(trace, key=lambda arrival: arrival.time), [], {}, []
    for number in sorted({arrival.adapter for arrival in pending} - {-1}):
        engine.add_adapter(f"user-{number}", ADAPTERS_FOLDER / list(TASKS)[number % len(TASKS)])
    while pending or engine.has_work:
        while pending and pending[0].time <= engine.clock.now():
            ask = pending.pop(0)
            how = SamplingParams(max_tokens=ask.output, ignore_eos=True)
            name = None if ask.adapter < 0 else f"user-{ask.adapter}"
            ids.append(engine.add_request([TOKEN] * ask.prompt, how, name))
        before = engine.steps
        done |= {news.request_id: news.completion for news in engine.step() if news.completion}
        if engine.steps > before:
            seen.append(watch(engine))
        if not engine.has_work and pending:
            engine.clock.advance(max(0.0, pending[0].time - engine.clock.now()))
    engine.check()
    return [done[number] for number in ids], seen
