"""AdapterVersion: one registration of a name, with all that is known without reading its weights."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from slora_ref.adapter import AdapterHeader
from slora_ref.pager import AdapterShape


@dataclass
class AdapterVersion:
    """One registration of a name. A name registered again gets another id, so nothing stale can answer for it.

    Args:
        pages: in the pool.
        nbytes: of the packed weights in host memory.
        source: what its packed weights are kept under; equal for names that share a copy.
        users: requests that have not ended.
        removed: the name is gone, or is another version's.
    """

    adapter_id: int
    name: str
    header: AdapterHeader
    shape: AdapterShape
    pages: int
    nbytes: int
    source: Hashable
    users: int = 0
    removed: bool = False
