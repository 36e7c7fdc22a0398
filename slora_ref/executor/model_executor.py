"""ModelExecutor: a step in NumPy, the model and then the sampler. It knows batches and sampling, but no requests."""

from __future__ import annotations

import numpy as np

from slora_ref.batch import Batch
from slora_ref.executor.result import StepResult
from slora_ref.model import LlamaModel
from slora_ref.sampler import Sampling, sample


class ModelExecutor:
    """Runs the model and samples on the spot."""

    def __init__(self, model: LlamaModel) -> None:
        self.model = model

    def run(self, batch: Batch, sampling: Sampling) -> StepResult:
        """Computes one step. A row that overflows gives non-finite logits, for that row alone and without a warning."""
        with np.errstate(over="ignore", invalid="ignore"):
            logits = self.model.forward(batch)
        tokens, finite = sample(logits[batch.sampled], sampling)
        return StepResult(tokens, finite, logits if batch.wants_logits else None)

    def follow(self, batch: Batch) -> None:
        """Computes a step on a shard that does not lead: the tokens are not its business."""
        with np.errstate(over="ignore", invalid="ignore"):
            self.model.forward(batch)
