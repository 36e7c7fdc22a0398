"""StartClock: where the time from the start of the process to its first token goes."""

from __future__ import annotations

import os
from pathlib import Path


class StartClock:
    """The parts of a start, one after the other; the first is Python's own start and all imports.

    What runs on threads beside them counts only while a part waits for it: compilers, for instance, in the warm-up.
    """

    def __init__(self) -> None:
        self.parts: dict[str, float] = {}  # seconds
        self._part, self._since = "imports", 0.0

    @property
    def seconds(self) -> float:
        """Of all parts that have ended."""
        return sum(self.parts.values())

    def note(self, part: str) -> None:
        """The part so far ends, and another begins, or the same once more."""
        now = process_seconds()
        self.parts[self._part] = self.parts.get(self._part, 0.0) + now - self._since
        self._part, self._since = part, now

    def __str__(self) -> str:
        return ", ".join(f"{part} {seconds:.1f}" for part, seconds in self.parts.items())


def process_seconds() -> float:
    """Since this process was started, as Linux counts it, in hundredths."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return float(Path("/proc/uptime").read_text().split()[0]) - ticks / os.sysconf("SC_CLK_TCK")
