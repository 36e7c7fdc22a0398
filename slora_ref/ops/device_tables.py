"""DeviceTables: the page tables of sequences and adapters on the device, in memory that stays where it is.

The pool's own tables, in host memory, are what is true. The device learns of changes as they happen: a step brings the
pages of its own rows, a load the row of its adapter; nothing is ever copied whole, but when an adapter comes that is
larger than all before. What the tables hold beyond a sequence's length or for a closed slot is never read.
"""

from __future__ import annotations

from dataclasses import fields

import numpy as np

from slora_ref.config import TARGETS
from slora_ref.ops.kernel_backend import KernelBackend
from slora_ref.ops.tables import AdapterTables
from slora_ref.shapes import Array, Int

ALIGNMENT = 16  # bytes: a row of the page table is an argument of the kernel that loads its adapter


class DeviceTables:
    """What kernels read of a pool's tables.

    Args:
        backend: where they lie.
        sequence_pages: [sequence_slots, 2, positions] the pool's.
        adapters: the pool's.
    """

    def __init__(
        self,
        backend: KernelBackend,
        sequence_pages: Int[Array, "sequence_slots two positions"],
        adapters: AdapterTables,
    ) -> None:
        self._backend = backend
        self.sequence_pages = backend.new(sequence_pages.shape, np.int32)
        self.adapters = self._empty(adapters, entries=1)
        self.max_rank = 1  # of the adapters that ever came, and the targets that they have:
        self.targets: frozenset[int] = frozenset()

    @property
    def shape(self) -> tuple[int, int, frozenset[int]]:
        """What the launches of a step depend on: when it changes, launches that were kept are of no use any more."""
        return self.adapters.pages.shape[1], self.max_rank, self.targets

    def _empty(self, like: AdapterTables, entries: int) -> AdapterTables:
        slots, each = len(like.pages), ALIGNMENT // np.dtype(np.int32).itemsize
        arrays = {
            field.name: self._backend.new(getattr(like, field.name).shape, getattr(like, field.name).dtype)
            for field in fields(like)
            if field.name != "pages"
        }
        return AdapterTables(pages=self._backend.new((slots, -(-entries // each) * each), np.int32), **arrays)

    def make_room(self, tables: AdapterTables, slot: int) -> None:
        """Makes the tables fit the adapter in `slot` of the pool's tables.

        What was started before reads the old tables to its end: their memory comes into other hands by what is started
        later, in order.
        """
        rank = int(tables.page_rank[slot].max())
        self.max_rank = max(self.max_rank, rank)
        self.targets |= {target for target in range(len(TARGETS)) if tables.page_rank[slot, target]}
        if tables.pages.shape[1] > self.adapters.pages.shape[1]:
            self.adapters = self._empty(tables, tables.pages.shape[1])
            for each in np.flatnonzero(tables.page_rank.any(axis=1)).tolist():
                self.enter_adapter(tables, each)

    def enter_adapter(self, tables: AdapterTables, slot: int) -> None:
        """Copies one adapter's entries, in the order of what is started."""
        for name, array in vars(tables).items():
            row = np.ascontiguousarray(array[slot])
            self._backend.write(getattr(self.adapters, name)[slot, : len(row)], row)
