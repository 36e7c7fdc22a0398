"""Who owns each page, for pictures and for counting; never on the hot path."""

from __future__ import annotations

import numpy as np

from slora_ref.pager.pool import PagePool
from slora_ref.shapes import Array, Int

FREE, KV = -2, -1


def page_owners(pool: PagePool) -> Int[Array, " pages"]:
    """[pages] FREE, KV, or the adapter slot that owns the page."""
    owners = np.full(pool.num_pages, FREE, np.int32)
    kv = pool.sequence_pages[pool.sequence_pages >= 0]
    owners[kv] = KV
    slots, entries = np.nonzero(pool.adapters.pages >= 0)
    owners[pool.adapters.pages[slots, entries]] = slots
    return owners
