"""PageStorage: the pages and the page tables, as a model reads them (paper section 5.1).

Which page is whose has been decided elsewhere: on this shard by PagePool, which is a PageStorage with a free list, or
by the shard that leads, whose decisions are entered here as they are told. So tables are equal on all shards.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from slora_ref.ops.tables import AdapterTables
from slora_ref.pager.layout import PAGES_PER_TOKEN, AdapterShape, PageLayout
from slora_ref.shapes import Array, Float, Int


class PageStorage:
    """One storage [layers, pages, width], and the tables of sequences and adapters.

    Args:
        layout: page arithmetic of the model, or of a shard of it.
        num_pages: pages; each is one row of `width` numbers in every layer.
        max_sequences, max_positions: sequence slots, and the longest a sequence can get, in tokens.
        max_adapters: adapter slots.
        dtype: of the storage; None: no storage at all, for a simulation that only counts pages.
        poison: fill the pages with NaN, so that a read of an unwritten page shows (tests).
        empty: makes the storage: (shape, dtype) -> an array on the device that the model runs on.
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
        empty: Callable[[tuple[int, ...], Any], Array] = np.empty,
    ) -> None:
        self.layout = layout
        self.poison = poison and dtype is not None
        self.storage = self._new_storage(layout, num_pages, dtype, empty)
        self.sequence_pages = np.full((max_sequences, PAGES_PER_TOKEN, max_positions), -1, np.int32)
        self.adapters = AdapterTables.empty(max_adapters, layout.num_layers, table=0)

    def _new_storage(
        self, layout: PageLayout, num_pages: int, dtype: Any | None, empty: Callable[[tuple[int, ...], Any], Array]
    ) -> Float[Array, "layers pages width"]:
        if dtype is None:
            return np.empty((layout.num_layers, 0, layout.width), np.float32)
        stride = layout.row_stride(np.dtype(dtype).itemsize)
        storage = empty((layout.num_layers, num_pages, stride), dtype)
        if self.poison:
            storage.fill(np.nan)
        return storage[:, :, : layout.width]

    @property
    def page_bytes(self) -> int:
        """Bytes of the numbers in one page, over all layers."""
        return self.layout.num_layers * self.layout.width * self.storage.itemsize

    @property
    def max_positions(self) -> int:
        """The longest a sequence can get, in tokens; the last of them takes no pages."""
        return int(self.sequence_pages.shape[2])

    def enter_rows(
        self,
        slots: Int[Array, " rows"],
        positions: Int[Array, " rows"],
        k_pages: Int[Array, " rows"],
        v_pages: Int[Array, " rows"],
    ) -> None:
        """Enters the two pages of each row, a token of the sequence in `slots`, in the sequences' tables."""
        self.sequence_pages[slots, 0, positions] = k_pages
        self.sequence_pages[slots, 1, positions] = v_pages

    def enter_adapter(self, slot: int, pages: Int[Array, " pages"], shape: AdapterShape) -> None:
        """Enters an adapter's pages, in table order, and its ranks and scales."""
        page_ranks = shape.page_ranks
        starts, a_ranks = self.layout.starts(page_ranks), self.layout.a_ranks(page_ranks)
        self.adapters.enter(slot, pages, starts, shape.ranks, a_ranks, shape.scales)

    def write_pages(self, pages: Int[Array, " pages"], image: Float[Array, "layers pages width"]) -> None:
        """Scatters an image into whole pages."""
        self.storage[:, pages] = image
