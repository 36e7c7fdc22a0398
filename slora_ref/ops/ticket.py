"""Ticket: the end of something that a device has been told to do. It knows no device."""

from __future__ import annotations

from abc import ABC, abstractmethod


class Ticket(ABC):
    """Whether something that was started has ended."""

    @property
    @abstractmethod
    def done(self) -> bool:
        """Whether it has ended; never waits."""

    @abstractmethod
    def wait(self) -> None:
        """Waits for its end."""

    @abstractmethod
    def begin(self) -> None:
        """What is measured starts here, in the order of what is started."""

    @abstractmethod
    def seconds(self) -> float:
        """How long it took from `begin`, after its end."""

    @abstractmethod
    def seconds_since(self, earlier: Ticket) -> float:
        """From the end of what was started earlier to the end of this, after both."""
