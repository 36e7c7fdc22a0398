"""Loaders: how an adapter gets from host memory into its pages. On the spot, on a thread; or on a GPU's side stream."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Protocol

from slora_ref.errors import LoadFailed
from slora_ref.pager import PagePool
from slora_ref.store import AdapterStore

Ended = tuple[int, LoadFailed | None]


class Loader(Protocol):
    """Copies an adapter from the store into pages that the pool has set aside for it.

    Args:
        seconds: how long copies were under way so far, whatever the engine did meanwhile.
    """

    seconds: float

    def start(self, adapter_id: int) -> None:
        """Begins one load. Failures are reported by `completed`, never raised here.

        The store may forget the adapter before the load has ended, so its image is to be taken now. The image stays in
        its place until `completed` has told of the load.
        """
        ...

    def completed(self) -> list[Ended]:
        """The loads that ended since the last call, each with what went wrong or None."""
        ...

    def wait(self) -> None:
        """Blocks until at least one started load has ended."""
        ...


class ImmediateLoader:
    """Loads on the spot, in `start`: the step waits for it, and a run can be repeated exactly."""

    def __init__(self, pool: PagePool, store: AdapterStore) -> None:
        self._pool, self._store = pool, store
        self._completed: list[Ended] = []
        self.seconds = 0.0

    def start(self, adapter_id: int) -> None:
        """Takes the image, which may read the folder, and scatters it."""
        started = time.perf_counter()
        failure = failure_of(adapter_id, lambda: self._pool.write_adapter(adapter_id, self._store.image(adapter_id)))
        self.seconds += time.perf_counter() - started
        self._completed.append((adapter_id, failure))

    def completed(self) -> list[Ended]:
        """Everything that was started since the last call."""
        ended, self._completed = self._completed, []
        return ended

    def wait(self) -> None:
        """Nothing is ever under way."""


class ThreadLoader:
    """Loads on a thread while the model runs: what a side stream is to a GPU. One load after the other.

    The pages are nobody else's until the load has ended, so the two threads never touch the same memory. The thread
    ends when the loader is no longer used by anybody.
    """

    def __init__(self, pool: PagePool, store: AdapterStore) -> None:
        self._pool, self._store = pool, store
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="adapter-loader")
        self._under_way: dict[int, Future[tuple[LoadFailed | None, float]]] = {}
        self.seconds = 0.0

    def start(self, adapter_id: int) -> None:
        """Takes the image and lets the thread scatter it."""
        pool, store = self._pool, self._store
        try:
            image = store.image(adapter_id)
        except LoadFailed as failure:
            self._under_way[adapter_id] = Future()
            self._under_way[adapter_id].set_result((failure, 0.0))
            return
        self._under_way[adapter_id] = self._executor.submit(
            _timed, adapter_id, lambda: pool.write_adapter(adapter_id, image)
        )

    def completed(self) -> list[Ended]:
        """What the thread has done since the last call, in the order in which it was started."""
        ended: list[Ended] = []
        for adapter_id in [adapter_id for adapter_id, future in self._under_way.items() if future.done()]:
            failure, seconds = self._under_way.pop(adapter_id).result()
            self.seconds += seconds
            ended.append((adapter_id, failure))
        return ended

    def wait(self) -> None:
        """Blocks until a load has ended that `completed` has not told of."""
        wait(self._under_way.values(), return_when=FIRST_COMPLETED)


def _timed(adapter_id: int, load: Callable[[], None]) -> tuple[LoadFailed | None, float]:
    started = time.perf_counter()
    failure = failure_of(adapter_id, load)
    return failure, time.perf_counter() - started


def failure_of(adapter_id: int, load: Callable[[], None]) -> LoadFailed | None:
    """Runs one load and says what went wrong: whatever one adapter's data breaks is the end of its requests alone."""
    try:
        load()
    except LoadFailed as failure:
        return failure
    except Exception as error:  # noqa: BLE001
        return LoadFailed(f"adapter {adapter_id} could not be loaded: {error!r}")
    return None
