"""Merge and switch: the adapter is merged into the weights, so a step costs what the base model's does, and can serve
one adapter only (paper section 4.1, Figure 9).

The pristine weights are kept and every merge starts from them. Adding and subtracting in place, as others do, drifts.
The merged ones stay where they are in memory, so that launches that were kept, or captured, read them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from slora_ref.adapter import Adapter
from slora_ref.batch import Batch
from slora_ref.checkpoint import LayerWeights, ModelWeights
from slora_ref.config import TARGETS, ModelConfig
from slora_ref.executor import KernelExecutor, ModelExecutor, StartedStep
from slora_ref.ops import KernelOps
from slora_ref.ops.stacks import multiply_stacks
from slora_ref.pager import PagePool
from slora_ref.request import BASE_MODEL
from slora_ref.sampler import Sampling
from slora_ref.shapes import Array, Float

Multiply = Callable[[Array, Array, Array, float], None]


class MergingExecutor:
    """An executor whose model has the step's adapter merged in. The policy must be OneAdapter.

    Args:
        inner: runs the model, whose weights are changed in place; `restore` makes them what they were.
        pool: the adapters, and which of them a slot holds.
    """

    def __init__(self, inner: ModelExecutor | KernelExecutor, pool: PagePool) -> None:
        self.inner, self.pool = inner, pool
        self.merges = 0
        self._merged: int | None = BASE_MODEL  # None: not all of an adapter
        self._pristine: dict[tuple[int, str], Array] = {}  # by layer and name, of matrices that were ever changed

    def start(self, batch: Batch, sampling: Sampling) -> StartedStep:
        """Starts one step, after a switch where it is another adapter's."""
        slot = _slot_of(batch)
        adapter = BASE_MODEL if slot < 0 else self.pool.adapter_in(slot)
        if adapter != self._merged:
            self.restore()
            self._merged = None
            if slot >= 0:
                self._merge(slot)
            self._merged = adapter
            self.merges += 1
        alone = replace(batch.segments, adapter=np.full_like(batch.segments.adapter, -1))
        return self.inner.start(replace(batch, segments=alone), sampling)

    def restore(self) -> None:
        """Takes the adapter out: the weights are what they were, to the last bit."""
        self._merged, layers = None, self.inner.model.weights.layers
        for (layer, name), pristine in self._pristine.items():
            _bits(getattr(layers[layer], name))[...] = _bits(pristine)
        self._merged = BASE_MODEL

    def _merge(self, slot: int) -> None:
        """W += s B A in every target that the adapter has, from its pages; one product each, rounded once."""
        model, tables, ops = self.inner.model, self.pool.adapters, self.inner.model.ops
        multiply: Multiply = _at_once(ops) if isinstance(ops, KernelOps) else _add_product
        for layer, weights in enumerate(model.weights.layers):
            for target, (name, rows) in _matrices(model.config).items():
                rank = int(tables.rank[slot, layer, target])
                if rank:
                    a, b = self._adapter(slot, layer, target)
                    matrix = getattr(weights, name)
                    if (layer, name) not in self._pristine:
                        self._pristine[layer, name] = matrix.copy()
                    scale = float(tables.scale[slot, layer, target])
                    multiply(matrix[None, rows], b[None, :rank].swapaxes(1, 2), a[None, :rank], scale)

    def _adapter(
        self, slot: int, layer: int, target: int
    ) -> tuple[Float[Array, "rank d_in"], Float[Array, "rank d_out"]]:
        """A's columns and B's rows, gathered from the pool."""
        tables, model = self.pool.adapters, self.inner.model
        d_in, d_out = model.config.target_shape(TARGETS[target])
        rank, width = int(tables.page_rank[slot, target]), self.pool.layout.width
        counts = [rank * -(-length // width) for length in (d_in, d_out)]
        starts = tables.a_start[slot, target], tables.b_start[slot, target]
        ids = [tables.pages[slot, start : start + count] for start, count in zip(starts, counts, strict=True)]
        both = model.ops.embed(self.pool.storage[layer], np.concatenate(ids))
        a, b = both[: counts[0]], both[counts[0] :]
        return a.reshape(rank, -1)[:, :d_in], b.reshape(rank, -1)[:, :d_out]


def _slot_of(batch: Batch) -> int:
    """The slot of a step's one adapter."""
    slots = set(batch.segments.adapter.tolist())
    assert len(slots) == 1, f"{len(slots)} adapters in a step; merged weights serve one: use the policy OneAdapter"
    return int(slots.pop())


def _matrices(config: ModelConfig) -> dict[int, tuple[str, slice]]:
    """By target: the matrix of LayerWeights that it is in, and its rows."""
    inside = {"qkv": TARGETS[:3], "o": TARGETS[3:4], "gate_up": TARGETS[4:6], "down": TARGETS[6:]}
    found = {}
    for name, targets in inside.items():
        start = 0
        for target in targets:
            end = start + config.target_shape(target)[1]
            found[TARGETS.index(target)] = name, slice(start, end)
            start = end
    return found


def _at_once(ops: KernelOps) -> Multiply:
    return lambda y, x, w, scale: ops.prepared_products(y, x, w, scale, add=True)()


def _add_product(y: Array, x: Array, w: Array, scale: float) -> None:
    multiply_stacks(y, x, w, scale, add=True)


def _bits(array: Any) -> Any:
    """The same memory as integers, which every library can copy."""
    return array.view(f"u{array.dtype.itemsize}")


def merged_weights(config: ModelConfig, weights: ModelWeights, adapter: Adapter) -> ModelWeights:
    """W + s B A in every target that the adapter has, on the host; the given weights stay as they are."""
    layers = [_merged_layer(config, layer, number, adapter) for number, layer in enumerate(weights.layers)]
    return replace(weights, layers=tuple(layers))


def _merged_layer(config: ModelConfig, weights: LayerWeights, layer: int, adapter: Adapter) -> LayerWeights:
    matrices = {name: getattr(weights, name).copy() for name in ("qkv", "o", "gate_up", "down")}
    for target, (name, rows) in _matrices(config).items():
        if adapter.header.ranks[layer, target]:
            scale = float(adapter.header.scales[layer, target])
            a, b = (half[layer, target][None] for half in (adapter.a, adapter.b))
            _add_product(matrices[name][None, rows], b, a, scale)
    return replace(weights, **matrices)
