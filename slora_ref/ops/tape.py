"""Tape: the launches of a step, kept to be repeated without preparing them again; Graph: all of them by one call.

Checking and packing a launch's arguments takes Python several times as long as starting it. All arrays of a step lie
where they lay before, so what differs between two steps of one shape is only the numbers in them: the same launches
serve both, and are captured in a CUDA graph as they are. For speed alone. It knows no kernels.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

Work = Callable[[], None]
Part = Literal["gemm", "lora", "attention", "communication", "lora_communication", "rest", "branch"]
"""Of a step's time; but a branch's beginning and end take none."""


def part_of(operation: str) -> Part:
    """What a kernel's time counts as."""
    if operation.startswith(("mbgm", "lora", "pad_adapter")):
        return "lora"
    return "attention" if operation.startswith("paged_attention") else "rest"


@dataclass
class Tape:
    """Work in the order in which it was done first.

    Args:
        work: what a device does.
        notes: what the host writes down each time that it is done.
    """

    work: list[tuple[Part, Work]] = field(default_factory=list)
    notes: list[Work] = field(default_factory=list)

    def replay(self) -> None:
        """Does it all again."""
        self.start()
        self.note()

    def start(self) -> None:
        """Does the work alone, as a graph that captures it wants."""
        for _, work in self.work:
            work()

    def note(self) -> None:
        """Writes down that it was done."""
        for note in self.notes:
            note()

    def then(self, other: Tape) -> Tape:
        """This, and the other behind it."""
        return Tape([*self.work, *other.work], [*self.notes, *other.notes])

    def only(self, *parts: Part) -> Tape:
        """The work of some parts, in or beside a branch as it was, for a measurement: its results mean nothing."""
        if not any(part in parts for part, _ in self.work):
            return Tape()
        return Tape([(part, work) for part, work in self.work if part in (*parts, "branch")])


class Graph(ABC):
    """A tape's work as one piece.

    Attributes:
        tape: the work, kept: its launches hold the arrays that they read and write.
    """

    tape: Tape

    @abstractmethod
    def launch(self) -> None:
        """Starts it all, in the order of what is started; never waits."""

    @abstractmethod
    def milliseconds(self) -> float:
        """Median time of one run, without the host's part."""


class Replayed(Graph):
    """A graph where there is none: does the work piece by piece.

    Args:
        tape: the work.
    """

    def __init__(self, tape: Tape) -> None:
        self.tape = tape

    def launch(self) -> None:
        """Does it."""
        self.tape.replay()

    def milliseconds(self) -> float:
        """Not measured: the host build is no model of a device's speed."""
        self.tape.replay()
        return 0.0
