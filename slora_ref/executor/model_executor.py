"""ModelExecutor: a step in NumPy, the model and then the sampler. It knows batches and sampling, but no requests."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from slora_ref.batch import Batch
from slora_ref.executor.result import StepResult
from slora_ref.model import LlamaModel
from slora_ref.sampler import Sampling, sample
from slora_ref.shapes import Array, Int


class ModelExecutor:
    """Runs the model and samples on the spot."""

    def __init__(self, model: LlamaModel) -> None:
        self.model = model
        self._sampled = np.zeros(0, np.int64)  # by the last step

    def start(self, batch: Batch, sampling: Sampling) -> StepResult:
        """Computes one step. A row that overflows gives non-finite logits, for that row alone and without a warning."""
        with np.errstate(over="ignore", invalid="ignore"):
            logits = self.model.forward(replace(batch, token_ids=self._entered(batch.token_ids)))
        tokens, finite = sample(logits[batch.sampled], sampling)
        self._sampled = tokens
        return StepResult(tokens, finite, logits if batch.wants_logits else None)

    def _entered(self, token_ids: Int[Array, " rows"]) -> Int[Array, " rows"]:
        """The tokens, with what the last step has sampled in place of the placeholders."""
        unread = token_ids < 0
        entered = token_ids.copy()
        entered[unread] = self._sampled[-1 - token_ids[unread]]
        return entered

    def follow(self, batch: Batch, sampling: Sampling) -> None:
        """The same, on a shard that does not lead."""
        self.start(batch, sampling)

    def wait(self) -> None:
        """Nothing is ever under way."""
