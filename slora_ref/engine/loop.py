"""EngineLoop: schedule, lay out, start, read. The loop that every engine shares, whatever its parts are.

Policy and scheduler decide, Batch lays out, the executor computes; what it brings appends tokens and frees what ended,
at once or (under_way.py) while the next step runs. An exception that belongs to one request ends that request alone.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence as Seq

from slora_ref.batch import Batch, arrange
from slora_ref.clock import Clock
from slora_ref.config import ModelConfig
from slora_ref.engine.inputs import sampling_of
from slora_ref.engine.live import Live
from slora_ref.engine.outputs import RequestOutput
from slora_ref.engine.under_way import Share, UnderWay
from slora_ref.errors import ShardLost
from slora_ref.executor import Executor
from slora_ref.prefetch import Prefetcher
from slora_ref.request import BASE_MODEL, FinishReason
from slora_ref.scheduler import Scheduler
from slora_ref.step import Step, Work
from slora_ref.store import AdapterVersion
from slora_ref.tokenizer import Tokenizer


class EngineLoop:
    """The parts of an engine and its loop.

    Args:
        scheduler, prefetcher, executor, clock: the parts; Engine.from_pretrained builds the usual ones.
        model_config: end tokens and vocabulary.
        tokenizer: for prompts and answers as text; None: token ids only.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        prefetcher: Prefetcher,
        executor: Executor,
        clock: Clock,
        model_config: ModelConfig,
        tokenizer: Tokenizer | None = None,
    ) -> None:
        self.scheduler, self.prefetcher, self.executor, self.clock = scheduler, prefetcher, executor, clock
        self.model_config, self.tokenizer = model_config, tokenizer
        self.pool, self.store = scheduler.pool, prefetcher.store
        self.steps = 0
        self._under_way: deque[UnderWay] = deque()  # oldest first; between two calls of `step`, at most one
        self._live: dict[int, Live] = {}
        self._news: list[RequestOutput] = []
        self._next_number = 0

    @property
    def has_work(self) -> bool:
        """Whether a request is waiting or running, or there is news that `step` has not returned yet."""
        return bool(self._live or self._news)

    # --- the loop ---

    def step(self) -> list[RequestOutput]:
        """One iteration: at most one run of the model. Returns the news of all requests since the last call.

        With `async_scheduling` these are what the step before this one has brought. But a step in which a request reads
        logits or log-probabilities is read at once.
        """
        failures = self.prefetcher.poll()
        for adapter_id, failure in failures:
            for sequence in [waiting for waiting in self.scheduler.waiting if waiting.adapter_id == adapter_id]:
                self._finish(self._live[sequence.number], FinishReason.ERROR, str(failure))
        step, dropped = self.scheduler.schedule(self.clock.now())
        for sequence in dropped:
            self._close(self._live[sequence.number])
        if step.work:
            self._run(step)
        elif self._under_way:
            self._read()
        elif self.prefetcher.waiting and not failures and not dropped:  # nothing to do and nothing to tell
            self._stand_still()
        news, self._news = self._news, []
        return news

    def _stand_still(self) -> None:
        """Waits for an adapter, since nothing else can run."""
        since = self.clock.now()
        self.prefetcher.wait_for_any()
        self.prefetcher.counts.stalled_s += self.clock.now() - since

    def _run(self, step: Step) -> None:
        """Starts a step, and reads what is under way: all but this one, if the next can be scheduled without it."""
        work = arrange(step.work)
        late = bool(self.scheduler.config.async_scheduling) and not any(item.reads_logits for item in work)
        try:
            batch = Batch.build(work, self.pool)
            self.scheduler.commit(step)
            self.steps += 1
            started = self.executor.start(batch, sampling_of([item.sequence for item in work if item.samples]))
            self._under_way.append(UnderWay.of(started, work))
            self._retire(work)
        except BaseException as error:  # noqa: BLE001  it is raised below
            self._fail(work, error)
            try:
                self._read()  # what the step has left of the samples of the one before, nobody knows
            finally:
                if _ends_more_than_a_step(error):
                    raise error  # also if it has ended a group of shards, of whom no step can be read any more
        else:
            self._read(all_but=1 if late else 0)

    def _retire(self, work: list[Work]) -> None:
        """Who gets the last token from the step under way, is not scheduled any more."""
        for item in work:
            if not item.sequence.tokens_left:
                self.scheduler.retire(item.sequence)

    def _read(self, all_but: int = 0) -> None:
        """Waits for the steps under way, but for so many, and takes in what they bring.

        What interrupts this ends the requests of that step alone: those of the others get their tokens before it is
        raised, since a token that is read later would stand in the place of another one.
        """
        while len(self._under_way) > all_but:
            under_way = self._under_way.popleft()
            try:
                self._take_in(under_way)
            except BaseException as error:
                self._fail(under_way.work, error)
                self._read()
                raise

    def _fail(self, work: Seq[Work], error: BaseException) -> None:
        """A step that fails (or is interrupted) ends its requests, not the engine."""
        for item in work:
            if not item.sequence.finished:
                self._finish(self._live[item.sequence.number], FinishReason.ERROR, f"the step failed: {error!r}")

    def _take_in(self, under_way: UnderWay) -> None:
        """Waits for a step, gives each sequence its logits and its token, and ends those that are done."""
        try:
            result = under_way.step.read()
        except Exception as error:
            if _ends_more_than_a_step(error):
                raise
            self._fail(under_way.work, error)
        else:
            now = self.clock.now()
            for share in under_way.shares(result):
                self._give(self._live[share.work.sequence.number], share, now)

    def _give(self, live: Live, share: Share, now: float) -> None:
        """What a step has brought for one request. What its data breaks, ends that request alone."""
        reason, error = None, None
        try:
            if share.logits is not None:
                live.keep_logits(share.work, share.logits)
            if not share.finite:
                reason, error = FinishReason.ERROR, "the logits are not finite: the adapter or the prompt overflows"
            elif share.token is not None:
                chosen_from = None if share.logits is None else share.logits[-1]
                reason = live.take(share.token, chosen_from, self.model_config.eos_token_ids)
                self._tell(live, share.token, now)
        except Exception as failure:  # noqa: BLE001
            reason, error = FinishReason.ERROR, f"the request failed: {failure!r}"
        if reason is not None:
            self._finish(live, reason, error)

    def _tell(self, live: Live, token: int, now: float) -> None:
        sequence = live.sequence
        if sequence.first_token_at is None:
            sequence.first_token_at = now
        text = live.text[-1] if live.text else ""
        self._news.append(RequestOutput(sequence.number, (token,), text))

    # --- the end of a request ---

    def _finish(self, live: Live, reason: FinishReason, error: str | None = None) -> None:
        self.scheduler.finish(live.sequence, reason, self.clock.now(), error)
        self._close(live)

    def _close(self, live: Live) -> None:
        """The sequence has finished: gives out the rest of its text and lets go of its adapter. Once a request."""
        sequence = live.sequence
        del self._live[sequence.number]
        if sequence.adapter_id != BASE_MODEL:
            self._forget_if_unused(self.store.release(sequence.adapter_id))
        rest = live.flush()
        self._news.append(RequestOutput(sequence.number, text=rest, completion=live.completion()))

    def _forget_if_unused(self, version: AdapterVersion) -> None:
        if version.removed and not version.users:
            self.prefetcher.drop(version.adapter_id)
            self.store.forget(version)

    def check(self) -> None:
        """Asserts the invariants of every part, and that the parts agree. For tests, after each step."""
        for part in (self.pool, self.store, self.prefetcher, self.scheduler):
            part.check()
        scheduled = [*self.scheduler.waiting, *self.scheduler.running, *self.scheduler.leaving]
        alive = {sequence.number for sequence in scheduled}
        assert alive == self._live.keys(), "the engine and the scheduler disagree about who is alive"
        expected = Counter(number for under_way in self._under_way for number in under_way.sampled)
        unread = {number: live.sequence.unread for number, live in self._live.items()}
        assert unread == {number: expected[number] for number in unread}, "a token is expected that no step samples"


def _ends_more_than_a_step(error: BaseException) -> bool:
    """Whether the caller must hear of it: the group of shards is lost, or somebody has interrupted."""
    return isinstance(error, ShardLost) or not isinstance(error, Exception)
