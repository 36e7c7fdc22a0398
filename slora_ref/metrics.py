"""Numbers about a run: percentiles of latencies and what the pool held over time. It knows no engine."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from slora_ref.pager import PoolUsage


def percentile(values: Iterable[float], percent: float) -> float | None:
    """The percentile with linear interpolation (NumPy's default); None for no values."""
    listed = list(values)
    return float(np.percentile(listed, percent)) if listed else None


@dataclass
class Occupancy:
    """What the pool held, sampled once a step."""

    usages: list[PoolUsage] = field(default_factory=list)

    def sample(self, usage: PoolUsage) -> None:
        """Adds one sample."""
        self.usages.append(usage)

    @property
    def peak_kv(self) -> int:
        """Most pages of keys and values."""
        return max((usage.kv for usage in self.usages), default=0)

    @property
    def peak_adapter(self) -> int:
        """Most pages of adapter weights."""
        return max((usage.adapter for usage in self.usages), default=0)

    @property
    def peak_used(self) -> int:
        """Most pages of both at the same time."""
        return max((usage.kv + usage.adapter for usage in self.usages), default=0)
