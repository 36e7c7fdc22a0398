"""The demo at scale: a model of billions of weights on a GPU, with thousands of synthetic adapters."""

from slora_ref.demo.scale.options import ScaleOptions
from slora_ref.demo.scale.report import ScaleReport
from slora_ref.demo.scale.run import run_scale_demo

__all__ = ["ScaleOptions", "ScaleReport", "run_scale_demo"]
