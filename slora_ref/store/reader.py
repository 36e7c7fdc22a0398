"""Reader: the thread that reads adapter folders, so that no step of the engine ever waits for a disk.

It works through an ordered list of wanted versions, which is given anew in every step: what is no longer on it, and not
begun, is not read. It knows no requests and no pool.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable
from collections.abc import Sequence as Seq
from concurrent.futures import ThreadPoolExecutor

from slora_ref.errors import LoadFailed
from slora_ref.store.disk import Disk
from slora_ref.store.host import HostMemory
from slora_ref.store.version import AdapterVersion


class Reader:
    """Reads what is wanted, the most urgent first, one at a time.

    The executor's thread ends when the reader is no longer used by anybody.

    Args:
        disk: reads one version.
        host: where they go.
    """

    def __init__(self, disk: Disk, host: HostMemory) -> None:
        self._disk, self._host = disk, host
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="adapter-reader")
        self._changed = threading.Condition()
        self._wanted: list[AdapterVersion] = []
        self._failures: dict[int, LoadFailed] = {}  # not told yet
        self._busy = False
        self._ended = 0  # reads that have ended, well or badly

    @property
    def busy(self) -> bool:
        """Whether a read is under way or about to begin, or a failure is not told yet."""
        return self._busy or bool(self._failures)

    def want(self, versions: Seq[AdapterVersion]) -> None:
        """Replaces the list of what is wanted, the most urgent first."""
        if not versions and not self._wanted:
            return
        with self._changed:
            self._wanted = list(versions)
            if self._busy or all(version.source in self._host for version in versions):
                return
            self._busy = True
            self._executor.submit(self._work)

    def failures(self) -> list[tuple[int, LoadFailed]]:
        """The reads that failed since the last call, by adapter id."""
        if not self._failures:
            return []
        with self._changed:
            failures = list(self._failures.items())
            self._failures = {}
            return failures

    def wait(self) -> None:
        """Blocks until a read has ended, or none is under way."""
        with self._changed:
            ended = self._ended
            self._changed.wait_for(lambda: self._ended > ended or not self._busy or bool(self._failures))

    def _work(self) -> None:
        """On the thread: reads until nothing is left to read, or there is no room for it."""
        while (found := self._next()) is not None:
            version, keep = found
            try:
                self._end(version, self._disk.bring(version, keep), None)
            except LoadFailed as failure:
                self._end(version, True, failure)

    def _next(self) -> tuple[AdapterVersion, set[Hashable]] | None:
        """The first version that is missing, and the sources before it, which must not give way to it."""
        with self._changed:
            for place, version in enumerate(self._wanted):
                if version.source not in self._host and version.adapter_id not in self._failures:
                    return version, {earlier.source for earlier in self._wanted[:place]}
            self._busy = False
            self._changed.notify_all()
            return None

    def _end(self, version: AdapterVersion, had_room: bool, failure: LoadFailed | None) -> None:
        with self._changed:
            self._ended += had_room
            if not had_room:  # the next list, in the next step, tries again
                self._wanted = []
            if failure is not None:
                self._failures[version.adapter_id] = failure
            self._changed.notify_all()
