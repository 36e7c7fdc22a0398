"""Scheduler: who runs in the next step (iteration-level scheduling, paper section 4; admission after LightLLM).

Each step it admits waiting requests in the policy's order while the pool can hold them to their ends, picks the rows to
compute, and preempts when pages run out (which only `admission = "expected"` allows). It counts pages and tokens; it
knows no arrays, no texts, no device.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence as Seq

from slora_ref.config import EngineConfig
from slora_ref.errors import RequestError
from slora_ref.pager import PagePool
from slora_ref.policy import Policy
from slora_ref.prefetch import Prefetcher
from slora_ref.request import BASE_MODEL, FinishReason, Sequence
from slora_ref.scheduler.audit import check_leaving, check_running, check_waiting
from slora_ref.scheduler.forecast import Forecast
from slora_ref.scheduler.room import Room
from slora_ref.step import Step, Work


class Scheduler:
    """The queue of waiting requests and the set of running ones.

    Args:
        pool, prefetcher: asked how much room there is; told what to pin, load and free.
        policy: orders the waiting requests.
        config: limits and modes.
    """

    def __init__(self, pool: PagePool, prefetcher: Prefetcher, policy: Policy, config: EngineConfig) -> None:
        self.pool, self.prefetcher, self.policy, self.config = pool, prefetcher, policy, config
        self.waiting: list[Sequence] = []  # by number, so a preempted sequence stands where it arrived
        self.running: list[Sequence] = []  # in order of admission
        self.leaving: list[Sequence] = []  # let go, see retire
        self.claimed: set[int] = set()  # adapters of waiting requests that have their place in the pool
        self.forecast = Forecast(config)
        self.preemptions = 0
        self._steps_until_join = 0

    # --- requests come and go ---

    def add(self, sequence: Sequence) -> None:
        """Puts a request into the queue.

        Raises:
            RequestError: it could never run, even alone; with the numbers and what would have to change.
        """
        needed = self._pages_alone(sequence)
        if needed > self.pool.num_pages:
            adapter = needed - self.pool.layout.token_pages(sequence.peak_tokens)
            raise RequestError(
                f"the request needs {needed} pages ({needed - adapter} for {sequence.peak_tokens} tokens, {adapter} "
                f"for its adapter), the pool has {self.pool.num_pages}: shorten it or enlarge the pool"
            )
        if not self.config.chunked_prefill and sequence.peak_tokens > self.config.max_batched_tokens:
            raise RequestError(
                f"up to {sequence.peak_tokens} tokens may have to be computed in one step, max_batched_tokens is "
                f"{self.config.max_batched_tokens}: raise it or allow chunked_prefill"
            )
        self._queue(sequence)

    def _queue(self, sequence: Sequence) -> None:
        insort(self.waiting, sequence, key=lambda other: other.number)

    def _pages_alone(self, sequence: Sequence) -> int:
        pages = self.pool.layout.token_pages(sequence.peak_tokens)
        return pages + (self.prefetcher.pages_of(sequence.adapter_id) if sequence.adapter_id != BASE_MODEL else 0)

    def finish(self, sequence: Sequence, reason: FinishReason, now: float, error: str | None = None) -> None:
        """Ends a sequence in whatever state it is and frees all that it held, exactly once."""
        assert not sequence.finished, f"request {sequence.number} ended twice"
        sequence.expect_nothing()
        if sequence.slot is not None:
            self.running.remove(sequence)
            self._release(sequence)
        else:
            (self.leaving if sequence in self.leaving else self.waiting).remove(sequence)
        sequence.finish_reason, sequence.error, sequence.finished_at = reason, error, now
        if reason in (FinishReason.STOP, FinishReason.LENGTH):
            self.forecast.observe(len(sequence.output_ids))

    def retire(self, sequence: Sequence) -> None:
        """Frees what a sequence holds whose last token is being sampled, before anybody has read it: for speed alone.

        A device works in order: who gets the pages next, writes them after the step that was started has read them.
        """
        self.running.remove(sequence)
        self._release(sequence)
        self.leaving.append(sequence)

    def _release(self, sequence: Sequence) -> None:
        assert sequence.slot is not None, sequence.number
        self.pool.close_sequence(sequence.slot)
        sequence.slot, sequence.computed = None, 0
        if sequence.adapter_id != BASE_MODEL:
            self.prefetcher.unpin(sequence.adapter_id)

    # --- one step ---

    def schedule(self, now: float) -> tuple[Step, list[Sequence]]:
        """Decides the next step.

        Returns:
            The step, for which the pool has the pages; and the waiting sequences that the policy dropped (already
            ended).
        """
        dropped = self._admit(now)
        return Step(self._fit_pages(self._pick_rows())), dropped

    def commit(self, step: Step) -> None:
        """The step has run: its tokens now have keys and values."""
        for work in step.work:
            work.sequence.computed += work.count

    # --- admission ---

    def _admit(self, now: float) -> list[Sequence]:
        """Moves waiting sequences to running, in the policy's order, up to the first that does not fit.

        A sequence that fits but whose adapter is missing keeps its place (a claim): its adapter is fetched, what it
        needs is counted, and those behind it may pass only into what is left, and only during its first load. So
        passing never delays it. Where it waits for a slot of the adapter table, only the base model may pass.
        """
        if not self._may_join():
            return []
        self.claimed = set()
        if not self.waiting:
            self.prefetcher.expect(())
            return []
        ordering = self.policy.order(self.waiting, self.running, now)
        dropped = list(ordering.dropped)
        for sequence in dropped:
            self.finish(sequence, FinishReason.ABORT, now, "dropped by the policy: it could not start in time")
        self._announce(ordering.candidates)
        room = Room(self.pool, self.prefetcher, self.forecast, self.config, self.running)
        admitted: list[Sequence] = []
        for sequence in ordering.candidates:
            if not room.has(sequence):
                break
            starts = room.has_slot(sequence) and self._bring(sequence, now)
            room.take(sequence, starts)
            if starts:
                admitted.append(sequence)
            elif sequence.fetches > 1:
                break
        self._start(admitted, now)
        if self.prefetcher.could_prefetch:
            self.prefetcher.prefetch(room.spare_pages(), room.spare_slots())
        return dropped

    def _announce(self, candidates: Seq[Sequence]) -> None:
        """Tells the prefetcher which adapters are coming, in order: no more requests than could start in this step, and
        behind them one for each adapter that may be loaded ahead.
        """
        near = candidates[: self.config.max_running + self.config.prefetch]
        coming = dict.fromkeys([sequence.adapter_id for sequence in near])
        coming.pop(BASE_MODEL, None)
        self.prefetcher.expect(list(coming))

    def _may_join(self) -> bool:
        """Whether new requests may join this step: join_every steps after the last ones did, or when nothing runs.

        Until one does join, each step is another try.
        """
        self._steps_until_join -= 1
        return self._steps_until_join <= 0 or not self.running

    def _bring(self, sequence: Sequence, now: float) -> bool:
        """Whether the sequence's adapter is resident; if not, it is fetched (or already on its way) and claimed."""
        adapter_id = sequence.adapter_id
        if adapter_id == BASE_MODEL:
            return True
        if not self.prefetcher.is_resident(adapter_id):
            sequence.wait_for_adapter(now)
            if adapter_id not in self.prefetcher.held:
                sequence.fetches += self.prefetcher.fetch(adapter_id, keep=self.claimed)
            if self.config.blocking_loads:
                self.prefetcher.wait()
        self.claimed.add(adapter_id)
        return self.prefetcher.is_resident(adapter_id)

    def _start(self, admitted: list[Sequence], now: float) -> None:
        every = self.config.join_every
        if admitted:  # a step of prefill alone is no step of the running ones
            self._steps_until_join = every + (self.config.separate_prefill and every > 1)
        for sequence in admitted:
            sequence.start(self.pool.open_sequence(), now)
            if sequence.adapter_id != BASE_MODEL:
                self.prefetcher.pin(sequence.adapter_id)
                self.claimed.discard(sequence.adapter_id)
                self.prefetcher.counts.hits += not (sequence.adapter_wait_steps or sequence.preemptions)
            self.waiting.remove(sequence)  # near the front under most policies
            self.running.append(sequence)

    # --- rows ---

    def _pick_rows(self) -> list[Work]:
        """Decoding sequences first, one row each, then prefill in order of admission up to max_batched_tokens."""
        prefill, decode = [], []
        for sequence in self.running:
            if sequence.uncomputed > 1:
                prefill.append(sequence)
            else:
                decode.append(Work(sequence, sequence.computed, 1))
        work = [] if prefill and self._prefill_alone(prefill[0], len(decode)) else decode
        room = self.config.max_batched_tokens - len(work)
        for sequence in prefill:
            count = min(sequence.uncomputed, room)
            if not count or (count < sequence.uncomputed and not self.config.chunked_prefill):
                break
            work.append(Work(sequence, sequence.computed, count))
            room -= count
        return work

    def _prefill_alone(self, first: Sequence, decoding: int) -> bool:
        """Whether decoding pauses now: the paper's mode, or a prompt that must stay whole and has no room beside."""
        if self.config.separate_prefill:
            return True
        return not self.config.chunked_prefill and first.uncomputed + decoding > self.config.max_batched_tokens

    def _fit_pages(self, work: list[Work]) -> tuple[Work, ...]:
        """Finds the pages for the rows: evicts idle adapters, then preempts the newest running sequences."""
        while work:
            needed = self.pool.layout.token_pages(sum(item.count for item in work))
            if self.prefetcher.make_room(needed, keep=self.claimed) or self.prefetcher.make_room(needed):
                break
            assert self.config.admission == "expected", f"{needed} pages needed: the forecast of the peak was too low"
            if len(self.running) == 1:  # only loads under way hold the rest; they end
                return ()
            self._preempt(self.running[-1])
            work = [item for item in work if item.sequence.slot is not None]
        return tuple(work)

    def _preempt(self, sequence: Sequence) -> None:
        """Frees a running sequence's pages; it keeps its tokens, waits where it arrived, is computed again later."""
        self.running.remove(sequence)
        self._release(sequence)
        sequence.preemptions += 1
        self.preemptions += 1
        self._queue(sequence)

    def check(self) -> None:
        """Asserts what must hold between steps."""
        check_waiting(self.waiting)
        check_running(self.running, self.pool, self.prefetcher, self.config.max_running)
        check_leaving(self.leaving)
