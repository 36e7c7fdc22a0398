"""The arguments of the kernels by which shards of one host exchange small arrays, in the order in which they take them.

What the arrays mean is written in kernels_cu/peers.h. It knows no backend, and not whose memory it is.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from slora_ref.ops.launch import Arguments, check_array
from slora_ref.shapes import Array, Int, Shaped
from slora_ref.tp.shard import Shard

CHUNK, CHUNKS = 16, 512  # bytes; a block of peers.h exchanges so many of them
BLOCKS = 1024  # the most of a launch: 8 MiB, so that no message of 128 rows of Llama goes another way between two


def memory_bytes(shards: int, blocks: int = BLOCKS) -> int:
    """Of one shard: two letters from each for every block, and whose turn has come; whole chunks."""
    return (2 * shards * blocks * CHUNKS + -(-shards * blocks * 4 // CHUNK)) * CHUNK


@dataclass(frozen=True)
class Mailbox:
    """What one shard exchanges arrays through.

    Args:
        shard: which one.
        memory: [words] of this shard, int32, zeros at the start.
        offsets: [shards] where the others' memory lies, in bytes from this one's.
        turns: [blocks] how often each block has exchanged.
        stop: [1] not 0 when the group has ended.
    """

    shard: Shard
    memory: Int[Array, " words"]
    offsets: Int[Array, " shards"]
    turns: Int[Array, " blocks"]
    stop: Int[Array, " one"]

    def takes(self, x: Shaped[Array, " ..."]) -> bool:
        """Whether an array can go this way: whole chunks, and not too many of them to send to every other shard."""
        most = len(self.turns) * CHUNKS * CHUNK // max(1, self.shard.count - 1)
        return 0 < x.nbytes <= most and x.nbytes % CHUNK == 0

    def arguments(self, nbytes: int) -> Arguments:
        """What both kernels end with, for so many bytes of each shard."""
        return {
            "memory": check_array("memory", self.memory, np.int32, (None,)),
            "offsets": check_array("offsets", self.offsets, np.int64, (self.shard.count,)),
            "turns": check_array("turns", self.turns, np.int32, (None,)),
            "stop": check_array("stop", self.stop, np.int32, (1,)),
            "chunks": np.int32(nbytes // CHUNK),
            "shard": np.int32(self.shard.index),
            "shards": np.int32(self.shard.count),
            "blocks": np.int32(len(self.turns)),
        }


def peer_reduce(x: Shaped[Array, " *dims"], mailbox: Mailbox) -> Arguments:
    """peer_reduce: x = the sum over shards, in its place."""
    return {"x": check_array("x", x, x.dtype, x.shape)} | mailbox.arguments(x.nbytes)


def peer_gather(gathered: Shaped[Array, "shards ..."], x: Shaped[Array, " *dims"], mailbox: Mailbox) -> Arguments:
    """peer_gather: gathered[s] = shard s's x."""
    shape = (mailbox.shard.count, *x.shape)
    first = {"gathered": check_array("gathered", gathered, x.dtype, shape), "x": check_array("x", x, x.dtype, x.shape)}
    return first | mailbox.arguments(x.nbytes)
