"""Step and Work: the scheduler's decision for one iteration. No arrays; Batch turns it into them."""

from __future__ import annotations

from dataclasses import dataclass

from slora_ref.request import Sequence


@dataclass(frozen=True, slots=True)
class Work:
    """Tokens start .. start + count - 1 of one sequence run in this step."""

    sequence: Sequence
    start: int
    count: int

    @property
    def samples(self) -> bool:
        """Whether the step reaches the sequence's last token, so that a new one is sampled."""
        return self.start + self.count == len(self.sequence.tokens)

    @property
    def reads_logits(self) -> bool:
        """Whether its request reads logits themselves, or what is computed from them on the host."""
        return self.sequence.request.params.reads_logits

    @property
    def logit_rows(self) -> int:
        """How many of its rows, the last ones, the model must give logits for."""
        return self.count if self.sequence.request.params.keep_logits else int(self.samples)


@dataclass(frozen=True)
class Step:
    """One iteration: decode and prefill rows side by side; empty when nothing can run."""

    work: tuple[Work, ...]

    @property
    def rows(self) -> int:
        """Tokens that the model computes in this step."""
        return sum(work.count for work in self.work)
