"""Eviction: which idle adapter leaves first. The paper's eager rule, least recently used, or by cost and likelihood.

An idle adapter has a score, fixed when it became idle, and the lowest score leaves first. What waiting requests need is
not in a score: such adapters leave after all others, the last in the queue first, under any policy (prefetcher.py).
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from typing import Literal, Protocol, get_args

Eviction = Literal["lru", "eager", "cost"]
EVICTIONS: tuple[Eviction, ...] = get_args(Eviction)


class Score(Protocol):
    """What decides between idle adapters."""

    def use(self, adapter_id: int) -> None:
        """A request began to use this adapter."""
        ...

    def of(self, adapter_id: int, pages: int) -> float:
        """The score of an adapter that becomes idle now; the lowest leaves first."""
        ...

    def forget(self, adapter_id: int) -> None:
        """This version will not come back."""
        ...


class LeastRecentlyUsed:
    """Later is higher."""

    def __init__(self) -> None:
        self._now = 0

    def use(self, adapter_id: int) -> None:
        """Only the end of a use counts."""

    def of(self, adapter_id: int, pages: int) -> float:
        """The number of times that an adapter became idle before."""
        self._now += 1
        return self._now

    def forget(self, adapter_id: int) -> None:
        """Nothing is remembered."""


class CostAware:
    """What its pages are worth: the cost of loading it again, times how likely that is, for each page that it frees.

    Likelihood is recent popularity: a count of uses that halves every HALF_LIFE uses of any adapter, and that goes on
    while the adapter is away. As all counts decay alike, their order stays, and so the logarithm of a count, dated back
    to the first use of all, is a score that never needs an update. The cost of a load grows with its pages, from what a
    load of no pages would cost: OVERHEAD_PAGES. So between equally popular adapters the smaller one stays.
    """

    HALF_LIFE = 2000.0
    OVERHEAD_PAGES = 4.0

    def __init__(self) -> None:
        self._uses = 0
        self._popularity: dict[int, float] = {}  # log2 of the count as if all uses had been at the start

    def use(self, adapter_id: int) -> None:
        """One use more, worth twice as much as one HALF_LIFE uses ago."""
        self._uses += 1
        now = self._uses / self.HALF_LIFE
        before = self._popularity.get(adapter_id, -math.inf)
        self._popularity[adapter_id] = now + math.log2(1 + 2 ** (before - now))

    def of(self, adapter_id: int, pages: int) -> float:
        """log2 of popularity x cost / pages."""
        unused = self._uses / self.HALF_LIFE - 1  # it was loaded and never used: as much as half a use now
        return self._popularity.get(adapter_id, unused) + math.log2(1 + self.OVERHEAD_PAGES / pages)

    def forget(self, adapter_id: int) -> None:
        """Its count goes with it."""
        self._popularity.pop(adapter_id, None)


SCORES: dict[Eviction, Callable[[], Score]] = {
    "lru": LeastRecentlyUsed,
    "eager": LeastRecentlyUsed,
    "cost": CostAware,
}


class IdleAdapters:
    """Resident adapters that nobody uses, the one that leaves first in front. O(log n) and a shift to change."""

    def __init__(self) -> None:
        self._in_order: list[tuple[float, int]] = []
        self._entries: dict[int, tuple[float, int, int]] = {}  # score, adapter id, pages
        self.pages = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, adapter_id: int) -> bool:
        return adapter_id in self._entries

    def __iter__(self) -> Iterator[int]:
        return (adapter_id for _, adapter_id in self._in_order)

    def add(self, adapter_id: int, score: float, pages: int) -> None:
        """An adapter becomes idle."""
        self._entries[adapter_id] = score, adapter_id, pages
        insort(self._in_order, (score, adapter_id))
        self.pages += pages

    def remove(self, adapter_id: int) -> None:
        """It is used again, or leaves."""
        score, _, pages = self._entries.pop(adapter_id)
        del self._in_order[bisect_left(self._in_order, (score, adapter_id))]
        self.pages -= pages

    def check(self) -> None:
        """Asserts that order, entries and the count of pages agree."""
        assert self._in_order == sorted(self._in_order), "idle adapters are out of order"
        assert {i: s for s, i in self._in_order} == {i: s for i, (s, _, _) in self._entries.items()}, "two lists differ"
        assert self.pages == sum(pages for _, _, pages in self._entries.values()), "the count of idle pages drifted"
