"""Fingerprint: whether the file at a path is still the one that was read before.

Time and size alone do not say it: archives and backups restore times, so two files of one size can have the same. The
inode and its time of change would say it, but they also change when nothing has: by `chmod`, or a backup of hard links.
So a fingerprint holds a digest of the header and of samples spread over the data, a few dozen reads that cost
microseconds. Another training differs everywhere, so some sample shows it; a change of single bytes between the samples
shows by the time of modification, unless somebody sets that back.
"""

from __future__ import annotations

import hashlib
import os
from typing import NamedTuple

SAMPLES, SAMPLE_BYTES = 32, 64
DIGEST_BYTES = 16


class Fingerprint(NamedTuple):
    """What identifies a file.

    Args:
        modified_ns, size: as the system tells them.
        digest: of the header and the samples.
        inode, changed_ns: tell that it is the very same file, where they are equal; nothing, where they differ.
    """

    modified_ns: int
    size: int
    digest: bytes
    inode: int
    changed_ns: int

    def same_content(self, other: Fingerprint) -> bool:
        """Whether the other was taken of a file with this content, wherever it lies and whoever may read it."""
        return self[:3] == other[:3]


def take_fingerprint(file: int, header: bytes) -> Fingerprint:
    """The fingerprint of an open file.

    Args:
        file: its descriptor.
        header: its first bytes, which were read already; samples are taken from what follows.
    """
    status = os.fstat(file)
    digest = hashlib.blake2b(header, digest_size=DIGEST_BYTES)
    last = status.st_size - SAMPLE_BYTES
    for i in range(SAMPLES if last > len(header) else 1):
        digest.update(os.pread(file, SAMPLE_BYTES, max(len(header), last) - i * (last - len(header)) // SAMPLES))
    return Fingerprint(status.st_mtime_ns, status.st_size, digest.digest(), status.st_ino, status.st_ctime_ns)
