"""The operations of a model through kernels: a whole forward pass agrees with NumpyOps in float64."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from tiny import tiny_config

from slora_ref.batch import Batch
from slora_ref.checkpoint import random_weights
from slora_ref.config import ModelConfig
from slora_ref.model import LlamaModel
from slora_ref.ops import NumpyOps, Ops, Segments, Spans
from slora_ref.ops.host_ops import HostOps
from slora_ref.pager import AdapterShape, PageLayout, PagePool

TOLERANCE = {"float32": 2e-5, "float16": 0.02, "bfloat16": 0.1}  # of the largest logit


def build_pool(config: ModelConfig, dtype: Any, seed: int = 3) -> PagePool:
    """A poisoned pool in random order: sequences of 9, 40 and 70 tokens, adapters of ranks 1, 5 and 24."""
    pool = PagePool(PageLayout(config), 2000, 4, 80, 4, dtype=dtype, poison=True, shuffle_seed=seed)
    rng = np.random.default_rng(seed)
    for adapter, rank in enumerate((1, 5, 24)):
        ranks = np.full((config.num_layers, 7), rank, np.int32)
        ranks[0, adapter] = 0  # absent from one layer
        pages = pool.open_adapter(adapter, AdapterShape(ranks, np.where(ranks, 1.5, 0).astype(np.float32)))
        image = rng.standard_normal((config.num_layers, len(pages), config.kv_width)) * 0.05
        pool.write_adapter(adapter, image.astype(dtype))
    for length in (9, 40, 70):
        slot = pool.open_sequence()
        pages = np.concatenate(pool.extend(np.full(length, slot), np.arange(length)))
        pool.storage[:, pages] = rng.standard_normal((config.num_layers, 2 * length, config.kv_width)).astype(dtype)
    return pool


def build_batch(pool: PagePool) -> Batch:
    """Decode rows of two sequences (adapters 0 and 2) and 33 rows of prefill (base model, then adapter 1)."""
    slots = np.array([0, 1, *[2] * 5, *[3] * 28])
    if len(pool._free_sequence_slots):
        pool.open_sequence()
    positions = np.array([9, 40, *range(70, 75), *range(28)])
    k_pages, v_pages = pool.extend(slots, positions)
    adapters = np.array([pool.adapter_slot(a) for a in (0, 2, -1, 1)])
    segments = Segments(adapters, np.array([0, 1, 2, 7]), np.array([1, 1, 5, 28]))
    spans = Spans(np.arange(4), np.array([0, 1, 2, 7]), np.array([1, 1, 5, 28]), np.array([10, 41, 75, 28]))
    ids = np.random.default_rng(1).integers(0, 97, len(slots))
    last = np.array([0, 1, 6, 34])
    return Batch(ids, positions, k_pages, v_pages, segments, spans, last, np.arange(4))


def logits_of(config: ModelConfig, ops: Ops, storage: Any, arithmetic: Any) -> np.ndarray:
    """Logits of one step; weights and pages rounded to `storage`, computed in `arithmetic`."""
    weights = random_weights(config, 5, np.float32)
    pool = build_pool(config, np.float32)
    batch = build_batch(pool)
    pool.storage = pool.storage.astype(storage).astype(arithmetic)
    rounded = cast(weights, lambda array: array.astype(storage).astype(arithmetic))
    return LlamaModel(config, rounded, ops, pool, 80).forward(batch)


def cast(value: Any, change: Any) -> Any:
    """Every array of nested dataclasses and tuples, changed."""
    if isinstance(value, np.ndarray):
        return change(value)
    if isinstance(value, tuple):
        return tuple(cast(item, change) for item in value)
    if hasattr(value, "__dataclass_fields__"):
        return type(value)(**{name: cast(getattr(value, name), change) for name in value.__dataclass_fields__})
    return value


@pytest.mark.parametrize("order", ["forward", "reverse"])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16], ids=lambda d: np.dtype(d).name)
def test_a_forward_pass_agrees_with_float64(dtype: Any, order: str) -> None:
    config = tiny_config(attention_bias=True)
    want = logits_of(config, NumpyOps(np.float64), dtype, np.float64)
    got = logits_of(config, HostOps(dtype, order=order), dtype, dtype).astype(np.float64)
    assert np.abs(got - want).max() < TOLERANCE[np.dtype(dtype).name] * np.abs(want).max()
    assert np.abs(want).max() > 0.1
