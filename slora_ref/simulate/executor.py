"""RooflineExecutor: an executor that computes nothing and lets the time of a step pass."""

from __future__ import annotations

import numpy as np

from slora_ref.batch import Batch
from slora_ref.clock import SimulatedClock
from slora_ref.executor import StepResult
from slora_ref.pager import PagePool
from slora_ref.sampler import Sampling
from slora_ref.simulate.datasheet import FP16
from slora_ref.simulate.roofline import LoraRows, Roofline, StepShape


class RooflineExecutor:
    """Takes the place of ModelExecutor: the batch is the real one, the tokens are all 0, the clock is moved on.

    Args:
        roofline: says how long a step takes.
        pool: the engine's, for the ranks of resident adapters.
    """

    def __init__(self, roofline: Roofline, pool: PagePool, clock: SimulatedClock) -> None:
        self.roofline, self.pool, self.clock = roofline, pool, clock

    def start(self, batch: Batch, sampling: Sampling) -> StepResult:
        """Passes the time of one step."""
        self.spend(self._shape(batch))
        samples = len(batch.sampled)
        return StepResult(
            np.zeros(samples, np.int64), np.ones(samples, np.bool_), np.zeros((len(batch.logit_rows), 1), np.float32)
        )

    def spend(self, shape: StepShape) -> None:
        """Passes the time of a step of this shape."""
        self.clock.advance(self.roofline.seconds(shape))

    def lora_rows(self, adapter: int, rows: int, page_ranks: list[int]) -> LoraRows:
        """The rows of one sequence, with what its adapter weighs."""
        layout = self.pool.layout
        pages = layout.adapter_pages(np.asarray(page_ranks, np.int32))
        return LoraRows(adapter, rows, max(page_ranks), pages * layout.page_bytes(FP16))

    def _shape(self, batch: Batch) -> StepShape:
        segments, spans = batch.segments, batch.spans
        slots = np.repeat(segments.adapter, segments.length)[spans.start]
        ranks = self.pool.adapters.page_rank
        lora = [
            self.lora_rows(slot, rows, ranks[slot].tolist())
            for slot, rows in zip(slots.tolist(), spans.length.tolist(), strict=True)
            if slot >= 0
        ]
        return StepShape(len(batch.token_ids), len(slots), int(spans.context.sum()), lora)
