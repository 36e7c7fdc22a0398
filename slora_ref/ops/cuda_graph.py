"""CudaGraph: launches captured once, then started by one call: for measurements without the host's part."""

from __future__ import annotations

import statistics
from typing import Any

import cupy

from slora_ref.ops.cuda_ops import CudaOps
from slora_ref.ops.tape import Tape

WARM_UP = 2


class CudaGraph:
    """A tape's launches, captured on the stream that they were prepared for.

    Args:
        ops: the backend whose tape it is.
        tape: work that has run before, so that all is compiled and nothing is allocated.
    """

    def __init__(self, ops: CudaOps, tape: Tape) -> None:
        self._stream = ops.stream
        self._stream.begin_capture()
        try:
            tape.replay()
        finally:
            self._graph: Any = self._stream.end_capture()

    def milliseconds(self, repeats: int = 10) -> float:
        """Median time of one run."""
        times = []
        for _ in range(WARM_UP + repeats):
            start, end = cupy.cuda.Event(), cupy.cuda.Event()
            start.record(self._stream)
            self._graph.launch(self._stream)
            end.record(self._stream)
            end.synchronize()
            times.append(float(cupy.cuda.get_elapsed_time(start, end)))
        return statistics.median(times[WARM_UP:])
