"""KernelLora: shrink and expand by kernels, and the step that all layers share. Its subclasses say where arrays lie."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from slora_ref.config import TARGETS
from slora_ref.ops import lora_arguments
from slora_ref.ops.kernel_backend import KernelBackend, LoraStep
from slora_ref.ops.ladder import has_kernel
from slora_ref.ops.plan import SHRINK_SPLITS, LoraPlan, plan_lora
from slora_ref.ops.tables import AdapterTables, LoraGroup, Segments
from slora_ref.shapes import Array, Float, Int
from slora_ref.tp.split import OVER_RANK

RANK_STEP = 8  # t has a multiple of so many columns for each target, so that its rows start aligned


class KernelLora(KernelBackend):
    """The LoRA operations of NumpyOps, as launches of MBGMV and MBGMM.

    Args:
        dtype, rungs: see KernelBackend.
        max_rank: the largest rank that will ever be registered; None: of the adapters resident in each step.
        shards: over which a model is split.

    Attributes:
        fixed_launches: launch the same LoRA kernels whatever the adapters of a step, so that a bucket has one graph
            alone; else those that would find nothing to do are left out. Bits do not change. Set it before a step is
            planned.
    """

    def __init__(
        self,
        dtype: Any,
        rungs: Mapping[str, str] | None = None,
        max_rank: int | None = None,
        shards: int = 1,
    ) -> None:
        super().__init__(dtype, rungs)
        self.max_rank, self.shards, self.fixed_launches = max_rank, shards, False
        self._lora: LoraStep | None = None
        self._lora_of: Segments | None = None

    @property
    def together(self) -> bool:
        """Whether MBGMV and MBGMM can be one launch: there is such a kernel, and nobody chose another one."""
        chosen = any(operation.startswith("mbgm") for operation in self.rungs)
        return not chosen and has_kernel("lora_shrink", self.dtype)

    def plan_lora(self, segments: Segments, rows: int) -> LoraPlan:
        """Which of this backend's kernels serve which rows of a step."""
        return plan_lora(segments, rows, self.together, self.fixed_launches)

    def lora_shrink(
        self,
        x: Float[Array, "rows d_in"],
        pages: Float[Array, "pages width"],
        tables: AdapterTables,
        segments: Segments,
        group: LoraGroup,
        layer: int,
    ) -> Float[Array, "splits rows targets t_columns"]:
        """MBGMV, MBGMM or both, by the step's plan, at each segment's own rank in this layer.

        Returns:
            [splits, rows, targets, t_columns] float32: the sum over splits is t.
        """
        step, targets = self._lora_step(tables, segments, len(x)), self._targets(group)
        columns = step.a_columns if OVER_RANK[group.targets[0]] else step.t_columns
        unused = step.targets.isdisjoint(group.targets)  # then t is nothing, and shards need not send it
        splits = max((SHRINK_SPLITS[kernels] for kernels in step.plan.kernels), default=1)
        t = self.empty("t", (splits, len(x), len(group.targets), 0 if unused else columns), np.float32)
        if unused:
            return t
        for kernels in step.plan.kernels:
            first = (_splits_of(t, kernels), x, pages, step.page_table)
            arguments = getattr(lora_arguments, f"{kernels}_shrink")
            self.run(f"{kernels}_shrink", arguments(*first, *step.entries(kernels, layer, targets, of_a=True)))
        return t

    def join_ranks(
        self,
        parts: Float[Array, "shards splits rows targets part_columns"],
        tables: AdapterTables,
        segments: Segments,
        group: LoraGroup,
    ) -> Float[Array, "splits rows targets t_columns"]:
        """By a kernel, since what is whose column depends on each row's rank."""
        if len(parts) == 1 or not parts.size:
            return parts[0]
        _, splits, rows, targets, _ = parts.shape
        step = self._lora_step(tables, segments, rows)
        t = self.empty("t_joined", (splits, rows, targets, step.t_columns), np.float32)
        arguments = lora_arguments.lora_join(t, parts, step.slots, step.a_page_rank, group.targets[0])
        self.run("lora_join", arguments, np.float32)
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
        """The kernels that lora_shrink chose."""
        step, targets = self._lora_step(tables, segments, len(y)), self._targets(group)
        if step.targets.isdisjoint(group.targets):
            return
        for kernels in step.plan.kernels:
            first = (y, _splits_of(t, kernels), pages, step.page_table)
            arguments = getattr(lora_arguments, f"{kernels}_expand")
            self.run(f"{kernels}_expand", arguments(*first, *step.entries(kernels, layer, targets), d_outs))

    def _targets(self, group: LoraGroup) -> slice:
        first = group.targets[0]
        assert group.targets == tuple(range(first, first + len(group.targets))), "targets of a group are neighbours"
        return slice(first, first + len(group.targets))

    def _lora_step(self, tables: AdapterTables, segments: Segments, rows: int) -> LoraStep:
        """Plans a step when its segments are seen for the first time."""
        if isinstance(segments, LoraStep):
            return segments
        if self._lora is None or self._lora_of is not segments:
            plan = self.plan_lora(segments, rows)
            device = AdapterTables(**{name: self.put(name, array, array.dtype) for name, array in vars(tables).items()})
            names = ("row_slots", "tile_slots", "tiles", "counts")
            slots, tile_slots, tiles, counts = (self.put(name, getattr(plan, name), np.int32) for name in names)
            rank, targets = self.max_rank or int(tables.page_rank.max(initial=1)), range(len(TARGETS))
            owners = self.put("slots", segments.of_rows(rows), np.int32)
            places = (slots, tile_slots, tiles, counts, owners)
            self._lora = self.lora_step(segments, plan, device, *places, rank, targets)
            self._lora_of = segments
        return self._lora

    def lora_step(
        self,
        segments: Segments,
        plan: LoraPlan,
        tables: AdapterTables,
        row_slots: Int[Array, " rows"],
        tile_slots: Int[Array, " tiles"],
        extents: Int[Array, "tiles 2"],
        counts: Int[Array, " two"],
        slots: Int[Array, " rows"],
        max_rank: int,
        targets: Iterable[int],
    ) -> LoraStep:
        """Looks up the adapters of a step, whose plan and tables are on the device."""
        rows, tiles = self._lookup("rows", row_slots, tables), self._lookup("tiles", tile_slots, tables)
        a_rows, a_tiles, a_rank = rows, tiles, -(-max_rank // self.shards)
        if self.shards > 1:
            of_a = replace(tables, rank=tables.a_rank)
            a_rows, a_tiles = self._lookup("a_rows", row_slots, of_a), self._lookup("a_tiles", tile_slots, of_a)
        return LoraStep(
            **vars(segments),
            plan=plan,
            rows=rows,
            tiles=tiles,
            a_rows=a_rows,
            a_tiles=a_tiles,
            slots=slots,
            extents=extents,
            counts=counts,
            page_table=tables.pages,
            a_page_rank=tables.a_page_rank,
            t_columns=-(-max_rank // RANK_STEP) * RANK_STEP,
            a_columns=-(-a_rank // RANK_STEP) * RANK_STEP,
            targets=frozenset(targets),
        )

    def _lookup(self, name: str, slots: Int[Array, " entries"], tables: AdapterTables) -> Array:
        _, layers, targets = tables.rank.shape
        lora = self.empty(f"lora_{name}", (layers, targets, len(slots), lora_arguments.LORA_WORDS), np.int32)
        if len(slots):
            self.run("lora_lookup", lora_arguments.lora_lookup(lora, slots, tables))
        return lora


def _splits_of(t: Array, kernels: str) -> Array:
    """What these kernels write of t; itself, if they write it all."""
    splits = SHRINK_SPLITS[kernels]
    return t if len(t) == splits else t[:splits]
