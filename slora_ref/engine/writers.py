"""Writers: how an adapter gets into the pages of a shard that does not lead; which pages, shard 0 has decided."""

from __future__ import annotations

from typing import Any, Protocol

from slora_ref.device_loader import PageWriter
from slora_ref.pager import PageStorage


class Writer(Protocol):
    """Brings adapters into pages and tables, on a shard that does not lead."""

    def make_room(self, slot: int) -> None:
        """An adapter is to come into this slot of the tables; perhaps it will not."""
        ...

    def write(self, slot: int, image: Any) -> None:
        """Writes an image into the adapter's pages, and is done."""
        ...


class HostWriter:
    """Writes into a pool in main memory."""

    def __init__(self, pool: PageStorage) -> None:
        self._pool = pool

    def make_room(self, slot: int) -> None:
        """There is room."""

    def write(self, slot: int, image: Any) -> None:
        """A copy."""
        self._pool.write_pages(self._pool.adapters.pages[slot, : image.shape[1]], image)


class DeviceWriter(PageWriter):
    """Writes into a pool on a device, and waits."""

    def write(self, slot: int, image: Any) -> None:
        """A copy by a kernel."""
        ticket, _ = self.start(slot, image)
        ticket.wait()
