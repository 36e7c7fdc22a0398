"""Communicator: the three collectives of tensor parallelism, with what they sent, whatever carries it.

All shards call the same collectives in the same order, with arrays of the same shape and dtype. Bytes are what one
shard sends of them. Threads (a ring) and started processes (a star around shard 0) count a message where they send it.
MPI and NCCL choose an algorithm and do not tell which; theirs are what a ring sends, as in the paper's cost model
(section 6): (N-1)/N of an all-gather's result, twice that for an all-reduce, all of a broadcast but on the last shard.
It knows nothing of models.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from slora_ref.shapes import Array, Shaped
from slora_ref.tp.shard import WHOLE, Shard

Collective = Literal["all_reduce", "all_gather", "broadcast"]
Purpose = Literal["base", "lora"]
"""Whose numbers are moved: the base model's (activations, logits), or LoRA's small intermediates."""


@dataclass
class Counts:
    """Calls and bytes sent by one shard, by collective; and the bytes of them that were LoRA's.

    Args:
        as_of_a_ring: whether the bytes of steps are a ring's, or those of the messages that were sent.
    """

    calls: dict[str, int] = field(default_factory=lambda: {"all_reduce": 0, "all_gather": 0, "broadcast": 0})
    nbytes: dict[str, int] = field(default_factory=lambda: {"all_reduce": 0, "all_gather": 0, "broadcast": 0})
    lora_nbytes: int = 0
    as_of_a_ring: bool = False

    def add(self, collective: Collective, nbytes: int, purpose: Purpose = "base") -> None:
        """One more call, which sent so many bytes."""
        self.calls[collective] += 1
        self.nbytes[collective] += nbytes
        if purpose == "lora":
            self.lora_nbytes += nbytes


class Communicator(ABC):
    """One shard's end of the group.

    Args:
        shard: which one.
    """

    def __init__(self, shard: Shard) -> None:
        self.shard, self.counts = shard, Counts()
        self.on_loss: list[Callable[[], None]] = []  # called when the group ends too early

    def all_reduce(self, x: Shaped[Array, " *dims"], purpose: Purpose = "base") -> Shaped[Array, " *dims"]:
        """The sum over shards, in the place of x, which must be contiguous; every shard gets the same bits.

        Raises:
            ShardLost: another shard has died or failed.
        """
        if self.shard.count > 1 and x.size:
            self.counts.add("all_reduce", self.reduce(x), purpose)
        return x

    def all_gather(self, x: Shaped[Array, " *dims"], purpose: Purpose = "base") -> Shaped[Array, "shards ..."]:
        """Every shard's x, in the order of the shards.

        Raises:
            ShardLost: another shard has died or failed.
        """
        if self.shard.count == 1:
            return x[None]
        gathered = np.empty((self.shard.count, *x.shape), x.dtype)
        if x.size:
            self.counts.add("all_gather", self.gather(x, gathered), purpose)
        return gathered

    def broadcast(self, message: bytes | None = None) -> bytes:
        """Shard 0's message, on every shard; the others pass None, and wait for as long as it takes.

        Raises:
            ShardLost: another shard has died or failed.
        """
        assert (message is not None) == (self.shard.index == 0), "shard 0 speaks, the others listen"
        if self.shard.count == 1:
            return message or b""
        received, sent = self._broadcast(message)
        self.counts.add("broadcast", sent)
        return received

    def check(self) -> None:  # noqa: B027  a group that is alive, or that cannot be without its processes
        """Raises ShardLost if the group has ended."""

    def close(self) -> None:  # noqa: B027
        """The other shards have been told to stop: lets go of what was started for them."""

    @abstractmethod
    def reduce(self, x: Shaped[Array, " ..."]) -> int:
        """Adds up in place; returns the bytes sent, which it does not count."""

    @abstractmethod
    def gather(self, x: Shaped[Array, " *dims"], gathered: Shaped[Array, "shards ..."]) -> int:
        """Fills `gathered`; returns the bytes sent, which it does not count."""

    @abstractmethod
    def _broadcast(self, message: bytes | None) -> tuple[bytes, int]:
        """The message and the bytes sent."""

    @abstractmethod
    def fail(self, reason: str) -> None:
        """Ends the group: what others wait for, or ask for later, raises ShardLost with this reason."""


class Alone(Communicator):
    """The communicator of a model that is not split: nothing is sent."""

    def __init__(self) -> None:
        super().__init__(WHOLE)

    def reduce(self, x: Shaped[Array, " ..."]) -> int:
        raise AssertionError("a single shard sends nothing")

    def gather(self, x: Shaped[Array, " *dims"], gathered: Shaped[Array, "shards ..."]) -> int:
        raise AssertionError("a single shard sends nothing")

    def _broadcast(self, message: bytes | None) -> tuple[bytes, int]:
        raise AssertionError("a single shard sends nothing")

    def fail(self, reason: str) -> None:
        """There is nobody to tell."""
