"""UnderWay: a step that has been started and not read yet. It exists for speed alone: so that a device need not wait.

With `async_scheduling` (vLLM's name) a step is scheduled and started before the tokens of the one before are known.
Nearly all of it can be said without them: pages, positions, and who ends by max_tokens (Scheduler.retire). Where a
token would stand, Sequence.expect puts a placeholder, for which the executor enters what the step before has sampled.
Only that a token or a text ends a request is seen a step late: then its row in the next step was for nothing, and what
that brings is dropped.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from slora_ref.executor import StartedStep, StepResult
from slora_ref.shapes import Array, Float
from slora_ref.step import Work


@dataclass(frozen=True)
class Share:
    """What a step has brought for one of its sequences.

    Args:
        work: the sequence, and which of its tokens ran.
        token: sampled; None: its prompt goes on.
        finite: whether the logits that it was sampled from were.
        logits: [logits, vocab] of its rows that wanted some; None: nobody in this step reads any.
    """

    work: Work
    token: int | None
    finite: bool
    logits: Float[Array, "logits vocab"] | None


@dataclass(frozen=True)
class UnderWay:
    """A started step, and what to do with its result.

    Args:
        step: computes.
        work: in the order of the batch.
        samples: which of them get a token.
        logit_rows: how many logits each of them wanted.
    """

    step: StartedStep
    work: Seq[Work]
    samples: list[bool]
    logit_rows: list[int]

    @classmethod
    def of(cls, step: StartedStep, work: Seq[Work]) -> UnderWay:
        """A step just started; from here on its sequences expect their tokens."""
        under_way = cls(step, work, [item.samples for item in work], [item.logit_rows for item in work])
        sampled = [item.sequence for item in work if item.samples]
        for place, sequence in enumerate(sampled):
            sequence.expect(place)
        return under_way

    @property
    def sampled(self) -> list[int]:
        """The numbers of the sequences that get a token."""
        return [item.sequence.number for item, samples in zip(self.work, self.samples, strict=True) if samples]

    def shares(self, result: StepResult) -> Iterator[Share]:
        """Cuts the result into what belongs to each sequence that has not ended meanwhile."""
        samples = iter(zip(result.tokens.tolist(), result.finite.tolist(), strict=True))
        row = 0
        for item, sampled, rows in zip(self.work, self.samples, self.logit_rows, strict=True):
            token, finite = next(samples) if sampled else (None, True)
            logits = None if result.logits is None else result.logits[row : row + rows]
            row += rows
            if not item.sequence.finished:
                yield Share(item, token, finite, logits)
