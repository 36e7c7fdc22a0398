"""What `bench kernels` measures of the kernels by which shards exchange small arrays: the least they cost, on one GPU.

The others have put their letters long ago, and this shard's go to memory of the same GPU.
"""

from __future__ import annotations

from typing import Any

import cupy
import numpy as np

from slora_ref.bench.kernels.cases import HIDDEN
from slora_ref.bench.kernels.rows import RowCase, draw, exact
from slora_ref.ops.launch import Arguments
from slora_ref.ops.peer_arguments import CHUNK, CHUNKS, Mailbox, memory_bytes, peer_gather, peer_reduce
from slora_ref.tp.shard import Shard

SHARDS, T_COLUMNS = 2, 3 * 8  # of q, k and v, at rank 16
BLOCKS = 128  # enough for what is measured
FAR_AHEAD = 1 << 30  # turns: nobody has to be waited for


def mailbox(random: Any) -> Mailbox:
    """Shard 0's, with random letters; the memory of shard 1 lies behind it."""
    words = memory_bytes(SHARDS, BLOCKS) // 4
    memory = cupy.zeros((SHARDS, words), np.int32)
    letters = SHARDS * 2 * BLOCKS * CHUNKS * CHUNK // 4
    memory[0, :letters] = draw(random, 2 * letters).view(np.int32)
    memory[:, letters:] = FAR_AHEAD
    offsets = cupy.asarray(np.arange(SHARDS, dtype=np.int64) * words * 4)
    zeros = cupy.zeros(BLOCKS, np.int32), cupy.zeros(1, np.int32)
    return Mailbox(Shard(0, SHARDS), memory.reshape(-1), offsets, *zeros)


def letter(before: Arguments, like: Any) -> Any:
    """What shard 1 has put for turn 0, as an array like another."""
    start = 2 * BLOCKS * CHUNKS * CHUNK // 4
    return before["memory"][start : start + like.nbytes // 4].view(like.dtype).reshape(like.shape)


def peer_sum(rows: int) -> RowCase:
    """peer_reduce of a step's rows."""

    def make(random: Any) -> Arguments:
        return peer_reduce(draw(random, rows, HIDDEN), mailbox(random))

    def check(before: Arguments, after: Arguments) -> float:
        want = before["x"].astype(np.float32) + letter(before, before["x"]).astype(np.float32)
        return exact((after["x"] == want.astype(np.float16)).all())

    return RowCase("peer_reduce", rows, 4 * 2 * rows * HIDDEN, make, check, most=8)


def peer_parts(rows: int) -> RowCase:
    """peer_gather of t of q, k and v."""

    def make(random: Any) -> Arguments:
        x = cupy.asarray(random.standard_normal((rows, T_COLUMNS), dtype=np.float32))
        return peer_gather(cupy.empty((SHARDS, rows, T_COLUMNS), np.float32), x, mailbox(random))

    def check(before: Arguments, after: Arguments) -> float:
        want = cupy.stack([before["x"], letter(before, before["x"])])
        return exact((after["gathered"] == want).all())

    return RowCase("peer_gather", rows, 5 * 4 * rows * T_COLUMNS, make, check, "float32", most=8)
