"""Padded bmm on a device: PaddedOps' idea with kernels and the vendor's batched products (the paper's S-LoRA-bmm).

In every layer of every step the adapters of the step are copied out of their pages into one array, all as large as the
largest, and rows are padded to the longest segment; then one batched product makes t = x A, and one a target adds t B.
A segment of more than MOST_ROWS rows counts as several, so that one long prompt does not make all others as long.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from slora_ref.ops import KernelOps, row_arguments
from slora_ref.ops.kernel_backend import LoraStep
from slora_ref.ops.pad_arguments import pad_adapter
from slora_ref.ops.plan import NONE, LoraPlan, cut
from slora_ref.ops.tables import AdapterTables, LoraGroup, Segments
from slora_ref.shapes import Array, Float, Int32

MOST_ROWS = 64
EACH = 8  # the number of segments is rounded up to a multiple, so that steps of nearly the same shape share launches


@dataclass(frozen=True)
class PaddedPlan(LoraPlan):
    """A plan whose tiles are the segments.

    Args:
        entries, longest: segments, and rows to which each is padded; both rounded up.
    """

    entries: int
    longest: int


@dataclass(frozen=True)
class Places:
    """Which row goes where, on the device.

    Args:
        inside: [entries * longest] the row at each place of the padded array; any where there is none.
        both: [rows + entries * longest] every row, and behind them `inside`.
        outside: [rows] where each row lies in an array that is made by `both`.
    """

    inside: Int32[Array, " places"]
    both: Int32[Array, " all"]
    outside: Int32[Array, " rows"]


class PaddedLora(KernelOps):
    """The two LoRA products, padded; all else is the backend's that this is mixed into."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._places: dict[tuple[int, int, int], Places] = {}  # by rows, entries and longest

    def plan_lora(self, segments: Segments, rows: int) -> PaddedPlan:
        """Cuts the segments and brings the places of their rows to the device."""
        slots, start, length = _cut_segments(segments)
        entries = -(-len(slots) // EACH) * EACH
        longest = 1 << int(length.max(initial=1) - 1).bit_length()
        capacity = -(-rows // EACH) * EACH
        tiles, tile_slots = np.zeros((capacity, 2), np.int32), np.full(capacity, NONE, np.int32)
        tile_slots[: len(slots)], tiles[: len(slots)] = slots, np.stack([start, length], axis=1)
        if entries:
            self._bring_places(start, length, (rows, entries, longest))
        kernels = (f"padded {entries} x {longest}",) if entries else ()
        none = np.full(rows, NONE, np.int32)
        return PaddedPlan(none, tiles, tile_slots, np.zeros(2, np.int32), kernels, entries, longest)

    def _bring_places(self, start: Array, length: Array, key: tuple[int, int, int]) -> None:
        rows, entries, longest = key
        if key not in self._places:
            sizes = (entries * longest, rows + entries * longest, rows)
            self._places[key] = Places(*(self.new((size,), np.int32) for size in sizes))
        inside, outside = np.zeros((entries, longest), np.int32), np.arange(rows, dtype=np.int32)
        entry, place = np.nonzero(np.arange(longest) < length[:, None])
        row = start[entry] + place
        inside[entry, place], outside[row] = row, rows + entry * longest + place
        there, flat = self._places[key], inside.ravel()
        self.write(there.inside, flat)
        self.write(there.both, np.concatenate([np.arange(rows, dtype=np.int32), flat]))
        self.write(there.outside, outside)

    def lora_shrink(
        self,
        x: Float[Array, "rows d_in"],
        pages: Float[Array, "pages width"],
        tables: AdapterTables,
        segments: Segments,
        group: LoraGroup,
        layer: int,
    ) -> Float[Array, "entries longest t_columns"]:
        """t = x A for every target of a group, side by side, in the dtype of storage."""
        step, plan = self._padded_step(tables, segments, len(x))
        if not plan.entries or step.targets.isdisjoint(group.targets):
            return self.empty("padded_t", (0, 0, 0), self.dtype)
        padded = self.empty("padded_x", (plan.entries * plan.longest, x.shape[1]), self.dtype)
        inside = self._places[len(x), plan.entries, plan.longest].inside
        self.run("gather_rows", row_arguments.gather_rows(padded, x, inside))
        a = self.empty("padded_a", (plan.entries, len(group.targets), step.t_columns, x.shape[1]), self.dtype)
        lora = step.tiles[layer, self._targets(group)]
        self.run("pad_adapter", pad_adapter(a, pages, step.page_table, lora, of_b=False))
        t = self.empty("padded_t", (plan.entries, plan.longest, len(group.targets) * step.t_columns), self.dtype)
        rows, columns = padded.reshape(*t.shape[:2], -1), a.reshape(plan.entries, t.shape[2], -1).swapaxes(1, 2)
        self.do("lora", self.prepared_products(t, rows, columns))
        return t

    def lora_expand(
        self,
        y: Float[Array, "rows d_outs"],
        t: Float[Array, "entries longest t_columns"],
        pages: Float[Array, "pages width"],
        tables: AdapterTables,
        segments: Segments,
        group: LoraGroup,
        layer: int,
        d_outs: tuple[int, ...],
    ) -> None:
        """y += scale * t B for every target of a group, in place: added to padded copies of the rows, which return."""
        step, plan = self._padded_step(tables, segments, len(y))
        if not t.size:
            return
        places = self._places[len(y), plan.entries, plan.longest]
        copied = self.empty("padded_y", (len(places.both), y.shape[1]), self.dtype)
        self.run("gather_rows", row_arguments.gather_rows(copied, y, places.both))
        padded, column, each = copied[len(y) :].reshape(*t.shape[:2], -1), 0, step.t_columns
        for number, (target, d_out) in enumerate(zip(group.targets, d_outs, strict=True)):
            b = self.empty("padded_b", (plan.entries, 1, each, d_out), self.dtype)
            lora = step.tiles[layer, target : target + 1]
            self.run("pad_adapter", pad_adapter(b, pages, step.page_table, lora, of_b=True))
            of_target = t[:, :, number * each : (number + 1) * each]
            out = padded[:, :, column : column + d_out]
            self.do("lora", self.prepared_products(out, of_target, b[:, 0], add=True))
            column += d_out
        self.run("gather_rows", row_arguments.gather_rows(y, copied, places.outside))

    def _padded_step(self, tables: AdapterTables, segments: Segments, rows: int) -> tuple[LoraStep, PaddedPlan]:
        step = self._lora_step(tables, segments, rows)
        assert isinstance(step.plan, PaddedPlan), f"planned by other operations: {step.plan}"
        return step, step.plan


def _cut_segments(segments: Segments) -> tuple[Array, Array, Array]:
    """Adapter slot, first row and rows of the segments that have an adapter, in pieces of at most MOST_ROWS."""
    used = (segments.adapter >= 0) & (segments.length > 0)
    which, start, length = cut(segments.start[used], segments.length[used], MOST_ROWS)
    return segments.adapter[used][which], start, length


def padded_like(usual: Any) -> KernelOps:
    """Operations like these on the same device, with the LoRA products padded."""
    kind: Callable[..., KernelOps] = type(f"Padded{type(usual).__name__}", (PaddedLora, type(usual)), {})
    return kind(usual.dtype, kernels=usual.kernels)
