"""Policies: which waiting request next. FCFS and LCFS, early abort, adapter clustering, fair sharing, one adapter."""

from slora_ref.policy.abort import EarlyAbort, OriginalEarlyAbort
from slora_ref.policy.base import FCFS, LCFS, Ordering, Policy
from slora_ref.policy.cluster import AdapterClusters, OriginalAdapterClusters
from slora_ref.policy.fair import FairShare
from slora_ref.policy.single import OneAdapter

__all__ = [
    "FCFS",
    "LCFS",
    "AdapterClusters",
    "EarlyAbort",
    "FairShare",
    "OneAdapter",
    "Ordering",
    "OriginalAdapterClusters",
    "OriginalEarlyAbort",
    "Policy",
]
