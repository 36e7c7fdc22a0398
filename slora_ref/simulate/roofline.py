"""How long a step takes on a GPU that is not there: the roofline of its bytes and its FLOPs, and the host beside it.

    seconds = max(launch, GPU) + t_sequence x sequences + collectives
    launch  = layers x (t_layer + t_lora where adapters are served)
    GPU     = max(weight bytes / bandwidth, FLOPs / peak) + key and value bytes / bandwidth + LoRA

with all rates at a fitted part of the data sheet's. The same form for prefill and decode, for every GPU and model. A
Kernels object says what LoRA costs, since that is where the systems differ, and a Messages object what shards send, if
there are several. It knows shapes, no requests.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

from slora_ref.config import TARGETS, ModelConfig
from slora_ref.simulate.datasheet import FP16, GPU


@dataclass(frozen=True)
class Constants:
    """What was fitted, one value for all GPUs, models and systems (see slora_ref/paper/fit.py).

    Args:
        bandwidth, flops: parts of the data sheet's rates that a step reaches; at most 1.
        lora_reads: part of the cache's rate at which LoRA kernels read weights again for every row; at most 1.
        layer, lora_layer: seconds of host work a layer, and more where adapters are served.
        sequence: seconds of host work a sequence of the step.
        padded_layer: of the bmm baseline alone: seconds more a layer where adapters are served.
        padded_copy: of the bmm baseline alone: seconds a sequence, layer and unit of hidden size that padding takes.
        collective, collective_bandwidth: of tensor parallelism alone: seconds a collective, and bytes a second of what
            a shard sends in it.
    """

    bandwidth: float
    flops: float
    lora_reads: float
    layer: float
    lora_layer: float
    sequence: float
    padded_layer: float
    padded_copy: float
    collective: float
    collective_bandwidth: float

    def __post_init__(self) -> None:
        """Nothing is faster than its data sheet, and nothing takes negative time."""
        assert all(0 < part <= 1 for part in (self.bandwidth, self.flops, self.lora_reads)), self
        assert min(self.layer, self.lora_layer, self.sequence, self.collective) >= 0, self


@dataclass(frozen=True, slots=True)
class LoraRows:
    """Neighbouring rows of one sequence that use an adapter.

    Args:
        adapter: its id.
        rows: how many.
        rank: of the adapter, the largest of its targets.
        nbytes: of its weights, over all layers.
    """

    adapter: int
    rows: int
    rank: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class StepShape:
    """What of a step costs time.

    Args:
        rows: tokens computed.
        sequences: how many they belong to.
        context: tokens whose keys and values are read, summed over sequences.
        lora: rows with adapters, one entry a sequence.
    """

    rows: int
    sequences: int
    context: int
    lora: Seq[LoraRows]


class Kernels(Protocol):
    """What serving adapters adds to a step; with `always`, also to one of an engine that has none."""

    always: bool

    def lora_seconds(self, shape: StepShape, gpu: GPU, constants: Constants) -> float:
        """Seconds on the GPU."""
        ...

    def host_seconds(self, shape: StepShape, constants: Constants) -> float:
        """Seconds of host work."""
        ...


class Messages(Protocol):
    """What shards send each other in a step."""

    def seconds(self, shape: StepShape, constants: Constants) -> float:
        """Seconds that it takes."""
        ...


class Roofline:
    """Times of one model on one GPU, or on several that share the work evenly.

    Args:
        gpu: several of them are one with the rates of all.
        kernels: what adapters cost; None: only the base model is served.
        messages: between the shards, if there are several.
    """

    def __init__(
        self,
        gpu: GPU,
        model: ModelConfig,
        constants: Constants,
        kernels: Kernels | None = None,
        messages: Messages | None = None,
    ) -> None:
        self.gpu, self.model, self.constants, self.kernels, self.messages = gpu, model, constants, kernels, messages
        self.weights = parameters(model)
        self.token_bytes = token_bytes(model)

    def seconds(self, shape: StepShape) -> float:
        """How long a step takes."""
        launch = self.model.num_layers * self.constants.layer
        if self.kernels is not None:
            launch += self.kernels.host_seconds(shape, self.constants)
        seconds = max(launch, self.gpu_seconds(shape)) + self.constants.sequence * shape.sequences
        return seconds if self.messages is None else seconds + self.messages.seconds(shape, self.constants)

    def gpu_seconds(self, shape: StepShape) -> float:
        """How long the GPU works on it."""
        constants, gpu = self.constants, self.gpu
        bandwidth = constants.bandwidth * gpu.bandwidth
        flops = 2.0 * self.weights * shape.rows
        dense = max(FP16 * self.weights / bandwidth, flops / (constants.flops * gpu.flops))
        seconds = dense + self.token_bytes * shape.context / bandwidth
        return seconds if self.kernels is None else seconds + self.kernels.lora_seconds(shape, gpu, constants)


def weight_bytes(model: ModelConfig) -> int:
    """Bytes of the model in device memory, in fp16: what a step reads, and the embedding."""
    return FP16 * (parameters(model) + model.vocab_size * model.hidden_size)


def token_bytes(model: ModelConfig) -> int:
    """Bytes of a token's keys and values, in fp16."""
    return 2 * FP16 * model.num_layers * model.kv_width


def parameters(model: ModelConfig) -> int:
    """Weights that every step reads: all projections and the head."""
    shapes = [model.target_shape(target) for target in TARGETS]
    return model.num_layers * sum(d_in * d_out for d_in, d_out in shapes) + model.vocab_size * model.hidden_size
