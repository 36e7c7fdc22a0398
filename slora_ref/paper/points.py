"""Point: one run of an experiment with what the authors measured in it, and what a null model would say.

The null model knows nothing but the offered rate and, read off the data, four capacities: a simulator that is not much
better explains nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from slora_ref.paper.run import Run, Variant
from slora_ref.paper.theirs import number, table
from slora_ref.simulate.datasheet import SETTINGS

CAPACITY = {
    ("llama-7b", "a10g"): "fig5_s2_a10g",
    ("llama-13b", "a100-40"): "fig5_s4_a100_40",
    ("llama-7b", "a100-80"): "fig5_s2_a100_80",
    ("llama-13b", "a100-80"): "fig5_s4_a100_80",
}
"""Where the null model reads a capacity: the last row, with the most adapters."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """One point of a figure or cell of a table.

    Args:
        name: as in the results.
        run: what the simulator plays.
        theirs: what the authors measured, by the names of Service's fields.
        note: why it says little, where it does.
    """

    name: str
    run: Run
    theirs: Mapping[str, float] = field(hash=False)
    note: str = ""

    @property
    def fitted(self) -> bool:
        """Whether the constants were fitted on this run."""
        return self.run in FITTED_RUNS or self.run in FITTED_SHARDS

    def as_variant(self, variant: Variant) -> Point:
        """The same point with another variant's options."""
        return replace(self, run=replace(self.run, variant=variant))


def null_model(run: Run, metric: str) -> float | None:
    """min(offered rate, capacity), for the throughput of S-LoRA; the null model says nothing else."""
    source = CAPACITY.get((SETTINGS[run.setting].model, run.gpu))
    if metric != "throughput" or run.system != "slora" or run.trace != "synthetic" or source is None:
        return None
    capacity = number(table(source)[-1]["S-LoRA thr"])
    assert capacity is not None, source
    return min(run.rate, capacity)


FITTED_RUNS = (
    Run(setting="S4", gpu="a100-80", adapters=400, rate=1.0),
    Run(setting="S2", gpu="a10g", adapters=200, rate=2.0),
    Run(setting="S4", gpu="a100-40", adapters=0, rate=2.0),
    Run(setting="S4", gpu="a100-80", adapters=0, rate=6.0),
    Run(setting="S2", gpu="a100-80", adapters=200, rate=10.0),
)
"""The five runs that the constants are fitted on; they are left out of all statistics."""

_FOUR_GPUS = Run(setting="S5", gpu="a100-40", adapters=10, rate=10.0, duration=120.0, shards=4)
FITTED_SHARDS = (_FOUR_GPUS, replace(_FOUR_GPUS, system="no-lora-messages"))
"""The two runs that the constants of collectives are fitted on: one row of fig8, whose third run is left to be said."""


def measured(cells: Mapping[str, str]) -> dict[str, float]:
    """The metrics whose cells hold a number."""
    values = {metric: number(cell) for metric, cell in cells.items()}
    return {metric: value for metric, value in values.items() if value is not None}
