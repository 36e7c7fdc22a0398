"""Traffic: who asks for what and when, and serving it to the end, as a client sees it."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from slora_ref.bench.serve.options import ServeOptions
from slora_ref.engine import Completion, Engine
from slora_ref.errors import SloraError
from slora_ref.request import FinishReason, SamplingParams
from slora_ref.workload import Arrival


class MeasurementFailed(SloraError):
    """A request of a measurement ended by an error: its numbers would mean nothing."""


def draw_traffic(options: ServeOptions, registered: int) -> list[Arrival]:
    """The requests of one run. Lengths and times do not depend on how many adapters are registered.

    Without any, all ask for the number 0, which `serve` takes for the base model.
    """
    rng = np.random.default_rng(options.seed)
    count = options.requests
    prompts, outputs = (rng.integers(*options.bounds, count).tolist() for _ in range(2))
    times = np.zeros(count) if options.rate is None else np.cumsum(rng.exponential(1 / options.rate, count))
    names = max(1, registered)
    shares = np.ones(names) if options.popularity == "uniform" else 1 / np.arange(1, names + 1)
    adapters = np.searchsorted(np.cumsum(shares / shares.sum()), rng.random(count)).clip(max=names - 1).tolist()
    columns = (times.tolist(), adapters, prompts, outputs)
    return [Arrival(time=t, adapter=a, prompt=p, output=o) for t, a, p, o in zip(*columns, strict=True)]


def serve(engine: Engine, arrivals: list[Arrival], after_step: Callable[[], None]) -> list[Completion]:
    """Sends each request at its time and steps until all have ended; completions in the order of the arrivals.

    Raises:
        MeasurementFailed: one ended by an error.
    """
    vocab = engine.model_config.vocab_size
    ids: list[int] = []
    done: dict[int, Completion] = {}
    start = engine.clock.now()
    while len(done) < len(arrivals):
        while len(ids) < len(arrivals) and arrivals[len(ids)].time <= engine.clock.now() - start:
            arrival, number = arrivals[len(ids)], len(ids)
            prompt = [(31 * number + 7 * place) % vocab for place in range(arrival.prompt)]
            params = SamplingParams(max_tokens=arrival.output, ignore_eos=True)
            ids.append(engine.add_request(prompt, params, str(arrival.adapter) if engine.adapters else None))
        if not engine.has_work:
            time.sleep(max(0.0, arrivals[len(ids)].time - (engine.clock.now() - start)))
            continue
        for news in engine.step():
            if news.completion is not None:
                done[news.request_id] = news.completion
        after_step()
    failed = [one for one in done.values() if one.finish_reason is not FinishReason.LENGTH]
    if failed:
        raise MeasurementFailed(f"{len(failed)} of {len(done)} requests failed: {failed[0].error}")
    return [done[request_id] for request_id in ids]
