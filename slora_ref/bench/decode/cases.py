"""What `bench decode` measures, and the floors of its parts: pure arithmetic."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from slora_ref.bench.peft_baseline.process import check_peft
from slora_ref.config import ModelConfig
from slora_ref.config.presets import parameters, preset
from slora_ref.errors import ConfigError
from slora_ref.options import MOST, check_choice, check_whole
from slora_ref.synthetic import AdapterKind
from slora_ref.tp.split import all_reduce_elements, check_split

BYTES_PER_S = 4.05e12  # an H200's measured copy rate, as in the figures that the rows are compared with
LINK_BYTES_PER_S = 4.5e11  # NVLink 4 in each direction, the vendor's figure
HALF = 2  # bytes of a number
MODES = ("graph", "eager")


@dataclass(frozen=True, kw_only=True)
class DecodeOptions:
    """What can be told.

    Args:
        model: name of a shape.
        batches: requests that decode together.
        adapters: distinct adapters among them; those above the batch are left out.
        kind: of the adapters.
        prompt, output: tokens of every request; parts are timed in the middle of the output.
        dtype: of weights, activations and pool.
        shards: GPUs that the model is split over.
        overlap_lora: see EngineConfig.
        peft: whether transformers and PEFT decode the same batches, before the engine does.
        modes: "graph", as the engine decodes unless told otherwise, or "eager": see EngineConfig.enforce_eager.
    """

    model: str = "llama-7b"
    batches: tuple[int, ...] = (64, 128)
    adapters: tuple[int, ...] = (0, 1, 8, 32, 64, 128)
    kind: AdapterKind = AdapterKind()
    prompt: int = 128
    output: int = 128
    dtype: str = "float16"
    shards: int = 1
    overlap_lora: bool = False
    peft: bool = False
    modes: tuple[str, ...] = ("graph",)

    def __post_init__(self) -> None:
        """Raises ConfigError for what cannot be measured."""
        check_whole(ConfigError, "shards", self.shards, 1, 64)
        check_split(preset(self.model), self.shards)
        if self.overlap_lora and self.shards == 1:
            raise ConfigError("overlap_lora is on, shards is 1: one shard sends no messages; give --shards 2")
        for name, values, least in (("batch", self.batches, 1), ("adapters", self.adapters, 0)):
            if not values:
                raise ConfigError(f"{name} is empty; give at least one number")
            for value in values:
                check_whole(ConfigError, name, value, least, 512)
        if not self.modes:
            raise ConfigError(f"mode is empty; give at least one of {', '.join(MODES)}")
        for mode in self.modes:
            check_choice(ConfigError, "mode", mode, MODES)
        if self.peft:
            check_peft(self.shards)
        for name in ("prompt", "output"):
            check_whole(ConfigError, name, getattr(self, name), 2, MOST)
        if min(self.adapters) > max(self.batches):
            raise ConfigError(
                f"the fewest adapters are {min(self.adapters)} and the largest batch {max(self.batches)}: nothing is "
                "left to measure; a batch of n requests has at most n adapters"
            )

    def cases(self) -> list[DecodeCase]:
        """Every batch with every number of adapters that it can hold."""
        context = self.prompt + self.output // 2
        return [
            DecodeCase(preset(self.model), batch, adapters, self.kind, context, self.shards)
            for batch in self.batches
            for adapters in self.adapters
            if adapters <= batch
        ]

    def describe(self, case: DecodeCase) -> dict[str, Any]:
        """The fields of a row that say what was measured, whoever decodes."""
        return {
            "model": self.model,
            "dtype": self.dtype,
            "batch": case.batch,
            "adapters": case.adapters,
            "rank": list(case.kind.ranks) if len(case.kind.ranks) > 1 else case.kind.ranks[0],
            "targets": list(case.kind.targets),
            "context": case.context,
            "shards": self.shards,
        }


@dataclass(frozen=True)
class Floor:
    """The least that a part can take, in milliseconds: its bytes once from memory, or its FLOPs."""

    bytes_ms: float
    flops_ms: float


@dataclass(frozen=True)
class DecodeCase:
    """One decode step.

    Args:
        config: of the model.
        batch, adapters: requests, and distinct adapters among them.
        context: tokens that each request attends over.
        shards: that share the work.
    """

    config: ModelConfig
    batch: int
    adapters: int
    kind: AdapterKind
    context: int
    shards: int = 1

    def floors(self, tflops: float) -> dict[str, Floor]:
        """Of the parts on one of the shards, at BYTES_PER_S, LINK_BYTES_PER_S and a measured rate of products."""
        config, shards = self.config, self.shards
        weights = parameters(config) - (0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size)
        ranks = [self.kind.ranks[i % len(self.kind.ranks)] for i in range(self.adapters)]
        lora = [self.kind.numbers(config, rank) for rank in ranks]
        of_rows = sum(lora[row % self.adapters] for row in range(self.batch)) if self.adapters else 0
        keys = self.batch * self.context * config.num_layers
        work = {
            "gemm": (weights, 2 * self.batch * weights),
            "lora": (sum(lora), 2 * of_rows),
            "attention": (2 * keys * config.kv_width, 4 * keys * config.q_width),
        }
        floors = {name: _floor(numbers / shards, flops / shards, tflops) for name, (numbers, flops) in work.items()}
        sums = (1 + 2 * config.num_layers) * all_reduce_elements(self.batch * config.hidden_size, shards)
        return floors | {"communication": Floor(1e3 * HALF * sums / LINK_BYTES_PER_S, 0.0)}

    def floor_ms(self, tflops: float) -> float:
        """Of the step: all bytes."""
        return sum(floor.bytes_ms for floor in self.floors(tflops).values())


def _floor(numbers: float, flops: float, tflops: float) -> Floor:
    return Floor(1e3 * HALF * numbers / BYTES_PER_S, 1e3 * flops / (tflops * 1e12))
