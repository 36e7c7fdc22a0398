"""Meter: what the steps of a run had to move and to compute at the least, how long they kept the device at work, and
what the pool held after each.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from slora_ref.batch import Batch
from slora_ref.bench.decode.cases import BYTES_PER_S
from slora_ref.config.presets import parameters
from slora_ref.engine import Engine
from slora_ref.engine.leader import GroupExecutor
from slora_ref.executor import Executor, KernelExecutor, PreparationCounts, StartedStep
from slora_ref.executor.kernel_step import KernelStep
from slora_ref.pager import PoolUsage
from slora_ref.sampler import Sampling


@dataclass
class Meter:
    """Stands between an engine and its executor.

    Args:
        engine: whose steps are counted.
        tflops: measured rate of products; None: no floor is wanted.
    """

    engine: Engine
    tflops: float | None
    floor_s: float = 0.0  # of all steps: their bytes once, or their FLOPs, whichever takes longer
    adapter_bytes: int = 0  # weights of the adapters of each step, summed over the steps
    rows: int = 0
    times: list[float] = field(default_factory=list)  # seconds on the engine's clock, after each step
    usages: list[PoolUsage] = field(default_factory=list)
    started: list[StartedStep] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Takes the executor's place."""
        self._inner: Executor = self.engine.executor
        self._weights = parameters(self.engine.model_config)
        self._start, self._prepared = self.engine.clock.now(), _prepared_by(self._inner)
        self.engine.executor = self

    def close(self) -> None:
        """Gives the executor its place back."""
        self.engine.executor = self._inner

    def start(self, batch: Batch, sampling: Sampling) -> StartedStep:
        """Counts one step and has it run."""
        pool = self.engine.pool
        slots = batch.segments.adapter[batch.segments.adapter >= 0]
        adapter_bytes = int((pool.adapters.pages[np.unique(slots)] >= 0).sum()) * pool.page_bytes
        tokens = int(batch.spans.context.sum())
        self.adapter_bytes += adapter_bytes
        self.rows += len(batch.token_ids)
        if self.tflops is not None:
            moved = self._weights * pool.storage.itemsize + pool.layout.token_pages(tokens) * pool.page_bytes
            flops = 2 * self._weights * len(batch.token_ids)
            self.floor_s += max((moved + adapter_bytes) / BYTES_PER_S, flops / (self.tflops * 1e12))
        self.started.append(self._inner.start(batch, sampling))
        return self.started[-1]

    def device_s(self) -> float | None:
        """Seconds in which a device was at work on a step: the rest of the time it waited for the host.

        From the arrival of a step's numbers to the departure of its samples. None: no device has computed the steps.
        """
        seconds = [step.seconds() for step in self.started if isinstance(step, KernelStep)]
        return sum(seconds) if seconds else None

    def prepared(self) -> PreparationCounts:
        """What the executor has prepared since; with shards, that of shard 0."""
        return _prepared_by(self._inner) - self._prepared

    def sample(self) -> None:
        """After a step: what the pool holds."""
        self.times.append(self.engine.clock.now() - self._start)
        self.usages.append(self.engine.pool.usage())


def _prepared_by(executor: Executor) -> PreparationCounts:
    """So far; nothing, if launches are not kept there."""
    own = executor.own if isinstance(executor, GroupExecutor) else executor
    return replace(own.kept.counts) if isinstance(own, KernelExecutor) else PreparationCounts()
