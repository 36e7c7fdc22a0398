"""The unified page pool (paper section 5.1): page layout, storage, the page tables of sequences and adapters."""

from slora_ref.pager.layout import AdapterShape, PageLayout
from slora_ref.pager.pool import PagePool, PoolUsage
from slora_ref.pager.storage import PageStorage

__all__ = ["AdapterShape", "PageLayout", "PagePool", "PageStorage", "PoolUsage"]
