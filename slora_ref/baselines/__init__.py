"""What S-LoRA is compared with, each the usual engine with one part swapped: executor, ops, policy; or n engines.

They run on the CPU, with the same tokens as the engine. In the simulator their times are those of
simulate/kernels.py and paper/packed.py.
"""

from __future__ import annotations

from pathlib import Path

from slora_ref.baselines.merge import MergingExecutor
from slora_ref.baselines.packed import Packed
from slora_ref.baselines.padded import PaddedOps
from slora_ref.config import EngineConfig
from slora_ref.engine import Engine
from slora_ref.engine.build import build_parts
from slora_ref.executor import ModelExecutor
from slora_ref.policy import OneAdapter

__all__ = ["MergingExecutor", "Packed", "PaddedOps", "merge_and_switch", "padded_bmm", "peft_style"]


def merge_and_switch(folder: Path, config: EngineConfig) -> Engine:
    """One adapter at a time, merged into the weights: another executor, and the policy that it needs."""
    scheduler, prefetcher, executor, clock, model, tokenizer = build_parts(folder, config, OneAdapter())
    assert isinstance(executor, ModelExecutor), f"merging runs on the CPU, not in a {type(executor).__name__}"
    merging = MergingExecutor(executor, prefetcher.store, scheduler.pool)
    return Engine(scheduler, prefetcher, merging, clock, model, tokenizer)


def padded_bmm(folder: Path, config: EngineConfig) -> Engine:
    """Adapters padded and copied at every step: other ops."""
    parts = build_parts(folder, config)
    executor = parts[2]
    assert isinstance(executor, ModelExecutor), f"padding runs on the CPU, not in a {type(executor).__name__}"
    executor.model.ops = PaddedOps(config.dtype)
    return Engine(*parts)


def peft_style(folder: Path, config: EngineConfig, batch: int) -> Engine:
    """Batches of one adapter, each to its end before the next: another policy."""
    return Engine.from_pretrained(folder, config, OneAdapter(joining=False, most_running=batch))
