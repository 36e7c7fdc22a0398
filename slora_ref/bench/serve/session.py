"""One engine for all runs of a measurement: its model is made once, its adapters are registered anew for each run."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from slora_ref.bench.serve.meter import Meter
from slora_ref.bench.serve.options import ServeOptions
from slora_ref.bench.serve.traffic import draw_traffic, serve
from slora_ref.engine import Completion, Engine
from slora_ref.executor import PreparationCounts
from slora_ref.prefetch import Eviction, PrefetchCounts
from slora_ref.synthetic import write_adapters
from slora_ref.toy import MODEL_FOLDER


@dataclass(frozen=True)
class Run:
    """What one run brought.

    Args:
        registered: names.
        register_s: seconds that registering them took.
        seconds: from the first request to the last answer.
        device_s: of them, see Meter.
        load_s: seconds in which copies into the pool were under way.
        reads, bytes_read: folders read from disk during the run.
        prepared: launches that were prepared for shapes of steps that had not come before.
    """

    registered: int
    register_s: float
    seconds: float
    device_s: float | None
    load_s: float
    reads: int
    bytes_read: int
    counts: PrefetchCounts
    prepared: PreparationCounts
    completions: list[Completion]
    meter: Meter

    @property
    def requests_per_s(self) -> float:
        """Requests a second."""
        return len(self.completions) / self.seconds


class Session:
    """Runs of one engine.

    Args:
        engine: fresh.
        folders: of the adapters, shared by the names in turn.
        tflops: see Meter.
    """

    def __init__(self, options: ServeOptions, engine: Engine, folders: list[Path], tflops: float | None) -> None:
        self.options, self.engine, self._folders, self._tflops = options, engine, folders, tflops

    def run(self, registered: int, eviction: Eviction) -> Run:
        """Registers so many names, warms host memory, serves the traffic, and takes the names away again."""
        engine, store, loader = self.engine, self.engine.store, self.engine.prefetcher.loader
        engine.prefetcher.change_policy(eviction)
        started = time.perf_counter()
        for i in range(registered):
            engine.add_adapter(str(i), self._folders[i % len(self._folders)])
        register_s = time.perf_counter() - started
        warm(engine)
        engine.prefetcher.counts = counts = PrefetchCounts()
        before = loader.seconds, store.disk.reads, store.disk.bytes_read
        arrivals, meter = draw_traffic(self.options, registered), Meter(engine, self._tflops)
        started = time.perf_counter()
        try:
            completions = serve(engine, arrivals, meter.sample)
        finally:
            meter.close()
        seconds = time.perf_counter() - started
        after = loader.seconds, store.disk.reads, store.disk.bytes_read
        for name in engine.adapters:
            engine.remove_adapter(name)
        while engine.prefetcher.waiting:
            engine.prefetcher.wait_for_any()
            engine.prefetcher.poll()
        load_s, reads, nbytes = (b - a for a, b in zip(before, after, strict=True))
        times = registered, register_s, seconds, meter.device_s(), load_s
        return Run(*times, int(reads), int(nbytes), counts, meter.prepared(), completions, meter)


def warm(engine: Engine) -> None:
    """Reads adapters into host memory, the first names first, as many as fit: as after a while of service."""
    store, room, chosen = engine.store, engine.store.budget_bytes, []
    sources = set()
    for name in engine.adapters:
        version = store.lookup(name)
        if version.source not in sources:
            room -= version.nbytes
            sources.add(version.source)
            if room < 0:
                break
            chosen.append(version.adapter_id)
    store.want(chosen)
    while store.reading:
        store.wait()
        store.failures()


@contextmanager
def open_session(options: ServeOptions, tflops: float | None = None, inline: bool = False) -> Iterator[Session]:
    """An engine and folders of adapters with random weights, which are deleted at the end.

    Args:
        inline: adapters are read and loaded within the steps, so that counts are the same in every run.

    Raises:
        ConfigError: the disk, the host or the device has not that much room.
    """
    config, engine_config = options.model_config(), options.engine_config()
    if inline:
        engine_config = replace(engine_config, loading="inline")
    with TemporaryDirectory(prefix="slora_ref_bench_") as folder:
        count = min(options.distinct, max(options.registered))
        folders = write_adapters(Path(folder), config, options.kind, count, options.seed)
        if options.is_toy:
            engine = Engine.from_pretrained(MODEL_FOLDER, engine_config)
        else:
            engine = Engine.from_config(config, engine_config, options.seed)
        yield Session(options, engine, folders, tflops)
