"""Forecast: how many tokens the running sequences will come to hold, as far as anyone can know.

Turns sequences into lifetimes for peak_tokens: how long each may still run, and how far prefill may set it back.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq

from slora_ref.config import EngineConfig
from slora_ref.request import Sequence
from slora_ref.scheduler.peak import Lifetime, peak_tokens

FOREVER = 1 << 62
"""A step that never comes."""


class Forecast:
    """The memory forecast of one engine.

    How far can a sequence lag behind lockstep? Prefill runs in order of admission. Beside decodes, a sequence lags by
    its own chunks before the last and by those of the sequences before it. Where prefill takes steps of its own,
    everybody waits for all of it. A sequence that waits for its adapter starts at a time that nobody knows, so it
    counts with all that it will ever hold, until everybody else has ended.

    Args:
        config: `admission` decides whether a sequence counts with its max_tokens or with the mean finished length.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._beside = config.chunked_prefill and not config.separate_prefill
        self._finished = 0
        self._generated = 0

    def observe(self, generated: int) -> None:
        """A sequence ended by itself after so many generated tokens."""
        self._finished += 1
        self._generated += generated

    def fits(self, sequences: Seq[Sequence], claims: Seq[Sequence], tokens: int) -> bool:
        """Whether these sequences never hold more than `tokens` tokens at once.

        Args:
            sequences: in order of admission.
            claims: sequences that wait for their adapters.
        """
        if sum([sequence.peak_tokens for sequence in [*sequences, *claims]]) <= tokens:
            return True  # even if all reached their full length at the same time
        return self.peak(sequences, claims) <= tokens

    def peak(self, sequences: Seq[Sequence], claims: Seq[Sequence] = ()) -> int:
        """The most tokens that these sequences will hold at once, whenever the claims start."""
        lives = self._lifetimes([*sequences, *claims])
        lives[len(sequences) :] = [(FOREVER, left, known) for _, left, known in lives[len(sequences) :]]
        return peak_tokens(lives, self._lag(sequences, claims))

    def _lifetimes(self, sequences: Seq[Sequence]) -> list[Lifetime]:
        """One pass with few calls: it runs for every candidate of every step."""
        expected = None
        if self._config.admission == "expected" and self._finished:
            expected = math.ceil(self._generated / self._finished)
        room = self._config.max_batched_tokens - len(sequences) + 1  # rows a step that decodes leave, at least
        lives, ahead = [], 0
        for sequence in sequences:
            known = len(sequence.tokens)
            left, late = sequence.peak_tokens + 1 - known, 0
            if expected is not None:
                left = min(left, max(1, expected - known + sequence.prompt_length))
            if known - sequence.computed > 1 and self._beside:
                ahead += known - sequence.computed
                late = -(-ahead // room) - 1
            lives.append((left + late, left, known))
        return lives

    def _lag(self, sequences: Seq[Sequence], claims: Seq[Sequence]) -> int:
        """Steps of prefill alone, in which all others wait. Claims may come one by one, each with steps of its own."""
        if self._beside:
            return 0
        prefills = [sequence.uncomputed for sequence in sequences if sequence.uncomputed > 1]
        later = [sequence.uncomputed for sequence in claims if sequence.uncomputed > 1]
        if not self._config.chunked_prefill:
            return len(prefills) + len(later)  # each step takes at least one whole prompt
        return sum(-(-tokens // self._config.max_batched_tokens) for tokens in [sum(prefills), *later])
