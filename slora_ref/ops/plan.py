"""The plan of a step: which kernel serves which rows, as the integer arrays that kernels read. Made once a step.

MBGMV serves rows one by one, MBGMM whole tiles of a segment; decode and prefill attention likewise. The choice is made
here, and only here: for adapters by the lengths and ranks of all segments of a step, so the last bits of a row with an
adapter may depend on what runs beside it; for attention by the length of a span. Arrays are padded to a size that
depends on the number of rows alone, so that a captured graph fits every step of its bucket.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from slora_ref.ops.tables import Segments, Spans
from slora_ref.shapes import Array, Int, Int32

NONE = -1  # no adapter, or no sequence


def uses_mbgmm(segments: Segments, rows: int) -> Array:
    """Whether a segment's rows share the reads of its adapter's weights (MBGMM) or read them one by one (MBGMV).

    Weights that are read again come from the cache, so a short segment saves little: its tiles cost as much as
    TILE_COST such reads. And all that is saved must be worth a launch of another kind, in which a row that is alone
    costs more. It is counted in rows x rank, each a column of A and a row of B, as measured on an H200.

    Args:
        rows: of the step, with its padding.
    """
    saved = (segments.length - 1) * segments.rank - TILE_COST
    shares = saved > 0
    alone = int((segments.length * segments.rank)[~shares].sum()) if rows <= TOGETHER_UP_TO else 0
    return shares & bool(saved[shares].sum() > LEAST_SAVED + ALONE_BESIDE * alone)


SHARED_FROM = 2  # rows of a segment, if its rank is large
TILE_COST, LEAST_SAVED, ALONE_BESIDE = 60, 512, 0.5
TOGETHER_UP_TO = 512  # rows of a step: beyond, MBGMM's tiles are larger, and one launch more matters less
SPANS_SHARED_FROM = 2  # rows of a span: a single query is decode attention


def tile_rows(rows: int) -> int:
    """The most rows of a tile in a step of so many rows: large tiles read weights less often, small ones fill a GPU."""
    return 16 if rows <= TOGETHER_UP_TO else 64


def query_tile(rows: int) -> int:
    """The most queries of a tile of prefill attention: each reads K and V once, but few of them leave a GPU idle."""
    return 16 if rows <= 128 else 64


def tile_count(rows: int, shortest: int, size: int) -> int:
    """The most tiles that segments of at least `shortest` rows, `rows` in all, can make."""
    return max(rows // shortest, 2 * rows // (size + 1))


@dataclass(frozen=True)
class LoraPlan:
    """Who computes the adapters' part of which rows.

    Args:
        row_slots: [rows] adapter slot of the rows that MBGMV serves, else -1.
        tiles: [tiles, 2] first row and number of rows of each tile that MBGMM, or both in one launch, serve; 0 rows: an
            unused entry, behind all used ones.
        tile_slots: [tiles] adapter slot of each tile, else -1.
        counts: [2] the first tiles are MBGMM's; the tiles in use.
        kernels: what is launched: "mbgmv" for the rows, "mbgmm" for the tiles, or "lora": all is in the tiles, and
            those that are not MBGMM's have one row, which is served as MBGMV would.
    """

    row_slots: Int32[Array, " rows"]
    tiles: Int32[Array, "tiles 2"]
    tile_slots: Int32[Array, " tiles"]
    counts: Int32[Array, " two"]
    kernels: tuple[str, ...]


def plan_lora(segments: Segments, rows: int, together: bool = False, fixed: bool = False) -> LoraPlan:
    """Divides the segments of a step of `rows` rows.

    Args:
        together: whether there are kernels that do MBGMV's and MBGMM's work in one launch; they are used in steps that
            have both, of at most TOGETHER_UP_TO rows. A row's bits are the same in either launch.
        fixed: the launches depend on the number of rows alone; else what would have nothing to do is left out, and a
            bucket has as many graphs as there are sets of kernels, which is faster.
    """
    used, shared = segments.adapter >= 0, uses_mbgmm(segments, rows)
    single = used & ~shared & (segments.length > 0)
    capacity = max(tile_count(rows, SHARED_FROM, tile_rows(rows)), rows if together and rows <= TOGETHER_UP_TO else 0)
    together = together and rows <= TOGETHER_UP_TO and bool(fixed or (used & shared).any())
    in_tiles = used & (shared | single) if together else used & shared
    row_slots = np.full(rows, NONE, np.int32)
    served = np.repeat(np.where(in_tiles, NONE, segments.adapter), segments.length)
    row_slots[: len(served)] = served  # rows beyond are padding
    first = np.argsort(~shared[in_tiles], kind="stable")  # MBGMM's tiles
    slots, start, length, tall = (
        array[in_tiles][first] for array in (segments.adapter, segments.start, segments.length, shared)
    )
    which, row, count = cut(start, length, np.where(tall, tile_rows(rows), 1))
    tiles, tile_slots = np.zeros((capacity, 2), np.int32), np.full(capacity, NONE, np.int32)
    tiles[: len(which)] = np.stack([row, count], axis=1)
    tile_slots[: len(which)] = slots[which]
    counts = np.array([tall[which].sum(), len(which)], np.int32)
    apart = {"mbgmv": fixed or bool(single.any()), "mbgmm": fixed or bool(len(which))}
    kernels = ("lora",) if together else tuple(name for name, needed in apart.items() if needed)
    return LoraPlan(row_slots, tiles, tile_slots, counts, kernels)


@dataclass(frozen=True)
class AttentionPlan:
    """Which rows are decode (one query of a sequence), and the tiles of the others.

    Args:
        queries: [rows, 2] sequence slot and visible tokens of each decode row; slot -1: not one.
        tiles: [tiles, 4] first row, number of rows, sequence slot, and visible tokens of the first row, each later row
            sees one more; 0 rows: an unused entry.
        single, shared: whether there are decode rows, and tiles.
    """

    queries: Int32[Array, "rows 2"]
    tiles: Int32[Array, "tiles 4"]
    single: bool
    shared: bool


def plan_attention(spans: Spans, rows: int) -> AttentionPlan:
    """Divides the spans of a step of `rows` rows."""
    queries = np.tile(np.array([NONE, 0], np.int32), (rows, 1))
    single = spans.length == 1
    queries[spans.start[single], 0] = spans.slot[single]
    queries[spans.start[single], 1] = spans.context[single]
    shared = spans.length >= SPANS_SHARED_FROM
    start, length = spans.start[shared], spans.length[shared]
    which, first, count = cut(start, length, query_tile(rows))
    visible = (spans.context[shared] - length)[which] + (first - start[which]) + 1
    tiles = np.zeros((tile_count(rows, SPANS_SHARED_FROM, query_tile(rows)), 4), np.int32)
    tiles[: len(which)] = np.stack([first, count, spans.slot[shared][which], visible], axis=1)
    return AttentionPlan(queries, tiles, bool(single.any()), bool(len(which)))


def cut(
    start: Int[Array, " n"], length: Int[Array, " n"], size: int | Int[Array, " n"]
) -> tuple[Int[Array, " tiles"], Int[Array, " tiles"], Int[Array, " tiles"]]:
    """Cuts ranges into tiles of at most `size` (of all, or of each): a tile's range, its start and its length."""
    size = np.broadcast_to(size, length.shape)
    counts = -(-length // size)
    which = np.repeat(np.arange(len(length)), counts)
    offset = (np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)) * size[which]
    return which, start[which] + offset, np.minimum(size[which], length[which] - offset)


def context_chunk(rows: int, kv_heads: int, positions: int) -> int:
    """Tokens of a context that one block of decode attention goes through.

    All of them where rows and heads alone fill a GPU; else parts, whose results are merged. So the order of a row's
    sums depends on the number of rows of the step (its bucket) and on its own context.
    """
    splits = max(1, BLOCKS_TO_FILL_A_GPU // (rows * -(-kv_heads // HEADS_OF_A_BLOCK)))
    return max(SHORTEST_CHUNK, -(-positions // splits))


BLOCKS_TO_FILL_A_GPU, HEADS_OF_A_BLOCK, SHORTEST_CHUNK = 256, 2, 256
SHRINK_SPLITS = {"mbgmv": 1, "mbgmm": 4, "lora": 4}  # parts of the sum over d_in, added by the expand that follows
