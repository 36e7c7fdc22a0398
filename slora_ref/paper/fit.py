"""Fits the simulator's constants: `python -m slora_ref.paper.fit` writes constants.json.

Six constants of one GPU, on exactly five runs (points.FITTED_RUNS) and two numbers of each: the throughput, and the
latency or the first token. A misfit of 1 % in throughput weighs as much as one of 10 % in latency, or of 30 % in the
first token of the run with little load: there the client's and the server's HTTP count too, and are not modelled. The
minimiser is Levenberg and Marquardt's, in the logarithms, with derivatives from differences. Then two constants of the
bmm baseline, and two of collectives between GPUs, each pair on two runs of its own.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from collections.abc import Sequence as Seq
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace

import numpy as np

from slora_ref.metrics import Service
from slora_ref.paper.constants import fitted_constants, how_fitted, write_constants
from slora_ref.paper.experiments import fig5, fig6, fig8
from slora_ref.paper.play import play
from slora_ref.paper.points import FITTED_RUNS, FITTED_SHARDS, Point
from slora_ref.paper.run import Run
from slora_ref.shapes import Array, Float
from slora_ref.simulate.roofline import Constants

NAMES = ("bandwidth", "flops", "lora_reads", "layer", "lora_layer", "sequence")
START = Constants(
    bandwidth=0.7,
    flops=0.5,
    lora_reads=0.15,
    layer=1.2e-3,
    lora_layer=1e-4,
    sequence=8e-5,
    padded_layer=1e-3,
    padded_copy=1e-7,
    collective=1e-4,
    collective_bandwidth=5e10,
)
WEIGHTS = {"throughput": 0.01, "latency": 0.1, "first_token": 0.3}
STEP = 0.04
ROUNDS = 5
"""Rounds of the minimiser; the last ones change little."""
HALVINGS, TURNS = 12, 3
"""Of a bisection; and of two that depend on each other."""

PADDED_RUNS = {
    "padded_layer": Run(setting="S4", gpu="a100-80", adapters=1, rate=6.0, system="bmm"),
    "padded_copy": Run(setting="S2", gpu="a100-80", adapters=200, rate=10.0, system="bmm"),
}
"""What each constant of the bmm baseline is fitted on."""


def targets() -> list[tuple[Run, str, float]]:
    """What is fitted: run, metric, the authors' number."""
    points = {point.run: point for point in [*fig6(), *fig5()]}  # where a run is in both, fig5's latency counts
    return [(run, metric, points[run].theirs[metric]) for run in FITTED_RUNS for metric in _metrics(points[run])]


def _metrics(point: Point) -> list[str]:
    return ["throughput", "latency" if "latency" in point.theirs else "first_token"]


def misfit(services: dict[Run, Service]) -> Float[Array, " targets"]:
    """[targets] how far each number is from the authors', in units of its weight."""
    return np.array(
        [np.log(getattr(services[run], metric) / theirs) / WEIGHTS[metric] for run, metric, theirs in targets()]
    )


def constants_of(logs: Float[Array, " constants"]) -> Constants:
    """The constants whose logarithms these are; efficiencies end at 1."""
    values = dict(zip(NAMES, np.exp(logs).tolist(), strict=True))
    return replace(START, **{name: min(value, 1.0) for name, value in values.items()})


def all_misfits(
    trials: Seq[Float[Array, " constants"]], pool: ProcessPoolExecutor
) -> list[Float[Array, " targets"]]:
    """The misfit of each set of constants."""
    jobs = [(run, constants_of(logs)) for logs in trials for run in FITTED_RUNS]
    played = list(pool.map(play, *zip(*jobs, strict=True)))
    size = len(FITTED_RUNS)
    return [
        misfit(dict(zip(FITTED_RUNS, played[first : first + size], strict=True)))
        for first in range(0, len(played), size)
    ]


def fit(start: Constants, rounds: int, pool: ProcessPoolExecutor) -> tuple[Constants, Float[Array, " targets"]]:
    """Minimises the sum of squares of the misfit."""
    logs = np.log([getattr(start, name) for name in NAMES])
    (best,) = all_misfits([logs], pool)
    damping = 0.01
    for number in range(rounds):
        moved = [logs + STEP * row for row in np.eye(len(NAMES))]
        slopes = np.stack([(there - best) / STEP for there in all_misfits(moved, pool)], axis=1)
        squares = slopes.T @ slopes
        dampings = [damping * 6.0**k for k in range(-1, 3)]
        trials = [
            logs - np.clip(np.linalg.solve(squares + d * np.diag(np.diag(squares) + 1e-9), slopes.T @ best), -0.5, 0.5)
            for d in dampings
        ]
        found = all_misfits(trials, pool)
        costs = [float(there @ there) for there in found]
        least = int(np.argmin(costs))
        if costs[least] >= float(best @ best):
            damping *= 36
            continue
        logs, best, damping = trials[least], found[least], dampings[least]
        print(f"round {number + 1}: {float(best @ best):.2f}", constants_of(logs), flush=True)
    return constants_of(logs), best


def fit_padded(constants: Constants) -> Constants:
    """The two constants of the bmm baseline, each on one of its runs, by bisection: throughput falls with both."""
    points = {replace(point.run, pool_tokens=None): point for point in fig5()}
    for name, run in PADDED_RUNS.items():
        point = points[run]

        def too_fast(tried: Constants, point: Point = point) -> bool:
            return play(point.run, tried).throughput > point.theirs["throughput"]

        constants = bisected(constants, name, (1e-10, 1e-2), too_fast)
    return constants


def fit_collectives(constants: Constants) -> Constants:
    """The two constants of tensor parallelism, in turn: the bandwidth on the throughput without the adapters' messages,
    the latency on how much of it these messages leave.
    """
    theirs = {point.run: point.theirs["throughput"] for point in fig8()}
    full, silent = FITTED_SHARDS

    def too_slow(tried: Constants) -> bool:
        return play(silent, tried).throughput < theirs[silent]

    def loses_too_little(tried: Constants) -> bool:
        return play(full, tried).throughput / play(silent, tried).throughput > theirs[full] / theirs[silent]

    for _ in range(TURNS):
        constants = bisected(constants, "collective", (1e-6, 1e-2), loses_too_little)
        constants = bisected(constants, "collective_bandwidth", (1e9, 1e12), too_slow)
    return constants


def bisected(
    constants: Constants, name: str, bounds: tuple[float, float], too_small: Callable[[Constants], bool]
) -> Constants:
    """One constant, between bounds, in the logarithm."""
    low, high = np.log(bounds)
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        if too_small(replace(constants, **{name: float(np.exp(middle))})):
            low = middle
        else:
            high = middle
    return replace(constants, **{name: float(np.exp((low + high) / 2))})


ONE_BY_ONE = {"--bmm": fit_padded, "--collectives": fit_collectives}


def main() -> int:
    """Fits and writes; with --bmm or --collectives only the constants of these, and the others stay."""
    for option, refit in ONE_BY_ONE.items():
        if option in sys.argv[1:]:
            write_constants(refit(fitted_constants()), how_fitted())
            return 0
    with ProcessPoolExecutor() as pool:
        constants, rest = fit(START, ROUNDS, pool)
    named = zip(targets(), rest.tolist(), strict=True)
    about: dict[str, object] = {
        "command": "python -m slora_ref.paper.fit",
        "start": asdict(START),
        "misfit": [[_name(run), metric, theirs, off * WEIGHTS[metric]] for (run, metric, theirs), off in named],
    }
    write_constants(fit_collectives(fit_padded(constants)), about)
    return 0


def _name(run: Run) -> str:
    return f"{run.setting} {run.gpu} n={run.adapters} R={run.rate:g} {run.system}"


if __name__ == "__main__":
    sys.exit(main())
