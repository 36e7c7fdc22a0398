"""Replay: a trace through the real loop, scheduler, policy, allocator and prefetcher, under a simulated clock.

It is EngineLoop without tokens and texts: every token is 0, and a request ends when it has its length. A step costs
tens of microseconds of host time, so a five-minute trace takes seconds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq

import numpy as np

from slora_ref.clock import SimulatedClock
from slora_ref.config import ModelConfig
from slora_ref.engine.live import Live
from slora_ref.engine.loop import EngineLoop
from slora_ref.errors import RequestError
from slora_ref.metrics import Occupancy, RequestRecord
from slora_ref.prefetch import Prefetcher
from slora_ref.request import BASE_MODEL, FinishReason, Request, SamplingParams, Sequence
from slora_ref.scheduler import Scheduler
from slora_ref.simulate.executor import RooflineExecutor
from slora_ref.simulate.roofline import LoraRows, StepShape
from slora_ref.simulate.store import ShapeStore
from slora_ref.step import Step
from slora_ref.workload import Arrival

ZEROS = (0,) * 4096
COMPLETED = (FinishReason.LENGTH, FinishReason.STOP)


class Replay(EngineLoop):
    """The loop of an engine whose executor only takes time.

    Args:
        scheduler, prefetcher, executor, clock, model_config: the parts of an EngineLoop.
        store: the prefetcher's.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        prefetcher: Prefetcher,
        executor: RooflineExecutor,
        clock: SimulatedClock,
        model_config: ModelConfig,
        store: ShapeStore,
    ) -> None:
        super().__init__(scheduler, prefetcher, executor, clock, model_config)
        self.executor: RooflineExecutor = executor
        self._rows = _RowsOfAdapters(store)
        self.sequences: list[Sequence] = []
        self.refused: list[Arrival] = []
        self.occupancy = Occupancy()

    def play(self, trace: Iterable[Arrival], each_step: Callable[[], None] | None = None) -> list[RequestRecord]:
        """Sends every request at its time and steps until all have ended.

        Args:
            each_step: called after every step (tests check the parts).

        Returns:
            A record of each request, in order of arrival.
        """
        coming = deque(trace)
        while self.advance(coming):
            if each_step is not None:
                each_step()
        return self.records()

    def advance(self, coming: deque[Arrival]) -> bool:
        """Sends what is due and makes one step, or waits for the next arrival.

        Args:
            coming: what is still to be sent, the next one first; those sent are taken off.

        Returns:
            False when nothing is left to do.
        """
        while coming and coming[0].time <= self.clock.now():
            self.send(coming.popleft())
        if self._live:
            self.step()
            self.occupancy.sample(self.pool.usage())
        elif coming:
            self.executor.clock.advance(coming[0].time - self.clock.now())
        return bool(self._live or coming)

    def send(self, arrival: Arrival) -> None:
        """Puts a request into the queue; one that could never run is refused."""
        params = SamplingParams(max_tokens=arrival.output, ignore_eos=True)
        name = None if arrival.adapter == BASE_MODEL else str(arrival.adapter)
        prompt = ZEROS[: arrival.prompt] if arrival.prompt <= len(ZEROS) else (0,) * arrival.prompt
        request = Request(prompt_ids=prompt, params=params, adapter=name, arrival=arrival.time)
        sequence = Sequence(self._next_number, request, arrival.adapter, seed=0)
        try:
            self.scheduler.add(sequence)
        except RequestError:
            self.refused.append(arrival)
            return
        if name is not None:
            self.store.acquire(self.store.lookup(name))
        self._next_number += 1
        self._live[sequence.number] = Live(sequence, None)
        self.sequences.append(sequence)

    def _run(self, step: Step) -> None:
        """As EngineLoop's, without the arrays that only a model reads."""
        work = step.work
        slots, positions = _rows(step)
        self.pool.extend(slots, positions)
        context = sum([item.start + item.count for item in work])
        shape = StepShape(len(slots), len(work), context, self._rows.of(step))
        self.scheduler.commit(step)
        self.steps += 1
        self.executor.spend(shape)
        now = self.clock.now()
        for item in work:
            sequence = item.sequence
            if item.start + item.count < len(sequence.tokens):
                continue
            sequence.tokens.append(0)
            if sequence.first_token_at is None:
                sequence.first_token_at = now
            if len(sequence.tokens) > sequence.peak_tokens:
                self._finish(self._live[sequence.number], FinishReason.LENGTH)

    def records(self) -> list[RequestRecord]:
        """What became of every request so far, those refused last."""
        records = [
            RequestRecord(
                arrival=sequence.request.arrival,
                first_token_at=sequence.first_token_at,
                finished_at=sequence.finished_at,
                adapter=sequence.adapter_id,
                prompt=sequence.prompt_length,
                output=len(sequence.output_ids),
                completed=sequence.finish_reason in COMPLETED,
            )
            for sequence in self.sequences
        ]
        return records + [_refused(arrival) for arrival in self.refused]


class _RowsOfAdapters:
    """LoraRows by adapter and count; most of a run's are the same few objects."""

    def __init__(self, store: ShapeStore) -> None:
        self._store = store
        self._made: dict[tuple[int, int], LoraRows] = {}

    def of(self, step: Step) -> Seq[LoraRows]:
        """The step's rows with adapters, one entry a sequence."""
        keys = [(item.sequence.adapter_id, item.count) for item in step.work]
        made = self._made
        return [made[key] if key in made else self._make(key) for key in keys if key[0] != BASE_MODEL]

    def _make(self, key: tuple[int, int]) -> LoraRows:
        adapter, rows = key
        self._made[key] = LoraRows(adapter, rows, self._store.ranks[adapter], self._store.version(adapter).nbytes)
        return self._made[key]


def _rows(step: Step) -> tuple[np.ndarray, np.ndarray]:
    """[rows] sequence slot and position of each row of the step."""
    slots = np.array([item.sequence.slot for item in step.work], np.int64)
    starts = np.array([item.start for item in step.work], np.int64)
    rows = step.rows
    if rows == len(slots):
        return slots, starts
    counts = np.array([item.count for item in step.work], np.int64)
    first = np.cumsum(counts) - counts
    return np.repeat(slots, counts), np.arange(rows) + np.repeat(starts - first, counts)


def _refused(arrival: Arrival) -> RequestRecord:
    return RequestRecord(
        arrival=arrival.time,
        first_token_at=None,
        finished_at=None,
        adapter=arrival.adapter,
        prompt=arrival.prompt,
        output=0,
        completed=False,
    )
