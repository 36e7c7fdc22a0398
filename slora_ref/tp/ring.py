"""Collectives on a ring: each shard only ever sends to the next one and receives from the one before.

An all-reduce goes around twice with a part of the array (Patarasuk and Yuan 2009): first each part collects its sum,
then the sums are passed on. So a shard sends 2 (N-1) / N of the array, the least there can be, and every shard ends
with the same bits, since each part is added up once. What carries a message is the subclass's business.
"""

from __future__ import annotations

from abc import abstractmethod

import numpy as np

from slora_ref.shapes import Array, Num, Shaped
from slora_ref.tp.communicator import Communicator


class RingCommunicator(Communicator):
    """A communicator whose shards can exchange a message with their neighbours. Bytes are counted as they are sent."""

    @abstractmethod
    def _send(self, array: Shaped[Array, " ..."]) -> None:
        """Sends a copy to the next shard, without waiting for it."""

    @abstractmethod
    def _receive(self) -> Shaped[Array, " ..."]:
        """Waits for the next message from the shard before.

        Raises:
            ShardLost: it will not come.
        """

    def reduce(self, x: Shaped[Array, " ..."]) -> int:
        parts = np.array_split(x.reshape(-1), self.shard.count)
        assert np.shares_memory(parts[0], x), "all_reduce works in place, on contiguous arrays"
        index, sent = self.shard.index, 0
        for turn in range(self.shard.count - 1):
            sent += self._pass_on(parts[index - turn])
            parts[index - turn - 1] += self._receive()
        for turn in range(self.shard.count - 1):  # the part after mine is complete here, in turn 0
            sent += self._pass_on(parts[(index + 1 - turn) % self.shard.count])
            parts[index - turn][...] = self._receive()
        return sent

    def gather(self, x: Shaped[Array, " *dims"], gathered: Shaped[Array, "shards ..."]) -> int:
        index, sent = self.shard.index, 0
        gathered[index] = x
        for turn in range(self.shard.count - 1):
            sent += self._pass_on(gathered[index - turn])
            gathered[index - turn - 1] = self._receive()
        return sent

    def _broadcast(self, message: bytes | None) -> tuple[bytes, int]:
        data: Num[Array, " bytes"] = self._receive() if message is None else np.frombuffer(message, np.uint8)
        last = self.shard.index == self.shard.count - 1
        return data.tobytes(), 0 if last else self._pass_on(data)

    def _pass_on(self, array: Shaped[Array, " ..."]) -> int:
        self._send(array)
        return int(array.nbytes)
