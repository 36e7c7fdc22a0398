"""PageAllocator: which pages of the pool are free (Unified Paging, paper section 5.1).

One free list for everything. It knows neither the KV cache nor adapters nor what a page holds: it hands out page ids
and takes them back. All pages are equal, so any free page serves any request and nothing fragments.
"""

from __future__ import annotations

import numpy as np

from slora_ref.errors import OutOfPages, PageError
from slora_ref.shapes import Array, Bool, Int


class PageAllocator:
    """A list of free page ids with two ends. Allocating or freeing n pages costs O(n), whatever the size of the pool.

    Any free page serves from either end. What comes and goes page by page uses one, what comes in blocks the other
    (`far`), and gives its pages back there: so the pages of a block stay neighbours, which travel faster.

    Args:
        num_pages: how many pages there are; ids are 0 .. num_pages - 1.
        shuffle_seed: hand the pages out in a random order (tests and benchmarks of scattered pages); None: ascending.
    """

    def __init__(self, num_pages: int, shuffle_seed: int | None = None) -> None:
        self.num_pages = num_pages
        self._ids = np.arange(num_pages - 1, -1, -1, dtype=np.int32)  # the free ones are _ids[_low:_high]
        if shuffle_seed is not None:
            np.random.default_rng(shuffle_seed).shuffle(self._ids)
        self._low, self._high = 0, num_pages
        self._is_free = np.ones(num_pages, dtype=np.bool_)
        self._scratch = np.zeros(num_pages, dtype=np.int32)  # finds duplicates in O(n), see _check_owned

    @property
    def free_pages(self) -> int:
        """Pages that nobody owns."""
        return self._high - self._low

    @property
    def used_pages(self) -> int:
        """Pages that somebody owns."""
        return self.num_pages - self.free_pages

    def given(self, far: bool = False) -> int:
        """Pages that one end has given out and not got back."""
        return self._low if far else self.num_pages - self._high

    def is_free(self, pages: Int[Array, " pages"]) -> Bool[Array, " pages"]:
        """[pages] whether nobody owns the page."""
        free: Bool[Array, " pages"] = self._is_free[pages]
        return free

    def allocate(self, count: int, far: bool = False) -> Int[Array, " pages"]:
        """Takes `count` pages: their ids, in no particular order.

        Args:
            far: from the far end of the list.

        Raises:
            OutOfPages: fewer than `count` are free; then nothing was allocated.
        """
        if count < 0:
            raise PageError(f"cannot allocate {count} pages")
        if count > self.free_pages:
            raise OutOfPages(count, self.free_pages)
        if far:
            self._low += count
            taken = self._ids[self._low - count : self._low]
        else:
            self._high -= count
            taken = self._ids[self._high : self._high + count]
        pages = taken[::-1].copy()
        self._is_free[pages] = False
        return pages

    def free(self, pages: Int[Array, " pages"], far: bool = False) -> None:
        """Gives pages back, at the end that they were taken from; they come out again in this order.

        Raises:
            PageError: a page outside the pool, already free, or named twice, or more than this end has given; then
                nothing was freed.
        """
        self._check_owned(pages)
        count, given = len(pages), self.given(far)
        if count > given:
            raise PageError(f"{count} pages freed at the {'far' if far else 'near'} end, which has given {given}")
        self._is_free[pages] = True
        if far:
            self._low -= count
            self._ids[self._low : self._low + count] = pages[::-1]
        else:
            self._high += count
            self._ids[self._high - count : self._high] = pages[::-1]

    def _check_owned(self, pages: Int[Array, " pages"]) -> None:
        """Raises PageError unless every page is in the pool, owned, and named once."""
        if len(pages) == 0:
            return
        if pages.min() < 0 or pages.max() >= self.num_pages:
            raise PageError(f"pages {pages.min()}..{pages.max()} freed, the pool has 0..{self.num_pages - 1}")
        if self._is_free[pages].any():
            raise PageError(f"pages freed twice: {pages[self._is_free[pages]][:8].tolist()}")
        order = np.arange(len(pages), dtype=np.int32)
        self._scratch[pages] = order  # a page named twice keeps only the last of its two numbers
        twice = self._scratch[pages] != order
        if twice.any():
            raise PageError(f"pages named twice in one free: {pages[twice][:8].tolist()}")

    def check(self) -> None:
        """Asserts that free and owned pages partition the pool: each page once. O(pool), for tests."""
        free = self._ids[self._low : self._high]
        assert 0 <= self._low <= self._high <= self.num_pages, (self._low, self._high, self.num_pages)
        assert ((free >= 0) & (free < self.num_pages)).all(), "the free list names a page outside the pool"
        assert len(np.unique(free)) == len(free), "a page is on the free list twice"
        assert self._is_free[free].all(), "a page on the free list is marked as owned"
        assert int(self._is_free.sum()) == len(free), (int(self._is_free.sum()), len(free))
