"""Prefetcher: which adapters are resident in the pool, loading the missing ones and evicting idle ones (paper section
5.2).

How the bytes travel is the Loader's business and is injected: at once, on a thread, on a side stream, in simulated
time. Which adapters are coming is the scheduler's: it hands over an ordered list in every step. The prefetcher knows
pages and pins, but no requests.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable
from collections.abc import Sequence as Seq

from slora_ref.errors import LoadFailed
from slora_ref.pager import PagePool
from slora_ref.prefetch.eviction import Eviction
from slora_ref.prefetch.loader import Loader
from slora_ref.prefetch.residency import Residency
from slora_ref.store import AdapterStore


class Prefetcher(Residency):
    """Loads adapters into the pool; what is there, it keeps, pins and evicts as Residency says.

    Args:
        pool, store: where adapters go and where they come from.
        loader: brings the bytes.
        eviction: see Residency.
        ahead: most adapters that one round of `prefetch` loads before their requests' turn; 0: none.
    """

    def __init__(
        self, pool: PagePool, store: AdapterStore, loader: Loader, eviction: Eviction = "lru", ahead: int = 0
    ) -> None:
        super().__init__(pool, store, eviction, ahead)
        self.loader = loader
        self._loading: dict[int, Hashable] = {}  # adapter id -> what holds its image in host memory
        self._round: set[int] = set()  # loads under way that nobody's turn has asked for
        self._cancelled: set[int] = set()
        self._failures: list[tuple[int, LoadFailed]] = []  # not reported yet

    @property
    def held(self) -> set[int]:
        """Adapters whose pages cannot be taken now: pinned or loading."""
        return self._pins.keys() | self._loading.keys()

    @property
    def loading(self) -> int:
        """Loads under way."""
        return len(self._loading)

    # --- loading ---

    def expect(self, adapter_ids: Seq[int]) -> None:
        """Takes the ordered list of adapters that waiting requests need, the next one first.

        Those that are neither resident nor loading are read into host memory, if they are not there; what was on the
        last list and is not on this one is no longer wanted.
        """
        self._coming = dict.fromkeys(adapter_ids)
        self.store.want([adapter_id for adapter_id in self._coming if adapter_id not in self._pages])
        if self.eviction == "eager" and self.ahead:
            for adapter_id in [idle for idle in self._idle if idle not in self._coming]:
                self._evict(adapter_id)

    def fetch(self, adapter_id: int, keep: Collection[int] = ()) -> bool:
        """Starts to load an adapter that is neither resident nor loading, evicting idle ones but those in `keep`.

        Returns:
            False if the pages could not be had now, or the adapter is not in host memory yet; then nothing changed.
        """
        version, pages = self.store.version(adapter_id), self.pages_of(adapter_id)
        if not self._could_free(pages, keep) or not self._could_free_slot(keep):
            return False
        hold = self.store.hold(adapter_id)
        if hold is None:
            return False
        self._free_slot(keep)
        self.make_room(pages, keep)
        self.pool.open_adapter(adapter_id, version.shape)
        self._pages[adapter_id] = pages
        self._loading[adapter_id] = hold
        try:
            self.loader.start(adapter_id)
        except BaseException:  # an interrupt: the load will never end
            self.store.let_go(self._loading.pop(adapter_id))
            self._close(adapter_id)
            raise
        return True

    @property
    def could_prefetch(self) -> bool:
        """Whether a new round may begin, and an adapter that is coming is missing."""
        return bool(self.ahead) and not self._round and any(i not in self._pages for i in self._coming)

    def prefetch(self, pages: int, slots: int) -> None:
        """Loads adapters that are coming before their requests' turn, one round of at most `ahead`.

        A round begins when the last one has ended, so a request that has no room because of it waits for one round at
        most. Only adapters that nobody waits for are evicted for it.

        Args:
            pages, slots: what nobody else needs, now or later. What idle adapters of the list take is part of it, so
                they stay until their turn.
        """
        there = [i for i in self._coming if i in self._idle]
        pages, slots = pages - sum(map(self.pages_of, there)), slots - len(there)
        for adapter_id in [i for i in self._coming if i not in self._pages]:
            pages -= self.pages_of(adapter_id)
            if pages < 0 or len(self._round) >= min(slots, self.ahead):
                break
            if self.fetch(adapter_id, keep=self._coming):
                self._round.add(adapter_id)
                self.counts.loads_ahead += 1

    def poll(self) -> list[tuple[int, LoadFailed]]:
        """Takes in what has been read and loaded since the last call.

        Returns:
            Adapters that could not be read or loaded, with the reason; they hold nothing.
        """
        self._take_in()
        failures, self._failures = self._failures, []
        return failures

    def _take_in(self) -> None:
        failures = self.store.failures()
        for adapter_id, failure in self.loader.completed():
            self.store.let_go(self._loading.pop(adapter_id))
            self._round.discard(adapter_id)
            unwanted = adapter_id in self._cancelled
            self._cancelled.discard(adapter_id)
            if failure is not None or unwanted:
                self._close(adapter_id)
            else:
                self._set_idle(adapter_id)
                self.counts.loads += 1
                self.counts.bytes_loaded += self.pages_of(adapter_id) * self.pool.page_bytes
            if failure is not None:
                failures.append((adapter_id, failure))
        self.counts.failures += len(failures)
        self._failures += failures

    @property
    def waiting(self) -> bool:
        """Whether something is on its way into the pool or into host memory."""
        return bool(self._loading) or self.store.reading

    def wait(self) -> None:
        """Blocks until no load is under way; `poll` reports failures."""
        while self._loading:
            self.loader.wait()
            self._take_in()

    def wait_for_any(self) -> None:
        """Blocks until something that is on its way has got further."""
        if self._loading:
            self.loader.wait()
        else:
            self.store.wait()

    def drop(self, adapter_id: int) -> None:
        """Forgets an adapter that nobody uses any more, wherever it is; a load under way is dropped when it ends."""
        assert adapter_id not in self._pins, f"adapter {adapter_id} dropped while in use"
        self._score.forget(adapter_id)
        self._coming.pop(adapter_id, None)
        if adapter_id in self._loading:
            self._cancelled.add(adapter_id)
        elif adapter_id in self._idle:
            self._close_idle(adapter_id)  # a removal, not an eviction: nobody wanted its pages

    def check(self) -> None:
        """Asserts that residency, pins and pages agree."""
        self._idle.check()
        idle, loading = set(self._idle), self._loading.keys()
        assert not idle & self._pins.keys(), "an adapter is idle and pinned"
        assert not loading & (idle | self._pins.keys()), "an adapter is loading and resident"
        assert all(count > 0 for count in self._pins.values()), self._pins
        assert self._idle.pages == sum(map(self.pages_of, idle)), "the count of idle pages drifted"
        known = loading | idle | self._pins.keys()
        assert known == self._pages.keys() and self._cancelled | self._round <= loading, "the books disagree"
        assert self.pool.usage().adapter == sum(map(self.pages_of, known)), "pages of adapters and residency disagree"
