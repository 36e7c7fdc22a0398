"""What the engine gives back: pieces while a request runs, and the whole with the last piece."""

from __future__ import annotations

from dataclasses import dataclass

from slora_ref.request import FinishReason
from slora_ref.shapes import Array, Float


@dataclass(frozen=True)
class Completion:
    """A request that has ended.

    Args:
        text: without special tokens and without a stop string.
        token_ids: all generated tokens, the one that ended the text included.
        error: what happened, if it ended by an error or was dropped.
        logprobs: with SamplingParams.logprobs, for each token a mapping from token to log-probability.
        logits: with keep_logits, [vocab] after each token of prompt and output but the last.
        arrival, first_token_at, finished_at: seconds on the engine's clock.
        adapter_wait_steps, adapter_wait_s: steps and seconds in which there was room for it, but its adapter was not in
            the pool yet.
    """

    request_id: int
    adapter: str | None
    prompt_ids: tuple[int, ...]
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    error: str | None
    logprobs: tuple[dict[int, float], ...]
    logits: tuple[Float[Array, " vocab"], ...]
    arrival: float
    first_token_at: float | None
    finished_at: float
    preemptions: int
    adapter_wait_steps: int
    adapter_wait_s: float


@dataclass(frozen=True)
class RequestOutput:
    """News of one request.

    Args:
        request_id: as add_request returned it.
        token_ids: tokens generated since the last piece.
        text: text that became certain since the last piece; the pieces of a request join to its completion's text.
        completion: with the last piece, the whole; None while the request goes on.
    """

    request_id: int
    token_ids: tuple[int, ...] = ()
    text: str = ""
    completion: Completion | None = None

    @property
    def finished(self) -> bool:
        """Whether this is the last piece."""
        return self.completion is not None
