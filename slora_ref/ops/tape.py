"""Tape: the launches of a step, kept to be repeated without preparing them again.

Checking and packing a launch's arguments takes Python ten times as long as starting it. All arrays of a step lie where
they lay before, so what differs between two steps of one shape is only the numbers in them: the same launches serve
both, and could be captured in a CUDA graph as they are. It knows no kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

Work = Callable[[], None]
Part = Literal["gemm", "lora", "attention", "communication", "lora_communication", "rest"]  # of a step's time


def part_of(operation: str) -> Part:
    """What a kernel's time counts as."""
    if operation.startswith(("mbgm", "lora")):
        return "lora"
    return "attention" if operation.startswith("paged_attention") else "rest"


@dataclass
class Tape:
    """Work in the order in which it was done first."""

    work: list[tuple[Part, Work]] = field(default_factory=list)

    def replay(self) -> None:
        """Does it all again."""
        for _, work in self.work:
            work()

    def only(self, *parts: Part) -> Tape:
        """The work of some parts, for a measurement: its results mean nothing."""
        return Tape([(part, work) for part, work in self.work if part in parts])
