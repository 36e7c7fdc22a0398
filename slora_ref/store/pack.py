"""Packing: an adapter as the pool stores it, whole pages in table order, ready to be copied in one piece."""

from __future__ import annotations

from typing import Any

import numpy as np

from slora_ref.adapter import Adapter
from slora_ref.checkpoint.tensors import as_bits
from slora_ref.config import TARGETS
from slora_ref.pager import AdapterShape, PageLayout
from slora_ref.shapes import Array, Float


def pack(adapter: Adapter, layout: PageLayout, dtype: Any) -> Float[Array, "layers pages width"]:
    """An adapter's packed weights in memory of their own, read-only."""
    pages = layout.adapter_pages(_page_ranks(adapter))
    image = np.empty((layout.num_layers, pages, layout.width), dtype)
    pack_into(image, adapter, layout)
    image.flags.writeable = False  # it is read again after every eviction
    return image


def pack_into(image: Float[Array, "layers pages width"], adapter: Adapter, layout: PageLayout) -> None:
    """Writes an adapter, or the layout's shard of it, into an image, converting its numbers; zeros where a vector ends
    inside a page, and past the rank.

    Column j of A is row j of PEFT's lora_A, row j of B is column j of PEFT's lora_B. The scale stays outside.
    """
    ranks, page_ranks = adapter.header.ranks, _page_ranks(adapter)
    a_start, b_start = layout.starts(page_ranks)
    if (ranks != page_ranks).any() or layout.shard.count > 1:
        image[...] = 0  # a layer of a smaller rank leaves pages over, and so do the last shards
    with np.errstate(over="ignore", invalid="ignore"):
        for target in range(len(TARGETS)):
            for layer in np.flatnonzero(ranks[:, target]).tolist():
                a, b = layout.cut(adapter.a[layer, target], adapter.b[layer, target], target, int(page_ranks[target]))
                _put(image[layer], int(a_start[target]), layout.a_pieces[target], a)
                _put(image[layer], int(b_start[target]), layout.b_pieces[target], b.T)


def _put(pages: Float[Array, "pages width"], start: int, pieces: int, vectors: Float[Array, "rank size"]) -> None:
    """Cuts each vector into `pieces` pages; the tail of the last piece is zeros."""
    (rank, size), width = vectors.shape, pages.shape[1]
    rows = pages[start : start + rank * pieces].reshape(rank, pieces * width)
    if rows.dtype == vectors.dtype:  # as integers: NumPy copies its own types faster than bfloat16
        rows, vectors = as_bits(rows), as_bits(vectors)
    rows[:, :size] = vectors
    rows[:, size:] = 0


def _page_ranks(adapter: Adapter) -> Any:
    return AdapterShape(adapter.header.ranks, adapter.header.scales).page_ranks
