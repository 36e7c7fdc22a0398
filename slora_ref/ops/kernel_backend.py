"""KernelBackend: how a launch runs and where its arrays lie, and what the launches of a step share.

A subclass provides a few methods. Memory comes from `empty`, so that a backend can hand out the same memory every step.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from slora_ref.ops.branches import Message, Product
from slora_ref.ops.ladder import fastest, make_launch, operation_of
from slora_ref.ops.launch import Arguments, Launch
from slora_ref.ops.plan import AttentionPlan, LoraPlan
from slora_ref.ops.tables import Segments, Spans
from slora_ref.ops.tape import Graph, Part, Tape, Work, part_of
from slora_ref.ops.ticket import Ticket
from slora_ref.shapes import Array

ALONE = ("lora_lookup", "branch", "communication", "lora_communication")
"""Behind these no kernel starts early: what the first wrote is read before all else, an early start would wait for the
kernel before it in its own branch alone, and whether messages are launches is their carrier's business."""


@dataclass(frozen=True)
class LoraStep(Segments):
    """Segments, and what all LoRA launches of their step share: the plan's arrays on the device.

    Args:
        plan: who computes which rows.
        rows, tiles: [layers, targets, entries, 4] where each row's, each tile's adapter lies, and the rank of its B.
        a_rows, a_tiles: the same with the columns of A that this shard has; rows and tiles, if it has them all.
        slots: [rows] adapter slot of every row, whoever computes it.
        a_page_rank: [adapter_slots, targets] as in AdapterTables.
        extents: [tiles, 2] first row and rows of each tile.
        counts: [2] the tiles with several rows, the tiles in use.
        page_table: [adapter_slots, table].
        t_columns: columns of t for each target; a_columns: of the part of t that one shard computes.
        targets: those that some adapter may have; a group without any is left out.
    """

    plan: LoraPlan
    rows: Array
    tiles: Array
    extents: Array
    counts: Array
    page_table: Array
    t_columns: int
    a_columns: int
    a_rows: Array
    a_tiles: Array
    slots: Array
    a_page_rank: Array
    targets: frozenset[int]

    def entries(self, kernels: str, layer: int, targets: slice, of_a: bool = False) -> tuple[Array, ...]:
        """What says to mbgmv, mbgmm or lora kernels who serves what in a layer, in the order of their arguments."""
        rows, tiles = (self.a_rows, self.a_tiles) if of_a else (self.rows, self.tiles)
        if kernels == "mbgmv":
            return (rows[layer, targets],)
        of_tiles = tiles[layer, targets], self.extents
        return of_tiles if kernels == "mbgmm" else (*of_tiles, self.counts)


@dataclass(frozen=True)
class AttentionStep(Spans):
    """Spans, and what all attention launches of their step share: the plan's arrays on the device."""

    plan: AttentionPlan
    queries: Array
    tiles: Array
    sequence_pages: Array


class KernelBackend(ABC):
    """Launches kernels, the fastest rung of each operation's ladder unless told otherwise.

    Args:
        dtype: of storage.
        rungs: the kernel to use for an operation, where it is not the fastest.

    Attributes:
        overlaps: whether messages have a branch of their own.
    """

    overlaps = False

    def __init__(self, dtype: Any, rungs: Mapping[str, str] | None = None) -> None:
        self.dtype = np.dtype(dtype)
        self.rungs = dict(rungs or {})
        self._tape: Tape | None = None
        self._branch: Literal["none", "due", "begun"] = "none"
        self._last = ""  # operation launched, or part of what was done else

    @abstractmethod
    def prepare(self, launch: Launch) -> Work:
        """What runs a kernel, as often as it is called.

        Raises:
            KernelError: an argument does not fit; the message names it.
        """

    @abstractmethod
    def graph(self, tape: Tape) -> Graph:
        """The work of a tape that has run before, to be started by one call."""

    @abstractmethod
    def empty(self, name: str, shape: tuple[int, ...], dtype: Any) -> Array:
        """An array for the result `name`; its numbers are unspecified."""

    @abstractmethod
    def put(self, name: str, array: Array, dtype: Any) -> Array:
        """`array` on the device, of this dtype and contiguous; itself where it is that already."""

    @abstractmethod
    def new(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """An array on the device that stays where it is; zeros."""

    @abstractmethod
    def staging(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """A NumPy array from which, and to which, the device copies without stopping the host."""

    @abstractmethod
    def readable(self, array: Array) -> Array:
        """A NumPy array where the device can read it; itself, if it lies there."""

    @abstractmethod
    def upload(self, to: Array, staged: Array) -> Ticket:
        """Starts a copy to the device; `staged` must keep its numbers until that is done."""

    @abstractmethod
    def write(self, to: Array, array: Array) -> None:
        """Copies any NumPy array to the device, in order with all else; `array` may change at once."""

    @abstractmethod
    def fetch(self, array: Array) -> Array:
        """A NumPy array of any array of the device; waits for it."""

    @abstractmethod
    def download(self, to: Array, array: Array) -> Ticket:
        """Starts a copy from the device into an array of `staging`, which has the numbers when that is done."""

    @abstractmethod
    def use(self) -> None:
        """What this thread starts from here on goes to this backend, whichever it has worked with before."""

    @abstractmethod
    def settle(self) -> None:
        """Waits for what has been started where work goes now."""

    @abstractmethod
    def in_branch(self) -> AbstractContextManager[None]:
        """What is prepared within goes to the branch."""

    @abstractmethod
    def begin_branch(self) -> None:
        """The branch waits for all that has been done so far."""

    @abstractmethod
    def end_branch(self) -> None:
        """What is done from here on waits for the branch."""

    @abstractmethod
    def from_here(self, work: Work) -> Work:
        """The same work, which goes where work goes now, in or beside a branch, whenever it is done."""

    @abstractmethod
    def beside(self) -> AbstractContextManager[Ticket]:
        """Work within goes beside the steps to come, and after all that was started before."""

    # --- branches ---

    def with_message(self, product: Callable[[], Product], message: Callable[[], Message]) -> tuple[Product, Message]:
        """A product, and a message: in a branch beside it, or behind it. Then what reads both comes next, and may start
        early, which a branch does not allow."""
        if not self.overlaps:
            return product(), message()
        with self.branch():
            received = message()
        made = product()
        self.join()
        return made, received

    @contextmanager
    def branch(self) -> Iterator[None]:
        """What is done within may run beside what is done after it, up to `join`; it waits for all that came before.

        If nothing is done within, there is no branch: to wait for an empty one costs a graph as much.
        """
        self._branch = "due"
        with self.in_branch():
            yield
        if self._branch == "due":
            self._branch = "none"

    def join(self) -> None:
        """What is done from here on waits for the branch."""
        if self._branch == "begun":
            self._branch = "none"
            self.do("branch", self.end_branch)

    # --- doing and keeping ---

    def do(self, part: Part, work: Work) -> None:
        """Does a piece of a step's work, and keeps it if somebody records."""
        if self._branch == "due":
            self._branch = "begun"
            self.do("branch", self.begin_branch)
        if self._tape is not None:
            self._tape.work.append((part, work))
        self._last = part
        work()

    def note(self, note: Work) -> None:
        """Has the host write something down, and again whenever the work is done of which somebody records it."""
        if self._tape is not None:
            self._tape.notes.append(note)
        note()

    @contextmanager
    def recording(self) -> Iterator[Tape]:
        """Keeps the work that is done within."""
        assert self._tape is None, "a recording within a recording"
        self._tape = tape = Tape()
        try:
            yield tape
        finally:
            self._tape = None

    def run(self, operation: str, arguments: Arguments, dtype: Any = None, part: Part | None = None) -> None:
        """Launches the chosen rung of an operation, compiled for `dtype`, or for the storage's.

        Args:
            part: of the step's time; None: the operation's own.
        """
        kind = self.dtype if dtype is None else np.dtype(dtype)
        kernel = self.rungs.get(operation) or fastest(operation, kind, arguments)
        assert operation_of(kernel) == operation, f"{kernel} is no rung of {operation}"
        launch = make_launch(kernel, kind, arguments)
        if launch.after_start and (self._branch == "due" or self._last in ALONE):
            launch = replace(launch, after_start=False)
        self.do(part or part_of(operation), self.prepare(launch))
        self._last = operation
