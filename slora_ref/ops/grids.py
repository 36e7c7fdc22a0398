"""How many blocks and threads the kernels of attention and of rows take, and how much shared memory, where that takes
more than a line; ops/rungs.py says which kernel takes what. Sizes are a kernel's integer arguments by name, and `nums`,
the numbers in 16 bytes.
"""

from __future__ import annotations

from types import SimpleNamespace


def blocks(items: int, each: int) -> int:
    """How many of `each` hold the items; at least one, for a grid without blocks is no grid."""
    return max(1, -(-items // each))


def attention_words(sizes: SimpleNamespace) -> int:
    """Scores of a block's threads and a sum for each column of a head."""
    return int(4 * (128 + sizes.head_dim))


def norm_threads(sizes: SimpleNamespace) -> int:
    """As many as hold a row in registers, two chunks of 16 bytes each, within 256 to 1,024."""
    return min(1024, max(256, 32 * blocks(sizes.hidden, 32 * 2 * sizes.nums)))


def fits_registers(sizes: SimpleNamespace) -> bool:
    """Whether a head's columns fit what the lanes of the faster attention rungs hold."""
    return bool(sizes.head_dim <= 256)


def shared_by(sizes: SimpleNamespace) -> int:
    """Query heads that a lane of decode attention serves with one read of K and V."""
    group = sizes.heads // sizes.kv_heads
    return group if group <= 2 else 4


def decode_blocks(sizes: SimpleNamespace) -> int:
    """Heads of K and V, as many in a block as 32 lanes read side by side, by the parts of their query heads."""
    lanes = 1 << (blocks(sizes.head_dim, sizes.nums) - 1).bit_length()
    return blocks(sizes.kv_heads, 32 // lanes) * blocks(sizes.heads // sizes.kv_heads, shared_by(sizes))


def pieces(sizes: SimpleNamespace) -> int:
    """What a row of rope_store is cut into: 16 bytes of either half of each head of q and k, and 16 bytes of v."""
    halves = (sizes.heads + sizes.kv_heads) * blocks(sizes.head_dim // 2, sizes.nums)
    return int(halves + blocks(sizes.kv_heads * sizes.head_dim, sizes.nums))


def staged_rows(sizes: SimpleNamespace) -> int:
    """Bytes of 16 queries, 32 keys and 32 values in float32, rows an odd number apart."""
    return int(4 * (16 + 2 * 32) * (blocks(sizes.head_dim, sizes.nums) * sizes.nums + 1))
