"""Room: what the pool, the tables and the next step have left in one round of admission.

Whatever was taken counts at its worst until its end: the peak of all sequences, and the pages of every adapter that is
pinned, loading, or needed by a sequence taken in this round.
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
        self._adapters = prefetcher.held
        self._adapter_pages = sum(map(prefetcher.pages_of, self._adapters))
        self._prefill_rows = 0

    def has(self, sequence: Sequence) -> bool:
        """Whether this sequence, too, can be held to its end."""
        extra_pages = self._extra_pages(sequence)
        if (
            len(self._taken) == self._config.max_running
            or len(self._adapters) + (extra_pages > 0) > self._pool.max_adapters
        ):
            return False
        rows = self._prefill_rows + sequence.uncomputed
        if self._config.separate_prefill and self._prefill_rows and rows > self._config.max_batched_tokens:
            return False  # the next prefill step is full
        pages = self._pool.num_pages - self._adapter_pages - extra_pages
        return self._forecast.fits([*self._taken, sequence], pages // self._pool.layout.token_pages(1))

    def take(self, sequence: Sequence) -> None:
        """This sequence has its place now."""
        self._adapter_pages += self._extra_pages(sequence)
        if sequence.adapter_id != BASE_MODEL:
            self._adapters.add(sequence.adapter_id)
        self._prefill_rows += sequence.uncomputed
        self._taken.append(sequence)

    def _extra_pages(self, sequence: Sequence) -> int:
        """Pages for its adapter, where that is not counted yet."""
        if sequence.adapter_id == BASE_MODEL or sequence.adapter_id in self._adapters:
            return 0
        return self._prefetcher.pages_of(sequence.adapter_id)
