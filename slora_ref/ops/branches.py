"""Branches of a step where there are none: everything is done when it is said, one thing after the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

Product = TypeVar("Product")
Message = TypeVar("Message")


class NoBranches:
    """What a backend without streams does."""

    def with_message(self, product: Callable[[], Product], message: Callable[[], Message]) -> tuple[Product, Message]:
        """A product, and a message beside which it may be computed; here the message comes after it."""
        return product(), message()
