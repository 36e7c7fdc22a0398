"""Adapters without weights: a store of shapes, and a loader that only takes time."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from functools import cache
from pathlib import Path

import numpy as np

from slora_ref.adapter import AdapterHeader
from slora_ref.checkpoint.fingerprint import Fingerprint
from slora_ref.clock import SimulatedClock
from slora_ref.config import TARGETS, ModelConfig
from slora_ref.pager import AdapterShape, PageLayout
from slora_ref.prefetch.loader import Ended
from slora_ref.simulate.datasheet import ADAPTED, FP16
from slora_ref.store import AdapterStore, AdapterVersion

NO_FILE = Fingerprint(0, 0, b"", 0, 0)


class ShapeStore(AdapterStore):
    """An AdapterStore whose adapters are ranks only.

    Args:
        in_pool: whether adapters take pages; without, they lie in memory that the pool does not know.
    """

    def __init__(self, config: ModelConfig, layout: PageLayout, in_pool: bool = True) -> None:
        super().__init__(config, layout, np.float16, budget_bytes=1)
        self.in_pool = in_pool
        self.ranks: list[int] = []  # of each adapter id

    def register(self, rank: int) -> AdapterVersion:
        """One more adapter, of this rank on the four attention projections; its name is its number."""
        shape = _shape(self.layout.num_layers, rank if self.in_pool else 0)
        header = AdapterHeader(Path(), shape.ranks, shape.scales, 1, 1, "float16", NO_FILE)
        pages = self.layout.adapter_pages(shape.page_ranks)
        nbytes = adapter_pages(self.layout, rank) * self.layout.page_bytes(FP16)
        version = AdapterVersion(self._next_id, str(self._next_id), header, shape, pages, nbytes, source=rank)
        self._by_name[version.name] = self._versions[version.adapter_id] = version
        self._next_id += 1
        self.ranks.append(rank)
        return version

    def hold(self, adapter_id: int) -> Hashable:
        """Nothing has to stay in its place."""
        return adapter_id

    def let_go(self, hold: Hashable) -> None:
        """Nothing was held."""


@cache
def _shape(layers: int, rank: int) -> AdapterShape:
    ranks = np.zeros((layers, len(TARGETS)), np.int32)
    ranks[:, [TARGETS.index(target) for target in ADAPTED]] = rank
    return AdapterShape(ranks, (ranks > 0).astype(np.float32))


def adapter_pages(layout: PageLayout, rank: int) -> int:
    """Pages that an adapter of this rank fills."""
    return layout.adapter_pages(_shape(layout.num_layers, rank).page_ranks)


class LinkLoader:
    """A loader that moves nothing: loads pass one by one over a link of a given speed, in simulated time.

    Args:
        bytes_per_s: of the link.
        overhead: seconds a load, beside its bytes.
    """

    def __init__(self, clock: SimulatedClock, store: ShapeStore, bytes_per_s: float, overhead: float) -> None:
        self._clock, self._store = clock, store
        self._bytes_per_s, self._overhead = bytes_per_s, overhead
        self.seconds = 0.0
        self._under_way: deque[tuple[float, int]] = deque()  # (when it ends, adapter id), in that order
        self._free_at = 0.0  # when the link has nothing left to do
        self.bytes_loaded = 0

    def start(self, adapter_id: int) -> None:
        """The load joins the end of the queue for the link."""
        nbytes = self._store.version(adapter_id).nbytes
        seconds = self._overhead + nbytes / self._bytes_per_s
        self._free_at = max(self._free_at, self._clock.now()) + seconds
        self.seconds += seconds
        self.bytes_loaded += nbytes
        self._under_way.append((self._free_at, adapter_id))

    def completed(self) -> list[Ended]:
        """Those that have ended by now; none ever fails."""
        ended: list[Ended] = []
        while self._under_way and self._under_way[0][0] <= self._clock.now():
            ended.append((self._under_way.popleft()[1], None))
        return ended

    def wait(self) -> None:
        """Lets time pass until the next load has ended."""
        if self._under_way:
            self._clock.advance(max(0.0, self._under_way[0][0] - self._clock.now()))
