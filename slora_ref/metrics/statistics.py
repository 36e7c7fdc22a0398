"""Percentiles and bootstrap intervals. Pure functions of lists of numbers."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq

import numpy as np


def percentile(values: Iterable[float], percent: float) -> float | None:
    """The percentile with linear interpolation (NumPy's default); None for no values."""
    listed = list(values)
    return float(np.percentile(listed, percent)) if listed else None


def bootstrap_interval(
    values: Seq[float], level: float = 0.95, resamples: int = 2000, seed: int = 0
) -> tuple[float, float]:
    """An interval for the mean, by resampling: percentile bootstrap (Efron).

    Args:
        values: one number a run, from runs with different seeds; at least one.
        level: how much of the resampled means the interval holds.

    Returns:
        Its low and its high end; equal where there is one value only.
    """
    assert values, "no runs, no interval"
    drawn = np.random.default_rng(seed).integers(len(values), size=(resamples, len(values)))
    means = np.asarray(values, dtype=np.float64)[drawn].mean(axis=1)
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)
