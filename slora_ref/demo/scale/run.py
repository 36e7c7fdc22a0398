"""Runs the demo at scale: makes model and adapters, serves the paper's workload, checks a sample of the answers."""

from __future__ import annotations

import importlib
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from slora_ref.demo.scale.check import check_sample
from slora_ref.demo.scale.options import ScaleOptions
from slora_ref.demo.scale.report import ScaleReport, summarize
from slora_ref.demo.serve import Ask, serve
from slora_ref.demo.watch import Draw, PoolWatch
from slora_ref.engine import Completion, Engine
from slora_ref.engine.devices import check_cuda
from slora_ref.request import SamplingParams
from slora_ref.synthetic import write_adapters

Say = Callable[[str], None]
Open = Callable[[ScaleOptions], Engine]


def open_engine(options: ScaleOptions) -> Engine:
    """The engine that the options ask for, after all memory has been checked.

    Raises:
        ConfigError: there is no GPU, or something does not fit.
    """
    check_cuda()
    options.check_host()
    memory = importlib.import_module("slora_ref.ops.cuda_memory")
    options.check_device(memory.total_bytes(), memory.used_bytes())
    if options.is_shape:
        return Engine.from_config(options.config(), options.engine_config(), options.seed)
    return Engine.from_pretrained(options.model, options.engine_config())


def run_scale_demo(
    options: ScaleOptions, say: Say, draw: Draw | None = None, open_with: Open = open_engine
) -> ScaleReport:
    """Serves the demo's requests.

    Args:
        say: takes lines about what happens.
        draw: takes the live line; None: there is none.
        open_with: makes the engine.

    Raises:
        ConfigError: something does not fit; nothing was served.
    """
    started = time.perf_counter()
    engine = open_with(options)
    seconds, pages = time.perf_counter() - started, engine.pool.num_pages
    say(f"{options.model} is ready after {seconds:.1f} s, with a pool of {pages:,} pages")
    with tempfile.TemporaryDirectory(prefix="slora_ref_demo_") as folder:
        started = time.perf_counter()
        sets = write_adapters(Path(folder), options.config(), options.kind, options.sets, options.seed)
        for number in range(options.adapters):
            engine.add_adapter(_name(number), sets[number % len(sets)])
        say(f"registered {options.adapters:,} adapters after {time.perf_counter() - started:.1f} s")
        asks = _asks(options, engine.model_config.vocab_size)
        first_ready = _first_token(engine, asks[0])
        watch = PoolWatch(engine, len(asks), draw)
        started = time.perf_counter()
        completions = serve(engine, asks, watch)
        seconds = time.perf_counter() - started
        engine.check()
        report = summarize(engine, options, completions, watch, seconds, first_ready)
        say(f"served {len(completions):,} requests in {seconds:.1f} s; checking {options.checked} of the answers")
        checked = check_sample(engine, _sample(completions, options))
        engine.check()
        return report.with_checks(checked)


def _name(number: int) -> str:
    return f"adapter-{number:05d}"


def _asks(options: ScaleOptions, vocab: int) -> list[Ask]:
    """The trace with prompts of random tokens; without a rate, all at once."""
    rng = np.random.default_rng(options.seed)
    return [
        Ask(
            prompt=rng.integers(0, vocab, arrival.prompt).tolist(),
            params=SamplingParams(max_tokens=arrival.output, ignore_eos=True),
            adapter=_name(arrival.adapter),
            arrival=arrival.time if options.rate else 0.0,
        )
        for arrival in options.trace()
    ]


def _first_token(engine: Engine, ask: Ask) -> float:
    """Serves one request alone, and returns the seconds from the start of the process to its first token."""
    with_one = SamplingParams(max_tokens=1, ignore_eos=True)
    engine.generate([ask.prompt], with_one, ask.adapter)
    return _process_seconds()


def _process_seconds() -> float:
    """Since this process was started, as Linux counts it."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return float(Path("/proc/uptime").read_text().split()[0]) - ticks / os.sysconf("SC_CLK_TCK")


def _sample(completions: list[Completion], options: ScaleOptions) -> list[Completion]:
    """So many answers, evenly spread over the requests."""
    places = np.linspace(0, len(completions) - 1, options.checked).astype(int).tolist()
    return [completions[place] for place in places]
