"""DeviceLoader: adapters to a device beside the steps (paper section 5.2).

A load is one launch, or a copy for each run of neighbouring pages, that takes the adapter's image from host memory over
the link into the pool's pages. It goes to a second stream: after what the main stream has been given so far, which may
still read those pages, and beside what comes later. Until its event has passed, no request of the adapter enters a
step; nothing waits for it.
"""

from __future__ import annotations

from collections import OrderedDict

from slora_ref.errors import LoadFailed
from slora_ref.ops import KernelOps
from slora_ref.ops.device_tables import DeviceTables
from slora_ref.ops.ticket import Ticket
from slora_ref.pager import PagePool, PageStorage
from slora_ref.prefetch import failure_of
from slora_ref.shapes import Array, Float
from slora_ref.store import AdapterStore


class PageWriter:
    """Brings adapters into the pages and tables of a device.

    Args:
        pool: whose pages they are; its own tables name them.
        ops: the backend of the pool's storage.
        tables: the pool's, on the device.
    """

    def __init__(self, pool: PageStorage, ops: KernelOps, tables: DeviceTables) -> None:
        self._pool, self._ops, self._tables = pool, ops, tables

    def make_room(self, slot: int) -> None:
        """Makes the tables fit the adapter that is to come; also if then it does not."""
        self._ops.use()
        self._tables.make_room(self._pool.adapters, slot)

    def start(self, slot: int, image: Float[Array, "layers pages width"]) -> tuple[Ticket, Array]:
        """Starts the copy of an image that is in host memory; gives back what is read until the ticket is done."""
        with self._ops.beside() as ticket:
            self._tables.enter_adapter(self._pool.adapters, slot)
            pages = (tables.pages[slot, : image.shape[1]] for tables in (self._tables.adapters, self._pool.adapters))
            staged = self._ops.readable(image)
            load = self._ops.prepared_load(self._pool.storage, staged, *pages)
            ticket.begin()
            load()
        return ticket, staged


class DeviceLoader:
    """A Loader of the prefetcher.

    Args:
        pool, store: where adapters go and where they come from.
        writer: brings them there.
        at_once: each load has ended when it has been started, so that a run can be repeated exactly.
    """

    def __init__(self, pool: PagePool, store: AdapterStore, writer: PageWriter, at_once: bool = False) -> None:
        self._pool, self._store, self._writer, self._at_once = pool, store, writer, at_once
        self._under_way: OrderedDict[int, tuple[Ticket, Array]] = OrderedDict()  # with the image that is being read
        self._failed: list[tuple[int, LoadFailed]] = []
        self.seconds = 0.0

    def start(self, adapter_id: int) -> None:
        """Starts the launch, and the copy of the adapter's entries in the tables."""
        self._writer.make_room(self._pool.adapter_slot(adapter_id))  # with shards, all must, whatever comes of it
        failure = failure_of(adapter_id, lambda: self.copy(adapter_id, self._store.image(adapter_id)))
        if failure is not None:
            self._failed.append((adapter_id, failure))

    def copy(self, adapter_id: int, image: Float[Array, "layers pages width"]) -> None:
        """Starts the copy of an image that is in host memory."""
        slot = self._pool.adapter_slot(adapter_id)
        self._writer.make_room(slot)
        ticket, staged = self._writer.start(slot, image)
        if self._at_once:
            ticket.wait()  # if this is interrupted, the load is none: it was raised here, and is not told of again
        self._under_way[adapter_id] = ticket, staged

    def completed(self) -> list[tuple[int, LoadFailed | None]]:
        """The loads whose events have passed since the last call, and those that failed."""
        passed = [adapter_id for adapter_id, (ticket, _) in self._under_way.items() if ticket.done]
        self.seconds += sum(self._under_way.pop(adapter_id)[0].seconds() for adapter_id in passed)
        ended: list[tuple[int, LoadFailed | None]] = [*self._failed, *((adapter_id, None) for adapter_id in passed)]
        self._failed = []
        return ended

    def wait(self) -> None:
        """Waits for the oldest load under way."""
        if not self._failed and self._under_way:
            next(iter(self._under_way.values()))[0].wait()
