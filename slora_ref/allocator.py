"""PageAllocator: which pages of the pool are free (Unified Paging, paper section 5.1).

One free list for everything. It knows neither the KV cache nor adapters nor what a page holds: it hands out page ids
and takes them back. All pages are equal, so any free page serves any request and nothing fragments.
"""

from __future__ import annotations

import numpy as np

from slora_ref.errors import OutOfPages, PageError
from slora_ref.shapes import Array, Bool, Int


class PageAllocator:
    """A stack of free page ids. Allocating or freeing n pages costs O(n), whatever the size of the pool.

    Args:
        num_pages: how many pages there are; ids are 0 .. num_pages - 1.
        shuffle_seed: hand the pages out in a random order (tests and benchmarks of scattered pages); None: ascending.
    """

    def __init__(self, num_pages: int, shuffle_seed: int | None = None) -> None:
        self.num_pages = num_pages
        self._stack = np.arange(num_pages - 1, -1, -1, dtype=np.int32)  # the free ids are _stack[:_top]
        if shuffle_seed is not None:
            np.random.default_rng(shuffle_seed).shuffle(self._stack)
        self._top = num_pages
        self._is_free = np.ones(num_pages, dtype=np.bool_)
        self._scratch = np.zeros(num_pages, dtype=np.int32)  # finds duplicates in O(n), see _check_owned

    @property
    def free_pages(self) -> int:
        """Pages that nobody owns."""
        return self._top

    @property
    def used_pages(self) -> int:
        """Pages that somebody owns."""
        return self.num_pages - self._top

    def is_free(self, pages: Int[Array, " pages"]) -> Bool[Array, " pages"]:
        """[pages] whether nobody owns the page."""
        free: Bool[Array, " pages"] = self._is_free[pages]
        return free

    def allocate(self, count: int) -> Int[Array, " pages"]:
        """Takes `count` pages: their ids, in no particular order.

        Raises:
            OutOfPages: fewer than `count` are free; then nothing was allocated.
        """
        if count < 0:
            raise PageError(f"cannot allocate {count} pages")
        if count > self._top:
            raise OutOfPages(count, self._top)
        pages = self._stack[self._top - count : self._top][::-1].copy()  # the top of the stack first
        self._top -= count
        self._is_free[pages] = False
        return pages

    def free(self, pages: Int[Array, " pages"]) -> None:
        """Gives pages back.

        Raises:
            PageError: a page outside the pool, already free, or named twice; then nothing was freed.
        """
        self._check_owned(pages)
        self._is_free[pages] = True
        self._stack[self._top : self._top + len(pages)] = pages[::-1]  # so that they come out again in this order
        self._top += len(pages)

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
        free = self._stack[: self._top]
        assert 0 <= self._top <= self.num_pages, (self._top, self.num_pages)
        assert ((free >= 0) & (free < self.num_pages)).all(), "the free list names a page outside the pool"
        assert len(np.unique(free)) == self._top, "a page is on the free list twice"
        assert self._is_free[free].all(), "a page on the free list is marked as owned"
        assert int(self._is_free.sum()) == self._top, (int(self._is_free.sum()), self._top)
