"""Which adapters are resident in the pool: loads, the paper's prefetch (section 5.2), eviction."""

from slora_ref.prefetch.counts import PrefetchCounts
from slora_ref.prefetch.eviction import EVICTIONS, Eviction
from slora_ref.prefetch.loader import ImmediateLoader, Loader, ThreadLoader, failure_of
from slora_ref.prefetch.prefetcher import Prefetcher

__all__ = [
    "EVICTIONS",
    "Eviction",
    "ImmediateLoader",
    "Loader",
    "PrefetchCounts",
    "Prefetcher",
    "ThreadLoader",
    "failure_of",
]
