"""PrefetchCounts: what was loaded, hit, evicted and waited for, so far."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class PrefetchCounts:
    """What the prefetcher did so far.

    Args:
        loads: adapters that were brought into the pool.
        loads_ahead: of these, the ones that were begun before a request's turn.
        hits: requests that found their adapter in the pool when their turn came.
        evictions: idle adapters that left, for others' pages or slots, or by the eager policy.
        failures: loads that failed, in the folder or on the way into the pool.
        bytes_loaded: into the pool.
        stalled_s: seconds in which the engine stood still for a load, since nothing else could run.
    """

    loads: int = 0
    loads_ahead: int = 0
    hits: int = 0
    evictions: int = 0
    failures: int = 0
    bytes_loaded: int = 0
    stalled_s: float = 0.0
