"""A LoRA projection on the GPU: adapters in pages in random order, more of them than the cache holds.

One pool of over 4 GB serves all cases. A case takes as many layers and sets of adapters from it as it needs to move
several times the cache's size between two uses of the same numbers; launch k uses the layer and set of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cupy
import numpy as np

from slora_ref.bench.kernels.cases import LoraCase
from slora_ref.ops import lora_arguments
from slora_ref.ops.cuda_kernels import CudaKernels
from slora_ref.ops.ladder import fastest, make_launch
from slora_ref.ops.launch import Arguments
from slora_ref.ops.plan import SHRINK_SPLITS, LoraPlan, plan_lora
from slora_ref.ops.tables import AdapterTables

POOL_BYTES = 4_400_000_000
ROTATED_BYTES = 300_000_000  # moved between two uses of the same numbers: five times an H200's L2
MOST_LAUNCHES = 160
LAYER_PAGES = 16_384  # pages of a layer over which a set is scattered, if it needs no more
SCALE = 8.0  # alpha / r of every adapter: makes deltas about as large as y


def make_pool(dtype: Any, seed: int = 0) -> Any:
    """[numbers] the pool's memory, filled with normal numbers of deviation 1 / 64."""
    bits = cupy.empty(POOL_BYTES // 2, np.uint16)
    random = cupy.random.default_rng(seed)
    for start in range(0, len(bits), 1 << 27):
        part = bits[start : start + (1 << 27)]
        normal = random.standard_normal(len(part), dtype=np.float32) / 64
        part[...] = to_bits(normal, dtype)
    return bits.view(dtype)


def to_bits(values: Any, dtype: Any) -> Any:
    """float32 rounded to a 16-bit type, as its bits; CuPy has no bfloat16 arithmetic."""
    if np.dtype(dtype).name == "float16":
        return values.astype(np.float16).view(np.uint16)
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def to_float64(array: Any) -> Any:
    """Exact."""
    if array.dtype.name == "float16":
        return array.astype(np.float64)
    return (array.view(np.uint16).astype(np.uint32) << 16).view(np.float32).astype(np.float64)


@dataclass
class AdapterSet:
    """What the launches of one set share.

    Args:
        plan: which rows are whose.
        rows, tiles: [layers, targets, entries, 4] of Lora.
        extents: [tiles, 2].
        counts: [2] the tiles with several rows, the tiles in use.
    """

    plan: LoraPlan
    rows: Any
    tiles: Any
    extents: Any
    counts: Any

    def entries(self, kernels: str, layer: int, targets: int) -> tuple[Any, ...]:
        """What mbgmv, mbgmm or lora kernels take, as in ops/kernel_backend.py."""
        rows, tiles = self.rows[layer, :targets], (self.tiles[layer, :targets], self.extents)
        return {"mbgmv": (rows,), "mbgmm": tiles, "lora": (*tiles, self.counts)}[kernels]


class LoraProjection:
    """The launches of a case.

    Args:
        case: what to measure.
        pool: make_pool's memory.
        kernels: the launcher.
        rungs: the kernel of an operation, where it is not the last rung.
    """

    def __init__(self, case: LoraCase, pool: Any, kernels: CudaKernels, rungs: dict[str, str] | None = None) -> None:
        self.case, self.kernels, self.rungs = case, kernels, rungs or {}
        self.stride = -(-case.width // 8) * 8
        pieces = [-(-size // case.width) for size in (case.d_in, *case.d_outs)]
        self.table = max(case.ranks) * (len(case.d_outs) * pieces[0] + sum(pieces[1:]))
        needed = sum(case.ranks) * (len(case.d_outs) * pieces[0] + sum(pieces[1:]))
        layer_pages = max(LAYER_PAGES * 4096 // self.stride, needed)
        self.layers = min(32, pool.size // (layer_pages * self.stride))
        launches = min(MOST_LAUNCHES, -(-ROTATED_BYTES // case.bytes_moved))
        self.sets_count = max(1, min(-(-launches // self.layers), layer_pages // needed))
        self.count = min(max(launches, 4), self.sets_count * self.layers)
        storage = pool[: self.layers * layer_pages * self.stride].reshape(self.layers, layer_pages, self.stride)
        self.storage = storage[:, :, : case.width]
        self.tables = self._lay_out(layer_pages, pieces)
        device = AdapterTables(**{name: cupy.asarray(array) for name, array in vars(self.tables).items()})
        self.page_table = device.pages
        self.sets = [self._prepare(index, device) for index in range(self.sets_count)]
        random = cupy.random.default_rng(1)
        shapes = {"x": (self.count, case.rows, case.d_in), "y": (self.count, case.rows, sum(case.d_outs))}
        dtype = pool.dtype
        self.x, self.y = (
            to_bits(random.standard_normal(shape, dtype=np.float32), dtype).view(dtype) for shape in shapes.values()
        )
        columns = -(-max(case.ranks) // 8) * 8
        shape = (max(SHRINK_SPLITS.values()), case.rows, len(case.d_outs), columns)
        self.t = cupy.full(shape, np.nan, np.float32)

    def _lay_out(self, layer_pages: int, pieces: list[int]) -> AdapterTables:
        case, targets = self.case, len(self.case.d_outs)
        tables = AdapterTables.empty(self.sets_count * len(case.ranks), self.layers, self.table)
        order = np.random.default_rng(2).permutation(layer_pages).astype(np.int32)
        taken = 0
        for slot in range(len(tables.pages)):
            rank, entries = case.ranks[slot % len(case.ranks)], 0
            for starts, sizes in ((tables.a_start, pieces[:1] * targets), (tables.b_start, pieces[1:])):
                for target, size in enumerate(sizes):
                    starts[slot, target] = entries
                    entries += rank * size
            tables.pages[slot, :entries] = order[taken : taken + entries]
            taken += entries
            tables.page_rank[slot, :targets] = rank
            tables.rank[slot, :, :targets] = rank
            tables.scale[slot, :, :targets] = SCALE
        return tables

    def _prepare(self, index: int, tables: AdapterTables) -> AdapterSet:
        segments = self.case.segments(index * len(self.case.ranks))
        apart = any(operation.startswith("mbgm") for operation in self.rungs)
        plan = plan_lora(segments, self.case.rows, together=not apart, fixed=self.case.fixed)
        return AdapterSet(
            plan=plan,
            rows=self._lookup(plan.row_slots, tables),
            tiles=self._lookup(plan.tile_slots, tables),
            extents=cupy.asarray(plan.tiles),
            counts=cupy.asarray(plan.counts),
        )

    def _lookup(self, slots: Any, tables: AdapterTables) -> Any:
        lora = cupy.empty((self.layers, tables.rank.shape[2], len(slots), 4), np.int32)
        if len(slots):
            self._run("lora_lookup", lora_arguments.lora_lookup(lora, cupy.asarray(slots), tables))
        return lora

    def _run(self, operation: str, arguments: Arguments) -> None:
        dtype = self.storage.dtype
        kernel = self.rungs.get(operation) or fastest(operation, dtype, arguments)
        self.kernels.run(make_launch(kernel, dtype, arguments))

    def launch(self, number: int, only: str | None = None) -> None:
        """Shrink and expand of launch `number`, as KernelOps would launch them; or the kernel of one operation only."""
        case, layer, chosen = self.case, number % self.layers, self.sets[number // self.layers]
        x, y, place = self.x[number], self.y[number], (self.storage[layer], self.page_table)
        steps = [(f"{kernels}_{half}", kernels) for half in ("shrink", "expand") for kernels in chosen.plan.kernels]
        for operation, kernels in steps:
            if only in (None, operation):
                t, entries = self.t[: SHRINK_SPLITS[kernels]], chosen.entries(kernels, layer, len(case.d_outs))
                make, shrinks = getattr(lora_arguments, operation), operation.endswith("shrink")
                arrays = (t, x, *place, *entries) if shrinks else (y, t, *place, *entries, case.d_outs)
                self._run(operation, make(*arrays))

    def launch_all(self, only: str | None = None) -> None:
        """Every launch, one after the other."""
        for number in range(self.count):
            self.launch(number, only)

    def error_of(self, replay: Callable[[], None]) -> float:
        """max |error| / max |reference| of the first and the last launch, against float64, for one run of `replay`."""
        checked = sorted({0, self.count - 1})
        wanted = [self._reference(number) for number in checked]
        replay()
        errors = [
            cupy.abs(to_float64(self.y[number]) - want).max() / cupy.abs(want).max()
            for number, want in zip(checked, wanted, strict=True)
        ]
        return max(float(error) for error in errors)

    def _reference(self, number: int) -> Any:
        """[rows, d_outs] y + scale x A B in float64."""
        case, layer, first = self.case, number % self.layers, number // self.layers * len(self.case.ranks)
        y, x, row = to_float64(self.y[number]), to_float64(self.x[number]), 0
        for adapter, (length, rank) in enumerate(zip(case.lengths, case.ranks, strict=True)):
            slot, column, some = first + adapter, 0, slice(row, row + length)
            for target, d_out in enumerate(case.d_outs):
                a = self._weights(layer, slot, int(self.tables.a_start[slot, target]), rank, case.d_in)
                b = self._weights(layer, slot, int(self.tables.b_start[slot, target]), rank, d_out)
                y[some, column : column + d_out] += SCALE * (x[some] @ a.T) @ b
                column += d_out
            row += length
        return y

    def _weights(self, layer: int, slot: int, start: int, rank: int, length: int) -> Any:
        """[rank, length] columns of A or rows of B, from pages."""
        pieces = -(-length // self.case.width)
        ids = cupy.asarray(self.tables.pages[slot, start : start + rank * pieces])
        return to_float64(self.storage[layer][ids]).reshape(rank, -1)[:, :length]
