"""Shard: one of N tensor-parallel workers. It knows nothing of what is split."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Shard:
    """Worker `index` of `count`. Shard 0 leads: it schedules and allocates pages."""

    index: int = 0
    count: int = 1

    def part(self, size: int) -> slice:
        """This shard's part of `size` things that divide evenly."""
        assert size % self.count == 0, f"{size} do not divide by {self.count} shards"
        each = size // self.count
        return slice(self.index * each, (self.index + 1) * each)


WHOLE = Shard()
"""The only shard of a model that is not split."""
