"""A scheduler with its pool and prefetcher, and no model: each step the test stands in for it and appends the tokens.

What EngineLoop does around the scheduler is done here in the same order: poll, schedule, allocate, commit, append, end.
After every step the parts check themselves, and the step is checked against the rules that hold in any mode.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from loaders import DelayedLoader
from strategies import Ask
from tiny import tiny_config, write_adapter_folder

from slora_ref.config import EngineConfig
from slora_ref.pager import PageLayout, PagePool
from slora_ref.policy import FCFS, Policy
from slora_ref.prefetch import Prefetcher
from slora_ref.request import BASE_MODEL, FinishReason, Request, SamplingParams, Sequence
from slora_ref.scheduler import Scheduler
from slora_ref.step import Step
from slora_ref.store import AdapterStore

MODEL = tiny_config(num_layers=1, hidden_size=2, intermediate_size=2, num_heads=1, num_kv_heads=1, head_dim=2)
"""One page holds any vector of this model, so an adapter of rank r on one target takes 2 r pages, as r tokens do."""


FOLDERS = tempfile.TemporaryDirectory(prefix="slora_ref_rig_")
"""Where the adapters of all rigs lie until the process ends."""


@functools.cache
def adapter_folder(rank: int) -> Path:
    """A real adapter of this rank on q_proj."""
    return write_adapter_folder(Path(FOLDERS.name) / str(rank), MODEL, rank, ["q_proj"])


@dataclass(frozen=True)
class Decision:
    """What the scheduler found when it decided a step, after the poll, and what it made of it.

    Args:
        joins: whether waiting requests could join in this step.
        waiting, running: before the step.
        resident: adapters that were there before and after, the base model among them.
        held: adapters whose pages could not be taken: pinned or loading.
        orphans: those being loaded for a request that has ended, or whose turn has not come.
        pages: of adapters that are held or wanted.
        computed, known: by request number, tokens with keys and values, and tokens in all.
        admitted: in order of admission.
        preempted: the last one first.
        step: what runs.
    """

    joins: bool
    waiting: list[Sequence]
    running: list[Sequence]
    resident: set[int]
    held: set[int]
    orphans: set[int]
    pages: dict[int, int]
    computed: dict[int, int]
    known: dict[int, int]
    admitted: list[Sequence] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)
    step: Step = Step(())


class Rig:
    """The parts of an engine around a model that is not there.

    Args:
        pages: of the pool.
        ranks: of the registered adapters; one of rank r takes 2 r pages. They are named 0, 1, 2, ...
        policy: FCFS unless given.
        eviction: of idle adapters.
        weights: whether the pool has storage and loads write into it; else they only count pages.
        host_bytes: of the store.
        options: of EngineConfig.
    """

    def __init__(
        self,
        pages: int,
        ranks: Seq[int] = (),
        policy: Policy | None = None,
        eviction: Any = "lru",
        max_adapters: int = 8,
        weights: bool = False,
        host_bytes: int = 1 << 20,
        **options: Any,
    ) -> None:
        options = {"prefetch": 0} | options
        self.config = EngineConfig(max_adapters=max_adapters, eviction=eviction, **options)
        layout = PageLayout(MODEL)
        sizes = (pages, self.config.max_running, pages // 2 + 1, max_adapters)
        self.pool = PagePool(layout, *sizes, dtype=np.float32 if weights else None, poison=weights)
        self.store = AdapterStore(MODEL, layout, np.float32, host_bytes)
        self.loader = DelayedLoader(self.pool, self.store) if weights else DelayedLoader()
        self.prefetcher = Prefetcher(self.pool, self.store, self.loader, eviction, self.config.prefetch)
        self.scheduler = Scheduler(self.pool, self.prefetcher, policy or FCFS(), self.config)
        self.ranks = list(ranks)
        for i, rank in enumerate(ranks):
            self.store.add(str(i), adapter_folder(rank))
        self.sequences: list[Sequence] = []  # all that were ever accepted
        self._alive: dict[int, Sequence] = {}
        self.stops_after: dict[int, int] = {}
        self.steps = 0
        self.orphans: set[int] = set()
        self.last_join = -self.config.join_every - 1
        self.last: Decision

    # --- what a user does ---

    def ask(self, ask: Ask) -> Sequence:
        """Adds a request. Raises RequestError when the scheduler refuses it; then nothing changed."""
        name = None if ask.adapter is None else str(ask.adapter)
        version = None if name is None else self.store.lookup(name)
        request = Request(prompt_ids=(0,) * ask.prompt, params=SamplingParams(max_tokens=ask.max_tokens), adapter=name)
        number = len(self.sequences)
        sequence = Sequence(number, request, BASE_MODEL if version is None else version.adapter_id, seed=0)
        self.scheduler.add(sequence)
        if version is not None:
            self.store.acquire(version)
        self.sequences.append(sequence)
        self._alive[number] = sequence
        self.stops_after[number] = ask.stops_after
        return sequence

    def abort(self, sequence: Sequence) -> None:
        """Ends a request by its client's wish."""
        self.orphans = (self.orphans | {sequence.adapter_id}) & self.prefetcher._loading.keys()
        self._end(sequence, FinishReason.ABORT)
        self.check()

    def replace(self, index: int, rank: int) -> None:
        """Takes an adapter's name away and gives it to another version, of another rank."""
        self._forget_if_unused(self.store.remove(str(index)).adapter_id)
        self.store.add(str(index), adapter_folder(rank))
        self.ranks[index] = rank
        self.check()

    @property
    def alive(self) -> list[Sequence]:
        """Requests that have not ended, in order of arrival."""
        return list(self._alive.values())

    # --- a step ---

    def step(self) -> Step:
        """One iteration, as EngineLoop.step does it."""
        for adapter_id, failure in self.prefetcher.poll():
            for sequence in [waiting for waiting in self.scheduler.waiting if waiting.adapter_id == adapter_id]:
                self._end(sequence, FinishReason.ERROR, str(failure))
        self.steps += 1
        step, dropped = self._schedule()
        for sequence in dropped:
            self._release(sequence)
        if step.work:
            self._run(step)
        elif self.prefetcher.waiting:
            self.prefetcher.wait_for_any()
        self.check()
        return step

    def _schedule(self) -> tuple[Step, list[Sequence]]:
        """Has the scheduler decide, and records what it found and did."""
        running, waiting = list(self.scheduler.running), list(self.scheduler.waiting)
        every = self.config.join_every
        pause = every + (self.config.separate_prefill and every > 1)
        joins = self.steps - self.last_join >= pause or not running
        preemptions = {s.number: s.preemptions for s in self.alive}
        found = Decision(
            joins=joins,
            waiting=waiting,
            running=running,
            resident=self._resident(),
            held=self.prefetcher.held,
            orphans=(self.orphans | self.prefetcher._round) & self.prefetcher._loading.keys(),
            pages={i: self.prefetcher.pages_of(i) for i in self.prefetcher.held | self._wanted()} | {BASE_MODEL: 0},
            computed={s.number: s.computed for s in self.alive},
            known={s.number: len(s.tokens) for s in self.alive},
        )
        step, dropped = self.scheduler.schedule(float(self.steps))
        gave_way = [s for s in waiting + running if s.preemptions > preemptions[s.number]]
        admitted = [s for s in self.scheduler.running if s in waiting] + [s for s in gave_way if s in waiting]
        preempted = [s for s in reversed(running + admitted) if s in gave_way]
        self.last_join = self.steps if admitted else self.last_join
        resident = found.resident & self._resident()
        self.last = replace(found, resident=resident, admitted=admitted, preempted=preempted, step=step)
        return step, dropped

    def _wanted(self) -> set[int]:
        return {s.adapter_id for s in self.alive} - {BASE_MODEL}

    def _resident(self) -> set[int]:
        return {i for i in self._wanted() if self.prefetcher.is_resident(i)} | {BASE_MODEL}

    def _run(self, step: Step) -> None:
        self._compute(step)
        for work in step.work:
            sequence = work.sequence
            if work.start + work.count == len(sequence.tokens):
                sequence.tokens.append(1)
                if not sequence.tokens_left:
                    self._end(sequence, FinishReason.LENGTH)
                elif len(sequence.output_ids) >= self.stops_after[sequence.number]:
                    self._end(sequence, FinishReason.STOP)

    def _compute(self, step: Step) -> None:
        slots = [work.sequence.slot for work in step.work for _ in range(work.count)]
        positions = [work.start + i for work in step.work for i in range(work.count)]
        self.pool.extend(np.array(slots), np.array(positions))
        self.scheduler.commit(step)

    def run_to_the_end(self, most_steps: int) -> None:
        """Steps until every request has ended, which must be within `most_steps`."""
        for _ in range(most_steps):
            if self.alive:
                self.step()
        assert not self.alive, f"still alive after {most_steps} steps: {[s.number for s in self.alive]}"

    def _end(self, sequence: Sequence, reason: FinishReason, error: str | None = None) -> None:
        self.scheduler.finish(sequence, reason, float(self.steps), error)
        self._release(sequence)

    def _release(self, sequence: Sequence) -> None:
        assert self._alive.pop(sequence.number).finished
        if sequence.adapter_id != BASE_MODEL:
            self.store.release(sequence.adapter_id)
            self._forget_if_unused(sequence.adapter_id)

    def _forget_if_unused(self, adapter_id: int) -> None:
        version = self.store.version(adapter_id)
        if version.removed and not version.users:
            self.prefetcher.drop(adapter_id)
            self.store.forget(version)

    # --- what always holds ---

    def check(self) -> None:
        """The parts check themselves, and one another."""
        for part in (self.pool, self.store, self.prefetcher, self.scheduler):
            part.check()
        running, waiting = self.scheduler.running, self.scheduler.waiting
        assert {s.number for s in running} | {s.number for s in waiting} == {s.number for s in self.alive}
        pinned = {s.adapter_id for s in running} - {BASE_MODEL}
        assert pinned == self.prefetcher._pins.keys()
        for adapter_id, count in self.prefetcher._pins.items():
            assert count == sum(s.adapter_id == adapter_id for s in running)
        assert self.pool.usage().kv == 2 * sum(s.computed for s in running)

    def check_all_is_free(self) -> None:
        """Nothing runs or waits: after the adapters are taken away too, the pool is what it was at the start."""
        assert not self.alive
        assert self.pool.usage().kv == 0 and not self.prefetcher._pins
        while self.prefetcher.loading:
            self.loader.wait()
            self.prefetcher.poll()
        for name in self.store.names:
            self._forget_if_unused(self.store.remove(name).adapter_id)
        self.check()
        assert self.pool.free_pages == self.pool.num_pages
        assert self.pool.free_adapter_slots == self.pool.max_adapters
        assert all(sequence.slot is None for sequence in self.sequences)
