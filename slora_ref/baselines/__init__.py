"""What S-LoRA is compared with, each the usual engine with one part swapped: executor, ops, pool, policy; or n engines.

They run on the CPU and on a GPU, with the same tokens as the engine. In the simulator their times are those of
simulate/kernels.py and paper/packed.py.
"""

from __future__ import annotations

from slora_ref.baselines.base import Base
from slora_ref.baselines.merge import MergingExecutor
from slora_ref.baselines.packed import Packed
from slora_ref.baselines.padded import PaddedOps
from slora_ref.baselines.padded_kernels import padded_like
from slora_ref.baselines.split import split_pools
from slora_ref.config import EngineConfig
from slora_ref.engine import Engine
from slora_ref.executor import KernelExecutor, ModelExecutor
from slora_ref.ops import KernelOps, Ops
from slora_ref.policy import OneAdapter

__all__ = [
    "Base",
    "MergingExecutor",
    "Packed",
    "PaddedOps",
    "merge_and_switch",
    "padded_bmm",
    "peft_style",
    "split_pools",
]


def merge_and_switch(base: Base, config: EngineConfig) -> Engine:
    """One adapter at a time, merged into the weights of `base`: another executor, and the policy that it needs."""
    scheduler, prefetcher, executor, clock, model, tokenizer = base.parts(config, OneAdapter())
    assert isinstance(executor, ModelExecutor | KernelExecutor), f"a {type(executor).__name__} has no weights"
    return Engine(scheduler, prefetcher, MergingExecutor(executor, scheduler.pool), clock, model, tokenizer)


def padded_bmm(base: Base, config: EngineConfig) -> Engine:
    """Adapters padded and copied at every step: other ops."""
    return Engine(*base.parts(config, ops=_padded_ops(base, config)))


def _padded_ops(base: Base, config: EngineConfig) -> Ops:
    usual = base.device.ops()
    return padded_like(usual) if isinstance(usual, KernelOps) else PaddedOps(config.dtype)


def peft_style(base: Base, config: EngineConfig, batch: int) -> Engine:
    """Batches of one adapter, each to its end before the next: another policy."""
    return base.engine(config, OneAdapter(joining=False, most_running=batch))
