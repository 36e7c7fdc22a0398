"""Disk: from PEFT folders, as they are, to packed weights in host memory.

A folder is read in one piece, not mapped: a mapped file that somebody cuts while it is used ends the process, and here
that must end one request. What was read counts only if the folder is still what it was when it was registered.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Hashable

from slora_ref.adapter.header import HeaderReader
from slora_ref.adapter.load import check_finite, convert, read_weights
from slora_ref.checkpoint.tensors import all_finite
from slora_ref.config import ModelConfig
from slora_ref.errors import LoadFailed
from slora_ref.pager import PageLayout
from slora_ref.shapes import Array, Float
from slora_ref.store.host import HostMemory
from slora_ref.store.pack import pack_into
from slora_ref.store.version import AdapterVersion


class Disk:
    """Fills host memory, on whatever thread it is asked to.

    Args:
        config, layout: of the base model and of the pool.
        host: where the weights go.
    """

    def __init__(self, config: ModelConfig, layout: PageLayout, host: HostMemory) -> None:
        self._layout, self._host = layout, host
        self._headers = HeaderReader(config)
        self._one_at_a_time = threading.Lock()
        self.reads = 0
        self.bytes_read = 0

    def bring(self, version: AdapterVersion, keep: Collection[Hashable] = ()) -> bool:
        """Reads a version into host memory, unless it is there.

        Args:
            keep: sources that must not give way.

        Returns:
            False if there is no room now.

        Raises:
            LoadFailed: the folder vanished, changed or is damaged; nothing is kept.
        """
        with self._one_at_a_time:
            if version.source in self._host:
                return True
            image = self._host.reserve(version.source, self._shape(version), keep)
            if image is None:
                return False
            try:
                self._read(version, image)
            except Exception as error:  # whatever one folder's data breaks is the end of its requests alone
                self._host.discard(version.source)
                raise LoadFailed(f"adapter {version.name!r} could not be loaded: {error}") from error
            except BaseException:  # an interrupt
                self._host.discard(version.source)
                raise
            self._host.publish(version.source)
            return True

    def _shape(self, version: AdapterVersion) -> tuple[int, int, int]:
        return self._layout.num_layers, version.pages, self._layout.width

    def _read(self, version: AdapterVersion, image: Float[Array, "layers pages width"]) -> None:
        stored = read_weights(version.header, self._headers)
        pack_into(image, stored, self._layout)
        if not all_finite(image):
            check_finite(convert(stored, image.dtype), stored)
        self.reads += 1
        self.bytes_read += version.header.fingerprint.size
