"""Forecast: how many tokens the running sequences will come to hold, as far as anyone can know.

Turns sequences into lifetimes for peak_tokens: how long each may still run, and how far prefill may set it back.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq

from slora_ref.config import EngineConfig
from slora_ref.request import Sequence
from slora_ref.scheduler.peak import Lifetime, peak_tokens


class Forecast:
    """The memory forecast of one engine.

    Args:
        config: `admission` decides whether a sequence counts with its max_tokens or with the mean finished length.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._finished = 0
        self._generated = 0

    def observe(self, generated: int) -> None:
        """A sequence ended by itself after so many generated tokens."""
        self._finished += 1
        self._generated += generated

    def peak(self, sequences: Seq[Sequence]) -> int:
        """The most tokens that these sequences (in order of admission) will hold at once."""
        return peak_tokens(
            Lifetime(len(sequence.tokens), self._left(sequence), delay)
            for sequence, delay in zip(sequences, self._delays(sequences), strict=True)
        )

    def _left(self, sequence: Sequence) -> int:
        """Tokens that the sequence is counted to generate still."""
        if self._config.admission == "max_tokens" or not self._finished:
            return sequence.tokens_left
        expected = math.ceil(self._generated / self._finished) - len(sequence.output_ids)
        return min(sequence.tokens_left, max(1, expected))

    def _delays(self, sequences: Seq[Sequence]) -> list[int]:
        """Steps by which each may lag behind lockstep, given that prefill runs in order of admission.

        Beside decodes, only prefilling sequences lag, by the chunks before their last. Where prefill takes steps of its
        own, every other sequence pauses in them.
        """
        pending = [sequence.uncomputed if sequence.uncomputed > 1 else 0 for sequence in sequences]
        if not self._config.chunked_prefill:
            return [sum(map(bool, pending))] * len(sequences)
        if self._config.separate_prefill:
            return [-(-sum(pending) // self._config.max_batched_tokens)] * len(sequences)
        room = self._config.max_batched_tokens - len(sequences) + 1  # rows a step that decodes leave, at least
        delays, ahead = [], 0
        for tokens in pending:
            ahead += tokens
            delays.append(-(-ahead // room) - 1 if tokens else 0)
        return delays
