"""AdapterStore: every registered adapter, by name (paper section 5.1: all adapters live in main memory).

Registering reads only the config and the header of the weights file. The weights are read when they are first wanted,
packed once in the order of the pool's pages, and kept in host memory up to a budget; names that share a folder share
that copy. It knows which requests still use a version, but neither the queue nor what is resident.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from slora_ref.adapter import Adapter, AdapterHeader, load_adapter, read_header
from slora_ref.config import TARGETS, ModelConfig
from slora_ref.errors import AdapterError, LoadFailed, SloraError, UnknownAdapter
from slora_ref.pager import AdapterShape, PageLayout
from slora_ref.shapes import Array, Float

LONGEST_NAME = 256


@dataclass
class AdapterVersion:
    """One registration of a name. A name registered again gets another id, so nothing stale can answer for it.

    Args:
        users: requests that have not ended.
    """

    adapter_id: int
    name: str
    header: AdapterHeader
    shape: AdapterShape
    pages: int
    users: int = 0
    removed: bool = False


class AdapterStore:
    """Registered adapters and their packed weights in host memory.

    Args:
        config, layout: of the base model and of the pool.
        dtype: of the packed weights, the pool's.
        budget_bytes: most bytes of packed weights kept; the least recently used are dropped and read again when wanted.
    """

    def __init__(
        self, config: ModelConfig, layout: PageLayout, dtype: Any = np.float32, budget_bytes: int = 1 << 30
    ) -> None:
        self.config, self.layout, self.dtype = config, layout, np.dtype(dtype)
        self.budget_bytes = budget_bytes
        self._by_name: dict[str, AdapterVersion] = {}
        self._versions: dict[int, AdapterVersion] = {}
        self._next_id = 0
        self._images: OrderedDict[tuple[object, ...], Float[Array, "layers pages width"]] = OrderedDict()

    @property
    def names(self) -> list[str]:
        """All names that requests can use."""
        return list(self._by_name)

    @property
    def host_bytes(self) -> int:
        """Bytes of packed weights in host memory."""
        return sum(image.nbytes for image in self._images.values())

    def add(self, name: str, path: str | Path) -> AdapterVersion:
        """Registers an adapter folder under a name.

        Raises:
            AdapterError, UnsupportedAdapter: the name is taken or malformed, or the folder is refused; nothing changed.
        """
        self._check_name(name)
        header = read_header(_folder(path), self.config)
        shape = AdapterShape(header.ranks, header.scales)
        pages = self.layout.adapter_pages(shape.page_ranks)
        version = AdapterVersion(self._next_id, name, header, shape, pages)
        self._by_name[name] = self._versions[self._next_id] = version
        self._next_id += 1
        return version

    def _check_name(self, name: str) -> None:
        if not isinstance(name, str):
            raise AdapterError(f"an adapter's name is a text, not {name!r:.60}")
        if name in self._by_name:
            raise AdapterError(f"adapter {name!r} is already registered; remove it first")
        if not 0 < len(name) <= LONGEST_NAME or not name.isprintable():
            raise AdapterError(f"adapter name {name[:40]!r} must be 1 to {LONGEST_NAME} printable characters")

    def lookup(self, name: str) -> AdapterVersion:
        """The current version of a name.

        Raises:
            UnknownAdapter: never answered by another adapter or by the base model.
        """
        version = self._by_name.get(name)
        if version is None:
            raise UnknownAdapter(
                f"no adapter is registered as {name[:80]!r} ({len(self._by_name)} are; engine.adapters lists them)"
            )
        return version

    def version(self, adapter_id: int) -> AdapterVersion:
        """A version by its id, also one that is removed but still in use."""
        return self._versions[adapter_id]

    def remove(self, name: str) -> AdapterVersion:
        """Takes a name away from new requests; the version lives until its last user has released it."""
        version = self.lookup(name)
        del self._by_name[name]
        version.removed = True
        return version

    def acquire(self, version: AdapterVersion) -> None:
        """One more request uses this version."""
        version.users += 1

    def release(self, adapter_id: int) -> AdapterVersion:
        """One request less uses this version."""
        version = self._versions[adapter_id]
        assert version.users > 0, f"adapter {version.name!r} released more often than acquired"
        version.users -= 1
        return version

    def forget(self, version: AdapterVersion) -> None:
        """Drops a removed version that nobody uses."""
        assert version.removed and version.users == 0, (version.name, version.removed, version.users)
        del self._versions[version.adapter_id]

    def image(self, adapter_id: int) -> Float[Array, "layers pages width"]:
        """The packed weights of a version, from host memory or from its folder.

        Raises:
            LoadFailed: the folder vanished, changed or is damaged; the message says which.
        """
        version = self._versions[adapter_id]
        source = version.header.path, version.header.fingerprint
        if source not in self._images:
            try:
                adapter = load_adapter(version.header, self.config, self.dtype)
                self._images[source] = pack(adapter, self.layout, self.dtype)
            except (SloraError, OSError, MemoryError) as error:
                raise LoadFailed(f"adapter {version.name!r} could not be loaded: {error}") from error
            self._shrink_to_budget()
        self._images.move_to_end(source)
        return self._images[source]

    def _shrink_to_budget(self) -> None:
        """Drops the least recently used images, but never the newest: it is about to be copied."""
        held = self.host_bytes
        while held > self.budget_bytes and len(self._images) > 1:
            _, dropped = self._images.popitem(last=False)
            held -= dropped.nbytes

    def check(self) -> None:
        """Asserts that names, versions and users agree."""
        for name, version in self._by_name.items():
            assert version.name == name and not version.removed, name
            assert self._versions.get(version.adapter_id) is version, name
        for version in self._versions.values():
            assert version.users >= 0, (version.name, version.users)
            assert not version.removed or version.users > 0, f"removed and unused, yet kept: {version.name!r}"


def _folder(path: str | Path) -> Path:
    """The folder itself: a link that is turned elsewhere later, or another working directory, change nothing."""
    try:
        return Path(path).resolve()
    except (TypeError, ValueError, OSError, RuntimeError) as error:
        raise AdapterError(f"{path!r:.80} is no path of an adapter folder: {error}") from None


def pack(adapter: Adapter, layout: PageLayout, dtype: Any) -> Float[Array, "layers pages width"]:
    """An adapter as the pool stores it: whole pages in table order, zeros where a vector ends inside a page.

    Column j of A is row j of PEFT's lora_A, row j of B is column j of PEFT's lora_B. The scale stays outside.
    """
    page_ranks = AdapterShape(adapter.header.ranks, adapter.header.scales).page_ranks
    a_start, b_start = layout.starts(page_ranks)
    image = np.zeros((layout.num_layers, layout.adapter_pages(page_ranks), layout.width), dtype)
    for target in range(len(TARGETS)):
        for layer in np.flatnonzero(adapter.header.ranks[:, target]).tolist():
            _put(image[layer], int(a_start[target]), layout.a_pieces[target], adapter.a[layer, target])
            _put(image[layer], int(b_start[target]), layout.b_pieces[target], adapter.b[layer, target].T)
    image.flags.writeable = False  # names share it, and it is read again after every eviction
    return image


def _put(pages: Float[Array, "pages width"], start: int, pieces: int, vectors: Float[Array, "rank size"]) -> None:
    """Cuts each vector into `pieces` pages; the tail of the last piece keeps its zeros."""
    rank, size = vectors.shape
    padded = np.zeros((rank, pieces * pages.shape[1]), pages.dtype)
    padded[:, :size] = vectors
    pages[start : start + rank * pieces] = padded.reshape(rank * pieces, -1)
