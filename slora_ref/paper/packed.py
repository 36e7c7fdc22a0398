"""Packed: n merged models on one GPU, each an engine with its part of the memory, on one clock (vLLM-packed).

Every engine has a queue, a pool and weights of its own. Their host work runs side by side; the GPU is shared, so an
engine's step begins on it when the one before has left.
"""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import replace

from slora_ref.clock import SimulatedClock
from slora_ref.metrics import RequestRecord
from slora_ref.paper.run import Run
from slora_ref.paper.systems import system_of
from slora_ref.request import BASE_MODEL
from slora_ref.simulate.datasheet import GPUS, MODELS, SETTINGS, free_tokens
from slora_ref.simulate.roofline import Constants, Roofline, StepShape, weight_bytes
from slora_ref.simulate.system import original_config
from slora_ref.workload import Arrival


class SharedGPU(Roofline):
    """A roofline whose GPU others use too.

    Args:
        free_at: one number for all who share it: when the GPU has nothing left to do.
    """

    def __init__(self, own: Roofline, clock: SimulatedClock, free_at: list[float]) -> None:
        super().__init__(own.gpu, own.model, own.constants)
        self._clock, self._free_at = clock, free_at

    def seconds(self, shape: StepShape) -> float:
        """As long as alone, but not before the GPU is free."""
        start = self._clock.now()
        self._free_at[0] = max(self._free_at[0], start) + self.gpu_seconds(shape)
        return max(super().seconds(shape), self._free_at[0] - start)


def play_packed(run: Run, constants: Constants) -> list[RequestRecord]:
    """A merged model for each adapter, none at all where they do not fit."""
    setting = SETTINGS[run.setting]
    gpu, model = GPUS[run.gpu], MODELS[setting.model]
    pool = free_tokens(gpu, model, run.adapters * weight_bytes(model)) // run.adapters
    alone = system_of(replace(run, system="slora"), constants)
    alone = replace(alone, adapters=0, config=original_config(max(pool, 2)))
    free_at = [0.0]
    engines = [alone.build() for _ in range(run.adapters)]
    queues: list[deque[Arrival]] = [deque() for _ in engines]
    for arrival in run.arrivals():
        queues[arrival.adapter].append(replace(arrival, adapter=BASE_MODEL))
    for engine in engines:
        engine.executor.roofline = SharedGPU(engine.executor.roofline, engine.executor.clock, free_at)
    turns = [(0.0, number) for number in range(len(engines))]
    while turns:
        _, number = heapq.heappop(turns)
        if engines[number].advance(queues[number]):
            heapq.heappush(turns, (engines[number].clock.now(), number))
    return [record for engine in engines for record in engine.records()]
