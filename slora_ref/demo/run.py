"""Runs the demo: registers the adapters, sends the requests, watches the pool, has every answer checked."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from slora_ref.config import EngineConfig
from slora_ref.demo.plot import check_plot, plot_pool
from slora_ref.demo.questions import Question, adapter_names, draw_questions
from slora_ref.demo.report import DemoReport, summarize
from slora_ref.demo.verify import Verifier
from slora_ref.demo.watch import PoolWatch
from slora_ref.engine import Completion, Engine
from slora_ref.errors import ConfigError
from slora_ref.request import SamplingParams
from slora_ref.toy import ADAPTERS_FOLDER, MODEL_FOLDER

Say = Callable[[str], None]
LONGEST_ANSWER = 32
MOST_RESIDENT = 48


@dataclass(frozen=True, kw_only=True)
class DemoOptions:
    """What `demo` can be told.

    Args:
        adapters: names to register.
        requests: how many are sent.
        pool_pages: pages of the pool; the default holds a few dozen adapters beside the sequences.
        seed: of words, popularity and arrivals.
        rate: requests a second; None: all at once.
        dtype: of weights, activations and pool.
    """

    adapters: int = 2000
    requests: int = 256
    pool_pages: int = 7000
    seed: int = 0
    rate: float | None = None
    dtype: str = "float32"

    def __post_init__(self) -> None:
        """Raises ConfigError with the value."""
        for name in ("adapters", "requests", "pool_pages"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.seed < 0:
            raise ConfigError(f"seed is {self.seed}; it must be 0 or above")
        if self.rate is not None and not 0 < self.rate < float("inf"):
            raise ConfigError(f"rate is {self.rate}; it must be a number of requests a second above 0")


def run_demo(options: DemoOptions, say: Say, draw: Say | None = None, plot: Path | None = None) -> DemoReport:
    """Serves the demo's requests.

    Args:
        say: takes lines about what happens.
        draw: takes a picture of the pool each time it changes (a live bar); None: no live picture.
        plot: an SVG file to draw the pool's history into; needs matplotlib.

    Raises:
        RequestError, ConfigError: the pool is too small for one of the requests; nothing was served.
    """
    if plot is not None:
        check_plot(plot)
    names = adapter_names(options.adapters)
    engine = _engine(options)
    started = time.perf_counter()
    for name, task in names:
        engine.add_adapter(name, ADAPTERS_FOLDER / task)
    say(f"registered {len(names):,} adapters in {time.perf_counter() - started:.1f} s")
    questions = draw_questions(names, options.requests, options.seed, options.rate)
    watch = PoolWatch(engine, len(questions), draw)
    started = time.perf_counter()
    completions = _serve(engine, questions, watch)
    seconds = time.perf_counter() - started
    engine.check()
    say(f"served {len(completions):,} requests in {seconds:.1f} s; checking each answer against dense merged weights")
    if plot is not None:
        plot_pool(watch, plot)
        say(f"drew the pool into {plot}")
    verifier = Verifier(MODEL_FOLDER)
    verdicts = [verifier.check(done, ADAPTERS_FOLDER / q.task) for done, q in zip(completions, questions, strict=True)]
    return summarize(engine, questions, completions, verdicts, watch, seconds)


def _engine(options: DemoOptions) -> Engine:
    config = EngineConfig(
        pool_pages=options.pool_pages,
        max_running=64,
        max_batched_tokens=256,
        max_adapters=MOST_RESIDENT,
        dtype=options.dtype,
        seed=options.seed,
    )
    return Engine.from_pretrained(MODEL_FOLDER, config)


def _serve(engine: Engine, questions: list[Question], watch: PoolWatch) -> list[Completion]:
    """Sends each request at its time and steps until all have ended; completions in the order of the questions."""
    params = SamplingParams(max_tokens=LONGEST_ANSWER, keep_logits=True)
    ids: list[int] = []
    done: dict[int, Completion] = {}
    start = engine.clock.now()
    while len(done) < len(questions):
        while len(ids) < len(questions) and questions[len(ids)].arrival <= engine.clock.now() - start:
            question = questions[len(ids)]
            ids.append(engine.add_request(question.prompt, params, question.adapter))
        if not engine.has_work:
            time.sleep(max(0.0, questions[len(ids)].arrival - (engine.clock.now() - start)))
            continue
        for news in engine.step():
            if news.completion is not None:
                done[news.request_id] = news.completion
        watch.sample(len(done))
    return [done[request_id] for request_id in ids]
