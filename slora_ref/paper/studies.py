"""Two studies that the paper lacks: what a rank costs, and what one pool for everything is worth against two.

In the simulator with the original's options, so that nothing but the thing studied differs: Llama-7B on an A100-80, 200
adapters, R = 8, for a minute.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from statistics import fmean
from typing import Any

from slora_ref.metrics import summarize
from slora_ref.pager import PageLayout
from slora_ref.paper.constants import fitted_constants
from slora_ref.paper.run import Run
from slora_ref.paper.systems import system_of
from slora_ref.simulate.datasheet import FP16
from slora_ref.simulate.store import adapter_pages
from slora_ref.simulate.system import System

GROUND = Run(setting="S2", gpu="a100-80", adapters=200, rate=8.0, duration=60.0)
RANKS = (4, 8, 16, 32, 64, 128, 256)
SHARES = (0.05, 0.1, 0.2, 0.4)
"""Parts of the memory for adapters alone, where there are two pools."""
TIGHT_TOKENS = 20_000
"""The memory of the second study: with the A100's 125,000 tokens nothing is ever short at this rate."""


def rank_sweep() -> list[dict[str, Any]]:
    """Rank 4 to 256 on the same trace: throughput, seconds a load, mean part of the pool."""
    rows = []
    for rank in RANKS:
        replay = replace(system_of(GROUND, fitted_constants()), ranks=(rank,)).build()
        service = summarize(replay.play(GROUND.arrivals()))
        rows.append(
            {
                "rank": rank,
                "throughput": service.throughput,
                "first_token": service.first_token,
                "load_seconds": replay.prefetcher.loader.seconds / replay.prefetcher.counts.loads,
                "adapter_share": replay.occupancy.mean_share("adapter"),
            }
        )
    return rows


def fragmentation() -> list[dict[str, Any]]:
    """One pool against two of the same total size, for several ways to cut it in two.

    The second pool has slots for adapters, each as large as the largest of them, as servers with a fixed number of
    LoRA slots have. Shares are means over the steps, of the whole memory; `free` is what nobody uses, in either pool;
    `refused` counts requests that are longer than the first pool.
    """
    system = system_of(replace(GROUND, pool_tokens=TIGHT_TOKENS), fitted_constants())
    return [_use("one pool", system, 0), *(_split(system, share) for share in SHARES)]


def _split(system: System, share: float) -> dict[str, Any]:
    """Two pools: the second with as many slots as fit in its share."""
    assert system.config.pool_pages is not None, "a simulated pool has its size in pages"
    slot = adapter_pages(PageLayout(system.model), max(system.ranks))
    slots = max(1, int(share * system.config.pool_pages) // slot)
    config = replace(system.config, pool_pages=system.config.pool_pages - slots * slot, max_adapters=slots)
    return _use(f"{share:.0%} for adapters", replace(system, config=config, adapters_in_pool=False), slots * slot)


def _use(name: str, system: System, set_aside: int) -> dict[str, Any]:
    """Plays the trace and says what the memory held.

    Args:
        set_aside: pages of the second pool; 0 where there is one pool.
    """
    replay = system.build()
    page_bytes = replay.pool.layout.page_bytes(FP16)
    adapters: list[float] = []  # pages that running adapters really fill, in each step, wherever they lie

    def look() -> None:
        held = replay.prefetcher.held
        adapters.append(sum(replay.prefetcher.store.version(i).nbytes for i in held) / page_bytes)

    service = summarize(replay.play(GROUND.arrivals(), look))
    total = replay.pool.num_pages + set_aside
    kv = fmean(usage.kv for usage in replay.occupancy.usages) / total
    adapter = fmean(adapters) / total
    return {
        "memory": name,
        "throughput": service.throughput,
        "first_token": service.first_token,
        "kv": kv,
        "adapter": adapter,
        "free": 1 - kv - adapter,
        "refused": len(replay.refused),
    }


STUDIES: dict[str, Callable[[], list[dict[str, Any]]]] = {"rank-sweep": rank_sweep, "fragmentation": fragmentation}
