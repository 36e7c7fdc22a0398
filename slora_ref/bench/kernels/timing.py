"""Time of GPU work without the host's part: a CUDA graph of many launches, replayed."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import cupy

WARM_UP, REPEATS = 3, 25


class Graph:
    """The launches of `work`, captured.

    Args:
        work: launches on the current stream; it has run before, so that all is compiled and allocated.
        count: projections in it.
    """

    def __init__(self, work: Callable[[], None], count: int) -> None:
        self.count = count
        self._stream = cupy.cuda.Stream(non_blocking=True)
        with self._stream:
            self._stream.begin_capture()
            try:
                work()
            finally:
                self._graph: Any = self._stream.end_capture()

    def replay(self) -> None:
        """Runs it once, to its end."""
        self._graph.launch(self._stream)
        self._stream.synchronize()

    def median_us(self, repeats: int = REPEATS) -> float:
        """Median microseconds of one projection."""
        times = []
        for _ in range(WARM_UP + repeats):
            start, end = cupy.cuda.Event(), cupy.cuda.Event()
            start.record(self._stream)
            self._graph.launch(self._stream)
            end.record(self._stream)
            end.synchronize()
            times.append(1e3 * cupy.cuda.get_elapsed_time(start, end) / self.count)
        return statistics.median(times[WARM_UP:])
