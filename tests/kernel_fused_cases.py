"""Cases for kernels of attention that do LoRA's work too: put together from the cases of the two launches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from kernel_cases import Case, LoraShape, decode_case, lay_out, lora_case, page_gap, rope_case, store

from slora_ref.ops import fused_arguments
from slora_ref.ops.kernel_source import DTYPES


def join_pages(
    rng: np.random.Generator, dtype: str, first: np.ndarray, second: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Two sets of pages as one, in random order, and where each page of the first and of the second lies."""
    width, counts = first.shape[1], (len(first), len(second))
    pages = store(np.full((sum(counts), width), np.nan), dtype, page_gap(width, dtype))
    order = rng.permutation(sum(counts)).astype(np.int32)
    places = order[: counts[0]], order[counts[0] :]
    for place, some in zip(places, (first, second), strict=True):
        pages[place] = some
    return pages, *places


def moved(ids: np.ndarray, places: np.ndarray) -> np.ndarray:
    """Page ids, those of no page left as they are."""
    return np.where(ids >= 0, places[ids], ids).astype(np.int32)


def rope_expand_case(
    dtype: str,
    seed: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    ranks: Sequence[Sequence[int]],
    owners: Sequence[int],
    splits: int = 1,
    gap: int = 0,
) -> Case:
    """A case of rope_store_expand.

    Args:
        ranks: [adapters][3]; owners: of the rows, -1: the base model.
    """
    rng, width = np.random.default_rng(seed), kv_heads * head_dim
    d_outs = (heads * head_dim, width, width)
    segments = [(owner % len(ranks) if owner >= 0 else -1, 1) for owner in owners]
    expand = lora_case("mbgmv_expand", dtype, seed, LoraShape(width, 1, d_outs, ranks, segments, splits, gap))
    qkv = expand.arguments["y"]
    rope = rope_case(dtype, seed, len(owners), heads, kv_heads, head_dim, gap, expand.want["y"].astype(DTYPES[dtype]))
    pages, of_rope, of_weights = join_pages(rng, dtype, rope.arguments["pages"], expand.arguments["pages"])
    ids = {name: moved(rope.arguments[name], of_rope) for name in ("k_pages", "v_pages")}
    sizes = {"qkv_stride": expand.arguments["y_stride"], "page_stride": np.int32(pages.strides[0] // pages.itemsize)}
    table = {"page_table": moved(expand.arguments["page_table"], of_weights)}
    arguments = fused_arguments.rope_store_expand(rope.arguments, expand.arguments)
    stored = np.full(pages.shape, np.nan)
    stored[of_rope] = rope.want["pages"]
    untouched = {"pages": np.isnan(stored), "qkv": rope.untouched["qkv"]}
    want = {"pages": stored, "qkv": rope.want["qkv"]}
    arguments |= {"qkv": qkv, "pages": pages} | ids | sizes | table
    return Case("rope_store_expand", dtype, arguments, want, untouched=untouched, roundings=2)


def decode_shrink_case(
    dtype: str,
    seed: int,
    kv_heads: int,
    group: int,
    head_dim: int,
    contexts: Sequence[int],
    ranks: Sequence[int],
    gap: int = 0,
) -> Case:
    """A case of paged_attention_decode_shrink: row i has adapter i, in turn, if its rank is not 0."""
    rng, rows = np.random.default_rng(seed), len(contexts)
    decode = decode_case(dtype, seed, kv_heads, group, head_dim, contexts, 1, gap)
    width, d_in = kv_heads * head_dim, kv_heads * group * head_dim
    owners = [row % len(ranks) for row in range(rows)]
    layout = lay_out(rng, dtype, LoraShape(width, d_in, (1,), [[rank] for rank in ranks], [(a, 1) for a in owners]))
    pages, of_tokens, of_weights = join_pages(rng, dtype, decode.arguments["pages"], layout.pages)
    lora = np.zeros((1, rows, 4), np.int32)
    side = 32 * (16 // DTYPES[dtype].itemsize) // (1 << (head_dim - 1).bit_length())  # heads of K that a warp reads
    blocks = -(-kv_heads // side) * (1 if group <= 2 else -(-group // 4))
    t = np.full((blocks, rows, 1, -(-max(ranks) // 8) * 8), np.nan, np.float32)
    out, want, written = decode.want["out"].astype(DTYPES[dtype]), np.full(t.shape[1:], np.nan), np.zeros(t.shape, bool)
    for row, owner in enumerate(owners):
        lora[0, row] = layout.lora.get((owner, 0), (0, 0, 0, 0))
        if ranks[owner] and contexts[row] >= 0:
            want[row, 0, : ranks[owner]] = out[row].astype(np.float64) @ layout.a[owner, 0]
            written[:, row, 0, : ranks[owner]] = True
    shrink = {"t": t[:1], "page_table": moved(layout.table, of_weights), "lora": lora, "width": np.int32(width)}
    arguments = decode.arguments | {
        "pages": pages,
        "sequence_pages": moved(decode.arguments["sequence_pages"], of_tokens),
        "page_stride": np.int32(pages.strides[0] // pages.itemsize),
    }
    arguments = fused_arguments.paged_attention_decode_shrink(
        arguments, shrink | {"t_columns": np.int32(t.shape[3])}, t
    )

    def derived(after: dict[str, Any]) -> dict[str, np.ndarray]:
        return {"out": after["out"], "t": after["t"].sum(axis=0)}

    untouched = decode.untouched | {"t": ~written}
    return Case("paged_attention_decode_shrink", dtype, arguments, decode.want | {"t": want}, derived, untouched)
