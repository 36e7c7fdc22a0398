"""Split pools: keys and values in one part of the memory and adapters in another, divided once and for all.

What Unified Paging avoids (paper section 5.1; its S-LoRA-no-unify-mem). The part for adapters has slots, each as large
as the largest adapter, as servers with a fixed number of LoRA slots have. The division never moves: a slot that holds a
small adapter, or none, serves no sequence, and pages that no sequence needs hold no adapter.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from slora_ref.adapter import read_header
from slora_ref.allocator import PageAllocator
from slora_ref.baselines.base import Base
from slora_ref.config import EngineConfig
from slora_ref.engine import Engine
from slora_ref.errors import ConfigError
from slora_ref.pager import AdapterShape, PageLayout, PagePool
from slora_ref.pager.audit import check_adapters, check_owners, check_poison, check_sequences
from slora_ref.policy import FCFS
from slora_ref.prefetch import Prefetcher
from slora_ref.scheduler import Scheduler
from slora_ref.shapes import Array, Int


class SplitPool(PagePool):
    """A PagePool whose last pages are adapter slots; `num_pages`, `free_pages` and `usage` speak of the other part.

    Args:
        slot_pages: pages of an adapter slot; there are `max_adapters` of them.
    """

    def __init__(self, layout: PageLayout, num_pages: int, slot_pages: int, **options: Any) -> None:
        super().__init__(layout, num_pages, **options)
        self.slot_pages, self._first = slot_pages, num_pages - options["max_adapters"] * slot_pages
        self.allocator = PageAllocator(self._first, options.get("shuffle_seed"))

    def open_adapter(self, adapter_id: int, shape: AdapterShape) -> Int[Array, " pages"]:
        """The first pages of a free slot.

        Raises:
            PageError: no slot is free, or the adapter already has one.
        """
        needed = self.layout.adapter_pages(shape.page_ranks)
        assert needed <= self.slot_pages, f"an adapter of {needed} pages, a slot has {self.slot_pages}"
        self._check_adapter(adapter_id)
        first = self._first + self._free_adapter_slots[-1] * self.slot_pages
        pages = first + np.arange(needed, dtype=np.int32)
        self._settle_adapter(adapter_id, pages, shape)
        return pages

    def _release_adapter(self, pages: Int[Array, " pages"]) -> None:
        """A slot's pages go nowhere."""
        if self.poison:
            self.storage[:, pages] = np.nan

    def check(self) -> None:
        """Asserts that sequences have the pages of the first part, and adapters those of their slots."""
        sequences = check_sequences(self.sequence_pages, self.lengths, self._free_sequence_slots)
        slots, pages = self._adapter_slots, self._adapter_pages
        check_adapters(self.layout, self.adapters, slots, pages, self._free_adapter_slots)
        check_owners(self.allocator, sequences)
        for adapter_id, own in pages.items():
            first = self._first + slots[adapter_id] * self.slot_pages
            assert (own == first + np.arange(len(own))).all() and len(own) <= self.slot_pages, adapter_id
        if self.poison:
            check_poison(self.allocator, self.storage[:, : self._first])


class SlotPrefetcher(Prefetcher):
    """A Prefetcher whose adapters take a slot, and no pages of the part that sequences share."""

    def pages_of(self, adapter_id: int) -> int:
        """None."""
        return 0


def split_pools(base: Base, config: EngineConfig, adapters: Mapping[str, Path], share: float) -> Engine:
    """The usual engine with its pool cut in two, and the adapters registered.

    Args:
        config: `pool_pages` are those of both parts together.
        share: of the pool that adapters get, rounded down to whole slots.

    Raises:
        ConfigError: `pool_pages` is not given, or the share has no room for the largest adapter or leaves none for two
            tokens.
    """
    if config.pool_pages is None:
        raise ConfigError("split pools divide pool_pages; give it")
    layout = PageLayout(base.model)
    sizes = [layout.adapter_pages(read_header(path, base.model).ranks.max(axis=0)) for path in set(adapters.values())]
    slots = int(share * config.pool_pages) // max(sizes)
    if not slots:
        raise ConfigError(
            f"{share:.0%} of {config.pool_pages} pages have no room for the largest adapter, {max(sizes)} pages: "
            "raise the share or pool_pages"
        )
    rest = config.pool_pages - slots * max(sizes)
    if rest < layout.token_pages(2):
        raise ConfigError(
            f"{share:.0%} for adapters leave {max(0, rest)} of {config.pool_pages} pages, and two tokens take "
            f"{layout.token_pages(2)}: lower the share"
        )
    config = replace(config, max_adapters=slots)

    def make_pool(layout: PageLayout, num_pages: int, **options: Any) -> SplitPool:
        return SplitPool(layout, num_pages, max(sizes), **options)

    _, usual, executor, clock, model, tokenizer = base.parts(config, make_pool=make_pool)
    prefetcher = SlotPrefetcher(usual.pool, usual.store, usual.loader, config.eviction, config.prefetch)
    scheduler = Scheduler(usual.pool, prefetcher, FCFS(), config)
    engine = Engine(scheduler, prefetcher, executor, clock, model, tokenizer)
    for name, path in adapters.items():
        engine.add_adapter(name, path)
    return engine
