"""The same requests in the simulator: with the constants fitted on the authors' system, and with none of its losses."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace
from statistics import fmean

from slora_ref.bench.real.points import RealPoint
from slora_ref.bench.real.scale import Scale
from slora_ref.metrics import summarize
from slora_ref.pager import PageLayout
from slora_ref.paper.constants import fitted_constants
from slora_ref.paper.run import Run
from slora_ref.paper.systems import system_of
from slora_ref.simulate.roofline import Constants
from slora_ref.simulate.store import adapter_pages
from slora_ref.simulate.system import System
from slora_ref.workload import Arrival


def without_losses(fitted: Constants) -> Constants:
    """The data sheet's rates, and a host that takes no time: no step can be faster."""
    rates = dict.fromkeys(("bandwidth", "flops", "lora_reads"), 1.0)
    times = dict.fromkeys(("layer", "lora_layer", "sequence", "padded_layer", "padded_copy"), 0.0)
    return replace(fitted, **rates, **times)


def simulate(point: RealPoint, scale: Scale, arrivals: Seq[Arrival], losses: bool = True) -> tuple[float, float]:
    """Requests a second, and requests that run at once, in this engine's way of serving.

    Args:
        losses: with the fitted constants; False: on the data sheet's GPU.
    """
    assert scale.gpu is not None, f"the simulator knows no {scale.device}"
    pool = scale.tight_tokens if point.tight else scale.pool_tokens
    run = Run(
        setting="S2",
        gpu=scale.gpu,
        adapters=point.adapters,
        rate=float(scale.requests),
        system="slora" if point.system == "split" else point.system,
        pool_tokens=pool,
        variant="ours",
    )
    fitted = fitted_constants()
    system = system_of(run, fitted if losses else without_losses(fitted))
    config = replace(system.config, max_running=scale.max_running, max_batched_tokens=scale.max_batched_tokens)
    replay = _split(replace(system, config=config), point.share).build()
    running: list[int] = []
    records = replay.play(arrivals, lambda: running.append(len(replay.scheduler.running)))
    return summarize(records).throughput, fmean(running)


def _split(system: System, share: float) -> System:
    """A pool without the adapters' part, and as many adapters at once as that has slots."""
    if not share:
        return system
    assert system.config.pool_pages is not None, "a simulated pool has its size in pages"
    slot = adapter_pages(PageLayout(system.model), max(system.ranks))
    slots = int(share * system.config.pool_pages) // slot
    config = replace(system.config, pool_pages=system.config.pool_pages - slots * slot, max_adapters=slots)
    return replace(system, config=config, adapters_in_pool=False)
