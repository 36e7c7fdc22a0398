"""CudaGraph: launches captured once, then started by one call. What is done for speed alone: results are a tape's.

A launch costs the host about 8 us and a step of a 7B model has 500 of them, more than some steps take the GPU; in a
graph they cost it 1 us each, and the host one call.
"""

from __future__ import annotations

import statistics
from typing import Any

import cupy

from slora_ref.ops.tape import Graph, Tape

WARM_UP, REPEATS = 2, 10


class CudaGraph(Graph):
    """A tape's launches, captured on the stream that they were prepared for.

    Args:
        stream: that stream.
        tape: work that has run before, so that all is compiled and nothing is allocated. It is kept: a graph knows the
            addresses of its arrays, and CuPy would give their memory to others.
    """

    def __init__(self, stream: Any, tape: Tape) -> None:
        self.tape, self._stream = tape, stream
        self._stream.begin_capture()
        try:
            tape.start()
        finally:
            self._graph: Any = self._stream.end_capture()

    def launch(self) -> None:
        """One call of the driver, on the stream."""
        self._graph.launch(self._stream)
        self.tape.note()

    def milliseconds(self) -> float:
        """Median of ten runs between events."""
        times = []
        for _ in range(WARM_UP + REPEATS):
            start, end = cupy.cuda.Event(), cupy.cuda.Event()
            start.record(self._stream)
            self.launch()
            end.record(self._stream)
            end.synchronize()
            times.append(float(cupy.cuda.get_elapsed_time(start, end)))
        return statistics.median(times[WARM_UP:])
