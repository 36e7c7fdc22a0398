"""Runs the demo: registers the adapters, sends the requests, watches the pool, has every answer checked."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from slora_ref.bench.occupancy import check_plot
from slora_ref.config import EngineConfig
from slora_ref.demo.options import DemoOptions, check_pool
from slora_ref.demo.plot import plot_pool
from slora_ref.demo.questions import LONGEST_ANSWER, Question, adapter_names, draw_questions
from slora_ref.demo.report import DemoReport, summarize
from slora_ref.demo.serve import Ask, serve
from slora_ref.demo.verify import TOLERANCES, Verdict, Verifier
from slora_ref.demo.watch import Draw, PoolWatch
from slora_ref.engine import Completion, Engine
from slora_ref.request import SamplingParams
from slora_ref.toy import ADAPTERS_FOLDER, MODEL_FOLDER

Say = Callable[[str], None]
MOST_RESIDENT = 48


def run_demo(options: DemoOptions, say: Say, draw: Draw | None = None, plot: Path | None = None) -> DemoReport:
    """Serves the demo's requests.

    Args:
        say: takes lines about what happens.
        draw: takes the live line (the pool, then the answers checked); None: there is none.
        plot: an SVG file to draw the pool's history into; needs matplotlib.

    Raises:
        ConfigError: the pool could not hold the largest request, or the picture could not be drawn; nothing was served.
    """
    if plot is not None:
        check_plot(plot)
    names = adapter_names(options.adapters)
    check_pool(options.pool_pages, {task for _, task in names}, options.shards)
    engine = _engine(options)
    started = time.perf_counter()
    for name, task in names:
        engine.add_adapter(name, ADAPTERS_FOLDER / task)
    say(f"registered {len(names):,} adapters in {time.perf_counter() - started:.1f} s")
    questions = draw_questions(names, options.requests, options.seed, options.rate)
    watch = PoolWatch(engine, len(questions), draw)
    started = time.perf_counter()
    completions = serve(engine, _asks(questions), watch)
    seconds = time.perf_counter() - started
    engine.check()
    say(f"served {len(completions):,} requests in {seconds:.1f} s; checking each answer against dense merged weights")
    if plot is not None:
        plot_pool(watch, plot)
        say(f"drew the pool into {plot}")
    verdicts = _check(questions, completions, options.dtype, draw)
    return summarize(engine, questions, completions, verdicts, watch, seconds)


def _engine(options: DemoOptions) -> Engine:
    config = EngineConfig(
        pool_pages=options.pool_pages,
        max_running=64,
        max_batched_tokens=256,
        max_adapters=MOST_RESIDENT,
        device=options.device,
        dtype=options.dtype,
        seed=options.seed,
        shards=options.shards,
        communicator=options.communicator,
        loading="inline",  # so that the same seed gives the same steps and counts
    )
    return Engine.from_pretrained(MODEL_FOLDER, config)


def _asks(questions: list[Question]) -> list[Ask]:
    params = SamplingParams(max_tokens=LONGEST_ANSWER, keep_logits=True)
    return [Ask(question.prompt, params, question.adapter, question.arrival) for question in questions]


def _check(
    questions: list[Question], completions: list[Completion], dtype: str, draw: Draw | None
) -> list[Verdict]:
    """The verdict on every answer."""
    verifier = Verifier(MODEL_FOLDER, LONGEST_ANSWER, TOLERANCES[dtype])
    verdicts: list[Verdict] = []
    for question, completion in zip(questions, completions, strict=True):
        verdicts.append(verifier.check(completion, ADAPTERS_FOLDER / question.task))
        line = f"checked {len(verdicts)}/{len(questions)} answers"
        if draw is not None:
            draw(partial(_cut, line))
    return verdicts


def _cut(line: str, columns: int) -> str:
    return line[: columns - 1]
