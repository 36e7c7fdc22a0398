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
        used = np.flatnonzero(segments.adapter >= 0).tolist()
        columns = [int(tables.page_rank[segments.adapter[i], targets].sum()) for i in used]
        a = np.zeros((len(used), max(columns, default=0), x.shape[1]), self.dtype)
        for place, (i, count) in enumerate(zip(used, columns, strict=True)):
            slot = segments.adapter[i]
            first = tables.a_start[slot, targets[0]]
            entries = tables.pages[slot, first : first + count * pieces]
            a[place, :count] = pages[entries].reshape(count, pieces * pages.shape[1])[:, : x.shape[1]]
        t = np.zeros((x.shape[0], a.shape[1]), self.dtype)
        self._multiply(x, a.transpose(0, 2, 1), segments, used, t)
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
        used = np.flatnonzero(segments.adapter >= 0).tolist()
        b = np.zeros((len(used), t.shape[1], y.shape[1]), self.dtype)
        for place, i in enumerate(used):
            slot = segments.adapter[i]
            row = column = 0
            for target, d_out in zip(group.targets, d_outs, strict=True):
                rank, page_rank = int(tables.rank[slot, layer, target]), int(tables.page_rank[slot, target])
                first, pieces = tables.b_start[slot, target], -(-d_out // pages.shape[1])
                entries = tables.pages[slot, first : first + page_rank * pieces]
                rows = pages[entries].reshape(page_rank, pieces * pages.shape[1])[:rank, :d_out]
                b[place, row : row + rank, column : column + d_out] = tables.scale[slot, layer, target] * rows
                row, column = row + page_rank, column + d_out
        delta = np.zeros_like(y)
        self._multiply(t, b, segments, used, delta)
        y += delta

    def _multiply(
        self,
        x: Float[Array, "rows d_in"],
        stack: Float[Array, "used d_in d_out"],
        segments: Segments,
        used: list[int],
        out: Float[Array, "rows d_out"],
    ) -> None:
        """Writes each used segment's rows times its own matrix, rows padded to the longest segment."""
        lengths = [int(segments.length[i]) for i in used]
        padded = np.zeros((len(used), max(lengths, default=0), x.shape[1]), self.dtype)
        spans = [slice(int(segments.start[i]), int(segments.start[i]) + n) for i, n in zip(used, lengths, strict=True)]
        for place, (span, length) in enumerate(zip(spans, lengths, strict=True)):
            padded[place, :length] = x[span]
        product = padded @ stack
        for place, (span, length) in enumerate(zip(spans, lengths, strict=True)):
            out[span] = product[place, :length]
