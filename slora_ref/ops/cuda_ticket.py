"""Passed: whether a stream of the GPU has come past a place, and how long it took."""

from __future__ import annotations

import cupy

from slora_ref.ops.ticket import Ticket


class Passed(Ticket):
    """For what a stream has been given: an event before it and one behind it."""

    def __init__(self) -> None:
        self._first, self.event = cupy.cuda.Event(), cupy.cuda.Event()

    @property
    def done(self) -> bool:
        """Whether the stream has passed the event."""
        return bool(self.event.done)

    def wait(self) -> None:
        """Waits for that."""
        self.event.synchronize()

    def begin(self) -> None:
        """The first event, on the current stream."""
        self._first.record(cupy.cuda.get_current_stream())

    def seconds(self) -> float:
        """Between the two events."""
        return float(cupy.cuda.get_elapsed_time(self._first, self.event)) / 1e3

    def seconds_since(self, earlier: Ticket) -> float:
        """Between the events behind both."""
        assert isinstance(earlier, Passed), "tickets of two backends"
        return float(cupy.cuda.get_elapsed_time(earlier.event, self.event)) / 1e3
