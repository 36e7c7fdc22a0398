"""Request, SamplingParams, Sequence: what somebody asked for, and how far it has got.

A Request never changes. A Sequence is a request in the system: its tokens, how many of them have keys and values in
pages, and how it ended. Neither knows pages, arrays or text.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from slora_ref.errors import RequestError
from slora_ref.options import MOST, check_real, check_switch, check_whole, is_finite

BASE_MODEL = -1
"""The adapter id of a request that uses no adapter: its rows are untouched by LoRA."""


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to choose tokens and when to stop. Names and meanings are vLLM's and transformers'.

    Args:
        max_tokens: most tokens to generate.
        temperature: 0 is greedy.
        top_k: keep the k likeliest tokens; 0 keeps all.
        top_p: then keep the smallest set of likeliest tokens whose probabilities reach top_p.
        min_p: then keep tokens at least min_p times as likely as the likeliest.
        seed: of this request's noise; None: drawn by the engine.
        stop: strings that end the text; they are not part of it.
        stop_token_ids: tokens that end the text, like the model's own end tokens.
        ignore_eos: the model's end tokens do not end the text.
        logprobs: for each generated token also the log-probabilities of this many likeliest tokens; None: none at all.
        keep_logits: keep the logits of every position, prompt included (Sequence.logits).
    """

    max_tokens: int = 16
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    keep_logits: bool = False

    def __post_init__(self) -> None:
        """Raises RequestError that names the parameter, its value and the rule."""
        check_whole(RequestError, "max_tokens", self.max_tokens, 1)
        check_whole(RequestError, "top_k", self.top_k, 0)
        for name, most in (("seed", (1 << 64) - 1), ("logprobs", MOST)):
            if getattr(self, name) is not None:
                check_whole(RequestError, name, getattr(self, name), 0, most)
        for name, low, high in (("temperature", 0.0, math.inf), ("top_p", 0.0, 1.0), ("min_p", 0.0, 1.0)):
            value = getattr(self, name)
            holds = is_finite(value) and low <= value <= high and (name != "top_p" or value > 0)
            rule = {"temperature": "a finite number, 0 (greedy) or above", "top_p": "above 0 and at most 1"}
            check_real(RequestError, name, value, holds, rule.get(name, "from 0 to 1"))
        for name in ("ignore_eos", "keep_logits"):
            check_switch(RequestError, name, getattr(self, name))
        self._check_items("stop", "strings that are not empty", lambda item: isinstance(item, str) and item != "")
        self._check_items("stop_token_ids", "token ids", lambda item: isinstance(item, int) and item >= 0)

    @property
    def reads_logits(self) -> bool:
        """Whether the logits themselves are wanted, not only the tokens chosen from them."""
        return self.keep_logits or self.logprobs is not None

    def _check_items(self, name: str, rule: str, holds: Callable[[Any], bool]) -> None:
        """A list will do too; it becomes the tuple that this class promises."""
        items = getattr(self, name)
        if not isinstance(items, list | tuple):
            raise RequestError(f"{name} is {items!r:.60}; it must be a tuple of {rule}")
        for item in items:
            if not holds(item):
                raise RequestError(f"{name} is {item!r:.60}; there may be only {rule}")
        object.__setattr__(self, name, tuple(items))


@dataclass(frozen=True, kw_only=True)
class Request:
    """One prompt for one adapter.

    Args:
        prompt_ids: at least one token.
        params: how to sample and when to stop.
        adapter: the name under which the adapter is registered; None: the base model.
        arrival: seconds on the engine's clock.
    """

    prompt_ids: tuple[int, ...]
    params: SamplingParams = SamplingParams()
    adapter: str | None = None
    arrival: float = 0.0


class FinishReason(Enum):
    """Why a sequence ended."""

    STOP = "stop"  # an end token, a stop token or a stop string
    LENGTH = "length"  # max_tokens reached
    ABORT = "abort"  # by the client, or dropped by the policy
    ERROR = "error"  # Sequence.error says what happened


@dataclass(eq=False)
class Sequence:
    """A request in the system.

    Args:
        number: unique and ascending in order of arrival; also the request's id.
        request: what was asked.
        adapter_id: the version of the adapter that this request is bound to, or BASE_MODEL.
        seed: of its sampling noise.
        tokens: the prompt, then what was generated. The last may be placeholders of tokens that a step is still
            sampling: negative, -1 - i for the i-th sample of its step.
        unread: how many of them are placeholders.
        computed: how many of the tokens have keys and values in pages.
        slot: sequence slot in the pool while running.
        prompt_length: tokens of the prompt.
        peak_tokens: most tokens that ever have keys and values: the last token generated is never fed back.
    """

    number: int
    request: Request
    adapter_id: int
    seed: int
    tokens: list[int] = field(default_factory=list)
    unread: int = 0
    computed: int = 0
    slot: int | None = None
    finish_reason: FinishReason | None = None
    error: str | None = None
    preemptions: int = 0
    first_token_at: float | None = None
    finished_at: float | None = None
    adapter_wait_steps: int = 0  # steps in which there was room for it, and its adapter was not there
    adapter_wait_s: float = 0.0  # seconds from the first of these steps to the one in which it started
    adapter_wait_since: float | None = None
    fetches: int = 0  # loads of its adapter that were begun for it
    logprobs: list[dict[int, float]] = field(default_factory=list)
    logits: list[Any] = field(default_factory=list)  # with keep_logits: one [vocab] array a position
    prompt_length: int = field(init=False)
    peak_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        """A new sequence starts with its prompt."""
        self.tokens = self.tokens or list(self.request.prompt_ids)
        self.prompt_length = len(self.request.prompt_ids)
        self.peak_tokens = self.prompt_length + self.request.params.max_tokens - 1

    @property
    def output_ids(self) -> list[int]:
        """The tokens generated so far, placeholders included."""
        return self.tokens[self.prompt_length :]

    def expect(self, sample: int) -> None:
        """The step that was started last samples its next token, as its sample number `sample`."""
        self.tokens.append(-1 - sample)
        self.unread += 1

    def receive(self, token: int) -> None:
        """The first token that was expected has been read."""
        self.tokens[-self.unread] = token
        self.unread -= 1

    def expect_nothing(self) -> None:
        """It has ended: what is still being sampled for it will be dropped."""
        del self.tokens[len(self.tokens) - self.unread :]
        self.unread = 0

    @property
    def uncomputed(self) -> int:
        """Tokens that wait for a step: 1 while decoding, more in prefill, all of them after a preemption."""
        return len(self.tokens) - self.computed

    @property
    def tokens_left(self) -> int:
        """Most tokens it may still generate."""
        return self.peak_tokens + 1 - len(self.tokens)

    def wait_for_adapter(self, now: float) -> None:
        """Another step without its adapter."""
        self.adapter_wait_steps += 1
        if self.adapter_wait_since is None:
            self.adapter_wait_since = now

    def start(self, slot: int, now: float) -> None:
        """It runs from this step on."""
        self.slot = slot
        if self.adapter_wait_since is not None:
            self.adapter_wait_s += now - self.adapter_wait_since
            self.adapter_wait_since = None

    @property
    def finished(self) -> bool:
        """Whether it has ended, for whatever reason."""
        return self.finish_reason is not None
