"""Run: one run of an experiment, named by its parameters alone, so that runs can be shared, sent to a process and kept.

What the parameters mean is the paper's Table 2. It knows neither constants nor how a system is built.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from slora_ref.workload import Arrival, SyntheticTrace, arena_trace, original_trace, paper_trace

Variant = Literal["original", "paper", "ours"]
VARIANTS: tuple[Variant, ...] = ("original", "paper", "ours")


@dataclass(frozen=True, kw_only=True)
class Run:
    """One system serving one trace.

    Args:
        setting, gpu: keys of SETTINGS and GPUS.
        adapters: n; 0 is the base model alone.
        rate, duration, alpha, cv, prompt, output: of the trace (R, D, alpha, cv, [Il, Iu), [Ol, Ou)).
        system: slora, or a baseline: no-unify, bmm, merge, peft, packed; or slora without a part of its work:
            no-lora-messages.
        policy: fcfs, lcfs, abort, clusters.
        clusters: d.
        pool_tokens: where it is not the setting's own.
        shards: GPUs that the model is split over.
        trace: synthetic, or the stand-in for the arena's.
        variant: whose options: the authors' code, their paper's text, or this engine's own.
    """

    setting: str
    gpu: str
    adapters: int
    rate: float
    duration: float = 300.0
    alpha: float = 1.0
    cv: float = 1.0
    prompt: tuple[int, int] = (8, 512)
    output: tuple[int, int] = (8, 512)
    system: str = "slora"
    policy: str = "fcfs"
    clusters: int = 0
    pool_tokens: int | None = None
    shards: int = 1
    trace: Literal["synthetic", "arena"] = "synthetic"
    variant: Variant = "original"

    def arrivals(self) -> list[Arrival]:
        """The run's trace; the paper's variant has the paper's reading of it."""
        if self.trace == "arena":
            return arena_trace(self.rate, self.duration)
        spec = SyntheticTrace(
            adapters=self.adapters,
            rate=self.rate,
            alpha=self.alpha,
            cv=self.cv,
            duration=self.duration,
            prompt=self.prompt,
            output=self.output,
        )
        return paper_trace(spec) if self.variant == "paper" else original_trace(spec)
