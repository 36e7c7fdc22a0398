"""EngineLoop: schedule, lay out, run, commit. The loop that every engine shares, whatever its parts are.

Policy and scheduler decide, Batch lays out, the executor computes, commit appends tokens and frees what ended. An
exception that belongs to one request ends that request alone.
"""

from __future__ import annotations

from slora_ref.batch import Batch, arrange
from slora_ref.clock import Clock
from slora_ref.config import ModelConfig
from slora_ref.engine.inputs import sampling_of
from slora_ref.engine.live import Live
from slora_ref.engine.outputs import RequestOutput
from slora_ref.errors import ShardLost
from slora_ref.executor import Executor, StepResult
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
        self._live: dict[int, Live] = {}
        self._news: list[RequestOutput] = []
        self._next_number = 0

    @property
    def has_work(self) -> bool:
        """Whether a request is waiting or running, or there is news that `step` has not returned yet."""
        return bool(self._live or self._news)

    # --- the loop ---

    def step(self) -> list[RequestOutput]:
        """One iteration: at most one run of the model. Returns the news of all requests since the last call."""
        failures = self.prefetcher.poll()
        for adapter_id, failure in failures:
            for sequence in [waiting for waiting in self.scheduler.waiting if waiting.adapter_id == adapter_id]:
                self._finish(self._live[sequence.number], FinishReason.ERROR, str(failure))
        step, dropped = self.scheduler.schedule(self.clock.now())
        for sequence in dropped:
            self._close(self._live[sequence.number])
        if step.work:
            self._run(step)
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
        work = arrange(step.work)
        try:
            batch = Batch.build(work, self.pool)
            self.scheduler.commit(step)
            self.steps += 1
            result = self.executor.run(batch, sampling_of([item.sequence for item in work if item.samples]))
        except BaseException as error:  # a step that fails (or is interrupted) ends its requests, not the engine
            for item in work:
                self._finish(self._live[item.sequence.number], FinishReason.ERROR, f"the step failed: {error!r}")
            if isinstance(error, ShardLost) or not isinstance(error, Exception):
                raise
            return
        self._commit(work, result)

    def _commit(self, work: list[Work], result: StepResult) -> None:
        """Gives each sequence its logits and its token, and ends those that are done."""
        samples = iter(zip(result.tokens.tolist(), result.finite.tolist(), strict=True))
        row, now = 0, self.clock.now()
        for item in work:
            live = self._live[item.sequence.number]
            logits = None if result.logits is None else result.logits[row : row + item.logit_rows]
            row += item.logit_rows
            token, finite = next(samples) if item.samples else (-1, True)
            reason, error = None, None
            try:
                if logits is not None:
                    live.keep_logits(item, logits)
                if not finite:
                    reason, error = FinishReason.ERROR, "the logits are not finite: the adapter or the prompt overflows"
                elif item.samples:
                    reason = live.take(token, None if logits is None else logits[-1], self.model_config.eos_token_ids)
                    self._tell(live, token, now)
            except Exception as failure:  # noqa: BLE001  what one request's data breaks, ends that request alone
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
        alive = {sequence.number for sequence in [*self.scheduler.waiting, *self.scheduler.running]}
        assert alive == self._live.keys(), "the engine and the scheduler disagree about who is alive"
