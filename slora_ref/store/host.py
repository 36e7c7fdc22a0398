"""HostMemory: packed adapters in one arena, each once, up to a budget; the least recently used give way.

Two threads use it: the engine's, and the one that reads folders. An entry appears when it is complete, and stays where
it is while a copy into the pool is under way (a hold).
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Collection, Hashable
from dataclasses import dataclass
from typing import Any

import numpy as np

from slora_ref.shapes import Array, Float
from slora_ref.store.arena import Arena


@dataclass
class Entry:
    """Packed weights in the arena.

    Args:
        start: of its extent.
        image: [layers, pages, width], read-only once it is ready.
        ready: complete.
    """

    start: int
    image: Float[Array, "layers pages width"]
    ready: bool = False


class HostMemory:
    """Entries by source (a folder's content, or a name's own copy of it).

    Args:
        arena: the memory.
        dtype: of the numbers, the pool's.
    """

    def __init__(self, arena: Arena, dtype: Any) -> None:
        self.arena, self.dtype = arena, np.dtype(dtype)
        self._lock = threading.Lock()
        self._entries: OrderedDict[Hashable, Entry] = OrderedDict()  # least recently used first
        self._holds: Counter[Hashable] = Counter()
        self.evictions = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the entries."""
        with self._lock:
            return sum(entry.image.nbytes for entry in self._entries.values())

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, source: Hashable) -> bool:
        entry = self._entries.get(source)
        return entry is not None and entry.ready

    def get(self, source: Hashable) -> Float[Array, "layers pages width"] | None:
        """The packed weights, if they are there; it counts as a use."""
        with self._lock:
            if source not in self:
                return None
            self._entries.move_to_end(source)
            return self._entries[source].image

    # --- holds ---

    def hold(self, source: Hashable) -> bool:
        """Keeps an entry in its place; False, and nothing is held, if it is not there."""
        with self._lock:
            if source in self:
                self._holds[source] += 1
            return source in self

    def hold_unread(self, source: Hashable, nbytes: int) -> bool:
        """Keeps an entry that is there, or is about to be read; False if it has no room beside what is held."""
        with self._lock:
            ends = [0]
            for entry in sorted((e for s, e in self._entries.items() if s in self._holds), key=lambda e: e.start):
                ends += [entry.start, entry.start + entry.image.nbytes]
            largest = max(b - a for a, b in zip(ends[::2], [*ends[1::2], self.arena.nbytes], strict=True))
            fits = source in self or nbytes <= largest
            if fits:
                self._holds[source] += 1
            return fits

    def let_go(self, source: Hashable) -> None:
        """Ends one hold."""
        with self._lock:
            assert self._holds[source] > 0, f"{source!r} let go more often than held"
            self._holds[source] -= 1
            if not self._holds[source]:
                del self._holds[source]

    # --- filling ---

    def reserve(
        self, source: Hashable, shape: tuple[int, int, int], keep: Collection[Hashable] = ()
    ) -> Float[Array, "layers pages width"] | None:
        """Memory for packed weights that are about to be read; what is least recently used gives way, but not `keep`.

        Returns:
            None if there is no room now: the rest is held or to be kept. Then some entries may be gone all the same.
        """
        nbytes = self.dtype.itemsize * shape[0] * shape[1] * shape[2]
        with self._lock:
            assert source not in self._entries, f"{source!r} is there already, or being read"
            while (start := self.arena.take(nbytes)) is None:
                idle = (s for s, e in self._entries.items() if e.ready and s not in self._holds and s not in keep)
                victim = next(idle, None)
                if victim is None:
                    return None
                self._remove(victim)
                self.evictions += 1
            image = self.arena.bytes_of(start, nbytes).view(self.dtype).reshape(shape)
            self._entries[source] = Entry(start, image)
            return image

    def publish(self, source: Hashable) -> None:
        """The weights are complete: from now on nobody can write into them."""
        with self._lock:
            entry = self._entries[source]
            entry.image.flags.writeable = False
            entry.ready = True

    def discard(self, source: Hashable) -> None:
        """Gives up an entry that could not be completed."""
        with self._lock:
            self._remove(source)

    def _remove(self, source: Hashable) -> None:
        self.arena.give_back(self._entries.pop(source).start)

    def check(self) -> None:
        """Asserts that entries and extents agree, and that holds are counted."""
        with self._lock:
            self.arena.check()
            starts = [entry.start for entry in self._entries.values()]
            assert sorted(starts) == sorted(self.arena._taken), "entries and extents differ"
            assert all(count > 0 for count in self._holds.values()), self._holds
            ready = [entry for entry in self._entries.values() if entry.ready]
            assert not any(entry.image.flags.writeable for entry in ready), "somebody could write into an entry"
