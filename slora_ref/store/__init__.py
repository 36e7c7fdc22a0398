"""Registered adapters, their folders on disk, and their packed weights in host memory (paper section 5.1)."""

from slora_ref.store.arena import Arena, plain_memory
from slora_ref.store.store import AdapterStore
from slora_ref.store.version import AdapterVersion

__all__ = ["AdapterStore", "AdapterVersion", "Arena", "plain_memory"]
