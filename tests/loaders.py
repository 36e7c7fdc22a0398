"""Loaders for tests: an adapter arrives when the test wants it to, or not at all."""

from __future__ import annotations

from collections.abc import Callable

from slora_ref.errors import LoadFailed


def nothing(adapter_id: int) -> None:
    """Writes no weights: for tests that count pages only."""


class DelayedLoader:
    """Each load ends after a number of polls, well or badly, as planned for its adapter.

    Args:
        write: brings the weights when a load ends well; may raise LoadFailed.
    """

    def __init__(self, write: Callable[[int], None] = nothing) -> None:
        self.polls: dict[int, int] = {}  # adapter id -> polls that a load is not ready for; 0 where not named
        self.failing: set[int] = set()  # adapters whose loads fail
        self.started: list[int] = []  # every load so far, in order
        self._write = write
        self._under_way: dict[int, int] = {}  # adapter id -> polls still to come

    def start(self, adapter_id: int) -> None:
        """Begins a load."""
        assert adapter_id not in self._under_way, f"adapter {adapter_id} is loaded twice at once"
        self.started.append(adapter_id)
        self._under_way[adapter_id] = self.polls.get(adapter_id, 0)

    def completed(self) -> list[tuple[int, LoadFailed | None]]:
        """One poll: the loads that are ready now."""
        ready = [adapter_id for adapter_id, left in self._under_way.items() if not left]
        self._under_way = {adapter_id: left - 1 for adapter_id, left in self._under_way.items() if left}
        return [(adapter_id, self._end(adapter_id)) for adapter_id in ready]

    def _end(self, adapter_id: int) -> LoadFailed | None:
        if adapter_id in self.failing:
            return LoadFailed(f"adapter {adapter_id} fails as planned")
        try:
            self._write(adapter_id)
        except LoadFailed as failure:
            return failure
        return None

    def wait(self) -> None:
        """Lets time pass until the next load is ready."""
        assert self._under_way, "waits for a load, and none is under way: a deadlock"
        passed = min(self._under_way.values())
        self._under_way = {adapter_id: left - passed for adapter_id, left in self._under_way.items()}
