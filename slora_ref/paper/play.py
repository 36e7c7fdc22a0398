"""Plays runs, each once, on as many processes as there are cores; and sets the results beside the authors' numbers."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial

from slora_ref.metrics import RequestRecord, Service, summarize
from slora_ref.paper.constants import fitted_constants
from slora_ref.paper.packed import play_packed
from slora_ref.paper.points import Point, null_model
from slora_ref.paper.run import Run
from slora_ref.paper.systems import system_of
from slora_ref.simulate.roofline import Constants

Done = Callable[[int, int], None]


def records_of(run: Run, constants: Constants) -> list[RequestRecord]:
    """What became of each request of the run's trace."""
    if run.system == "packed":
        return play_packed(run, constants)
    return system_of(run, constants).build().play(run.arrivals())


def play(run: Run, constants: Constants) -> Service:
    """The numbers of one run."""
    return summarize(records_of(run, constants))


def play_all(
    runs: Iterable[Run], constants: Constants | None = None, done: Done | None = None, jobs: int | None = None
) -> dict[Run, Service]:
    """The numbers of all runs.

    Args:
        constants: the committed ones unless given.
        done: told after each run how many of how many are done.
        jobs: processes; None: one a core.
    """
    each = list(dict.fromkeys(runs))
    played: dict[Run, Service] = {}
    one = partial(play, constants=constants or fitted_constants())
    workers = min(jobs or os.cpu_count() or 1, max(1, len(each)))
    if workers == 1:
        services: Iterable[Service] = map(one, each)
        return _collect(each, services, played, done)
    with ProcessPoolExecutor(workers) as pool:
        return _collect(each, pool.map(one, each), played, done)


def _collect(
    runs: Seq[Run], services: Iterable[Service], played: dict[Run, Service], done: Done | None
) -> dict[Run, Service]:
    for run, service in zip(runs, services, strict=True):
        played[run] = service
        if done is not None:
            done(len(played), len(runs))
    return played


@dataclass(frozen=True, kw_only=True)
class Row:
    """One number of ours beside one of theirs.

    Args:
        ours: None where no request was served.
        rel_error: ours / theirs - 1; None where theirs is 0, or another variant's options were asked for.
    """

    point: str
    variant: str
    metric: str
    ours: float | None
    theirs: float
    null_model: float | None
    rel_error: float | None
    fitted: bool


def compare(points: Iterable[Point], played: dict[Run, Service]) -> list[Row]:
    """A row for each number that the authors measured."""
    return [
        _row(point, metric, theirs, played[point.run])
        for point in points
        for metric, theirs in point.theirs.items()
    ]


def _row(point: Point, metric: str, theirs: float, service: Service) -> Row:
    ours = getattr(service, metric)
    comparable = ours is not None and theirs != 0 and point.run.variant == "original"
    return Row(
        point=point.name,
        variant=point.run.variant,
        metric=metric,
        ours=ours,
        theirs=theirs,
        null_model=null_model(point.run, metric),
        rel_error=ours / theirs - 1 if comparable else None,
        fitted=point.fitted,
    )
