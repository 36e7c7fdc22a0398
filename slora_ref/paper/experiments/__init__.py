"""The experiments of the paper's evaluation, one small function each, and two that it lacks."""

from collections.abc import Callable

from slora_ref.paper.experiments.ablations import fig9, fig10, fig11, fig12
from slora_ref.paper.experiments.shards import fig8
from slora_ref.paper.experiments.throughput import fig5, fig6, fig7, table3, table4, table5
from slora_ref.paper.points import Point

EXPERIMENTS: dict[str, Callable[[], list[Point]]] = {
    "table3": table3,
    "table4": table4,
    "table5": table5,
    "fig5": fig5,
    "fig6": fig6,
    "fig7": fig7,
    "fig8": fig8,
    "fig9": fig9,
    "fig10": fig10,
    "fig11": fig11,
    "fig12": fig12,
}

__all__ = [
    "EXPERIMENTS",
    "fig5",
    "fig6",
    "fig7",
    "fig8",
    "fig9",
    "fig10",
    "fig11",
    "fig12",
    "table3",
    "table4",
    "table5",
]
