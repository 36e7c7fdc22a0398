"""Live: one request inside the engine, from its tokens to its text. What goes wrong here is its own business."""

from __future__ import annotations

from dataclasses import dataclass, field

from slora_ref.engine.outputs import Completion
from slora_ref.request import FinishReason, Sequence
from slora_ref.sampler import log_probabilities
from slora_ref.shapes import Array, Float
from slora_ref.step import Work
from slora_ref.text import TextStream


@dataclass
class Live:
    """A request that has not ended.

    Args:
        sequence: its tokens.
        stream: decodes them; None without a tokenizer.
        text: the pieces given out so far.
    """

    sequence: Sequence
    stream: TextStream | None
    text: list[str] = field(default_factory=list)

    def keep_logits(self, work: Work, logits: Float[Array, "logits vocab"]) -> None:
        """Stores the logits of the positions that are new; after a preemption some are computed again.

        As copies: a view would keep the logits of all requests of the step in memory.
        """
        if self.sequence.request.params.keep_logits:
            self.sequence.logits += [row.copy() for row in logits[len(self.sequence.logits) - work.start :]]

    def take(
        self, token: int, logits: Float[Array, " vocab"] | None, end_tokens: tuple[int, ...]
    ) -> FinishReason | None:
        """Takes a generated token, which was expected, and appends its text.

        Args:
            logits: [vocab] that the token was chosen from; None: nobody in this step reads them.
            end_tokens: of the model.

        Returns:
            Why the request is done now, or None.
        """
        sequence, params = self.sequence, self.sequence.request.params
        if params.logprobs is not None:
            assert logits is not None, "a step whose requests read logits came without"
            sequence.logprobs.append(log_probabilities(logits, token, params.logprobs))
        sequence.receive(token)
        if self.stream is not None:
            self.text.append(self.stream.push(token))
        if token in params.stop_token_ids or (token in end_tokens and not params.ignore_eos):
            return FinishReason.STOP
        if self.stream is not None and self.stream.stopped:
            return FinishReason.STOP
        return None if sequence.tokens_left or sequence.unread else FinishReason.LENGTH

    def flush(self) -> str:
        """The text that was held back; the request has ended. Where it cannot be decoded, it has ended by an error."""
        rest = ""
        try:
            rest = "" if self.stream is None else self.stream.flush()
        except Exception as failure:  # noqa: BLE001  the end of one request must not be the end of the step
            self.sequence.finish_reason = FinishReason.ERROR
            self.sequence.error = self.sequence.error or f"the request failed: {failure!r}"
        self.text.append(rest)
        return rest

    def completion(self) -> Completion:
        """The whole of the request, after its sequence has finished."""
        sequence = self.sequence
        assert sequence.finish_reason is not None and sequence.finished_at is not None, sequence.number
        return Completion(
            request_id=sequence.number,
            adapter=sequence.request.adapter,
            prompt_ids=sequence.request.prompt_ids,
            text="".join(self.text),
            token_ids=tuple(sequence.output_ids),
            finish_reason=sequence.finish_reason,
            error=sequence.error,
            logprobs=tuple(sequence.logprobs),
            logits=tuple(sequence.logits),
            arrival=sequence.request.arrival,
            first_token_at=sequence.first_token_at,
            finished_at=sequence.finished_at,
            preemptions=sequence.preemptions,
            adapter_wait_steps=sequence.adapter_wait_steps,
            adapter_wait_s=sequence.adapter_wait_s,
        )
