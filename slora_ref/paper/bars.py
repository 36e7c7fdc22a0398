"""How close the replay is to the original: the statistics that the results page states and the wrong simulators fail.

Fitted runs are left out, and so is what the authors' files mark as placeholders.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np

from slora_ref.paper.play import Row

NEAR = 0.1
"""An attainment, or a ratio of throughputs, is right within so much."""


@dataclass(frozen=True, kw_only=True)
class Errors:
    """Absolute relative errors of a set of numbers; all 0 for none."""

    count: int
    median: float
    p90: float
    worst: float


@dataclass(frozen=True, kw_only=True)
class Closeness:
    """Of S-LoRA's own points in fig5, fig6 and table3.

    Args:
        throughput, latency: of points that nothing was fitted on.
        null_model: throughput errors of the null model on the same points.
        attainment_near, attainment_count: how many of fig6's and table3's attainments are within NEAR.
    """

    throughput: Errors
    latency: Errors
    null_model: Errors
    attainment_near: int
    attainment_count: int

    @property
    def passes(self) -> bool:
        """Whether this can be called a simulator of the original."""
        return (
            self.throughput.median <= 0.02
            and self.throughput.p90 <= 0.06
            and self.throughput.worst <= 0.10
            and self.latency.median <= 0.10
            and self.latency.worst <= 0.30
            and self.attainment_near >= 17
        )


@dataclass(frozen=True, kw_only=True)
class ShardCloseness:
    """Of fig8: what adapters and their messages cost on several GPUs.

    Args:
        ordered: rows in which the base model alone is fastest and S-LoRA slowest.
        ratios: of the rows that nothing was fitted on: (S-LoRA / without the adapters' messages, theirs).
    """

    ordered: int
    rows: int
    ratios: tuple[tuple[float, float], ...]

    @property
    def worst_ratio(self) -> float:
        """The largest difference of a ratio from theirs."""
        return max(abs(ours - theirs) for ours, theirs in self.ratios)

    @property
    def passes(self) -> bool:
        """Whether the cost of messages is explained."""
        return self.ordered == self.rows and self.worst_ratio <= NEAR


def shard_closeness(rows: Seq[Row]) -> ShardCloseness:
    """The statistics of fig8's rows, which are three to each place: all, without messages, base."""
    values = {row.point: row for row in rows if row.variant == "original"}
    places = list(dict.fromkeys(point.rpartition(" ")[0] for point in values))
    ordered, ratios = 0, []
    for place in places:
        full, silent, base = (values[f"{place} {system}"] for system in ("slora", "no-lora-messages", "base"))
        assert full.ours and silent.ours and base.ours, f"{place}: nothing was served"
        ordered += full.ours < silent.ours < base.ours
        if not full.fitted:
            ratios.append((full.ours / silent.ours, full.theirs / silent.theirs))
    return ShardCloseness(ordered=ordered, rows=len(places), ratios=tuple(ratios))


def errors(values: Iterable[float]) -> Errors:
    """The statistics of these relative errors."""
    sizes = np.abs(list(values) or [0.0])
    return Errors(
        count=len(sizes), median=float(np.median(sizes)), p90=float(np.quantile(sizes, 0.9)), worst=float(sizes.max())
    )


def closeness(rows: Seq[Row]) -> Closeness:
    """The statistics of rows of fig5, fig6 and table3."""
    own = [row for row in rows if row.point.endswith(" slora") and row.variant == "original"]
    free = [row for row in own if not row.fitted]
    attainments = [row for row in own if row.metric == "attainment"]
    return Closeness(
        throughput=errors(row.rel_error for row in _of(free, "throughput") if row.rel_error is not None),
        latency=errors(row.rel_error for row in _of(free, "latency") if row.rel_error is not None),
        null_model=errors(
            row.null_model / row.theirs - 1 for row in _of(free, "throughput") if row.null_model is not None
        ),
        attainment_near=sum(row.ours is not None and abs(row.ours - row.theirs) <= NEAR for row in attainments),
        attainment_count=len(attainments),
    )


def _of(rows: Seq[Row], metric: str) -> list[Row]:
    return [row for row in rows if row.metric == metric]
