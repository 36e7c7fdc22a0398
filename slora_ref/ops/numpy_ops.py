"""NumpyOps: every operation of the model in NumPy, the readable specification and the CPU path.

Loops run over adapters and sequences only, never over tokens or heads. Products go to the BLAS that NumPy brings.
Arrays are [rows, ...]: one row a token. Reductions and products are in the dtype of the arrays (float32, or float64 as
an oracle).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from slora_ref.ops.attend import attend
from slora_ref.ops.branches import NoBranches
from slora_ref.ops.join import join_ranks
from slora_ref.ops.tables import AdapterTables, LoraGroup, Segments, Spans
from slora_ref.shapes import Array, Float, Int, Shaped


class NumpyOps(NoBranches):
    """The CPU backend: a dtype, and a buffer for gathered weights."""

    def __init__(self, dtype: Any = np.float32) -> None:
        self.dtype = np.dtype(dtype)
        self._buffer = np.empty(0, self.dtype)

    def _gather(
        self, pages: Float[Array, "pages width"], table: Int[Array, " table"], start: int, count: int
    ) -> Float[Array, "count width"]:
        """Reads the `count` pages named by the table's entries from `start` on, wherever they lie.

        The result lives in a buffer that the next gather overwrites: it stays in the cache, so that only the pages
        themselves come from memory.
        """
        width = pages.shape[1]
        if self._buffer.size < count * width or self._buffer.dtype != pages.dtype:
            self._buffer = np.empty(count * width, pages.dtype)
        gathered = self._buffer[: count * width].reshape(count, width)
        pages.take(table[start : start + count], axis=0, out=gathered, mode="clip")  # other modes copy twice
        return gathered

    def embed(self, weight: Float[Array, "vocab_rows hidden"], ids: Int[Array, " rows"]) -> Float[Array, "rows hidden"]:
        """The embedding rows of `ids`."""
        rows: Float[Array, "rows hidden"] = weight[ids]
        return rows

    def linear(
        self,
        x: Float[Array, "rows d_in"],
        weight: Float[Array, "d_out d_in"],
        bias: Float[Array, " d_out"] | None = None,
    ) -> Float[Array, "rows d_out"]:
        """y = x W^T + bias, with W as checkpoints store it. 2 * rows * d_in * d_out FLOPs."""
        y: Float[Array, "rows d_out"] = x @ weight.T
        return y if bias is None else y + bias

    def head(self, x: Float[Array, "rows hidden"], weight: Float[Array, "vocab hidden"]) -> Float[Array, "rows vocab"]:
        """Logits x W^T; a backend of half precision gives them in float32."""
        return self.linear(x, weight)

    def join_columns(self, parts: Float[Array, "shards rows part"]) -> Float[Array, "rows columns"]:
        """A matrix from the columns of it that each shard has computed, side by side."""
        return parts[0] if len(parts) == 1 else np.concatenate(list(parts), axis=1)

    def rms_norm(
        self, x: Float[Array, "rows hidden"], weight: Float[Array, " hidden"], eps: float
    ) -> Float[Array, "rows hidden"]:
        """x / sqrt(mean(x^2) + eps) * weight, a row at a time (Zhang and Sennrich 2019)."""
        mean_square = np.einsum("rh,rh->r", x, x) / x.shape[1]
        scale = 1.0 / np.sqrt(mean_square + eps)
        normed: Float[Array, "rows hidden"] = x * scale[:, None].astype(x.dtype) * weight
        return normed

    def add_rms_norm(
        self,
        x: Float[Array, "rows hidden"],
        delta: Float[Array, "rows hidden"],
        weight: Float[Array, " hidden"],
        eps: float,
    ) -> Float[Array, "rows hidden"]:
        """x += delta in place, then the norm of the sum: one operation, since one kernel does it."""
        x += delta
        return self.rms_norm(x, weight, eps)

    def silu_mul(self, gate_up: Float[Array, "rows two_ffn"]) -> Float[Array, "rows ffn"]:
        """silu(gate) * up, where the row holds gate, then up."""
        gate, up = np.split(gate_up, 2, axis=1)
        # exp(-gate) may overflow to inf for a very negative gate; 1 / inf = 0 is the right limit.
        with np.errstate(over="ignore"):
            inner: Float[Array, "rows ffn"] = gate / (1 + np.exp(-gate)) * up
        return inner

    def lora_shrink(
        self,
        x: Float[Array, "rows d_in"],
        pages: Float[Array, "pages width"],
        tables: AdapterTables,
        segments: Segments,
        group: LoraGroup,
        layer: int,
    ) -> Float[Array, "rows t_width"]:
        """t = x A for every target of a group, at each segment's own rank (MBGMV / MBGMM, paper section 5.3).

        The As of a group are neighbours in the page table, so one gather and one product make the intermediates of,
        say, q, k and v side by side. A layer whose rank is below the adapter's page rank has zeros in the columns
        beyond.

        Args:
            x: [rows, d_in] input of the group's projections.
            pages: [pages, width] the pool's storage of this layer.
            layer: kernels leave out the columns beyond its rank, which are zeros.

        Returns:
            [rows, t_width] t, target after target; what lies beyond a segment's own columns is unspecified.
        """
        targets, pieces = list(group.targets), -(-x.shape[1] // pages.shape[1])
        slots, rows_of = segments.with_adapter()
        columns = tables.a_page_rank[slots][:, targets].sum(axis=1)
        t = np.empty((x.shape[0], int(columns.max(initial=0))), self.dtype)
        shapes = _lists(slots, columns, tables.a_start[slots, targets[0]])
        for rows, slot, r, first in zip(rows_of, *shapes, strict=True):
            if r:
                a = self._gather(pages, tables.pages[slot], first, r * pieces).reshape(r, -1)[:, : x.shape[1]]
                np.matmul(x[rows], a.T, out=t[rows, :r], dtype=self.dtype)
        return t

    def join_ranks(
        self,
        parts: Float[Array, "shards rows part_width"],
        tables: AdapterTables,
        segments: Segments,
        group: LoraGroup,
    ) -> Float[Array, "rows t_width"]:
        """t from the columns of it that each shard has computed; see ops/join.py."""
        return parts[0] if len(parts) == 1 else join_ranks(parts, tables, segments, group)

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
        """y += scale * t B for every target of a group, in place. Rows of the base model (adapter -1) stay untouched.

        The Bs of a group are neighbours in the page table too, so one gather reads them.

        Args:
            y: [rows, sum of d_outs] outputs of the group's targets side by side.
            t: what lora_shrink returned for the same group.
            pages: [pages, width] the pool's storage of this layer.
            d_outs: output width of each target of the group.
        """
        targets, pieces = list(group.targets), [-(-d_out // pages.shape[1]) for d_out in d_outs]
        slots, rows_of = segments.with_adapter()
        of_targets = (tables.rank[slots, layer], tables.page_rank[slots], tables.scale[slots, layer])
        shapes = _lists(slots, tables.b_start[slots, targets[0]], *(table[:, targets] for table in of_targets))
        for rows, slot, first, ranks, page_ranks, scales in zip(rows_of, *shapes, strict=True):
            counts = [page_rank * cut for page_rank, cut in zip(page_ranks, pieces, strict=True)]
            b_pages = self._gather(pages, tables.pages[slot], first, sum(counts))
            t_column = y_column = page = 0
            for rank, page_rank, scale, count, d_out in zip(ranks, page_ranks, scales, counts, d_outs, strict=True):
                if rank:
                    b = b_pages[page : page + count].reshape(page_rank, -1)[:rank, :d_out]
                    y[rows, y_column : y_column + d_out] += (scale * t[rows, t_column : t_column + rank]) @ b
                t_column, y_column, page = t_column + page_rank, y_column + d_out, page + count

    def rope(
        self, x: Float[Array, "rows heads head_dim"], cos: Float[Array, "rows half"], sin: Float[Array, "rows half"]
    ) -> Float[Array, "rows heads head_dim"]:
        """Rotates each head's pairs (i, i + head_dim / 2) by the row's angles (RoFormer, in HF Llama's layout)."""
        low, high = np.split(x, 2, axis=2)
        cos, sin = cos[:, None, :], sin[:, None, :]
        return np.concatenate([low * cos - high * sin, high * cos + low * sin], axis=2)

    def store(
        self,
        pages: Float[Array, "pages width"],
        k: Float[Array, "rows width"],
        v: Float[Array, "rows width"],
        k_pages: Int[Array, " rows"],
        v_pages: Int[Array, " rows"],
    ) -> None:
        """Writes each row's key and value into its two pages; page -1 means do not store (a padding row)."""
        kept = k_pages >= 0
        pages[k_pages[kept]] = k[kept]
        pages[v_pages[kept]] = v[kept]

    def angle_table(self, table: Float[Array, "positions half"]) -> Float[Array, "positions half"]:
        """A table of cosines or sines as rope_store wants it."""
        return table.astype(self.dtype)

    def rope_store(
        self,
        qkv: Float[Array, "rows qkv_width"],
        pages: Float[Array, "pages width"],
        cos: Float[Array, "positions half"],
        sin: Float[Array, "positions half"],
        positions: Int[Array, " rows"],
        k_pages: Int[Array, " rows"],
        v_pages: Int[Array, " rows"],
    ) -> Float[Array, "rows heads head_dim"]:
        """Rotates q and k by their positions, stores k and v, returns q; one operation, since one kernel does it."""
        q, k, v = np.split(qkv, [qkv.shape[1] - 2 * pages.shape[1], qkv.shape[1] - pages.shape[1]], axis=1)
        q, k = (self.rope(x.reshape(len(x), -1, 2 * cos.shape[1]), cos[positions], sin[positions]) for x in (q, k))
        self.store(pages, k.reshape(len(k), -1), v, k_pages, v_pages)
        return q

    def attention(
        self,
        q: Float[Array, "rows heads head_dim"],
        pages: Float[Array, "pages width"],
        sequence_pages: Int[Array, "sequence_slots two positions"],
        spans: Spans,
    ) -> Float[Array, "rows q_width"]:
        """Causal attention of each row over the pages of its own sequence; prefill and decode are the same formula.

        softmax(q K^T / sqrt(head_dim)) V, where heads / kv_heads query heads share a key head (grouped-query
        attention).

        Args:
            q: [rows, heads, head_dim] rotated queries.
            pages: [pages, width] this layer's storage; width = kv_heads * head_dim; this step's keys are already
                stored.
            sequence_pages: [sequence_slots, 2, positions] the pages of keys (0) and values (1).
        """
        rows, heads, head_dim = q.shape
        out = np.empty((rows, heads * head_dim), self.dtype)
        kv_heads = pages.shape[1] // head_dim
        for slot, start, length, context in zip(
            *_lists(spans.slot, spans.start, spans.length, spans.context), strict=True
        ):
            if length:
                keys, values = pages[sequence_pages[slot, :, :context]].reshape(2, context, kv_heads, head_dim)
                out[start : start + length] = attend(q[start : start + length], keys, values)
        return out


def _lists(*arrays: Shaped[Array, "n ..."]) -> list[list[Any]]:
    """Arrays as Python lists: a loop over them is several times quicker."""
    return [array.tolist() for array in arrays]
