"""KernelOps: NumpyOps' interface made of kernel launches.

It gives each operation its arrays, in as few launches as there are kernels for. Its subclasses say how a launch runs
and where arrays lie.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import numpy as np

from slora_ref.ops import attention_arguments, lora_arguments, row_arguments
from slora_ref.ops.kernel_backend import AttentionStep, KernelBackend, LoraStep
from slora_ref.ops.plan import SHRINK_SPLITS, context_chunk, plan_attention, plan_lora
from slora_ref.ops.tables import AdapterTables, LoraGroup, Segments, Spans
from slora_ref.shapes import Array, Float, Int

RANK_STEP = 8  # t has a multiple of so many columns for each target, so that its rows start aligned


class KernelOps(KernelBackend):
    """A backend that launches kernels.

    Args:
        dtype: of storage; sums are in float32.
        rungs: the kernel to use for an operation, where it is not the last rung.
        max_rank: the largest rank that will ever be registered; None: of the adapters resident in each step.
    """

    def __init__(self, dtype: Any, rungs: Mapping[str, str] | None = None, max_rank: int | None = None) -> None:
        super().__init__(dtype, rungs)
        self.max_rank = max_rank
        self._lora: LoraStep | None = None
        self._attention: AttentionStep | None = None

    @abstractmethod
    def linear(
        self,
        x: Float[Array, "rows d_in"],
        weight: Float[Array, "d_out d_in"],
        bias: Float[Array, " d_out"] | None = None,
    ) -> Float[Array, "rows d_out"]:
        """y = x W^T + bias by the vendor's library, accumulated in float32."""

    @abstractmethod
    def embed(self, weight: Float[Array, "vocab_rows hidden"], ids: Int[Array, " rows"]) -> Float[Array, "rows hidden"]:
        """The embedding rows of `ids`."""

    # --- operations on rows ---

    def rms_norm(
        self, x: Float[Array, "rows hidden"], weight: Float[Array, " hidden"], eps: float
    ) -> Float[Array, "rows hidden"]:
        """x / sqrt(mean(x^2) + eps) * weight."""
        out = self.empty("rms_norm", x.shape, self.dtype)
        self.run("rms_norm", row_arguments.rms_norm(out, x, None, weight, eps))
        return out

    def add_rms_norm(
        self,
        x: Float[Array, "rows hidden"],
        delta: Float[Array, "rows hidden"],
        weight: Float[Array, " hidden"],
        eps: float,
    ) -> Float[Array, "rows hidden"]:
        """x += delta in place; returns the norm of the sum. Reads and writes each number once."""
        out = self.empty("rms_norm", x.shape, self.dtype)
        self.run("rms_norm", row_arguments.rms_norm(out, x, delta, weight, eps))
        return out

    def silu_mul(self, gate_up: Float[Array, "rows two_ffn"]) -> Float[Array, "rows ffn"]:
        """silu(gate) * up, where the row holds gate, then up."""
        out = self.empty("silu_mul", (gate_up.shape[0], gate_up.shape[1] // 2), self.dtype)
        self.run("silu_mul", row_arguments.silu_mul(out, gate_up))
        return out

    def argmax(self, logits: Float[Array, "rows vocab"]) -> tuple[Int[Array, " rows"], Int[Array, " rows"]]:
        """[rows] the first largest logit's index, and [rows] 1 where all logits are finite."""
        token, finite = (self.empty(name, (len(logits),), np.int32) for name in ("token", "finite"))
        self.run("argmax", row_arguments.argmax(token, finite, logits))
        return token, finite

    # --- LoRA ---

    def lora_shrink(
        self,
        x: Float[Array, "rows d_in"],
        pages: Float[Array, "pages width"],
        tables: AdapterTables,
        segments: Segments,
        group: LoraGroup,
        layer: int,
    ) -> Float[Array, "splits rows targets t_columns"]:
        """t = x A for every target of a group, at each segment's own rank in this layer, float32.

        Returns:
            [splits, rows, targets, t_columns]: for lora_expand; the sum over splits is t. What lies beyond a row's rank
            is unspecified.
        """
        step, targets = self._lora_step(tables, segments, len(x)), self._targets(group)
        shape = (max(SHRINK_SPLITS.values()), len(x), len(group.targets), step.t_columns)
        t = self.empty("t", shape, np.float32)
        if step.plan.single:
            part, lora = t[: SHRINK_SPLITS["mbgmv"]], step.rows[layer, targets]
            self.run("mbgmv_shrink", lora_arguments.mbgmv_shrink(part, x, pages, step.page_table, lora))
        if step.plan.shared:
            part, lora = t[: SHRINK_SPLITS["mbgmm"]], step.tiles[layer, targets]
            arguments = lora_arguments.mbgmm_shrink(part, x, pages, step.page_table, lora, step.extents)
            self.run("mbgmm_shrink", arguments)
        return t

    def lora_expand(
        self,
        y: Float[Array, "rows d_outs"],
        t: Float[Array, "splits rows targets t_columns"],
        pages: Float[Array, "pages width"],
        tables: AdapterTables,
        segments: Segments,
        group: LoraGroup,
        layer: int,
        d_outs: tuple[int, ...],
    ) -> None:
        """y += scale * t B for every target of a group, in place. Rows of the base model stay untouched."""
        step, targets = self._lora_step(tables, segments, len(y)), self._targets(group)
        if step.plan.single:
            part, lora = t[: SHRINK_SPLITS["mbgmv"]], step.rows[layer, targets]
            self.run("mbgmv_expand", lora_arguments.mbgmv_expand(y, part, pages, step.page_table, lora, d_outs))
        if step.plan.shared:
            part, lora = t[: SHRINK_SPLITS["mbgmm"]], step.tiles[layer, targets]
            arguments = lora_arguments.mbgmm_expand(y, part, pages, step.page_table, lora, step.extents, d_outs)
            self.run("mbgmm_expand", arguments)

    def _targets(self, group: LoraGroup) -> slice:
        first = group.targets[0]
        assert group.targets == tuple(range(first, first + len(group.targets))), "targets of a group are neighbours"
        return slice(first, first + len(group.targets))

    def _lora_step(self, tables: AdapterTables, segments: Segments, rows: int) -> LoraStep:
        """Plans a step when its segments are seen for the first time."""
        if self._lora is None or self._lora.of is not segments:
            plan = plan_lora(segments, rows)
            device = AdapterTables(**{name: self.put(name, array, array.dtype) for name, array in vars(tables).items()})
            rank = self.max_rank or int(tables.page_rank.max(initial=1))
            self._lora = LoraStep(
                of=segments,
                plan=plan,
                rows=self._lookup("rows", plan.row_slots, device),
                tiles=self._lookup("tiles", plan.tile_slots, device),
                extents=self.put("tile_extents", plan.tiles, np.int32),
                page_table=device.pages,
                t_columns=-(-rank // RANK_STEP) * RANK_STEP,
            )
        return self._lora

    def _lookup(self, name: str, slots: Int[Array, " entries"], tables: AdapterTables) -> Array:
        _, layers, targets = tables.rank.shape
        lora = self.empty(f"lora_{name}", (layers, targets, len(slots), lora_arguments.LORA_WORDS), np.int32)
        if len(slots):
            self.run(
                "lora_lookup", lora_arguments.lora_lookup(lora, self.put(f"{name}_slots", slots, np.int32), tables)
            )
        return lora

    # --- keys, values, attention ---

    @abstractmethod
    def angle_table(self, table: Float[Array, "positions half"]) -> Float[Array, "positions half"]:
        """A table of cosines or sines as rope_store wants it: on the device, float32."""

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
        """Turns q in place, writes k (turned) and v into their pages; page -1: do not store. Returns q, a view."""
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
        """Causal attention of each row over the pages of its own sequence."""
        rows, heads, head_dim = q.shape
        step = self._attention_step(sequence_pages, spans, rows)
        flat, out = q.reshape(rows, heads * head_dim), self.empty("attention", (rows, heads * head_dim), self.dtype)
        places = sequence_pages.shape[2]
        if step.plan.single:
            chunk = context_chunk(rows, heads, places)
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
        if self._attention is None or self._attention.of is not spans:
            plan = plan_attention(spans, rows)
            queries, tiles = (self.put(f"attention_{n}", getattr(plan, n), np.int32) for n in ("queries", "tiles"))
            table = self.put("sequence_pages", sequence_pages, np.int32)
            self._attention = AttentionStep(spans, plan, queries, tiles, table)
        return self._attention
