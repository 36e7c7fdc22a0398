"""Prefetcher: which adapters are resident in the pool, loading the missing ones and evicting idle ones (paper section
5.2).

How the bytes travel is the injected Loader's business: at once, on a thread or side stream, in simulated time. The
prefetcher knows pages and pins, but no requests.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal, Protocol

from slora_ref.errors import LoadFailed
from slora_ref.pager import PagePool
from slora_ref.store import AdapterStore


class Loader(Protocol):
    """Copies an adapter from the store into pages that the pool has set aside for it."""

    def start(self, adapter_id: int) -> None:
        """Begins one load. Failures are reported by `completed`, never raised here.

        The store may forget the adapter before the load has ended, so its image is to be taken now.
        """
        ...

    def completed(self) -> list[tuple[int, LoadFailed | None]]:
        """The loads that ended since the last call, each with what went wrong or None."""
        ...

    def wait(self) -> None:
        """Blocks until at least one started load has ended."""
        ...


class ImmediateLoader:
    """Loads on the spot, in `start`: the CPU's way, where a load is a copy within main memory."""

    def __init__(self, pool: PagePool, store: AdapterStore) -> None:
        self._pool, self._store = pool, store
        self._completed: list[tuple[int, LoadFailed | None]] = []

    def start(self, adapter_id: int) -> None:
        """Reads, packs and scatters the adapter."""
        failure: LoadFailed | None = None
        try:
            self._pool.write_adapter(adapter_id, self._store.image(adapter_id))
        except LoadFailed as error:
            failure = error
        except Exception as error:  # noqa: BLE001  whatever one adapter's data breaks is the end of its requests alone
            failure = LoadFailed(f"adapter {adapter_id} could not be loaded: {error!r}")
        self._completed.append((adapter_id, failure))

    def completed(self) -> list[tuple[int, LoadFailed | None]]:
        """Everything that was started since the last call."""
        ended, self._completed = self._completed, []
        return ended

    def wait(self) -> None:
        """Nothing is ever under way."""


@dataclass
class PrefetchCounts:
    """What the prefetcher did so far."""

    loads: int = 0
    hits: int = 0
    evictions: int = 0
    failures: int = 0
    bytes_loaded: int = 0


class Prefetcher:
    """Residency of adapters: loading, idle, pinned.

    Args:
        pool, store: where adapters go and where they come from.
        loader: brings the bytes.
        eviction: "lru" keeps idle adapters until their pages are wanted, "eager" drops them at their last unpin.
    """

    def __init__(
        self, pool: PagePool, store: AdapterStore, loader: Loader, eviction: Literal["lru", "eager"] = "lru"
    ) -> None:
        self.pool, self.store, self.loader, self.eviction = pool, store, loader, eviction
        self.counts = PrefetchCounts()
        self._pages: dict[int, int] = {}  # of every adapter that has pages, also of one that the store has forgotten
        self._loading: set[int] = set()
        self._cancelled: set[int] = set()
        self._failures: list[tuple[int, LoadFailed]] = []  # not reported yet
        self._idle: OrderedDict[int, None] = OrderedDict()  # resident, not pinned; least recently used first
        self._pins: dict[int, int] = {}  # resident and used by so many running sequences
        self._idle_pages = 0

    def is_resident(self, adapter_id: int) -> bool:
        """Whether a request of this adapter can enter a step."""
        return adapter_id in self._pins or adapter_id in self._idle

    @property
    def held(self) -> set[int]:
        """Adapters whose pages cannot be taken now: pinned or loading."""
        return self._pins.keys() | self._loading

    @property
    def loading(self) -> int:
        """Loads under way."""
        return len(self._loading)

    @property
    def resident(self) -> int:
        """Resident adapters, pinned or idle."""
        return len(self._pins) + len(self._idle)

    def pages_of(self, adapter_id: int) -> int:
        """Pages that the adapter takes."""
        return self._pages[adapter_id] if adapter_id in self._pages else self.store.version(adapter_id).pages

    def fetch(self, adapter_id: int, keep: Collection[int] = ()) -> bool:
        """Starts to load an adapter that is neither resident nor loading, evicting idle ones but those in `keep`.

        Returns:
            False if the pages could not be had now; then nothing changed.
        """
        version = self.store.version(adapter_id)
        if not self._could_free(version.pages, keep) or not self._free_slot(keep):
            return False
        self.make_room(version.pages, keep)
        self.pool.open_adapter(adapter_id, version.shape)
        self._pages[adapter_id] = version.pages
        self._loading.add(adapter_id)
        try:
            self.loader.start(adapter_id)
        except BaseException:  # an interrupt: the load will never end
            self._loading.remove(adapter_id)
            self._close(adapter_id)
            raise
        return True

    def poll(self) -> list[tuple[int, LoadFailed]]:
        """Takes in what the loader has finished.

        Returns:
            Adapters that could not be loaded, with the reason; their pages are free again.
        """
        self._take_in()
        failures, self._failures = self._failures, []
        return failures

    def wait(self) -> None:
        """Blocks until no load is under way; `poll` reports failures."""
        while self._loading:
            self.loader.wait()
            self._take_in()

    def _take_in(self) -> None:
        for adapter_id, failure in self.loader.completed():
            self._loading.remove(adapter_id)
            unwanted = adapter_id in self._cancelled
            self._cancelled.discard(adapter_id)
            if failure is not None or unwanted:
                self._close(adapter_id)
            else:
                self._set_idle(adapter_id)
                self.counts.loads += 1
                self.counts.bytes_loaded += self.pages_of(adapter_id) * self.pool.page_bytes
            if failure is not None:
                self.counts.failures += 1
                self._failures.append((adapter_id, failure))

    def pin(self, adapter_id: int) -> None:
        """A running sequence uses this resident adapter."""
        if adapter_id in self._idle:
            del self._idle[adapter_id]
            self._idle_pages -= self.pages_of(adapter_id)
        self._pins[adapter_id] = self._pins.get(adapter_id, 0) + 1

    def unpin(self, adapter_id: int) -> None:
        """A sequence stopped using it."""
        self._pins[adapter_id] -= 1
        if not self._pins[adapter_id]:
            del self._pins[adapter_id]
            self._set_idle(adapter_id)
            if self.eviction == "eager":
                self._evict(adapter_id)

    def _set_idle(self, adapter_id: int) -> None:
        self._idle[adapter_id] = None
        self._idle_pages += self.pages_of(adapter_id)

    def make_room(self, pages: int, keep: Collection[int] = ()) -> bool:
        """Evicts idle adapters, least recently used first, until `pages` pages are free.

        Returns:
            False if even all idle adapters outside `keep` would not be enough; then none was evicted.
        """
        if not self._could_free(pages, keep):
            return False
        while self.pool.free_pages < pages:
            self._evict(next(candidate for candidate in self._idle if candidate not in keep))
        return True

    def _could_free(self, pages: int, keep: Collection[int]) -> bool:
        """Whether so many pages would be free if all idle adapters outside `keep` were evicted."""
        kept_pages = sum(self.pages_of(adapter_id) for adapter_id in keep if adapter_id in self._idle)
        return self.pool.free_pages + self._idle_pages - kept_pages >= pages

    def _free_slot(self, keep: Collection[int]) -> bool:
        """Evicts one idle adapter if all adapter slots are taken."""
        if self.pool.free_adapter_slots:
            return True
        victim = next((candidate for candidate in self._idle if candidate not in keep), None)
        if victim is not None:
            self._evict(victim)
        return victim is not None

    def _evict(self, adapter_id: int) -> None:
        self._close_idle(adapter_id)
        self.counts.evictions += 1

    def _close_idle(self, adapter_id: int) -> None:
        del self._idle[adapter_id]
        self._idle_pages -= self.pages_of(adapter_id)
        self._close(adapter_id)

    def _close(self, adapter_id: int) -> None:
        self.pool.close_adapter(adapter_id)
        del self._pages[adapter_id]

    def drop(self, adapter_id: int) -> None:
        """Forgets an adapter that nobody uses any more, wherever it is; a load under way is dropped when it ends."""
        assert adapter_id not in self._pins, f"adapter {adapter_id} dropped while in use"
        if adapter_id in self._loading:
            self._cancelled.add(adapter_id)
        elif adapter_id in self._idle:
            self._close_idle(adapter_id)  # a removal, not an eviction: nobody wanted its pages

    def check(self) -> None:
        """Asserts that residency, pins and pages agree."""
        assert not self._idle.keys() & self._pins.keys(), "an adapter is idle and pinned"
        assert not self._loading & (self._idle.keys() | self._pins.keys()), "an adapter is loading and resident"
        assert all(count > 0 for count in self._pins.values()), self._pins
        assert self._idle_pages == sum(map(self.pages_of, self._idle)), "the count of idle pages drifted"
        known = self._loading | self._idle.keys() | self._pins.keys()
        assert known == self._pages.keys() and self._cancelled <= self._loading, "the books of residency disagree"
        assert self.pool.usage().adapter == sum(map(self.pages_of, known)), "pages of adapters and residency disagree"
