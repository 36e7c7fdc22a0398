"""Room: what the pool, the tables and the next step have left in one round of admission.

Whatever was taken counts at its worst until its end: the peak of all sequences, and the pages of every adapter that is
pinned, loading, or needed by a sequence that was taken in this round, to start now or when its adapter is there (a
claim).
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from slora_ref.config import EngineConfig
from slora_ref.pager import PagePool
from slora_ref.prefetch import Prefetcher
from slora_ref.request import BASE_MODEL, Sequence
from slora_ref.scheduler.forecast import Forecast


class Room:
    """The room at the start of a round, and what is left as sequences take their part.

    Args:
        running: in order of admission.
    """

    def __init__(
        self,
        pool: PagePool,
        prefetcher: Prefetcher,
        forecast: Forecast,
        config: EngineConfig,
        running: Seq[Sequence],
    ) -> None:
        self._pool, self._prefetcher, self._config = pool, prefetcher, config
        self._forecast = forecast
        self._taken = list(running)
        self._claims: list[Sequence] = []
        self._adapters = prefetcher.held
        self._adapter_pages = sum(map(prefetcher.pages_of, self._adapters))
        self._prefill_rows = 0

    def has(self, sequence: Sequence) -> bool:
        """Whether this sequence, too, can be held to its end, as soon as its adapter has a slot."""
        if len(self._taken) + len(self._claims) >= self._config.max_running:
            return False
        rows = self._prefill_rows + sequence.uncomputed
        if self._config.separate_prefill and self._prefill_rows and rows > self._config.max_batched_tokens:
            return False  # the next prefill step is full
        pages = self._pool.num_pages - self._adapter_pages - self._extra_pages(sequence)
        return self._forecast.fits([*self._taken, sequence], self._claims, pages // self._pool.layout.token_pages(1))

    def has_slot(self, sequence: Sequence) -> bool:
        """Whether its adapter has a slot, or could have one now. From the first that has none, no adapter passes."""
        missing = sequence.adapter_id not in self._adapters
        return sequence.adapter_id == BASE_MODEL or len(self._adapters) + missing <= self._pool.max_adapters

    def take(self, sequence: Sequence, starts: bool) -> None:
        """This sequence has its place now, or else its claim to one."""
        self._adapter_pages += self._extra_pages(sequence)
        if sequence.adapter_id != BASE_MODEL:
            self._adapters.add(sequence.adapter_id)
        self._prefill_rows += sequence.uncomputed * starts
        (self._taken if starts else self._claims).append(sequence)

    def spare_pages(self) -> int:
        """Pages that nobody who has a place or a claim will need, and no adapter that is held. O(running)."""
        tokens = self._forecast.peak(self._taken, self._claims)
        return self._pool.num_pages - self._adapter_pages - self._pool.layout.token_pages(tokens)

    def spare_slots(self) -> int:
        """Slots of the adapter table that are left."""
        return self._pool.max_adapters - len(self._adapters)

    def _extra_pages(self, sequence: Sequence) -> int:
        """Pages for its adapter, where that is not counted yet."""
        if sequence.adapter_id == BASE_MODEL or sequence.adapter_id in self._adapters:
            return 0
        return self._prefetcher.pages_of(sequence.adapter_id)
