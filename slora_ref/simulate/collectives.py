"""What the shards of the original exchange in a step, and how long that takes (paper section 6, figure 8).

A collective takes a latency and its bytes. Nothing hides the latency: each shard is a process that starts the
collective from Python, and all wait for the last one. That, not the bytes, is what adapters cost here: four more
collectives a layer, which move 5 r / 2 h of what the base model's two do.
"""

from __future__ import annotations

from dataclasses import dataclass

from slora_ref.config import ModelConfig
from slora_ref.simulate.datasheet import FP16
from slora_ref.simulate.roofline import Constants, StepShape
from slora_ref.tp.split import all_reduce_elements, lora_elements


@dataclass(frozen=True)
class Collectives:
    """Of one model on N shards.

    Args:
        lora: whether adapters' small intermediates are sent, too; without, a model's results would be wrong.
        gathers: of q, k and v in each layer: three in the original, one where they are fused.
    """

    model: ModelConfig
    shards: int
    lora: bool
    gathers: int = 3

    def seconds(self, shape: StepShape, constants: Constants) -> float:
        """All collectives of a step, one after the other."""
        calls, elements = self._base(shape)
        if self.lora and shape.lora:
            more, small = self._adapters(shape)
            calls, elements = calls + more, elements + small
        return calls * constants.collective + FP16 * elements / constants.collective_bandwidth

    def _base(self, shape: StepShape) -> tuple[int, int]:
        """Collectives, and numbers that a shard sends: all-reduces of embedding, o and down, a gather of logits."""
        reduces = 1 + 2 * self.model.num_layers
        logits = (self.shards - 1) * shape.sequences * self.model.vocab_size // self.shards
        return reduces + 1, reduces * all_reduce_elements(shape.rows * self.model.hidden_size, self.shards) + logits

    def _adapters(self, shape: StepShape) -> tuple[int, int]:
        """Gathers of q, k and v, and o's all-reduce: for all rows, at the largest rank of the batch."""
        rank, layers = max([item.rank for item in shape.lora]), self.model.num_layers
        return (self.gathers + 1) * layers, layers * lora_elements(shape.rows, rank, self.shards)
