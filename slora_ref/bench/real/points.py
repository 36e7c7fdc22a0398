"""The points that are run for real: S-LoRA and its baselines with 1 to 200 adapters of the paper's setting S2."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

System = Literal["slora", "bmm", "merge", "split"]


@dataclass(frozen=True)
class RealPoint:
    """One run.

    Args:
        tight: whether the pool is the small one.
        share: of the pool that adapters have alone, where it is split.
    """

    system: System
    adapters: int
    tight: bool = False
    share: float = 0.0

    @property
    def name(self) -> str:
        """As in the results."""
        parts = [f"n={self.adapters}", *(["tight pool"] if self.tight else []), self.system]
        return " ".join([*parts, *([f"{self.share:.0%} for adapters"] if self.share else [])])


def _points(system: System, *counts: int) -> list[RealPoint]:
    return [RealPoint(system, count) for count in counts]


EXPERIMENTS: Mapping[str, list[RealPoint]] = {
    "fig5": [*_points("slora", 1, 5, 100, 200), *_points("bmm", 5, 100)],
    "fig9": [*_points("slora", 1, 5), *_points("merge", 1, 5)],
    "fragmentation": [
        RealPoint("slora", 200, tight=True),
        *(RealPoint("split", 200, tight=True, share=share) for share in (0.2, 0.4)),
    ],
}
"""By experiment. Figure 5: padding against paging; Figure 9: merging against computing on the fly; and the study of one
pool against two (the paper's S-LoRA-no-unify-mem)."""
