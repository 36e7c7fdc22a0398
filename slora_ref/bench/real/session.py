"""Engines of all systems on one base model, each serving the same requests; and the same in the simulator."""

from __future__ import annotations

import gc
import importlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory

from slora_ref.baselines import Base, MergingExecutor, merge_and_switch, padded_bmm, split_pools
from slora_ref.bench.real.points import RealPoint
from slora_ref.bench.real.scale import Scale
from slora_ref.bench.serve.session import warm
from slora_ref.bench.serve.traffic import serve
from slora_ref.config import EngineConfig
from slora_ref.engine import Completion, Engine
from slora_ref.synthetic import write_adapters
from slora_ref.workload import Arrival, SyntheticTrace, original_trace

MAKERS: Mapping[str, Callable[[Base, EngineConfig], Engine]] = {
    "slora": Base.engine,
    "bmm": padded_bmm,
    "merge": merge_and_switch,
}
AT_ONCE_S = 0.01
WARM_UP = 8  # the same requests are served before, with answers of an eighth, so that launches are prepared


@dataclass(frozen=True)
class Outcome:
    """What a run brought.

    Args:
        seconds: from the first request to the last answer.
        running: requests that ran in each step.
        merges: switches of merged weights.
    """

    completions: list[Completion]
    seconds: float
    running: list[int]
    loads: int
    merges: int

    @property
    def requests_per_s(self) -> float:
        """Requests a second."""
        return len(self.completions) / self.seconds

    @property
    def mean_running(self) -> float:
        """Requests that run at once, over the steps."""
        return fmean(self.running)


class RealSession:
    """A base model and folders of adapters.

    Args:
        folders: shared by the names in turn.
    """

    def __init__(self, scale: Scale, base: Base, folders: list[Path]) -> None:
        self.scale, self.base, self.folders = scale, base, folders

    def arrivals(self, adapters: int) -> list[Arrival]:
        """The requests, all within AT_ONCE_S: uniform popularity, the paper's alpha = 1."""
        rate, lengths = self.scale.requests / AT_ONCE_S, self.scale.lengths
        spec = SyntheticTrace(adapters=adapters, rate=rate, duration=AT_ONCE_S, prompt=lengths, output=lengths)
        return original_trace(spec)

    def run(self, point: RealPoint) -> Outcome:
        """Makes the system, warms it up, and serves."""
        engine = self._engine(point)
        warm(engine)
        arrivals = self.arrivals(point.adapters)
        serve(engine, [replace(each, time=0.0, output=-(-each.output // WARM_UP)) for each in arrivals], lambda: None)
        running: list[int] = []
        loads, merges, start = engine.prefetcher.counts.loads, _merges(engine), engine.clock.now()
        completions = serve(engine, arrivals, lambda: running.append(len(engine.scheduler.running)))
        seconds = engine.clock.now() - start
        loads, merges = engine.prefetcher.counts.loads - loads, _merges(engine) - merges
        engine.check()
        if isinstance(engine.executor, MergingExecutor):
            engine.executor.restore()
        return Outcome(completions, seconds, running, loads, merges)

    def _engine(self, point: RealPoint) -> Engine:
        scale, folders = self.scale, self._folders(point.adapters)
        config = scale.engine_config(scale.tight_tokens if point.tight else scale.pool_tokens)
        if point.system == "split":
            return split_pools(self.base, config, folders, point.share)
        engine = MAKERS[point.system](self.base, config)
        for name, path in folders.items():
            engine.add_adapter(name, path)
        return engine

    def _folders(self, adapters: int) -> Mapping[str, Path]:
        return {str(i): self.folders[i % len(self.folders)] for i in range(adapters)}


def _merges(engine: Engine) -> int:
    return engine.executor.merges if isinstance(engine.executor, MergingExecutor) else 0


@contextmanager
def open_real(scale: Scale) -> Iterator[RealSession]:
    """The base model with random weights, and folders of adapters, which are deleted at the end.

    Raises:
        ConfigError: there is no such device here, or the disk has not that much room.
    """
    base = Base.random(scale.model_config(), scale.engine_config(scale.pool_tokens))
    with TemporaryDirectory(prefix="slora_ref_real_") as folder:
        yield RealSession(scale, base, write_adapters(Path(folder), base.model, scale.kind, scale.distinct, seed=0))


def free_memory(device: str) -> None:
    """What an engine that nobody uses any more had of a GPU's memory."""
    gc.collect()
    if device == "cuda":
        importlib.import_module("slora_ref.ops.cuda_memory").used_bytes()
