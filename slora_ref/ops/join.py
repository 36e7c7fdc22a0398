"""Puts the small intermediate of LoRA together from the columns that each shard has computed (paper section 6)."""

from __future__ import annotations

import numpy as np

from slora_ref.ops.tables import AdapterTables, LoraGroup, Segments
from slora_ref.shapes import Array, Float


def join_ranks(
    parts: Float[Array, "shards rows part_width"], tables: AdapterTables, segments: Segments, group: LoraGroup
) -> Float[Array, "rows t_width"]:
    """t = x A from [x A_0 | x A_1 | ...], for every target of a group.

    Args:
        parts: [shards, rows, part_width] what lora_shrink returned on each shard: of each target the columns that this
            shard holds, side by side.

    Returns:
        [rows, t_width] of each target all columns, as one shard would have computed them; the zeros are left out that
        fill the last shards' columns where the rank does not divide.
    """
    targets = list(group.targets)
    slots, rows_of = segments.with_adapter()
    ranks, columns = tables.page_rank[slots][:, targets], tables.a_page_rank[slots][:, targets]
    t = np.empty((parts.shape[1], int(ranks.sum(axis=1).max(initial=0))), parts.dtype)
    for rows, of_targets in zip(rows_of, np.stack([ranks, columns], axis=2).tolist(), strict=True):
        to = at = 0
        for rank, count in of_targets:
            whole = parts[:, rows, at : at + count].transpose(1, 0, 2)
            t[rows, to : to + rank] = whole.reshape(len(whole), len(parts) * count)[:, :rank]
            to, at = to + rank, at + count
    return t
