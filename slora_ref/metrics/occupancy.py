"""Occupancy: what the pool held over time. It knows no engine."""

from __future__ import annotations

from dataclasses import dataclass, field

from slora_ref.pager import PoolUsage


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

    def mean_share(self, kind: str) -> float:
        """The mean part of the pool that is `kv`, `adapter` or `free`, over the samples; 0 without any."""
        shares = [getattr(usage, kind) / (usage.kv + usage.adapter + usage.free) for usage in self.usages]
        return sum(shares) / len(shares) if shares else 0.0
