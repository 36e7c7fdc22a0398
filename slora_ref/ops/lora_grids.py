"""How the LoRA kernels divide their work into blocks: what kernels_cu/lora.h and lora_rows.h work out the same way."""

from __future__ import annotations

from types import SimpleNamespace

from slora_ref.ops.grids import blocks
from slora_ref.ops.launch import Grid

MOST_BESIDE = 256  # rows that have blocks of their own; of more rows, MBGMM serves most, and empty blocks cost


def outputs(sizes: SimpleNamespace) -> int:
    """Columns of y of all targets."""
    return int(sizes.d_out0 + sizes.d_out1 + sizes.d_out2)


def chunks(sizes: SimpleNamespace, length: int) -> int:
    """Chunks of 16 bytes of a vector in pages: chunks_of of kernels_cu/lora.h."""
    pages, rest = divmod(length, sizes.width)
    return int(pages * -(-sizes.width // sizes.nums) - (-rest // sizes.nums))


def runs(sizes: SimpleNamespace, size: int) -> int:
    """Runs of `size` chunks that the targets' outputs make: find_run of kernels_cu/lora.h."""
    return sum(-(-chunks(sizes, d_out) // size) for d_out in (sizes.d_out0, sizes.d_out1, sizes.d_out2))


def warp_columns(sizes: SimpleNamespace) -> int:
    """Columns of A that a warp takes at a time: columns_of_a_warp of kernels_cu/lora_rows.h."""
    part = -(-chunks(sizes, sizes.d_in) // sizes.splits)
    return 4 if part <= 128 and sizes.t_columns >= 32 else 2 if part <= 256 and sizes.t_columns >= 16 else 1


def expand_lanes(sizes: SimpleNamespace) -> int:
    """Chunks of y that a block of 128 threads owns; its other threads share their ranks, at least 8 ranks each.

    As many groups share them as make 2,000 warps in all: one row alone is as slow as its loads in sequence.
    """
    warps = sizes.rows * sum(chunks(sizes, d_out) for d_out in (sizes.d_out0, sizes.d_out1, sizes.d_out2)) // 32
    most = min(4, sizes.t_columns // 8)
    groups = 1
    while 2 * groups <= most and groups * warps < 2000:
        groups *= 2
    return 128 // groups


def is_lean(sizes: SimpleNamespace) -> bool:
    """Whether all of B that a thread of MBGMV needs is up to 8 loads of 16 bytes, each from a page of its own."""
    d_outs = (sizes.d_out0, sizes.d_out1, sizes.d_out2)
    lengths = (*d_outs, sizes.width, sizes.y_stride, sizes.page_stride)
    whole = max(d_outs) <= sizes.width and not any(length % sizes.nums for length in lengths)
    return bool(whole and sizes.t_columns in (4, 8) and sizes.splits == 1)


def row_blocks(sizes: SimpleNamespace, columns: int, resident: int) -> int:
    """Blocks that loop over the rows: enough for two rounds on a GPU, as MBGMM may have taken most of the rows.

    Args:
        columns: of A, that a block takes.
        resident: blocks that a multiprocessor has room for.
    """
    each = blocks(sizes.t_columns, columns) * sizes.targets * sizes.splits
    return min(int(sizes.rows), max(32, 2 * 132 * resident // each))


def tile_blocks(sizes: SimpleNamespace, each: int, most: int) -> int:
    """Blocks that loop over the tiles, `each` for a tile: few of all possible tiles are used, and empty blocks cost."""
    return min(int(sizes.tile_count), max(1, most // each))


def shrink_blocks(sizes: SimpleNamespace) -> int:
    """Targets, in blocks of 64 columns."""
    return int(sizes.targets * blocks(sizes.t_columns, 64))


def together(sizes: SimpleNamespace, parts: int, resident: int) -> Grid:
    """Blocks that take piece after piece of work, `parts` for each tile: as many as an H200 holds at a time.

    Args:
        resident: blocks that a multiprocessor has room for.
    """
    return min(int(sizes.tile_count) * parts, resident * 132), 1, 1
