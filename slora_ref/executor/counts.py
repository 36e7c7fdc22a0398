"""PreparationCounts: what was done once for steps that are then repeated, and the host's time that it took."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter


@dataclass
class PreparationCounts:
    """What an executor did for shapes of steps that came for the first time, or for the second.

    Args:
        tapes: shapes, of a step's layers or of what comes behind them, whose launches were prepared.
        tapes_s: seconds that took, with starting them once.
        graphs: shapes that were captured.
        graphs_s: seconds that took.
    """

    tapes: int = 0
    tapes_s: float = 0.0
    graphs: int = 0
    graphs_s: float = 0.0

    @contextmanager
    def tape(self) -> Iterator[None]:
        """Counts what is prepared within."""
        started = perf_counter()
        yield
        self.tapes, self.tapes_s = self.tapes + 1, self.tapes_s + perf_counter() - started

    @contextmanager
    def graph(self) -> Iterator[None]:
        """Counts what is captured within."""
        started = perf_counter()
        yield
        self.graphs, self.graphs_s = self.graphs + 1, self.graphs_s + perf_counter() - started

    def __sub__(self, before: PreparationCounts) -> PreparationCounts:
        """What has come since."""
        ours, theirs = vars(self), vars(before)
        return PreparationCounts(**{name: ours[name] - theirs[name] for name in ours})
