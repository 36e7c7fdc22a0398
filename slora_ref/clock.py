"""Clocks: what time it is, for arrivals, latencies and policies. Real, or simulated."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Seconds since some start; never runs backwards."""

    def now(self) -> float:
        """The current time in seconds."""
        ...


class MonotonicClock:
    """The time since the clock was made."""

    def __init__(self) -> None:
        self._start = time.monotonic()

    def now(self) -> float:
        """Seconds since the clock was made."""
        return time.monotonic() - self._start


class SimulatedClock:
    """Stands still until somebody advances it."""

    def __init__(self, start: float = 0.0) -> None:
        self._now = start

    def now(self) -> float:
        """The simulated time in seconds."""
        return self._now

    def advance(self, seconds: float) -> None:
        """Lets time pass."""
        assert seconds >= 0, f"time cannot run backwards by {seconds} s"
        self._now += seconds
