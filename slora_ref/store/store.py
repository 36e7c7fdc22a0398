"""AdapterStore: every registered adapter, by name (paper section 5.1: all adapters live in main memory).

Three tiers. Disk: PEFT folders as they are; registering reads only the config and the header of the weights. Host
memory: one arena, each adapter once, packed in the order of the pool's pages, up to a budget. The pool: not the store's
business, and neither is the queue; it knows which requests still use a version.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from slora_ref.adapter.header import AdapterHeader, HeaderReader
from slora_ref.checkpoint.tensors import float_dtype
from slora_ref.config import ModelConfig
from slora_ref.errors import AdapterError, LoadFailed, UnknownAdapter
from slora_ref.pager import AdapterShape, PageLayout
from slora_ref.shapes import Array, Float
from slora_ref.store.arena import Allocate, Arena, plain_memory
from slora_ref.store.disk import Disk
from slora_ref.store.host import HostMemory
from slora_ref.store.reader import Reader
from slora_ref.store.version import AdapterVersion

LONGEST_NAME = 256


class AdapterStore:
    """Registered adapters and their packed weights in host memory.

    Args:
        config, layout: of the base model and of the pool.
        dtype: of the packed weights, the pool's.
        budget_bytes: size of the arena; beyond it the least recently used are dropped and read again when wanted.
        allocate: makes the arena; a GPU's wants pinned memory.
        share: names of one folder share its copy; otherwise each name has its own, as if the folders were different.
        background: folders are read on a thread, as `want` asks; otherwise in `image`, when they are first needed.
    """

    def __init__(
        self,
        config: ModelConfig,
        layout: PageLayout,
        dtype: Any = np.float32,
        budget_bytes: int = 1 << 30,
        *,
        allocate: Allocate = plain_memory,
        share: bool = True,
        background: bool = False,
    ) -> None:
        self.layout, self.dtype, self.budget_bytes = layout, float_dtype(dtype), budget_bytes
        self.host = HostMemory(Arena(budget_bytes, allocate), self.dtype)
        self.disk = Disk(config, layout, self.host)
        self._reader = Reader(self.disk, self.host) if background else None
        self._headers, self._share = HeaderReader(config), share
        self._by_name: dict[str, AdapterVersion] = {}
        self._versions: dict[int, AdapterVersion] = {}
        self._next_id = 0

    @property
    def names(self) -> list[str]:
        """All names that requests can use."""
        return list(self._by_name)

    @property
    def host_bytes(self) -> int:
        """Bytes of packed weights in host memory."""
        return self.host.nbytes

    # --- names and versions ---

    def add(self, name: str, path: str | Path) -> AdapterVersion:
        """Registers an adapter folder under a name.

        Raises:
            AdapterError, UnsupportedAdapter: the name is taken or malformed, the folder is refused, or the adapter
                alone exceeds the budget of host memory; nothing changed.
        """
        self._check_name(name)
        if name in self._by_name:
            raise AdapterError(f"adapter {name!r} is already registered; remove it first, or replace it")
        return self._register(name, path)

    def replace(self, name: str, path: str | Path) -> AdapterVersion:
        """Gives a registered name another folder, or the same one read anew; requests so far keep the old version.

        Returns:
            The old version, removed.

        Raises:
            UnknownAdapter: there is no such name. AdapterError, UnsupportedAdapter: the old version stays.
        """
        old = self.lookup(name)
        self._register(name, path)
        old.removed = True
        return old

    def _register(self, name: str, path: str | Path) -> AdapterVersion:
        header, _ = self._headers.inspect(_folder(path))
        shape = AdapterShape(header.ranks, header.scales)
        pages = self.layout.adapter_pages(shape.page_ranks)
        nbytes = self.layout.num_layers * pages * self.layout.width * self.dtype.itemsize
        if nbytes > self.budget_bytes:
            raise AdapterError(
                f"adapter {name!r} takes {nbytes:,} bytes of host memory; host_bytes is {self.budget_bytes:,}: raise it"
            )
        source = self._source(header, self._next_id)
        version = AdapterVersion(self._next_id, name, header, shape, pages, nbytes, source)
        self._by_name[name] = self._versions[self._next_id] = version
        self._next_id += 1
        return version

    def _source(self, header: AdapterHeader, adapter_id: int) -> Hashable:
        """Names share a copy only of the very same file, so that a change which its fingerprint misses stays one."""
        return header.path, header.fingerprint, None if self._share else adapter_id

    def _check_name(self, name: str) -> None:
        if not isinstance(name, str):
            raise AdapterError(f"an adapter's name is a text, not {name!r:.60}")
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

    # --- host memory ---

    def want(self, adapter_ids: Iterable[int]) -> None:
        """Says which versions should be in host memory, the most urgent first, instead of those wanted before.

        What is no longer wanted, and not being read, is not read. Without a thread this does nothing.
        """
        if self._reader is not None:
            self._reader.want([self._versions[adapter_id] for adapter_id in adapter_ids])

    def hold(self, adapter_id: int) -> Hashable | None:
        """Keeps the packed weights of a version in their place, for a copy into the pool.

        Returns:
            What `let_go` takes; None, and nothing is held, while the thread has not read them or there is no room.
        """
        version = self._versions[adapter_id]
        source = version.source
        held = self.host.hold(source) if self._reader is not None else self.host.hold_unread(source, version.nbytes)
        return source if held else None

    def let_go(self, hold: Hashable) -> None:
        """Ends a hold. The version may have been forgotten since."""
        self.host.let_go(hold)

    def image(self, adapter_id: int) -> Float[Array, "layers pages width"]:
        """The packed weights of a version; where they are not in host memory, its folder is read now.

        Raises:
            LoadFailed: the folder vanished, changed or is damaged, or there is no room; the message says which.
        """
        version = self._versions[adapter_id]
        image = self.host.get(version.source)
        if image is None:
            if not self.disk.bring(version):
                raise LoadFailed(f"adapter {version.name!r} has no room in host memory beside the loads under way")
            image = self.host.get(version.source)
            assert image is not None, f"adapter {version.name!r} was dropped as soon as it was read"
        return image

    @property
    def reading(self) -> bool:
        """Whether the thread reads, or has failures to tell."""
        return self._reader is not None and self._reader.busy

    def failures(self) -> list[tuple[int, LoadFailed]]:
        """What the thread could not read since the last call, by adapter id."""
        return [] if self._reader is None else self._reader.failures()

    def wait(self) -> None:
        """Blocks until the thread has read one folder, or reads none."""
        if self._reader is not None:
            self._reader.wait()

    def check(self) -> None:
        """Asserts that names, versions and users agree, and that the arena holds what it should."""
        self.host.check()
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
