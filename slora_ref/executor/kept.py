"""KeptSteps: the launches of steps, kept by shape and repeated. For speed alone: a step comes out the same without.

Preparing launches costs the host several times what starting them does, so they are kept as tapes (ops/tape.py); and
where even starting them one by one takes longer than a GPU needs to run them, as in a step of nothing but decode, they
are captured as a graph, which is one call. It knows shapes and launches, but no batches and no model.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from slora_ref.executor.counts import PreparationCounts
from slora_ref.ops import KernelOps
from slora_ref.ops.tape import Tape, Work

Result = TypeVar("Result")

MOST_TAPES = 128  # one of a 7B model takes half a megabyte of host memory
MOST_GRAPHS = 96  # two for each bucket of up to 512 rows: with LoRA kernels and without


@dataclass(frozen=True)
class Kept(Generic[Result]):
    """Launches that have run.

    Args:
        tape: the launches.
        again: starts them again.
        result: the arrays in which they leave what they compute; the same every time.
        behind: launches that read this result, by their shape.
    """

    tape: Tape
    again: Work
    result: Result
    behind: Shelf = field(default_factory=OrderedDict)


Shelf = OrderedDict[Hashable, Kept[Any]]  # the one that was used last is at the end


class KeptSteps:
    """Tapes and graphs, of which those that were used last stay.

    Args:
        ops: the backend that launches.
        keep: False: nothing is kept, every step prepares its own launches.
        capture: False: nothing is captured (vLLM: enforce_eager).

    Attributes:
        counts: what was prepared and captured so far.
    """

    def __init__(self, ops: KernelOps, keep: bool = True, capture: bool = True) -> None:
        self._ops, self._keep, self._capture = ops, keep, capture
        self._valid_for: Hashable = None
        self.tapes: Shelf = OrderedDict()
        self.graphs: Shelf = OrderedDict()
        self.counts = PreparationCounts()

    def valid_for(self, tables: Hashable) -> None:
        """Forgets all that was kept if these are other tables than before: then launches have other arguments."""
        if tables != self._valid_for:
            self.tapes.clear()
            self.graphs.clear()
            self._valid_for = tables

    def do(
        self, shape: Hashable, launch: Callable[[], Result], after: Kept[Any] | None = None
    ) -> Kept[Result]:
        """Repeats the launches of a shape; those that come for the first time are made by `launch`.

        Args:
            after: what they read the result of; without it they are of no use.
        """
        shelf = self.tapes if after is None else after.behind
        kept = _used(shelf, shape)
        if kept is not None:
            kept.again()
            return kept
        with self.counts.tape(), self._ops.recording() as tape:
            kept = Kept(tape, tape.replay, launch())
        if self._keep:
            _keep(shelf, shape, kept, MOST_TAPES)
        return kept

    def do_at_once(self, first: Hashable, second: Hashable) -> Kept[Any] | None:
        """Repeats the launches of one shape and those behind them of another, as a graph.

        Returns:
            The whole, with the second's result; None: nothing was done, since they have not both run before.
        """
        whole = _used(self.graphs, (first, second))
        if whole is None:
            before = self.tapes.get(first)
            after = before and before.behind.get(second)
            if not self._capture or before is None or after is None:
                return None
            with self.counts.graph():
                graph = self._ops.graph(before.tape.then(after.tape))
            whole = Kept(graph.tape, graph.launch, after.result)
            _keep(self.graphs, (first, second), whole, MOST_GRAPHS)
        whole.again()
        return whole


def _used(shelf: Shelf, shape: Hashable) -> Kept[Any] | None:
    """What is kept for a shape, which is now the one used last."""
    if shape not in shelf:
        return None
    shelf.move_to_end(shape)
    return shelf[shape]


def _keep(shelf: Shelf, shape: Hashable, new: Kept[Any], most: int) -> None:
    """Keeps one more; beyond `most` the one that was used longest ago goes."""
    shelf[shape] = new
    if len(shelf) > most:
        shelf.popitem(last=False)
