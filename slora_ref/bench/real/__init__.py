"""`paper WHAT --device`: points of the paper's figures run for real, with every baseline, beside the simulator."""

from slora_ref.bench.real.points import EXPERIMENTS
from slora_ref.bench.real.rows import run_points
from slora_ref.bench.real.scale import SCALES, Scale

__all__ = ["EXPERIMENTS", "SCALES", "Scale", "run_points"]
