"""Executor and StepResult: what the engine asks for and what it gets. Neither knows how a step is computed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from slora_ref.batch import Batch
from slora_ref.sampler import Sampling
from slora_ref.shapes import Array, Bool, Float, Int


@dataclass(frozen=True)
class StepResult:
    """What a step brought.

    Args:
        tokens: [samples] the next token of each sampled row.
        finite: [samples] whether that row's logits were finite; where not, the token means nothing.
        logits: [logits, vocab] of batch.logit_rows; None where no request reads any.
    """

    tokens: Int[Array, " samples"]
    finite: Bool[Array, " samples"]
    logits: Float[Array, "logits vocab"] | None


class Executor(Protocol):
    """Runs batches."""

    def run(self, batch: Batch, sampling: Sampling) -> StepResult:
        """Computes one step."""
        ...


class FollowingExecutor(Protocol):
    """Runs batches on a shard that does not lead."""

    def follow(self, batch: Batch) -> None:
        """Computes one step."""
        ...
