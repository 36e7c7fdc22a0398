"""What must hold between the tables of a pool and its free list. PagePool.check calls these; for tests, O(pool)."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq

import numpy as np

from slora_ref.allocator import PageAllocator
from slora_ref.ops.tables import AdapterTables
from slora_ref.pager.layout import PageLayout
from slora_ref.shapes import Array, Float, Int


def check_sequences(
    pages: Int[Array, "slots pair positions"], lengths: Int[Array, " slots"], closed: Seq[int]
) -> list[Int[Array, " _"]]:
    """Asserts that each sequence slot has pages up to its length and none beyond, a closed one none at all.

    Returns:
        The pages of each sequence.
    """
    assert len(set(closed)) == len(closed), f"a sequence slot is free twice: {closed}"
    assert not lengths[list(closed)].any(), "a closed sequence slot holds pages"
    within = np.arange(pages.shape[2]) < lengths[:, None, None]
    assert ((pages >= 0) == within).all(), "a sequence's table and its length disagree"
    return [pages[slot, :, :length].ravel() for slot, length in enumerate(lengths.tolist())]


def check_adapters(
    layout: PageLayout,
    tables: AdapterTables,
    slots: Mapping[int, int],
    pages: Mapping[int, Int[Array, " _"]],
    closed: Seq[int],
) -> list[Int[Array, " _"]]:
    """Asserts that each adapter has a slot of its own and the tables that its ranks ask for.

    Returns:
        The pages of each adapter.
    """
    assert sorted([*closed, *slots.values()]) == list(range(len(tables.pages))), "an adapter slot is lost or used twice"
    assert slots.keys() == pages.keys(), "adapters with slots and adapters with pages differ"
    for table in (tables.page_rank, tables.rank, tables.a_page_rank, tables.a_rank, tables.scale):
        assert not table[list(closed)].any(), "a closed adapter slot has ranks or scales"
    assert (tables.pages[list(closed)] == -1).all(), "a closed adapter slot holds pages"
    for adapter_id, slot in slots.items():
        own, page_rank = pages[adapter_id], tables.page_rank[slot]
        assert (tables.pages[slot, : len(own)] == own).all(), f"the table of adapter {adapter_id} drifted"
        assert (tables.pages[slot, len(own) :] == -1).all(), f"the table of adapter {adapter_id} is too long"
        assert (tables.rank[slot].max(axis=0) == page_rank).all(), f"the ranks of adapter {adapter_id} drifted"
        columns = layout.a_ranks(page_rank)
        assert (tables.a_page_rank[slot] == columns).all(), f"the columns of adapter {adapter_id} drifted"
        assert len(own) == layout.adapter_pages(page_rank), f"adapter {adapter_id} has {len(own)} pages"
        starts = layout.starts(page_rank)
        assert (tables.a_start[slot] == starts[0]).all() and (tables.b_start[slot] == starts[1]).all(), adapter_id
    return list(pages.values())


def check_owners(allocator: PageAllocator, owned: Seq[Int[Array, " _"]]) -> None:
    """Asserts that these pages are exactly those that are not free, each owned once."""
    allocator.check()
    ids = np.concatenate([np.zeros(0, np.int32), *owned])
    assert ((ids >= 0) & (ids < allocator.num_pages)).all(), "a table names a page outside the pool"
    assert len(np.unique(ids)) == len(ids), "a page has two owners"
    assert not allocator.is_free(ids).any(), "a free page is in a table"
    assert len(ids) == allocator.used_pages, (len(ids), allocator.used_pages)


def check_poison(allocator: PageAllocator, storage: Float[Array, "layers pages width"]) -> None:
    """Asserts that free pages hold nothing but NaN."""
    free = allocator.is_free(np.arange(allocator.num_pages))
    assert np.isnan(storage[:, free]).all(), "a free page was written"
