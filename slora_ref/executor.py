"""Executors: whatever can run a batch. The real one computes; a simulated one would only say how long it takes.

An executor knows batches and sampling, but no requests, no queue and no text.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from slora_ref.batch import Batch
from slora_ref.model import LlamaModel
from slora_ref.sampler import Sampling, sample
from slora_ref.shapes import Array, Bool, Float, Int


@dataclass(frozen=True)
class StepResult:
    """What a step brought.

    Args:
        tokens: [samples] the next token of each sampled row.
        finite: [samples] whether that row's logits were finite; where not, the token means nothing.
        logits: [logits, vocab] of batch.logit_rows.
    """

    tokens: Int[Array, " samples"]
    finite: Bool[Array, " samples"]
    logits: Float[Array, "logits vocab"]


class Executor(Protocol):
    """Runs batches."""

    def run(self, batch: Batch, sampling: Sampling) -> StepResult:
        """Computes one step."""
        ...


class ModelExecutor:
    """Runs the model and samples on the spot."""

    def __init__(self, model: LlamaModel) -> None:
        self.model = model

    def run(self, batch: Batch, sampling: Sampling) -> StepResult:
        """Computes one step. A row that overflows gives non-finite logits, for that row alone and without a warning."""
        with np.errstate(over="ignore", invalid="ignore"):
            logits = self.model.forward(batch)
        tokens, finite = sample(logits[batch.sampled], sampling)
        return StepResult(tokens, finite, logits)
