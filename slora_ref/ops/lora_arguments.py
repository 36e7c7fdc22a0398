"""The arguments of the LoRA kernels, in the order in which every rung of an operation takes them.

What the arrays mean is written in the head of the operation's first rung. Sizes and strides are read off the arrays, so
a caller passes nothing twice. It knows no backend: arrays are NumPy's or CuPy's.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from slora_ref.ops.launch import Arguments, check_array, row_stride
from slora_ref.ops.layouts import by_layout
from slora_ref.ops.tables import AdapterTables
from slora_ref.shapes import Array, Float, Int

LORA_WORDS = 4  # a Lora entry is 4 words of 32 bits: first entry of A, of B, rank, scale
MOST_TARGETS = 3  # q, k and v are the largest group


def lora_lookup(
    lora: Int[Array, "layers targets entries 4"], slots: Int[Array, " entries"], tables: AdapterTables
) -> Arguments:
    """lora_lookup: fills `lora` for the adapter slots of some rows or tiles."""
    adapters, layers, targets = tables.rank.shape
    return {
        "lora": check_array("lora", lora, np.int32, (layers, targets, len(slots), LORA_WORDS)),
        "slots": check_array("slots", slots, np.int32, (None,)),
        "a_start": check_array("a_start", tables.a_start, np.int32, (adapters, targets)),
        "b_start": check_array("b_start", tables.b_start, np.int32, (adapters, targets)),
        "rank": check_array("rank", tables.rank, np.int32, (adapters, layers, targets)),
        "scale": check_array("scale", tables.scale, np.float32, tables.rank.shape),
        "entries": np.int32(len(slots)),
        "layers": np.int32(layers),
        "targets": np.int32(targets),
        "table": np.int32(tables.pages.shape[1]),
    }


@by_layout
def lora_join(
    t: Float[Array, "splits rows targets t_columns"],
    parts: Float[Array, "shards splits rows targets part_columns"],
    slots: Int[Array, " rows"],
    columns: Int[Array, "adapter_slots all_targets"],
    first: int,
) -> Arguments:
    """lora_join: t from the columns that each shard has computed; `first` is the group's first target."""
    splits, rows, targets, t_columns = t.shape
    return {
        "t": check_array("t", t, np.float32, t.shape),
        "parts": check_array("parts", parts, np.float32, (None, splits, rows, targets, None)),
        "slots": check_array("slots", slots, np.int32, (rows,)),
        "columns": check_array("columns", columns, np.int32, (None, None)),
        "splits": np.int32(splits),
        "rows": np.int32(rows),
        "targets": np.int32(targets),
        "t_columns": np.int32(t_columns),
        "part_columns": np.int32(parts.shape[4]),
        "shards": np.int32(parts.shape[0]),
        "first": np.int32(first),
        "all_targets": np.int32(columns.shape[1]),
    }


@by_layout
def mbgmv_shrink(
    t: Float[Array, "splits rows targets t_columns"],
    x: Float[Array, "rows d_in"],
    pages: Float[Array, "pages width"],
    page_table: Int[Array, "adapter_slots table"],
    lora: Int[Array, "targets rows 4"],
) -> Arguments:
    """mbgmv_shrink: t = x A, each row with its own adapter."""
    return _weights(pages, page_table, lora, len(x), t, x=x) | _shrink_sizes(t, x, pages)


@by_layout
def mbgmv_expand(
    y: Float[Array, "rows d_outs"],
    t: Float[Array, "splits rows targets t_columns"],
    pages: Float[Array, "pages width"],
    page_table: Int[Array, "adapter_slots table"],
    lora: Int[Array, "targets rows 4"],
    d_outs: tuple[int, ...],
) -> Arguments:
    """mbgmv_expand: y += scale t B, each row with its own adapter."""
    return _weights(pages, page_table, lora, len(y), t, y=y, d_outs=d_outs) | _expand_sizes(y, t, pages, d_outs)


@by_layout
def mbgmm_shrink(
    t: Float[Array, "splits rows targets t_columns"],
    x: Float[Array, "rows d_in"],
    pages: Float[Array, "pages width"],
    page_table: Int[Array, "adapter_slots table"],
    lora: Int[Array, "targets tiles 4"],
    tiles: Int[Array, "tiles 2"],
) -> Arguments:
    """mbgmm_shrink: t = x A, each tile of rows with its adapter."""
    first = _weights(pages, page_table, lora, len(tiles), t, x=x)
    return first | _tiles(tiles) | _shrink_sizes(t, x, pages)


@by_layout
def mbgmm_expand(
    y: Float[Array, "rows d_outs"],
    t: Float[Array, "splits rows targets t_columns"],
    pages: Float[Array, "pages width"],
    page_table: Int[Array, "adapter_slots table"],
    lora: Int[Array, "targets tiles 4"],
    tiles: Int[Array, "tiles 2"],
    d_outs: tuple[int, ...],
) -> Arguments:
    """mbgmm_expand: y += scale t B, each tile of rows with its adapter."""
    first = _weights(pages, page_table, lora, len(tiles), t, y=y, d_outs=d_outs)
    return first | _tiles(tiles) | _expand_sizes(y, t, pages, d_outs)


@by_layout
def lora_shrink(
    t: Float[Array, "splits rows targets t_columns"],
    x: Float[Array, "rows d_in"],
    pages: Float[Array, "pages width"],
    page_table: Int[Array, "adapter_slots table"],
    lora: Int[Array, "targets tiles 4"],
    tiles: Int[Array, "tiles 2"],
    counts: Int[Array, " two"],
) -> Arguments:
    """lora_shrink: mbgmm_shrink, whose tiles from counts[0] on have one row each, which MBGMV serves."""
    return _with_counts(mbgmm_shrink(t, x, pages, page_table, lora, tiles), counts)


@by_layout
def lora_expand(
    y: Float[Array, "rows d_outs"],
    t: Float[Array, "splits rows targets t_columns"],
    pages: Float[Array, "pages width"],
    page_table: Int[Array, "adapter_slots table"],
    lora: Int[Array, "targets tiles 4"],
    tiles: Int[Array, "tiles 2"],
    counts: Int[Array, " two"],
    d_outs: tuple[int, ...],
) -> Arguments:
    """lora_expand: mbgmm_expand, whose tiles from counts[0] on have one row each, which MBGMV serves."""
    return _with_counts(mbgmm_expand(y, t, pages, page_table, lora, tiles, d_outs), counts)


def _with_counts(arguments: Arguments, counts: Any) -> Arguments:
    """The arguments with `counts` behind the tiles."""
    names = list(arguments)
    behind = names.index("tiles") + 1
    items = [(name, arguments[name]) for name in names]
    return dict([*items[:behind], ("counts", check_array("counts", counts, np.int32, (2,))), *items[behind:]])


def _weights(
    pages: Any,
    page_table: Any,
    lora: Any,
    entries: int,
    t: Any,
    x: Any = None,
    y: Any = None,
    d_outs: tuple[int, ...] = (),
) -> Arguments:
    """The arrays that shrink (with x) and expand (with y) begin with; storage has the dtype of the pages."""
    dtype, rows = pages.dtype, t.shape[1]
    if x is not None:
        check_array("t", t, np.float32, (None, rows, None, None))
        first = {"t": t, "x": check_array("x", x, dtype, (rows, None), strided=True)}
    else:
        first = {"y": check_array("y", y, dtype, (rows, sum(d_outs)), strided=True)}
        first["t"] = check_array("t", t, np.float32, (None, rows, len(d_outs), None))
    return first | {
        "pages": check_array("pages", pages, dtype, (None, None), strided=True),
        "page_table": check_array("page_table", page_table, np.int32, (None, None)),
        "lora": check_array("lora", lora, np.int32, (t.shape[2], entries, LORA_WORDS)),
    }


def _tiles(tiles: Any) -> Arguments:
    """What MBGMM's kernels take beside MBGMV's."""
    return {"tiles": check_array("tiles", tiles, np.int32, (None, 2)), "tile_count": np.int32(len(tiles))}


def _shrink_sizes(t: Any, x: Any, pages: Any) -> Arguments:
    """The numbers that every shrink ends with."""
    rows, d_in = x.shape
    return {
        "rows": np.int32(rows),
        "d_in": np.int32(d_in),
        "width": np.int32(pages.shape[1]),
        **_t_sizes(t),
        "x_stride": row_stride(x),
        "page_stride": row_stride(pages),
    }


def _expand_sizes(y: Any, t: Any, pages: Any, d_outs: tuple[int, ...]) -> Arguments:
    """The numbers that every expand ends with."""
    return {
        "rows": np.int32(y.shape[0]),
        **_d_outs(d_outs),
        "width": np.int32(pages.shape[1]),
        **_t_sizes(t),
        "y_stride": row_stride(y),
        "page_stride": row_stride(pages),
    }


def _t_sizes(t: Any) -> Arguments:
    splits, _, targets, t_columns = t.shape
    return {"targets": np.int32(targets), "t_columns": np.int32(t_columns), "splits": np.int32(splits)}


def _d_outs(d_outs: tuple[int, ...]) -> Arguments:
    assert len(d_outs) <= MOST_TARGETS, d_outs
    padded = (*d_outs, 0, 0)[:MOST_TARGETS]
    return {f"d_out{i}": np.int32(d_out) for i, d_out in enumerate(padded)}
