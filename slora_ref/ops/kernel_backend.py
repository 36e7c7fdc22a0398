"""KernelBackend: how a launch runs and where its arrays lie, and what the launches of a step share.

A subclass provides three methods. Memory comes from `empty`, so that a backend can hand out the same memory every step.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from slora_ref.ops.launch import Arguments, Launch
from slora_ref.ops.plan import AttentionPlan, LoraPlan
from slora_ref.ops.rungs import fastest, make_launch, operation_of
from slora_ref.ops.tables import Segments, Spans
from slora_ref.shapes import Array


@dataclass(frozen=True)
class LoraStep:
    """What all LoRA launches of a step share: the plan's arrays on the device.

    Args:
        of: the segments it was made for.
        rows, tiles: [layers, targets, entries, 4] where each row's, each tile's adapter lies.
        extents: [tiles, 2] first row and rows of each tile.
        page_table: [adapter_slots, table].
        t_columns: columns of t for each target.
    """

    of: Segments
    plan: LoraPlan
    rows: Array
    tiles: Array
    extents: Array
    page_table: Array
    t_columns: int


@dataclass(frozen=True)
class AttentionStep:
    """What all attention launches of a step share: the plan's arrays on the device."""

    of: Spans
    plan: AttentionPlan
    queries: Array
    tiles: Array
    sequence_pages: Array


class KernelBackend(ABC):
    """Launches kernels, the fastest rung of each operation's ladder unless told otherwise.

    Args:
        dtype: of storage.
        rungs: the kernel to use for an operation, where it is not the fastest.
    """

    def __init__(self, dtype: Any, rungs: Mapping[str, str] | None = None) -> None:
        self.dtype = np.dtype(dtype)
        self.rungs = dict(rungs or {})

    @abstractmethod
    def launch(self, launch: Launch) -> None:
        """Runs a kernel.

        Raises:
            KernelError: an argument does not fit; the message names it.
        """

    @abstractmethod
    def empty(self, name: str, shape: tuple[int, ...], dtype: Any) -> Array:
        """An array for the result `name`; its numbers are unspecified."""

    @abstractmethod
    def put(self, name: str, array: Array, dtype: Any) -> Array:
        """`array` on the device, of this dtype and contiguous; itself where it is that already."""

    def run(self, operation: str, arguments: Arguments) -> None:
        """Launches the chosen rung of an operation."""
        kernel = self.rungs.get(operation) or fastest(operation, self.dtype, arguments)
        assert operation_of(kernel) == operation, f"{kernel} is no rung of {operation}"
        self.launch(make_launch(kernel, self.dtype, arguments))
