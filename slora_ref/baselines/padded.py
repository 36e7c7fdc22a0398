"""Padded bmm: the adapters of a step are padded to its largest rank, copied side by side and multiplied as one batch of
matrices (the paper's S-LoRA-bmm).

What the paged kernels avoid: the copy, the zeros that are multiplied, and rows padded to the longest segment.
"""

from __future__ import annotations

import numpy as np

from slora_ref.ops import NumpyOps
from slora_ref.ops.tables import AdapterTables, LoraGroup, Segments
from slora_ref.shapes import Array, Float


class PaddedOps(NumpyOps):
    """NumpyOps with the two LoRA products padded."""

    def lora_shrink(
        self,
        x: Float[Array, "rows d_in"],
        pages: Float[Array, "pages width"],
        tables: AdapterTables,
        segments: Segments,
        group: LoraGroup,
        layer: int,
    ) -> Float[Array, "rows t_width"]:
        """t = x A: one product of [segments, longest, d_in] and [segments, d_in, largest sum of ranks]."""
        targets, pieces = list(group.targets), -(-x.shape[1] // pages.shape[1])
        slots, rows_of = segments.with_adapter()
        columns = tables.page_rank[slots][:, targets].sum(axis=1).tolist()
        a = np.zeros((len(slots), max(columns, default=0), x.shape[1]), self.dtype)
        for place, (slot, count) in enumerate(zip(slots, columns, strict=True)):
            first = tables.a_start[slot, targets[0]]
            entries = tables.pages[slot, first : first + count * pieces]
            a[place, :count] = pages[entries].reshape(count, pieces * pages.shape[1])[:, : x.shape[1]]
        t = np.zeros((x.shape[0], a.shape[1]), self.dtype)
        self._multiply(x, a.transpose(0, 2, 1), rows_of, t)
        return t

    def lora_expand(
        self,
        y: Float[Array, "rows d_outs"],
        t: Float[Array, "rows t_width"],
        pages: Float[Array, "pages width"],
        tables: AdapterTables,
        segments: Segments,
        group: LoraGroup,
        layer: int,
        d_outs: tuple[int, ...],
    ) -> None:
        """y += s t B: one product with [segments, largest sum of ranks, sum of d_outs], zero between the targets."""
        slots, rows_of = segments.with_adapter()
        b = np.zeros((len(slots), t.shape[1], y.shape[1]), self.dtype)
        for place, slot in enumerate(slots):
            row = column = 0
            for target, d_out in zip(group.targets, d_outs, strict=True):
                rank, page_rank = int(tables.rank[slot, layer, target]), int(tables.page_rank[slot, target])
                first, pieces = tables.b_start[slot, target], -(-d_out // pages.shape[1])
                entries = tables.pages[slot, first : first + page_rank * pieces]
                rows = pages[entries].reshape(page_rank, pieces * pages.shape[1])[:rank, :d_out]
                b[place, row : row + rank, column : column + d_out] = tables.scale[slot, layer, target] * rows
                row, column = row + page_rank, column + d_out
        delta = np.zeros_like(y)
        self._multiply(t, b, rows_of, delta)
        y += delta

    def _multiply(
        self,
        x: Float[Array, "rows d_in"],
        stack: Float[Array, "used d_in d_out"],
        rows_of: list[slice],
        out: Float[Array, "rows d_out"],
    ) -> None:
        """Writes each used segment's rows times its own matrix, rows padded to the longest segment."""
        lengths = [rows.stop - rows.start for rows in rows_of]
        padded = np.zeros((len(rows_of), max(lengths, default=0), x.shape[1]), self.dtype)
        for place, (rows, length) in enumerate(zip(rows_of, lengths, strict=True)):
            padded[place, :length] = x[rows]
        product = padded @ stack
        for place, (rows, length) in enumerate(zip(rows_of, lengths, strict=True)):
            out[rows] = product[place, :length]
