"""Executor and StepResult: what the engine asks for and what it gets. Neither knows how a step is computed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

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

    def read(self) -> StepResult:
        """Itself: what was computed at once is a step to be read like any other."""
        return self


@runtime_checkable
class StartedStep(Protocol):
    """A step that is being computed."""

    def read(self) -> StepResult:
        """What it brought; waits for it."""
        ...


class Executor(Protocol):
    """Runs batches."""

    def start(self, batch: Batch, sampling: Sampling) -> StartedStep:
        """Starts one step, behind those that were started before; or computes it at once.

        A batch may hold placeholders of what the step before samples, if all logits of that step are sampled from. A
        step of which somebody reads the logits is read before the next one starts; of the others at most two are
        started and not read.
        """
        ...


class FollowingExecutor(Protocol):
    """Runs batches on a shard that does not lead."""

    def follow(self, batch: Batch, sampling: Sampling) -> None:
        """Starts one step, or computes it at once.

        It samples as the leading shard does, from the same logits: so the tokens that the next batch has placeholders
        for are known here, too, and none has to be sent.
        """
        ...

    def wait(self) -> None:
        """Waits for the steps that were started: until then the other shards need this one."""
        ...
