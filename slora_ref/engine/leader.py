"""Leader: the shard that schedules, and what makes the other shards do as it does (paper section 6).

It wraps the two parts of an engine that touch a device, executor and loader; scheduler, policies and prefetcher are
those of an engine without shards. A load happens on all shards or on none. A shard that fails in a step cannot be done
without: then the group ends, and every later step raises ShardLost.
"""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Collection, Iterator

import numpy as np

from slora_ref.batch import Batch
from slora_ref.engine.orders import Order, load_order, run_order
from slora_ref.errors import ConfigError, LoadFailed, ShardLost, SloraError
from slora_ref.executor import Executor, KernelExecutor, StartedStep, StepResult
from slora_ref.executor.timing import milliseconds
from slora_ref.ops.tape import Part
from slora_ref.pager import PagePool
from slora_ref.prefetch import Loader
from slora_ref.sampler import Sampling
from slora_ref.store import AdapterStore
from slora_ref.tp.communicator import Communicator, Counts

REPORT_BYTES = 512  # of a shard's failure, cut to this; the same for all, since it is gathered


def agree(communicator: Communicator, failure: str | None) -> str | None:
    """What went wrong on the first shard on which something did; None: on none. All shards must call this.

    Raises:
        ShardLost: a shard cannot answer any more.
    """
    report = np.zeros(REPORT_BYTES, np.uint8)
    text = "" if failure is None else f"shard {communicator.shard.index}: {failure}"
    said = text.encode()[:REPORT_BYTES]
    report[: len(said)] = np.frombuffer(said, np.uint8)
    for answer in communicator.all_gather(report):
        if answer[0]:
            return answer.tobytes().rstrip(b"\0").decode(errors="replace")
    return None


class Leader:
    """Tells the other shards what to do, and to stop when nobody uses it any more or the process ends.

    Args:
        communicator: of shard 0.
        stops: whether the followers have nothing else to wait for than this leader.
    """

    def __init__(self, communicator: Communicator, stops: bool) -> None:
        self.communicator = communicator
        if stops:
            weakref.finalize(self, stop, communicator)

    def tell(self, order: Order) -> None:
        """All shards get the order."""
        with self.or_the_group_ends():
            self.communicator.broadcast(order.encode())

    @contextlib.contextmanager
    def doing(self, order: Order) -> Iterator[None]:
        """All shards do as the order says, shard 0 in the body of this context; whatever interrupts it ends the group.

        Raises:
            ShardLost: a shard has died or failed.
        """
        message = order.encode()
        with self.or_the_group_ends():
            self.communicator.broadcast(message)
            yield

    @contextlib.contextmanager
    def together(self, order: Order, failed: type[SloraError] = ConfigError) -> Iterator[None]:
        """All shards do as the order says, shard 0 in the body of this context.

        Raises:
            failed: another shard could not; the message says which and why. ShardLost: one has died.
        """
        self.tell(order)
        try:
            yield
        except BaseException as error:
            self._agree(str(error) or repr(error))
            raise
        failure = self._agree(None)
        if failure is not None:
            raise failed(failure)

    def _agree(self, failure: str | None) -> str | None:
        with self.or_the_group_ends():
            return agree(self.communicator, failure)

    @contextlib.contextmanager
    def or_the_group_ends(self, upon: type[BaseException] = BaseException) -> Iterator[None]:
        """Whatever interrupts the body ends the group, since the others wait in the middle of it."""
        try:
            yield
        except ShardLost:
            raise
        except upon as error:
            self.communicator.check()  # if the group has ended, that is the cause
            self.communicator.fail(f"shard 0 failed: {error!r}")
            raise


def stop(communicator: Communicator) -> None:
    """Tells the followers to leave, if they are still there, and sees that they do."""
    with contextlib.suppress(ShardLost):
        communicator.broadcast(Order("stop").encode())
    communicator.close()


class GroupStep:
    """A step that all shards compute.

    Args:
        leader: of the group.
        step: shard 0's.
    """

    def __init__(self, leader: Leader, step: StartedStep) -> None:
        self._leader, self._step = leader, step

    def read(self) -> StepResult:
        """What it brought; waits for shard 0's device, which has had the others' part of it then.

        Nobody else waits for that, so who interrupts it leaves the group as it is.

        Raises:
            ShardLost: a shard has died or failed.
        """
        with self._leader.or_the_group_ends(upon=Exception):
            result = self._step.read()
            self._leader.communicator.check()  # a group that has ended lets go of its GPU: the result means nothing
            return result


class GroupExecutor:
    """Has every shard compute each step, and sample the same tokens from the same logits.

    So a step can be told and started before the one before it is read, as without shards.

    Args:
        leader: of the group.
        executor: shard 0's own.
    """

    def __init__(self, leader: Leader, executor: Executor) -> None:
        self._leader, self._executor = leader, executor

    @property
    def counts(self) -> Counts:
        """What shard 0 has sent."""
        return self._leader.communicator.counts

    @property
    def own(self) -> Executor:
        """Shard 0's."""
        return self._executor

    def milliseconds(self, parts: Collection[Part] = ()) -> float:
        """Of parts of the last step, on all shards at once; see executor/timing.py."""
        assert isinstance(self._executor, KernelExecutor), "only launches are kept"
        with self._leader.doing(Order("time", {"parts": list(parts)})):
            return milliseconds(self._executor, parts)

    def start(self, batch: Batch, sampling: Sampling) -> GroupStep:
        """Starts one step on all shards.

        Raises:
            ShardLost: a shard has died or failed.
        """
        with self._leader.doing(run_order(batch, sampling)):
            return GroupStep(self._leader, self._executor.start(batch, sampling))


class GroupLoader:
    """Loads an adapter on all shards at once, each its own part; if one cannot, none has.

    Args:
        leader: of the group.
        loader: shard 0's own, which loads on the spot.
        pool, store: shard 0's.
    """

    def __init__(self, leader: Leader, loader: Loader, pool: PagePool, store: AdapterStore) -> None:
        self._leader, self._loader, self._pool, self._store = leader, loader, pool, store
        self._completed: list[tuple[int, LoadFailed | None]] = []
        self.seconds = 0.0

    def start(self, adapter_id: int) -> None:
        """Loads, and waits for all.

        Raises:
            ShardLost: a shard has died or failed.
        """
        started, version = time.perf_counter(), self._store.version(adapter_id)
        failure: LoadFailed | None = None
        try:
            with self._leader.together(load_order(version, self._pool), LoadFailed):
                self._load(adapter_id)
        except LoadFailed as error:
            failure = error
        self.seconds += time.perf_counter() - started
        self._completed.append((adapter_id, failure))

    def _load(self, adapter_id: int) -> None:
        self._loader.start(adapter_id)
        self._loader.wait()
        [(_, failure)] = self._loader.completed()
        if failure is not None:
            raise failure

    def completed(self) -> list[tuple[int, LoadFailed | None]]:
        """Everything that was started since the last call."""
        ended, self._completed = self._completed, []
        return ended

    def wait(self) -> None:
        """Nothing is ever under way."""
