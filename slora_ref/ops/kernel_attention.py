"""KernelAttention: keys and values into pages, and attention over pages, by kernels."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import numpy as np

from slora_ref.ops import attention_arguments, row_arguments
from slora_ref.ops.kernel_backend import AttentionStep, KernelBackend
from slora_ref.ops.plan import context_chunk, plan_attention
from slora_ref.ops.tables import Spans
from slora_ref.shapes import Array, Float, Int


class KernelAttention(KernelBackend):
    """The operations of NumpyOps on keys and values, as launches of kernels.

    Args:
        dtype, rungs: see KernelBackend.
    """

    def __init__(self, dtype: Any, rungs: Mapping[str, str] | None = None) -> None:
        super().__init__(dtype, rungs)
        self._attention: AttentionStep | None = None
        self._attention_of: Spans | None = None

    @abstractmethod
    def angle_table(self, table: Float[Array, "positions half"]) -> Float[Array, "positions half"]:
        """On the device, float32."""

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
        """Turns q in place and returns a view of it."""
        names = {"positions": positions, "k_pages": k_pages, "v_pages": v_pages}
        rows = [self.put(name, array, np.int32) for name, array in names.items()]
        self.run("rope_store", attention_arguments.rope_store(qkv, pages, cos, sin, *rows))
        q: Array = qkv[:, : qkv.shape[1] - 2 * pages.shape[1]]
        return q.reshape(len(q), -1, 2 * cos.shape[1])

    def attention(
        self,
        q: Float[Array, "rows heads head_dim"],
        pages: Float[Array, "pages width"],
        sequence_pages: Int[Array, "sequence_slots two positions"],
        spans: Spans,
    ) -> Float[Array, "rows q_width"]:
        """A sequence with one row: its context in splits, put together by a second kernel; with more: tiles of rows."""
        rows, heads, head_dim = q.shape
        step = self._attention_step(sequence_pages, spans, rows)
        flat, out = q.reshape(rows, heads * head_dim), self.empty("attention", (rows, heads * head_dim), self.dtype)
        places = sequence_pages.shape[2]
        if step.plan.single:
            chunk = context_chunk(rows, pages.shape[1] // head_dim, places)
            splits = -(-places // chunk)
            partial = self.empty("attention_partial", (rows, heads, splits, head_dim), np.float32)
            stats = self.empty("attention_stats", (rows, heads, splits, 2), np.float32)
            arguments = (pages, step.sequence_pages, step.queries, chunk)
            decode = attention_arguments.paged_attention_decode(out, partial, stats, flat, *arguments)
            self.run("paged_attention_decode", decode)
            if splits > 1:
                merge = attention_arguments.paged_attention_merge(out, partial, stats, step.queries, chunk)
                self.run("paged_attention_merge", merge)
        if step.plan.shared:
            prefill = (out, flat, pages, step.sequence_pages, step.tiles, head_dim)
            self.run("paged_attention_prefill", attention_arguments.paged_attention_prefill(*prefill))
        return out

    def _attention_step(self, sequence_pages: Array, spans: Spans, rows: int) -> AttentionStep:
        """Plans a step when its spans are seen for the first time."""
        if isinstance(spans, AttentionStep):
            return spans
        if self._attention is None or self._attention_of is not spans:
            plan = plan_attention(spans, rows)
            queries, tiles = (self.put(f"attention_{n}", getattr(plan, n), np.int32) for n in ("queries", "tiles"))
            places = {"queries": queries, "tiles": tiles, "sequence_pages": self.put("table", sequence_pages, np.int32)}
            self._attention = AttentionStep(**vars(spans), plan=plan, **places)
            self._attention_of = spans
        return self._attention

    def enter_pages(
        self,
        sequence_pages: Int[Array, "sequence_slots two positions"],
        slots: Int[Array, " rows"],
        positions: Int[Array, " rows"],
        k_pages: Int[Array, " rows"],
        v_pages: Int[Array, " rows"],
    ) -> None:
        """Enters a step's new pages into the table of sequences on the device."""
        arguments = row_arguments.enter_pages(sequence_pages, slots, positions, k_pages, v_pages)
        self.run("enter_pages", arguments, np.float32)
