"""Branches of a step where there are none: everything is done when it is said, one thing after the other."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class NoBranches:
    """What a backend without streams does."""

    @contextmanager
    def branch(self) -> Iterator[None]:
        """What is done within may run beside what is done after it, up to `join`; here it does not."""
        yield

    def join(self) -> None:
        """What is done from here on waits for the branch."""
