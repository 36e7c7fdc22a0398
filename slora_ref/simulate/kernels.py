"""What adapters cost in a step: the original's kernels, this project's, and those of the baselines.

For decode, and for prefill in most cases, the authors' system runs BGMV: every row reads its adapter. Its tiled kernel
(MBGMM), in which every sequence reads it once, runs only where a prompt of 200 tokens, a rank of 64 and two requests
meet.
"""

from __future__ import annotations

from slora_ref.config import ModelConfig
from slora_ref.request import BASE_MODEL
from slora_ref.simulate.datasheet import ADAPTED, FP16, GPU
from slora_ref.simulate.roofline import Constants, StepShape

TILED_PROMPT, TILED_RANK, TILED_REQUESTS = 200, 64, 2


def distinct_bytes(shape: StepShape) -> int:
    """Bytes of the step's adapters, each once."""
    return sum({item.adapter: item.nbytes for item in shape.lora}.values())


class OriginalKernels:
    """BGMV and the Triton MBGMM of the original, 8 launches a layer from Python.

    A block of BGMV works on 1024 / R outputs of a row, R the largest rank of the batch, and lanes above the row's own
    rank idle: so a row costs as much as the largest adapter. What is read again comes from the L2 cache; every adapter
    comes from memory at least once.

    Attributes:
        always: whether they cost something where no adapter is registered, too.
    """

    always = False

    def __init__(self, model: ModelConfig) -> None:
        self.model = model

    def lora_seconds(self, shape: StepShape, gpu: GPU, constants: Constants) -> float:
        """Each row reads an adapter of the largest rank; in the tiled kernel, each sequence does."""
        return _seconds(shape, len(shape.lora) if _is_tiled(shape) else _rows(shape), gpu, constants)

    def host_seconds(self, shape: StepShape, constants: Constants) -> float:
        """The launches, whoever runs."""
        return self.model.num_layers * constants.lora_layer


class SegmentKernels(OriginalKernels):
    """This project's: rows of one adapter are a segment that reads it once; launched as the original's."""

    def lora_seconds(self, shape: StepShape, gpu: GPU, constants: Constants) -> float:
        """Each distinct adapter is read once."""
        return distinct_bytes(shape) / (constants.bandwidth * gpu.bandwidth)


class TiledPrefillKernels(OriginalKernels):
    """The paper's text: prefill always runs the tiled kernel, decode reads the adapter anew for every row."""

    def lora_seconds(self, shape: StepShape, gpu: GPU, constants: Constants) -> float:
        """Each sequence reads its adapter once."""
        return _seconds(shape, len(shape.lora), gpu, constants)


class PaddedKernels(OriginalKernels):
    """The bmm baseline: for each sequence the adapter is padded to the batch's largest rank and copied, at every step.

    The authors' code does it layer by layer from Python, so that it takes nearly as long for small ranks. With one
    adapter there is nothing to pad, and the copy is left out. It goes through the layers in every step, also where the
    base model alone is served: then that costs the host what launches cost it.
    """

    always = True

    def lora_seconds(self, shape: StepShape, gpu: GPU, constants: Constants) -> float:
        """The product itself reads what was copied."""
        largest = max((item.nbytes for item in shape.lora), default=0)
        return largest * len(shape.lora) / (constants.bandwidth * gpu.bandwidth)

    def host_seconds(self, shape: StepShape, constants: Constants) -> float:
        """Launches, and the copy."""
        launches = super().host_seconds(shape, constants)
        if not shape.lora:
            return launches
        launches += constants.padded_layer * self.model.num_layers
        if len({item.adapter for item in shape.lora}) < 2:
            return launches
        return launches + constants.padded_copy * len(shape.lora) * self.model.num_layers * self.model.hidden_size


class MergedKernels(OriginalKernels):
    """Weights with one adapter merged in: nothing to add in a step, but to change the adapter all are read and written
    twice, once to take the old one out and once to put the new one in.
    """

    def __init__(self, model: ModelConfig) -> None:
        super().__init__(model)
        shapes = [model.target_shape(target) for target in ADAPTED]
        self._weights = FP16 * model.num_layers * sum(d_in * d_out for d_in, d_out in shapes)
        self._merged = BASE_MODEL

    def lora_seconds(self, shape: StepShape, gpu: GPU, constants: Constants) -> float:
        """The change, if this step is another adapter's."""
        adapter = shape.lora[0].adapter if shape.lora else BASE_MODEL
        changed, self._merged = adapter != self._merged, adapter
        return 4 * self._weights / (constants.bandwidth * gpu.bandwidth) if changed else 0.0

    def host_seconds(self, shape: StepShape, constants: Constants) -> float:
        """None."""
        return 0.0


def _is_tiled(shape: StepShape) -> bool:
    """Whether the original runs its tiled kernel."""
    return (
        len(shape.lora) >= TILED_REQUESTS
        and max([item.rows for item in shape.lora]) >= TILED_PROMPT
        and max([item.rank for item in shape.lora]) >= TILED_RANK
    )


def _rows(shape: StepShape) -> int:
    return sum([item.rows for item in shape.lora])


def _seconds(shape: StepShape, readers: int, gpu: GPU, constants: Constants) -> float:
    """Time until so many readers have each read the largest adapter of the step."""
    if not shape.lora:
        return 0.0
    from_cache = readers * max([item.nbytes for item in shape.lora]) / (constants.lora_reads * gpu.cache)
    return max(from_cache, distinct_bytes(shape) / (constants.bandwidth * gpu.bandwidth))
