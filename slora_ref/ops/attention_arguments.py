"""The arguments of the attention kernels, in the order in which every rung of an operation takes them.

What the arrays mean is written in the head of the operation's first rung. It knows no backend.
"""

from __future__ import annotations

import numpy as np

from slora_ref.ops.launch import Arguments, check_array, row_stride
from slora_ref.ops.layouts import by_layout
from slora_ref.shapes import Array, Float, Int


@by_layout
def rope_store(
    qkv: Float[Array, "rows qkv_width"],
    pages: Float[Array, "pages width"],
    cos: Float[Array, "positions half"],
    sin: Float[Array, "positions half"],
    positions: Int[Array, " rows"],
    k_pages: Int[Array, " rows"],
    v_pages: Int[Array, " rows"],
) -> Arguments:
    """rope_store: turns q in place, writes k (turned) and v into pages."""
    rows, (places, half), width = qkv.shape[0], cos.shape, pages.shape[1]
    kv_heads = width // (2 * half)
    return {
        "qkv": check_array("qkv", qkv, pages.dtype, (None, None), strided=True),
        "pages": check_array("pages", pages, pages.dtype, (None, kv_heads * 2 * half), strided=True),
        "cos": check_array("cos", cos, np.float32, (places, half)),
        "sin": check_array("sin", sin, np.float32, (places, half)),
        "positions": check_array("positions", positions, np.int32, (rows,)),
        "k_pages": check_array("k_pages", k_pages, np.int32, (rows,)),
        "v_pages": check_array("v_pages", v_pages, np.int32, (rows,)),
        "rows": np.int32(rows),
        "heads": np.int32(qkv.shape[1] // (2 * half) - 2 * kv_heads),
        "kv_heads": np.int32(kv_heads),
        "head_dim": np.int32(2 * half),
        "qkv_stride": row_stride(qkv),
        "page_stride": row_stride(pages),
    }


@by_layout
def paged_attention_decode(
    out: Float[Array, "rows q_width"],
    partial: Float[Array, "rows heads splits head_dim"],
    stats: Float[Array, "rows heads splits 2"],
    q: Float[Array, "rows q_width"],
    pages: Float[Array, "pages width"],
    sequence_pages: Int[Array, "sequence_slots two positions"],
    queries: Int[Array, "rows 2"],
    chunk: int,
) -> Arguments:
    """paged_attention_decode: one query a row; with several splits of `chunk` tokens, it fills partial and stats."""
    rows, heads, splits, head_dim = partial.shape
    return {
        "out": check_array("out", out, pages.dtype, (rows, heads * head_dim), strided=True),
        "partial": check_array("partial", partial, np.float32, (rows, heads, splits, head_dim)),
        "stats": check_array("stats", stats, np.float32, (rows, heads, splits, 2)),
        "q": check_array("q", q, pages.dtype, (rows, heads * head_dim), strided=True),
        "pages": check_array("pages", pages, pages.dtype, (None, None), strided=True),
        "sequence_pages": check_array("sequence_pages", sequence_pages, np.int32, (None, 2, None)),
        "queries": check_array("queries", queries, np.int32, (rows, 2)),
        "rows": np.int32(rows),
        "heads": np.int32(heads),
        "kv_heads": np.int32(pages.shape[1] // head_dim),
        "head_dim": np.int32(head_dim),
        "positions": np.int32(sequence_pages.shape[2]),
        "chunk": np.int32(chunk),
        "splits": np.int32(splits),
        "q_stride": row_stride(q),
        "out_stride": row_stride(out),
        "page_stride": row_stride(pages),
    }


@by_layout
def paged_attention_merge(
    out: Float[Array, "rows q_width"],
    partial: Float[Array, "rows heads splits head_dim"],
    stats: Float[Array, "rows heads splits 2"],
    queries: Int[Array, "rows 2"],
    chunk: int,
) -> Arguments:
    """paged_attention_merge: out from the splits of paged_attention_decode."""
    rows, heads, splits, head_dim = partial.shape
    return {
        "out": check_array("out", out, out.dtype, (rows, heads * head_dim), strided=True),
        "partial": check_array("partial", partial, np.float32, (rows, heads, splits, head_dim)),
        "stats": check_array("stats", stats, np.float32, (rows, heads, splits, 2)),
        "queries": check_array("queries", queries, np.int32, (rows, 2)),
        "rows": np.int32(rows),
        "heads": np.int32(heads),
        "head_dim": np.int32(head_dim),
        "chunk": np.int32(chunk),
        "splits": np.int32(splits),
        "out_stride": row_stride(out),
    }


@by_layout
def paged_attention_prefill(
    out: Float[Array, "rows q_width"],
    q: Float[Array, "rows q_width"],
    pages: Float[Array, "pages width"],
    sequence_pages: Int[Array, "sequence_slots two positions"],
    tiles: Int[Array, "tiles 4"],
    head_dim: int,
) -> Arguments:
    """paged_attention_prefill: many queries of a sequence, in tiles of neighbouring rows."""
    rows, q_width = q.shape
    return {
        "out": check_array("out", out, pages.dtype, (rows, q_width), strided=True),
        "q": check_array("q", q, pages.dtype, (rows, q_width), strided=True),
        "pages": check_array("pages", pages, pages.dtype, (None, None), strided=True),
        "sequence_pages": check_array("sequence_pages", sequence_pages, np.int32, (None, 2, None)),
        "tiles": check_array("tiles", tiles, np.int32, (None, 4)),
        "tile_count": np.int32(len(tiles)),
        "heads": np.int32(q_width // head_dim),
        "kv_heads": np.int32(pages.shape[1] // head_dim),
        "head_dim": np.int32(head_dim),
        "positions": np.int32(sequence_pages.shape[2]),
        "q_stride": row_stride(q),
        "out_stride": row_stride(out),
        "page_stride": row_stride(pages),
    }
