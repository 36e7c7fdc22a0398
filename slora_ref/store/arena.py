"""Arena: one piece of host memory, allocated at the start and cut into extents.

Allocated once because pinning memory for a GPU is slow and stops all that runs; the function that allocates is given,
so that nothing here knows of a GPU. It knows sizes, not what an extent holds.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable

import numpy as np

from slora_ref.errors import ConfigError
from slora_ref.shapes import Array, Num

ALIGNMENT = 256  # bytes; what a vector load, a cache line and a copy engine like
Allocate = Callable[[int], Num[Array, " bytes"]]
"""From a number of bytes to an array of so many uint8."""


def plain_memory(nbytes: int) -> Num[Array, " bytes"]:
    """Memory of the process. The system backs it page by page as it is written, so an unused arena costs nothing."""
    return np.empty(nbytes, np.uint8)


class Arena:
    """Extents of any size out of one array. The smallest gap that is large enough is taken; neighbouring gaps merge.

    Args:
        nbytes: in all.
        allocate: makes the array.

    Raises:
        ConfigError: the machine has not that much memory.
    """

    def __init__(self, nbytes: int, allocate: Allocate = plain_memory) -> None:
        self.nbytes = nbytes
        try:
            self._memory = allocate(nbytes)
        except MemoryError as error:
            raise ConfigError(f"host_bytes is {nbytes:,}, more than this machine gives: lower it") from error
        self._gaps = [(0, nbytes)]  # (first byte, byte after the last), in order, never touching
        self._taken: dict[int, int] = {}  # first byte -> byte after the last

    def take(self, nbytes: int) -> int | None:
        """The first byte of a new extent; None where no gap is large enough."""
        size = -(-nbytes // ALIGNMENT) * ALIGNMENT
        fitting = [(end - start, start) for start, end in self._gaps if end - start >= nbytes]
        if not fitting:
            return None
        length, start = min(fitting)
        self._gaps.remove((start, start + length))
        end = start + min(size, length)
        if end < start + length:
            insort(self._gaps, (end, start + length))
        self._taken[start] = end
        return start

    def give_back(self, start: int) -> None:
        """Ends an extent."""
        end = self._taken.pop(start)
        for gap in [gap for gap in self._gaps if gap[1] == start or gap[0] == end]:
            self._gaps.remove(gap)
            start, end = min(start, gap[0]), max(end, gap[1])
        insort(self._gaps, (start, end))

    def bytes_of(self, start: int, nbytes: int) -> Num[Array, " bytes"]:
        """The memory of an extent."""
        return self._memory[start : start + nbytes]

    def check(self) -> None:
        """Asserts that gaps and extents tile the memory, and that gaps never touch."""
        pieces = sorted([*self._gaps, *self._taken.items()])
        assert [start for start, _ in pieces] == [0, *(end for _, end in pieces[:-1])][: len(pieces)], pieces
        assert pieces[-1][1] == self.nbytes and all(start < end for start, end in pieces), pieces
        assert self._gaps == sorted(self._gaps), self._gaps
        ends = {end for _, end in self._gaps}
        assert not any(start in ends for start, _ in self._gaps), f"gaps that touch: {self._gaps}"
