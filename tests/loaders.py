"""Loaders and readers for tests: an adapter arrives when the test wants it to, or not at all."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Any

from slora_ref.errors import LoadFailed
from slora_ref.pager import PagePool
from slora_ref.store import AdapterStore, AdapterVersion


class DelayedLoader:
    """Each load ends after a number of polls, well or badly, as planned for its adapter.

    Like a copy on a thread or a stream, it takes the weights when it is started and writes them when it ends.

    Args:
        pool, store: where to and where from; None: it moves no weights, for tests that count pages only.
        write: puts an adapter's image into its pages, where that is not the pool's business.
    """

    def __init__(
        self,
        pool: PagePool | None = None,
        store: AdapterStore | None = None,
        write: Callable[[int, Any], None] | None = None,
    ) -> None:
        self.polls: dict[int, int] = {}  # adapter id -> polls that a load is not ready for; 0 where not named
        self.failing: set[int] = set()  # adapters whose loads fail
        self.seconds = 0.0
        self.started: list[int] = []  # every load so far, in order
        self._write, self._store = write or (pool.write_adapter if pool else None), store
        self._under_way: dict[int, int] = {}  # adapter id -> polls still to come
        self._brought: dict[int, Any] = {}  # adapter id -> its weights, or why they could not be had

    def start(self, adapter_id: int) -> None:
        """Begins a load."""
        assert adapter_id not in self._under_way, f"adapter {adapter_id} is loaded twice at once"
        self.started.append(adapter_id)
        self._under_way[adapter_id] = self.polls.get(adapter_id, 0)
        if self._store is not None:
            try:
                self._brought[adapter_id] = self._store.image(adapter_id)
            except LoadFailed as failure:
                self._brought[adapter_id] = failure

    def completed(self) -> list[tuple[int, LoadFailed | None]]:
        """One poll: the loads that are ready now."""
        ready = [adapter_id for adapter_id, left in self._under_way.items() if not left]
        self._under_way = {adapter_id: left - 1 for adapter_id, left in self._under_way.items() if left}
        return [(adapter_id, self._end(adapter_id)) for adapter_id in ready]

    def _end(self, adapter_id: int) -> LoadFailed | None:
        brought = self._brought.pop(adapter_id, None)
        if adapter_id in self.failing:
            return LoadFailed(f"adapter {adapter_id} fails as planned")
        if isinstance(brought, LoadFailed):
            return brought
        if self._write is not None:
            self._write(adapter_id, brought)
        return None

    def wait(self) -> None:
        """Lets time pass until the next load is ready."""
        assert self._under_way, "waits for a load, and none is under way: a deadlock"
        passed = min(self._under_way.values())
        self._under_way = {adapter_id: left - passed for adapter_id, left in self._under_way.items()}


class DelayedReader:
    """Stands in for the thread of a store: a read ends after a number of polls, well or badly, as planned."""

    def __init__(self, store: AdapterStore) -> None:
        self.polls = 0  # that a read is not ready for
        self.failing: set[int] = set()  # adapters whose reads fail
        self._disk, self._host = store.disk, store.host
        self._wanted: list[AdapterVersion] = []
        self._current: AdapterVersion | None = None
        self._left = 0
        self._failures: list[tuple[int, LoadFailed]] = []
        store._reader = self  # type: ignore[assignment]

    @property
    def busy(self) -> bool:
        """Whether a read is under way, or a failure is not told yet."""
        return self._current is not None or bool(self._failures)

    def want(self, versions: Seq[AdapterVersion]) -> None:
        """Replaces the list; the read under way goes on."""
        self._wanted = list(versions)
        self._begin()

    def _begin(self) -> None:
        failed = {adapter_id for adapter_id, _ in self._failures}
        if self._current is None:
            missing = (v for v in self._wanted if v.source not in self._host and v.adapter_id not in failed)
            self._current, self._left = next(missing, None), self.polls

    def failures(self) -> list[tuple[int, LoadFailed]]:
        """One poll."""
        if self._current is not None:
            if self._left:
                self._left -= 1
            else:
                self._read(self._current)
        failures, self._failures = self._failures, []
        return failures

    def _read(self, version: AdapterVersion) -> None:
        self._current = None
        keep = {wanted.source for wanted in self._wanted if wanted is not version}
        try:
            if version.adapter_id in self.failing:
                raise LoadFailed(f"adapter {version.adapter_id} cannot be read, as planned")
            if not self._disk.bring(version, keep):
                self._wanted = []
        except LoadFailed as failure:
            self._failures.append((version.adapter_id, failure))
        self._begin()

    def wait(self) -> None:
        """Lets time pass until the read under way is ready."""
        self._left = 0
