"""Shards as threads of one process: for tests and for reading. Messages are copies that go through queues."""

from __future__ import annotations

from queue import SimpleQueue

from slora_ref.errors import ShardLost
from slora_ref.shapes import Array, Shaped
from slora_ref.tp.ring import RingCommunicator
from slora_ref.tp.shard import Shard


class ThreadRing:
    """What the threads share: the link into each shard, and why the group has ended.

    Args:
        shards: how many.
    """

    def __init__(self, shards: int) -> None:
        self.links: list[SimpleQueue[Array | None]] = [SimpleQueue() for _ in range(shards)]
        self.reason: str | None = None

    def fail(self, reason: str) -> None:
        """Wakes all who wait; the first reason stays."""
        self.reason = self.reason or reason
        for link in self.links:
            link.put(None)

    def check(self) -> None:
        """Raises ShardLost if the group has ended."""
        if self.reason is not None:
            raise ShardLost(self.reason)


class ThreadCommunicator(RingCommunicator):
    """A shard that is a thread.

    Args:
        shard: which one.
        ring: the group's.
    """

    def __init__(self, shard: Shard, ring: ThreadRing) -> None:
        super().__init__(shard)
        self._ring = ring

    def _send(self, array: Shaped[Array, " ..."]) -> None:
        self.check()
        self._ring.links[(self.shard.index + 1) % self.shard.count].put(array.copy())

    def _receive(self) -> Shaped[Array, " ..."]:
        self.check()
        message = self._ring.links[self.shard.index].get()
        self.check()
        assert message is not None, "only a group that has ended sends nothing"
        return message

    def check(self) -> None:
        """Raises ShardLost if the group has ended."""
        self._ring.check()

    def fail(self, reason: str) -> None:
        """Ends the group."""
        self._ring.fail(reason)


def thread_communicators(shards: int) -> list[ThreadCommunicator]:
    """One for each shard; each is to be used by one thread."""
    ring = ThreadRing(shards)
    return [ThreadCommunicator(Shard(index, shards), ring) for index in range(shards)]
