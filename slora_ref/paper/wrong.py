"""Three simulators that are wrong on purpose: what the bars are worth is what they refuse.

`python -m slora_ref.paper.wrong` plays all points of fig5, fig6 and table3 in the right simulator and in these, without
fitting anything anew, and writes what came out. The right one must pass the bars, and each wrong one fail.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from collections.abc import Sequence as Seq
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any

from slora_ref.metrics import Service, summarize
from slora_ref.paper.bars import closeness
from slora_ref.paper.constants import fitted_constants
from slora_ref.paper.experiments import fig5, fig6, table3
from slora_ref.paper.play import compare
from slora_ref.paper.points import Point
from slora_ref.paper.run import Run
from slora_ref.paper.systems import system_of
from slora_ref.request import Sequence
from slora_ref.scheduler import Forecast
from slora_ref.simulate.replay import Replay
from slora_ref.simulate.system import System

FILE = "wrong_simulators.json"
FIXED = (
    "S1 a10g n=20 R=2 slora",
    "S2 a10g n=1 R=2 slora",
    "S4 a100-40 n=50 R=2 slora",
    "S2 a10g n=200 R=1.5 slora",
    "S4 a100-80 n=400 R=2 slora",
    "S2 a100-80 n=5 slora",
)
"""The points that are replayed in every test run."""


class SumForecast(Forecast):
    """Admission by the sum of all full lengths, as if all requests ended at the same moment."""

    def fits(self, sequences: Seq[Sequence], claims: Seq[Sequence], tokens: int) -> bool:
        """Whether the sum fits."""
        return sum(sequence.peak_tokens for sequence in [*sequences, *claims]) <= tokens


def _right(system: System) -> Replay:
    return system.build()


def _joining_every_step(system: System) -> Replay:
    return replace(system, config=replace(system.config, join_every=1)).build()


def _admitting_by_the_sum(system: System) -> Replay:
    replay = system.build()
    replay.scheduler.forecast = SumForecast(system.config)
    return replay


def _not_counting_adapters(system: System) -> Replay:
    return replace(system, adapters_in_pool=False).build()


SIMULATORS: dict[str, Callable[[System], Replay]] = {
    "right": _right,
    "join every step": _joining_every_step,
    "admission by the sum of input and output": _admitting_by_the_sum,
    "adapters not counted": _not_counting_adapters,
}


def own_points() -> list[Point]:
    """S-LoRA's points of fig5, fig6 and table3."""
    return [point for point in [*fig5(), *fig6(), *table3()] if point.run.system == "slora"]


def play_in(name: str, run: Run) -> Service:
    """The numbers of one run in one of the simulators."""
    return summarize(SIMULATORS[name](system_of(run, fitted_constants())).play(run.arrivals()))


def committed() -> dict[str, Any]:
    """What the last whole comparison wrote."""
    path = resources.files("slora_ref.paper") / "results" / FILE
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def main() -> int:
    """Plays everything; exit code 1 if the right simulator fails a bar or a wrong one passes them all."""
    points = own_points()
    runs = list(dict.fromkeys(point.run for point in points))
    result: dict[str, Any] = {"command": "python -m slora_ref.paper.wrong", "simulators": {}}
    as_expected = True
    with ProcessPoolExecutor() as pool:
        for name in SIMULATORS:
            played = dict(zip(runs, pool.map(partial(play_in, name), runs), strict=True))
            close = closeness(compare(points, played))
            as_expected &= close.passes == (name == "right")
            throughput = {point.name: played[point.run].throughput for point in points}
            result["simulators"][name] = {"passes": close.passes, **asdict(close), "throughput_of": throughput}
            print(f"{name}: {'passes' if close.passes else 'fails'}", close, flush=True)
    text = json.dumps(result, indent=1) + "\n"
    (Path(__file__).with_name("results") / FILE).write_text(text, encoding="utf-8")
    return 0 if as_expected else 1


if __name__ == "__main__":
    sys.exit(main())
