"""System: which machine, which model, which adapters, which options. It builds the parts and replays a trace.

The `original` options are the authors' published runs: new requests join after ten steps of decoding, adapters leave at
once, nothing is prefetched, loads stop everything and cross the link twice, admission knows the output lengths.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from slora_ref.clock import SimulatedClock
from slora_ref.config import EngineConfig, ModelConfig
from slora_ref.pager import PageLayout, PagePool
from slora_ref.policy import FCFS, Policy
from slora_ref.prefetch import Prefetcher
from slora_ref.scheduler import Scheduler
from slora_ref.simulate.collectives import Collectives
from slora_ref.simulate.datasheet import GPU, LINK_BYTES_PER_S, LOAD_SECONDS, MOST_RUNNING, prefill_tokens
from slora_ref.simulate.executor import RooflineExecutor
from slora_ref.simulate.kernels import OriginalKernels
from slora_ref.simulate.replay import Replay
from slora_ref.simulate.roofline import Constants, Kernels, Roofline
from slora_ref.simulate.store import LinkLoader, ShapeStore

MOST_RESIDENT = 1024


def original_config(pool_tokens: int) -> EngineConfig:
    """The original's options for a pool of so many tokens."""
    return EngineConfig(
        pool_pages=2 * pool_tokens,
        max_running=MOST_RUNNING,
        max_batched_tokens=prefill_tokens(pool_tokens),
        max_adapters=MOST_RESIDENT,
        separate_prefill=True,
        join_every=10,
        blocking_loads=True,
        prefetch=0,
        eviction="eager",
    )


@dataclass(frozen=True, kw_only=True)
class System:
    """What serves a trace in the simulator.

    Args:
        adapters: how many are registered; 0: the base model alone.
        ranks: adapter i has ranks[i % len(ranks)].
        policy: makes a new policy; policies have a state.
        kernels: makes what says what adapters cost in a step.
        adapters_in_pool: whether adapters take pages of the pool.
        crossings: how often an adapter's bytes cross the link in a load; the original's do twice.
        shards: GPUs that the model is split over, each with a part of every page.
        lora_messages: whether shards send each other the adapters' intermediates.
        gathers: collectives for those of q, k and v.
    """

    gpu: GPU
    model: ModelConfig
    adapters: int
    ranks: tuple[int, ...]
    config: EngineConfig
    constants: Constants
    policy: Callable[[], Policy] = FCFS
    kernels: Callable[[ModelConfig], Kernels] = OriginalKernels
    adapters_in_pool: bool = True
    crossings: int = 2
    shards: int = 1
    lora_messages: bool = True
    gathers: int = 3

    def build(self) -> Replay:
        """The parts, put together."""
        assert self.config.pool_pages is not None, "the pool of a simulation has its size in pages"
        layout = PageLayout(self.model)
        longest = min(self.model.max_position_embeddings, self.config.pool_pages // 2 + 1)
        config = self.config
        pool = PagePool(layout, self.config.pool_pages, config.max_running, longest, config.max_adapters, dtype=None)
        clock = SimulatedClock()
        store = ShapeStore(self.model, layout, self.adapters_in_pool)
        for number in range(self.adapters):
            store.register(self.ranks[number % len(self.ranks)])
        loader = LinkLoader(clock, store, self.shards * LINK_BYTES_PER_S / self.crossings, LOAD_SECONDS)
        prefetcher = Prefetcher(pool, store, loader, config.eviction, config.prefetch)
        scheduler = Scheduler(pool, prefetcher, self.policy(), config)
        own = self.kernels(self.model)
        kernels = own if self.adapters or own.always else None
        messages = Collectives(self.model, self.shards, self.lora_messages, self.gathers) if self.shards > 1 else None
        gpus = self.gpu.times(self.shards)
        roofline = Roofline(gpus, self.model, self.constants, kernels, messages)
        executor = RooflineExecutor(roofline, pool, clock)
        return Replay(scheduler, prefetcher, executor, clock, self.model, store)
