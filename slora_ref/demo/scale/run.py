"""Runs the demo at scale: makes model and adapters, serves the paper's workload, checks a sample of the answers."""

from __future__ import annotations

import importlib
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from slora_ref.demo.scale.check import check_sample, dense_weights
from slora_ref.demo.scale.options import ScaleOptions
from slora_ref.demo.scale.report import ScaleReport, summarize
from slora_ref.demo.scale.start import StartClock
from slora_ref.demo.serve import Ask, serve
from slora_ref.demo.watch import Draw, PoolWatch
from slora_ref.engine import Completion, Engine
from slora_ref.engine.build import Note
from slora_ref.engine.devices import check_cuda
from slora_ref.request import SamplingParams
from slora_ref.synthetic import write_adapters

Say = Callable[[str], None]
Open = Callable[[ScaleOptions, Note], Engine]


def check_fits(options: ScaleOptions) -> None:
    """Raises ConfigError when there is no GPU, or something does not fit into its memory or the host's."""
    check_cuda()
    options.check_host()
    memory = importlib.import_module("slora_ref.ops.cuda_memory")
    options.check_device(memory.total_bytes(), memory.used_bytes())


def open_engine(options: ScaleOptions, note: Note) -> Engine:
    """The engine that the options ask for."""
    if options.is_shape:
        return Engine.from_config(options.config(), options.engine_config(), options.seed, note=note)
    return Engine.from_pretrained(options.model, options.engine_config(), note=note)


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
    clock, on_gpu = StartClock(), options.device == "cuda"
    clock.note("device")
    if on_gpu:
        check_fits(options)
    kept = _kernels_kept() if on_gpu else 0
    with tempfile.TemporaryDirectory(prefix="slora_ref_demo_") as folder:
        engine = _start(options, Path(folder), clock.note, open_with)
        asks = _asks(options, engine.model_config.vocab_size)
        _first_token(engine, asks[0])
        clock.note("requests")
        cached = _kernels_kept() == kept if on_gpu else None
        say(f"first token after {clock.seconds:.1f} s: {clock}; a pool of {engine.pool.num_pages:,} pages")
        watch = PoolWatch(engine, len(asks), draw)
        started = time.perf_counter()
        completions = serve(engine, asks, watch)
        seconds = time.perf_counter() - started
        engine.check()
        report = summarize(engine, options, completions, watch, seconds, clock.parts, cached)
        say(f"served {len(completions):,} requests in {seconds:.1f} s; checking a sample of the answers")
        checked = check_sample(engine, _sample(completions, options), dense_weights(engine, options))
        engine.check()
        return report.with_checks(checked)


def _kernels_kept() -> int:
    """Machine codes in the folder where CuPy keeps them: as many as before, and nothing was compiled."""
    return int(importlib.import_module("slora_ref.ops.cuda_memory").kernels_kept())


def _start(options: ScaleOptions, folder: Path, note: Note, open_with: Open) -> Engine:
    """An engine with all adapters registered, whose folders are written beside the making of the model."""
    with ThreadPoolExecutor(1) as writer:
        writing = writer.submit(write_adapters, folder, options.config(), options.kind, options.sets, options.seed)
        engine = open_with(options, note)
        note("adapters")
        sets = writing.result()
    for number in range(options.adapters):
        engine.add_adapter(_name(number), sets[number % len(sets)])
    note("first token")
    return engine


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


def _first_token(engine: Engine, ask: Ask) -> None:
    """Serves one request alone, to its first token."""
    with_one = SamplingParams(max_tokens=1, ignore_eos=True)
    engine.generate([ask.prompt], with_one, ask.adapter)


def _sample(completions: list[Completion], options: ScaleOptions) -> list[Completion]:
    """So many answers, evenly spread over the requests."""
    places = np.linspace(0, len(completions) - 1, min(options.checked, len(completions))).astype(int).tolist()
    return [completions[place] for place in places]
