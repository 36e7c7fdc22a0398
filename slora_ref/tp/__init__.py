"""Tensor parallelism (paper section 6): what is split over shards, and how shards talk.

split.py computes and never communicates; the communicators move arrays and know nothing of models.
"""

from slora_ref.tp.shard import WHOLE, Shard
from slora_ref.tp.split import check_split, local_config

__all__ = ["WHOLE", "Shard", "check_split", "local_config"]
