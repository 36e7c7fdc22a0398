"""Merge and switch: the adapter is merged into the weights, so a step costs what the base model's does, and can serve
one adapter only (paper section 4.1, Figure 9).

The pristine weights are kept and every merge starts from them. Adding and subtracting in place, as others do, drifts.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from slora_ref.adapter import Adapter, load_adapter
from slora_ref.batch import Batch
from slora_ref.checkpoint import LayerWeights, ModelWeights
from slora_ref.config import TARGETS, ModelConfig
from slora_ref.executor import ModelExecutor, StepResult
from slora_ref.pager import PagePool
from slora_ref.request import BASE_MODEL
from slora_ref.sampler import Sampling
from slora_ref.shapes import Array, Float
from slora_ref.store import AdapterStore


class MergingExecutor:
    """A ModelExecutor whose model has the step's adapter merged in. The policy must be OneAdapter.

    Args:
        inner: runs the model; its weights are replaced, never changed.
        store: whose folders the adapters come from.
        pool: knows which adapter a slot holds.
    """

    def __init__(self, inner: ModelExecutor, store: AdapterStore, pool: PagePool) -> None:
        self.inner, self.store, self.pool = inner, store, pool
        self.pristine = inner.model.weights
        self.merges = 0
        self._merged = BASE_MODEL

    def run(self, batch: Batch, sampling: Sampling) -> StepResult:
        """Computes one step, after a switch where it is another adapter's."""
        adapter = _adapter_of(batch, self.pool)
        if adapter != self._merged:
            self._switch(adapter)
        alone = replace(batch.segments, adapter=np.full_like(batch.segments.adapter, -1))
        return self.inner.run(replace(batch, segments=alone), sampling)

    def _switch(self, adapter_id: int) -> None:
        model = self.inner.model
        model.weights = self.pristine
        if adapter_id != BASE_MODEL:
            header = self.store.version(adapter_id).header
            adapter = load_adapter(header, model.config, self.pristine.embed.dtype)
            model.weights = merged_weights(model.config, self.pristine, adapter)
        self._merged = adapter_id
        self.merges += 1


def _adapter_of(batch: Batch, pool: PagePool) -> int:
    """The one adapter of a step."""
    slots = set(batch.segments.adapter.tolist())
    assert len(slots) == 1, f"{len(slots)} adapters in a step; merged weights serve one: use the policy OneAdapter"
    slot = slots.pop()
    return BASE_MODEL if slot < 0 else pool.adapter_in(slot)


def merged_weights(config: ModelConfig, weights: ModelWeights, adapter: Adapter) -> ModelWeights:
    """W + s B A in every target that the adapter has; the given weights stay as they are."""
    layers = [_merged_layer(config, layer, number, adapter) for number, layer in enumerate(weights.layers)]
    return replace(weights, layers=type(weights.layers)(layers))


def _merged_layer(config: ModelConfig, weights: LayerWeights, layer: int, adapter: Adapter) -> LayerWeights:
    delta = {target: _delta(config, adapter, layer, number) for number, target in enumerate(TARGETS)}
    return replace(
        weights,
        qkv=weights.qkv + np.concatenate([delta["q_proj"], delta["k_proj"], delta["v_proj"]]),
        o=weights.o + delta["o_proj"],
        gate_up=weights.gate_up + np.concatenate([delta["gate_proj"], delta["up_proj"]]),
        down=weights.down + delta["down_proj"],
    )


def _delta(config: ModelConfig, adapter: Adapter, layer: int, target: int) -> Float[Array, "d_out d_in"]:
    """[d_out, d_in] s B A, zeros where the adapter has no such target."""
    d_in, d_out = config.target_shape(TARGETS[target])
    if not adapter.header.ranks[layer, target]:
        return np.zeros((d_out, d_in), np.float32)
    scale = adapter.header.scales[layer, target]
    product: Float[Array, "d_out d_in"] = scale * (adapter.b[layer, target] @ adapter.a[layer, target])
    return product
