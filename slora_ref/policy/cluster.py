"""Adapter clustering (paper section 4.2): few adapters in the running batch, so that more memory is left for keys and
values.

Both wrap another policy, whose order and drops they keep within each group: FCFS, or early abort.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from slora_ref.policy.base import FCFS, Ordering, Policy
from slora_ref.request import BASE_MODEL, Sequence

PATIENCE_SECONDS = 6.0


def _adapters(sequences: Seq[Sequence]) -> set[int]:
    """Adapters that these use; the base model is none."""
    return {sequence.adapter_id for sequence in sequences} - {BASE_MODEL}


class AdapterClusters:
    """The paper's clusters: at most `clusters` adapters run at once.

    Starvation: bounded. Who has waited for `patience` seconds is passed by no later arrival: candidates are then those
    who came no later, in order of arrival, whatever their adapters. So a request starts at the latest when it has
    waited that long and all have ended who were running or waiting before it then.

    Args:
        clusters: d, the most adapters in the running batch.
        inner: orders within the adapters that may run.
        patience: seconds until clustering gives way to order of arrival.
    """

    def __init__(self, clusters: int, inner: Policy | None = None, patience: float = PATIENCE_SECONDS) -> None:
        assert clusters >= 1, f"{clusters} clusters would let nobody run"
        self.clusters, self.inner, self.patience = clusters, inner or FCFS(), patience

    def order(self, waiting: Seq[Sequence], running: Seq[Sequence], now: float) -> Ordering:
        """Running adapters first, then others up to the limit."""
        ordering = self.inner.order(waiting, running, now)
        tired = [s for s in ordering.candidates if s.request.arrival <= now - self.patience]
        if tired:
            return Ordering(sorted(tired, key=lambda sequence: sequence.number), ordering.dropped)
        present = _adapters(running)
        here = [s for s in ordering.candidates if s.adapter_id in present or s.adapter_id == BASE_MODEL]
        others = [s for s in ordering.candidates if s.adapter_id not in present and s.adapter_id != BASE_MODEL]
        return Ordering([*here, *self._within_limit(others, present)], ordering.dropped)

    def _within_limit(self, others: list[Sequence], present: set[int]) -> list[Sequence]:
        """Of requests whose adapters do not run, those of the first adapters that there is room for."""
        chosen: list[Sequence] = []
        for sequence in others:
            if sequence.adapter_id not in present and len(present) >= self.clusters:
                continue
            present.add(sequence.adapter_id)
            chosen.append(sequence)
        return chosen


class OriginalAdapterClusters:
    """The authors' clusters: once `clusters` adapters run, requests of running adapters come first, and the others
    behind them without a limit. With nothing running, or fewer adapters, it is the inner policy's order alone.

    Starvation: possible. While requests of running adapters keep coming and fill the pool, the others wait.
    """

    def __init__(self, clusters: int, inner: Policy | None = None) -> None:
        self.clusters, self.inner = clusters, inner or FCFS()

    def order(self, waiting: Seq[Sequence], running: Seq[Sequence], now: float) -> Ordering:
        """Running adapters first, once there are enough of them."""
        ordering = self.inner.order(waiting, running, now)
        present = {sequence.adapter_id for sequence in running}
        if len(present) < self.clusters:
            return ordering
        ordered = sorted(ordering.candidates, key=lambda sequence: sequence.adapter_id not in present)  # stable
        return Ordering(ordered, ordering.dropped)
