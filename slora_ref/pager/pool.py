"""PagePool: keys, values and adapter weights in one storage, from one free list (Unified Paging, paper section 5.1).

The pool owns the storage, the allocator and the page tables. It knows who owns a page, not why: which adapter to keep
and which sequence to run is the scheduler's and the prefetcher's business.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from slora_ref.allocator import PageAllocator
from slora_ref.errors import PageError
from slora_ref.pager.audit import check_adapters, check_owners, check_poison, check_sequences
from slora_ref.pager.layout import PAGES_PER_TOKEN, AdapterShape, PageLayout
from slora_ref.pager.storage import PageStorage
from slora_ref.shapes import Array, Float, Int


@dataclass(frozen=True)
class PoolUsage:
    """Pages by kind at one moment."""

    kv: int
    adapter: int
    free: int


class PagePool(PageStorage):
    """One storage [layers, pages, width] for sequences and adapters.

    Args:
        layout, num_pages, dtype, empty: see PageStorage.
        max_sequences, max_positions, max_adapters: see PageStorage; a slot is taken while it holds pages.
        poison: see PageStorage; here freed pages are filled with NaN, too.
        shuffle_seed: hand out pages in a random order (tests).
    """

    def __init__(
        self,
        layout: PageLayout,
        num_pages: int,
        max_sequences: int,
        max_positions: int,
        max_adapters: int,
        dtype: Any | None = np.float32,
        poison: bool = False,
        shuffle_seed: int | None = None,
        empty: Callable[[tuple[int, ...], Any], Array] = np.empty,
    ) -> None:
        super().__init__(layout, num_pages, max_sequences, max_positions, max_adapters, dtype, poison, empty)
        self.allocator = PageAllocator(num_pages, shuffle_seed)
        self.lengths = np.zeros(max_sequences, np.int64)  # tokens of each sequence slot that have pages
        self._free_sequence_slots = list(range(max_sequences - 1, -1, -1))
        self._free_adapter_slots = list(range(max_adapters - 1, -1, -1))
        self._adapter_slots: dict[int, int] = {}  # adapter id -> slot
        self._adapter_pages: dict[int, Int[Array, " pages"]] = {}  # adapter id -> its pages, in table order
        self._kv_pages = 0

    @property
    def num_pages(self) -> int:
        """Pages of the pool."""
        return self.allocator.num_pages

    @property
    def free_pages(self) -> int:
        """Pages that nobody owns."""
        return self.allocator.free_pages

    @property
    def free_adapter_slots(self) -> int:
        """How many more adapters could be resident if pages were no limit."""
        return len(self._free_adapter_slots)

    @property
    def max_adapters(self) -> int:
        """Adapter slots in all."""
        return len(self._free_adapter_slots) + len(self._adapter_slots)

    @property
    def max_sequences(self) -> int:
        """Sequence slots in all."""
        return len(self.lengths)

    def usage(self) -> PoolUsage:
        """Pages by kind."""
        adapter = self.allocator.used_pages - self._kv_pages
        return PoolUsage(kv=self._kv_pages, adapter=adapter, free=self.allocator.free_pages)

    # --- sequences ---

    def open_sequence(self) -> int:
        """A sequence slot that holds no pages yet.

        Raises:
            PageError: all slots are taken; the scheduler admits at most max_sequences.
        """
        if not self._free_sequence_slots:
            raise PageError(f"all {self.max_sequences} sequence slots are taken")
        return self._free_sequence_slots.pop()

    def extend(
        self, slots: Int[Array, " rows"], positions: Int[Array, " rows"]
    ) -> tuple[Int[Array, " rows"], Int[Array, " rows"]]:
        """Gives each row (a new token of a sequence) its two pages: one allocation for a whole step.

        Args:
            slots: [rows] sequence slot of each row.
            positions: [rows] token position of each row; a sequence's rows continue where it ends.

        Returns:
            [rows] page of the key, [rows] page of the value; also entered in the sequences' tables.

        Raises:
            OutOfPages: nothing was allocated, no table changed.
        """
        rows = len(slots)
        pages = self.allocator.allocate(PAGES_PER_TOKEN * rows)
        k_pages, v_pages = pages[:rows], pages[rows:]
        self.enter_rows(slots, positions, k_pages, v_pages)
        self.lengths += np.bincount(slots, minlength=self.max_sequences)
        self._kv_pages += len(pages)
        return k_pages, v_pages

    def close_sequence(self, slot: int) -> None:
        """Frees all pages of a sequence and its slot."""
        if slot in self._free_sequence_slots:
            raise PageError(f"sequence slot {slot} closed twice")
        self.clear_sequence(slot)
        self._free_sequence_slots.append(slot)

    def clear_sequence(self, slot: int) -> None:
        """Frees all pages of a sequence; the slot stays open and empty."""
        length = int(self.lengths[slot])
        pages = self.sequence_pages[slot, :, :length].ravel()
        self._release(pages)
        self._kv_pages -= len(pages)
        self.sequence_pages[slot, :, :length] = -1
        self.lengths[slot] = 0

    # --- adapters ---

    def adapter_slot(self, adapter_id: int) -> int:
        """The slot of a resident adapter; -1 for the base model (adapter_id -1)."""
        return -1 if adapter_id < 0 else self._adapter_slots[adapter_id]

    def adapter_in(self, slot: int) -> int:
        """The adapter that holds a slot."""
        return next(adapter_id for adapter_id, held in self._adapter_slots.items() if held == slot)

    def open_adapter(self, adapter_id: int, shape: AdapterShape) -> Int[Array, " pages"]:
        """Allocates the pages of an adapter and enters it in the tables; its weights are written by write_adapter.

        Args:
            adapter_id: unique number of this version of the adapter (never a name: a reloaded name is another number).

        Returns:
            [pages] its pages, in table order.

        Raises:
            OutOfPages: nothing was allocated. PageError: no adapter slot is free, or the adapter already has pages.
        """
        self._check_adapter(adapter_id)
        pages = self.allocator.allocate(self.layout.adapter_pages(shape.page_ranks), far=True)
        self._settle_adapter(adapter_id, pages, shape)
        return pages

    def _check_adapter(self, adapter_id: int) -> None:
        if adapter_id in self._adapter_slots:
            raise PageError(f"adapter {adapter_id} already has pages")
        if not self._free_adapter_slots:
            raise PageError(f"all {self.max_adapters} adapter slots are taken")

    def _settle_adapter(self, adapter_id: int, pages: Int[Array, " pages"], shape: AdapterShape) -> None:
        slot = self._free_adapter_slots.pop()
        self.enter_adapter(slot, pages, shape)
        self._adapter_slots[adapter_id], self._adapter_pages[adapter_id] = slot, pages

    def write_adapter(self, adapter_id: int, image: Float[Array, "layers pages width"]) -> None:
        """Scatters an adapter's page image into its pages, whole pages: beyond d_in or d_out the image has zeros."""
        self.write_pages(self._adapter_pages[adapter_id], image)

    def close_adapter(self, adapter_id: int) -> None:
        """Frees the pages and the slot of an adapter."""
        slot = self._adapter_slots.pop(adapter_id)
        self._release_adapter(self._adapter_pages.pop(adapter_id))
        self.adapters.clear(slot)
        self._free_adapter_slots.append(slot)

    def _release_adapter(self, pages: Int[Array, " pages"]) -> None:
        self._release(pages, far=True)

    def _release(self, pages: Int[Array, " pages"], far: bool = False) -> None:
        self.allocator.free(pages, far)
        if self.poison:
            self.storage[:, pages] = np.nan

    # --- invariants ---

    def check(self) -> None:
        """Asserts that free, key/value and adapter pages partition the pool, as the tables say. For tests."""
        sequences = check_sequences(self.sequence_pages, self.lengths, self._free_sequence_slots)
        adapters = check_adapters(
            self.layout, self.adapters, self._adapter_slots, self._adapter_pages, self._free_adapter_slots
        )
        assert sum(map(len, sequences)) == self._kv_pages, "the count of key and value pages drifted"
        check_owners(self.allocator, [*sequences, *adapters])
        ends = self.allocator.given(), self.allocator.given(far=True)
        assert ends == (self._kv_pages, sum(map(len, adapters))), f"pages went back at the other end: {ends}"
        if self.poison:
            check_poison(self.allocator, self.storage)
