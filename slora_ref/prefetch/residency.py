"""Residency: which adapters have their pages in the pool, who uses them, and who leaves when pages are wanted."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from slora_ref.pager import PagePool
from slora_ref.prefetch.counts import PrefetchCounts
from slora_ref.prefetch.eviction import SCORES, Eviction, IdleAdapters
from slora_ref.store import AdapterStore


class Residency:
    """Resident adapters, pinned by running sequences or idle.

    Args:
        pool, store: where adapters go, and how large they are.
        eviction: "lru" and "cost" keep idle adapters until their pages are wanted, "eager" drops them at their last
            unpin, unless a waiting request needs them and adapters are loaded ahead.
        ahead: whether adapters are loaded ahead of their requests' turn, and how many at once.
    """

    def __init__(self, pool: PagePool, store: AdapterStore, eviction: Eviction, ahead: int) -> None:
        self.pool, self.store, self.eviction, self.ahead = pool, store, eviction, ahead
        self.counts = PrefetchCounts()
        self._score = SCORES[eviction]()
        self._pages: dict[int, int] = {}  # of every adapter that has pages, also of one that the store has forgotten
        self._idle = IdleAdapters()  # resident, not pinned
        self._pins: dict[int, int] = {}  # resident and used by so many running sequences
        self._coming: dict[int, None] = {}  # needed by waiting requests, the next one first

    def is_resident(self, adapter_id: int) -> bool:
        """Whether a request of this adapter can enter a step."""
        return adapter_id in self._pins or adapter_id in self._idle

    @property
    def resident(self) -> int:
        """Resident adapters, pinned or idle."""
        return len(self._pins) + len(self._idle)

    def pages_of(self, adapter_id: int) -> int:
        """Pages that the adapter takes."""
        return self._pages[adapter_id] if adapter_id in self._pages else self.store.version(adapter_id).pages

    def change_policy(self, eviction: Eviction) -> None:
        """From now on idle adapters leave by another rule. Only while none is resident, since scores do not compare."""
        assert not self._pages, f"{len(self._pages)} adapters have pages"
        self.eviction, self._score = eviction, SCORES[eviction]()

    # --- use ---

    def pin(self, adapter_id: int) -> None:
        """A running sequence uses this resident adapter."""
        if adapter_id in self._idle:
            self._idle.remove(adapter_id)
        self._pins[adapter_id] = self._pins.get(adapter_id, 0) + 1
        self._score.use(adapter_id)

    def unpin(self, adapter_id: int) -> None:
        """A sequence stopped using it."""
        self._pins[adapter_id] -= 1
        if not self._pins[adapter_id]:
            del self._pins[adapter_id]
            self._set_idle(adapter_id)
            if self.eviction == "eager" and not (self.ahead and adapter_id in self._coming):
                self._evict(adapter_id)

    def _set_idle(self, adapter_id: int) -> None:
        pages = self.pages_of(adapter_id)
        self._idle.add(adapter_id, self._score.of(adapter_id, pages), pages)

    # --- eviction ---

    def make_room(self, pages: int, keep: Collection[int] = ()) -> bool:
        """Evicts idle adapters until `pages` pages are free.

        Returns:
            False if even all idle adapters outside `keep` would not be enough; then none was evicted.
        """
        if self.pool.free_pages >= pages:
            return True
        if not self._could_free(pages, keep):
            return False
        while self.pool.free_pages < pages:
            self._evict(next(self._victims(keep)))
        return True

    def _victims(self, keep: Collection[int]) -> Iterator[int]:
        """Who may leave, in order: what nobody waits for, by its score, then what is coming, the last one first."""
        yield from (i for i in self._idle if i not in self._coming and i not in keep)
        yield from (i for i in reversed(self._coming) if i in self._idle and i not in keep)

    def _could_free(self, pages: int, keep: Collection[int]) -> bool:
        """Whether so many pages would be free if all idle adapters outside `keep` were evicted."""
        kept_pages = sum(self.pages_of(adapter_id) for adapter_id in keep if adapter_id in self._idle)
        return self.pool.free_pages + self._idle.pages - kept_pages >= pages

    def _could_free_slot(self, keep: Collection[int]) -> bool:
        return self.pool.free_adapter_slots > 0 or next(self._victims(keep), None) is not None

    def _free_slot(self, keep: Collection[int]) -> None:
        """Evicts one idle adapter if all adapter slots are taken."""
        if not self.pool.free_adapter_slots:
            self._evict(next(self._victims(keep)))

    def _evict(self, adapter_id: int) -> None:
        self._close_idle(adapter_id)
        self.counts.evictions += 1

    def _close_idle(self, adapter_id: int) -> None:
        self._idle.remove(adapter_id)
        self._close(adapter_id)

    def _close(self, adapter_id: int) -> None:
        self.pool.close_adapter(adapter_id)
        del self._pages[adapter_id]
